"""The cards of a campaign: whose processes are on them, and whether their memory has come back after a launch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soakrig.clock import Clock
from soakrig.errors import UsageError, WatcherError
from soakrig.soak.watch import proc
from soakrig.soak.watch.nvml_session import read_once

POLL_S = 1.0
TOLERANCE_MIB = 64.0
"""What the driver may keep for itself from one launch to the next."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Card:
    """One card as NVML shows it. ``index``: NVML's, in the order of PCI addresses. ``memory_used_mib``: in use, by
    whomever; None where the card does not tell. ``pids``: of compute processes, in the pid namespace that NVML sees;
    None where it does not tell."""

    uuid: str
    index: int
    memory_used_mib: float | None
    pids: tuple[int, ...] | None

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.uuid})"


def read_cards(
    visible: str | None,
    clock: Clock,
    *,
    order: str | None = None,
    env: Mapping[str, str] | None = None,
    deadline: float = 30.0,
) -> list[Card] | None:
    """The cards that an engine sees, or None where there is no NVML.

    ``visible``: CUDA_VISIBLE_DEVICES of the engine, None where it is not set (every card), "" for none at all;
    ``order``: its CUDA_DEVICE_ORDER. ``env`` is of the child process that asks NVML for at most ``deadline`` seconds.

    Raises ``UsageError`` for a device that is none of the cards, and for numbers whose meaning is open: unless
    CUDA_DEVICE_ORDER says otherwise CUDA numbers the fastest card first, NVML does not. Raises ``WatcherError`` where
    NVML hangs or a card is lost.
    """
    wanted = None if visible is None else _devices(visible)
    if wanted == []:
        return []
    answer = read_once("state", clock, env=env, deadline=deadline)
    if isinstance(answer, str):
        return None
    found: list[dict[str, Any]] = answer["gpus"]
    if wanted is not None:
        _same_numbers(wanted, found, order)
        found = [_named(one, found, answer["notes"]) for one in wanted]
    for gpu in found:
        if "failed" in gpu:
            raise WatcherError(
                f"GPU {gpu['index']} at {gpu['pci']}: {gpu['failed']['text']}", remedy="It needs a reset or a reboot."
            )
    return [_card(gpu) for gpu in found]


def foreign(cards: Sequence[Card] | None, ours: Callable[[int], bool]) -> str:
    """The compute processes on ``cards`` that are not ``ours``, for people; "" where there is none, or none is known
    (no NVML, a card that does not tell)."""
    found: list[str] = []
    for card in cards or ():
        for pid in card.pids or ():
            if not ours(pid):
                found.append(f"{_process(pid)} on {card}")  # noqa: PERF401  (a comprehension of three clauses)
    if not found:
        return ""
    many = len(found) > 1
    return f"{'processes' if many else 'a process'} that {'are' if many else 'is'} not ours: {', '.join(found)}"


def wait_memory_back(
    before: Sequence[Card] | None,
    read: Callable[[], Sequence[Card] | None],
    clock: Clock,
    stop: threading.Event,
    deadline_s: float,
    tolerance_mib: float = TOLERANCE_MIB,
) -> str:
    """Wait until each card's used memory is back to what it was ``before`` plus ``tolerance_mib``; "" once it is.

    ``read`` is asked every second, for ``deadline_s`` seconds or until ``stop`` is set; then the text says which card
    holds what. Cards that do not tell their memory are not waited for. An answer that ``read`` cannot give
    (``WatcherError``) is asked for again.
    """
    end = clock.monotonic() + deadline_s
    while True:
        try:
            why = _held(before or (), read() if before else (), tolerance_mib)
        except WatcherError as error:
            why = error.message
        if not why:
            return ""
        if clock.monotonic() >= end:
            return f"after {deadline_s:g} s {why}"
        if clock.wait(stop, min(POLL_S, max(0.0, end - clock.monotonic()))):
            return f"stopped while {why}"


def _held(before: Sequence[Card], now: Sequence[Card] | None, tolerance_mib: float) -> str:
    """What is not back yet."""
    if now is None:
        return "NVML is no longer there, so nobody knows whether the memory is back"
    shown = {card.uuid: card for card in now}
    found: list[str] = []
    for old in before:
        card = shown.get(old.uuid)
        if card is None:
            found.append(f"{old} is no longer shown by NVML")
        elif old.memory_used_mib is None:
            continue
        elif card.memory_used_mib is None:
            found.append(f"{card} no longer tells how much of its memory is in use")
        elif card.memory_used_mib > old.memory_used_mib + tolerance_mib:
            by = f", held by {', '.join(_process(pid) for pid in card.pids)}" if card.pids else ", by no process shown"
            found.append(
                f"{card} has {card.memory_used_mib:.0f} MiB in use, at most "
                f"{old.memory_used_mib + tolerance_mib:.0f} were expected{by}"
            )
    return "; ".join(found)


def _devices(visible: str) -> list[str]:
    """Words of CUDA_VISIBLE_DEVICES. CUDA stops at one that it does not know, and "-1" is used for that."""
    words: list[str] = []
    for word in (part.strip() for part in visible.split(",")):
        if word in ("", "-1", "NoDevFiles"):
            break
        words.append(word)
    return words


def _same_numbers(wanted: Sequence[str], found: Sequence[Mapping[str, Any]], order: str | None) -> None:
    kinds = {gpu.get("name") for gpu in found}
    if order != "PCI_BUS_ID" and len(kinds) > 1 and any(word.isdigit() for word in wanted):
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES is {','.join(wanted)}, and the cards here differ "
            f"({', '.join(sorted(map(str, kinds)))}): which of them CUDA gives those numbers is not known",
            remedy="Set CUDA_DEVICE_ORDER=PCI_BUS_ID too, or name the card by its UUID (`nvidia-smi -L`).",
        )


def _named(word: str, found: Sequence[dict[str, Any]], notes: Sequence[str]) -> dict[str, Any]:
    """The card of one word: a number, or a UUID that may be cut short as long as it is of one card only."""
    hits = [gpu for gpu in found if _is(gpu, word)]
    if len(hits) == 1:
        return hits[0]
    if not hits and notes:  # it may be the one that could not be looked at
        raise WatcherError(f"CUDA_VISIBLE_DEVICES names {word}, which NVML does not show: {'; '.join(notes)}")
    shown = ", ".join(f"{gpu['index']} ({gpu['uuid']})" for gpu in found)
    raise UsageError(
        f"CUDA_VISIBLE_DEVICES names {word}, which is {'several' if hits else 'none'} of the cards here: {shown}",
        remedy="Name whole cards by number or UUID; parts of one (MIG) cannot be told from each other.",
    )


def _is(gpu: Mapping[str, Any], word: str) -> bool:
    return gpu["index"] == int(word) if word.isdigit() else (gpu["uuid"] or "").lower().startswith(word.lower())


def _card(gpu: Mapping[str, Any]) -> Card:
    memory, pids = gpu.get("memory"), gpu.get("compute_pids")
    used = memory[0] / _MIB if memory else None
    return Card(gpu["uuid"] or f"index-{gpu['index']}", gpu["index"], used, None if pids is None else tuple(pids))


def _process(pid: int) -> str:
    stat = proc.read_stat(pid)
    return f"pid {pid} ({stat.name})" if stat else f"pid {pid} (not visible here: of a container, or ended just now)"
