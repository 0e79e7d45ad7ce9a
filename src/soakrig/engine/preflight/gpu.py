"""The card: does what the launch asks for fit, who holds the rest, and does anybody else compute there?"""

from __future__ import annotations

from collections.abc import Sequence

from soakrig.engine.launch_values import flag_value
from soakrig.engine.planning.fit import share_of_card
from soakrig.engine.preflight.finding import GIB, Finding, gib, ok, refused, unknown
from soakrig.engine.preflight.machine import Card, Machine
from soakrig.engine.registry_entry import Entry
from soakrig.engine.vllm.installation import Installation

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


def wants_gpu(entry: Entry, machine: Machine) -> bool:
    """Whether the launch computes on a card: vLLM unless it is built for the CPU, the embedded engine where asked."""
    if entry.backend == "embedded":
        return flag_value(entry.flags, "--device") == "cuda"
    return not (isinstance(machine.installation, Installation) and machine.installation.cpu)


def check_vram(entry: Entry, machine: Machine) -> Finding:
    """``gpu_memory_utilization`` of each card that the launch uses against what is free there."""
    name = "vram"
    cards = cards_or_finding(name, entry, machine)
    if isinstance(cards, Finding):
        return cards
    share = entry.gpu_memory_utilization
    if share is None:
        return unknown(name, "the registry does not say what share of the card it takes", "Set gpu_memory_utilization.")
    texts: list[str] = []
    worst: tuple[float, float, str] | None = None
    for card in cards:
        if card.used is None or card.total is None:
            return unknown(name, f"{card} does not tell its memory")
        need, free = share_of_card(card.total, share), card.total - card.used
        text = f"{card}: {gib(need)} needed ({share:g} of {gib(card.total)}), {gib(free)} free"
        texts.append(text)
        if free < need and (worst is None or free - need < worst[1] - worst[0]):
            worst = (need, free, f"{text}; {_rest(card, machine)}")
    if worst is not None:
        remedy = "Stop what holds the rest, or take a smaller gpu_memory_utilization (and fewer slots)."
        return refused(name, worst[2], remedy, needs=worst[0] / GIB, has=worst[1] / GIB, unit="GiB")
    return ok(name, "; ".join(texts))


def check_gpu_process(entry: Entry, machine: Machine) -> Finding:
    """Nobody else may compute on the card: one more process there has ended a host with pinned memory before."""
    name = "gpu-process"
    cards = cards_or_finding(name, entry, machine)
    if isinstance(cards, Finding):
        return cards
    found: list[str] = []
    for card in cards:
        if card.holders is None:
            return unknown(name, f"{card} does not tell who computes on it")
        found += [f"{_named(one.pid, one.name, machine)} on {card}" for one in card.holders if one.compute]
    if found:
        text = f"{len(found)} on the card, 0 expected: {', '.join(found)}"
        remedy = "Stop it, or show this model another card with CUDA_VISIBLE_DEVICES."
        return refused(name, text, remedy, needs=0, has=len(found), unit="processes")
    return ok(name, "nobody else computes there", needs=0, has=0, unit="processes")


def cards_of(entry: Entry, machine: Machine) -> list[Card] | str:
    """The cards that the launch uses, or why that is not known. NVML numbers cards by PCI address; CUDA numbers the
    fastest first unless CUDA_DEVICE_ORDER says otherwise, so numbers of unlike cards mean nothing."""
    cards = machine.gpu.cards
    if cards is None:
        return machine.gpu.why
    order = entry.settings.get(ORDER, machine.caller.get(ORDER, ""))
    visible = entry.settings.get(VISIBLE, machine.caller.get(VISIBLE))
    alike = len({card.name for card in cards}) < 2
    if visible is None:
        if not alike and order != "PCI_BUS_ID":
            return f"which of the {len(cards)} unlike cards CUDA takes first is not known; set {VISIBLE} to a UUID"
        found = list(cards)
    else:
        found: list[Card] = []
        for word in (part.strip() for part in visible.split(",")):
            if word in ("", "-1", "NoDevFiles"):
                break  # CUDA stops there
            if word.isdigit() and not alike and order != "PCI_BUS_ID":
                return f"{VISIBLE}={visible} numbers unlike cards; set {ORDER}=PCI_BUS_ID, or name a UUID"
            hits = [one for one in cards if _is(one, word)]
            if len(hits) != 1:
                return f"{VISIBLE} names {word}, which is {'several' if hits else 'none'} of the cards here"
            found += hits
    wanted = _parallel(entry)
    if not found:
        return f"no card is visible to it ({VISIBLE}={visible})" if cards else "NVML shows no card"
    return found[:wanted]


def cards_or_finding(name: str, entry: Entry, machine: Machine) -> list[Card] | Finding:
    """The cards that the launch uses; where there are none to look at, what check ``name`` says of that."""
    if not wants_gpu(entry, machine):
        return ok(name, "it computes on the CPU")
    cards = cards_of(entry, machine)
    return unknown(name, cards) if isinstance(cards, str) else cards


def _parallel(entry: Entry) -> int:
    """Cards that one server of vLLM takes: tensor parallel times pipeline parallel."""
    count = 1
    for flag in ("--tensor-parallel-size", "--pipeline-parallel-size"):
        text = flag_value(entry.flags, flag)
        count *= int(text) if text and text.isdecimal() else 1
    return count


def _is(card: Card, word: str) -> bool:
    return card.index == int(word) if word.isdigit() else card.uuid.lower().startswith(word.lower())


def _rest(card: Card, machine: Machine) -> str:
    """Who holds what is not free."""
    if card.holders is None:
        return "who holds the rest is not told"
    holders: Sequence[str] = [_named(one.pid, str(one), machine) for one in card.holders if one.bytes != 0]
    shown = f"held by {', '.join(holders)}" if holders else "no process is shown there"
    if card.unattributed:
        shown += f"; {gib(card.unattributed)} held by no process shown"
    return shown


def _named(pid: int, text: str, machine: Machine) -> str:
    """With the model's name where it is one of ours."""
    ours = next((one.name for one in machine.serving if pid in one.pids), "")
    text = text if text.startswith("pid ") else f"pid {pid}{f' ({text})' if text else ''}"
    return f"{text} of {ours}" if ours else text
