"""The card by parts: what the checkpoint and the settings alone put there, before the engine adds what nobody knows."""

from __future__ import annotations

from soakrig.engine.checkpoint import checkpoint_folder
from soakrig.engine.launch_values import flag_value
from soakrig.engine.planning.checkpoint import read_checkpoint
from soakrig.engine.planning.fit import OFFLOAD, SIZING, Need, card_need, placed
from soakrig.engine.planning.quantity import Figure
from soakrig.engine.preflight.finding import GIB, Finding, gib, ok, refused, unknown
from soakrig.engine.preflight.gpu import cards_or_finding
from soakrig.engine.preflight.machine import Machine
from soakrig.engine.registry_entry import KV_CAP, Entry, expand
from soakrig.errors import UsageError


def check_vram_parts(entry: Entry, machine: Machine) -> Finding:
    """Resident weights, slots, staging rows and the capped KV cache against what is free of the launch's cards.

    Activations, graphs and the CUDA context come on top; what is left for them is told. All of the checkpoint counts,
    also what an engine may not load (a vision tower). vLLM itself finds out late: slots that are allocated after its
    profiling are missing in the middle of serving.
    """
    name = "vram-parts"
    cards = cards_or_finding(name, entry, machine)
    if isinstance(cards, Finding):
        return cards
    free = 0
    for card in cards:
        if card.used is None or card.total is None:
            return unknown(name, f"{card} does not tell its memory")
        free += card.total - card.used
    try:
        need = device_parts(entry, machine.home)
    except UsageError as error:
        return unknown(name, f"the parts are not known: {error.message}", error.remedy)
    except ValueError as error:
        return unknown(name, str(error), "Correct it in the registry.")
    whole = need.total.value
    listed = " + ".join(f"{gib(part.value)} {part.source}" for part in need.parts)
    where = str(cards[0]) if len(cards) == 1 else f"{len(cards)} cards together"
    text = f"{where}: {gib(whole)} needed ({listed}), {gib(free)} free"
    if free < whole:
        remedy = "Offload more, take fewer slots, or a shorter context (the KV cap follows it)."
        return refused(name, text, remedy, needs=whole / GIB, has=free / GIB, unit="GiB")
    rest = f"{gib(free - whole)} left for activations, graphs and the CUDA context"
    if kv_bytes(entry) is None:
        rest += ", and for the KV cache, which has no cap"
    return ok(name, f"{text}; {rest}", needs=whole / GIB, has=free / GIB, unit="GiB")


def device_parts(entry: Entry, home: str) -> Need:
    """What the entry's checkpoint, offload, slots and KV cap put on its cards.

    Raises ``UsageError`` where its files cannot be read or the settings do not fit them, ValueError for a text in the
    entry that is no number.
    """
    folder = checkpoint_folder(entry, home)
    if folder is None:
        raise UsageError(
            f"there are no files of {entry.checkpoint or entry.backend} to read here",
            remedy="Name the folder of a checkpoint.",
        )
    settings = {name: expand(entry.settings[name], home) for name in SIZING if name in entry.settings}
    if entry.offload_gib:
        settings[OFFLOAD] = repr(entry.offload_gib)
    kv = kv_bytes(entry)
    return card_need(placed(read_checkpoint(str(folder)), settings), None if kv is None else Figure.of(kv, "B"))


def kv_bytes(entry: Entry) -> int | None:
    """Bytes of the KV cache that the launch asks for; None where it leaves that to the engine."""
    given = flag_value(entry.flags, KV_CAP)
    return int(given) if given is not None and given.isdecimal() else entry.kv_cap_bytes
