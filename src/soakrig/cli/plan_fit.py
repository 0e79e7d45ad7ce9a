"""``soak plan fit``: whether a launch fits a machine, by sums alone, before anything is stopped or bought."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soakrig.cli.output import emit_json
from soakrig.errors import UsageError

if TYPE_CHECKING:
    from soakrig.engine.registry_entry import Entry

GIB = 1 << 30
Size = str | None
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


def fit(
    model: Annotated[str | None, typer.Argument(help="A model of the registry.", metavar="[MODEL]")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Folder of a checkpoint, for the sizes by parts.")] = None,
    context: Annotated[int | None, typer.Option(help="Context in tokens; the KV cap follows it.")] = None,
    validated: Annotated[int | None, typer.Option(help="The context that was validated.")] = None,
    kv_per_token: Annotated[Size, typer.Option(help="KV cache of a token: '17200 B'.")] = None,
    kv_cap: Annotated[Size, typer.Option(help="KV cache, where it does not follow the context: '5.25 GiB'.")] = None,
    offload: Annotated[Size, typer.Option(help="Weights that leave the card: '125 GiB'.")] = None,
    slots: Annotated[str | None, typer.Option(help="Slots of each offloaded layer, arena:N, or a slot map.")] = None,
    transient: Annotated[Size, typer.Option(help="Host memory that loading takes on top: '30 GiB'.")] = None,
    host_ram: Annotated[Size, typer.Option(help="Host memory that the launch takes, all together.")] = None,
    utilisation: Annotated[float | None, typer.Option(help="Share of the card that the engine asks for: 0.95.")] = None,
    kv_tier: Annotated[Size, typer.Option(help="KV-offload tier in /dev/shm: '48 GiB'.")] = None,
    ram: Annotated[Size, typer.Option(help="Host memory that is available there; this host's where left out.")] = None,
    card: Annotated[Size, typer.Option(help="Memory of a card there: '95.6 GiB'; this host's where left out.")] = None,
    card_used: Annotated[str, typer.Option(help="Of it taken by others.")] = "0 B",
    cards: Annotated[int, typer.Option(help="How many such cards.")] = 1,
    shm: Annotated[Size, typer.Option(help="Free of its /dev/shm; this host's where left out.")] = None,
    registry: Annotated[Path | None, typer.Option(help="Models of your own (TOML), as of `soak engine`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Whether a launch fits: context, KV cap, host memory, the card whole and by parts, /dev/shm, both numbers of each.

    The launch is a MODEL of the registry, a checkpoint, or both, with the figures that are given in place of theirs.
    Sizes have their unit; a whole number of GB is asked back.

    Exit status: 0 it fits, 3 refused, 2 something could not be seen, 64 bad input.
    """
    from soakrig.cli.engine_facts import gpu_facts
    from soakrig.cli.engine_tables import findings_json, show_findings, table_console
    from soakrig.engine.preflight.checks import FIT, exit_code, run_checks
    from soakrig.engine.preflight.machine import GpuFacts, Machine
    from soakrig.engine.preflight.stated import StatedLaunch, StatedMachine

    if model is None and checkpoint is None:
        raise UsageError("neither MODEL nor --checkpoint", remedy="soak plan fit glm53, or --checkpoint DIR")
    if not 1 <= cards <= 1024:
        raise UsageError(f"--cards {cards}: 1 to 1024 was expected")
    launch = StatedLaunch(
        context, validated, _bytes(kv_per_token, "--kv-per-token"), _bytes(kv_cap, "--kv-cap"),
        _gib(offload, "--offload"), slots, _gib(transient, "--transient"), _gib(host_ram, "--host-ram"), utilisation,
        _gib(kv_tier, "--kv-tier"), checkpoint,
    )  # fmt: skip
    entry = launch.over(None if model is None else _find(model, registry))
    stated = StatedMachine(
        _bytes(ram, "--ram"), _bytes(card, "--card"), _bytes(card_used, "--card-used") or 0, cards, _bytes(shm, "--shm")
    )
    gpu = GpuFacts() if card is not None or entry.backend == "embedded" else gpu_facts()
    findings = run_checks(entry, stated.over(Machine(gpu=gpu, caller=_home())), names=FIT)
    if as_json:
        emit_json({**findings_json(entry.name, findings), **_sums(entry)})
    else:
        show_findings(table_console(), entry.name, findings)
    raise typer.Exit(exit_code(findings))


def _find(model: str, registry: Path | None) -> Entry:
    from soakrig.engine.registry import load_registry

    return load_registry(registry).find(model)


def _home() -> dict[str, str]:
    """Of the caller's environment the home alone: CUDA_VISIBLE_DEVICES says nothing of another machine's cards."""
    return {name: os.environ[name] for name in ("HOME",) if name in os.environ}


def _sums(entry: Entry) -> dict[str, Any]:
    """The needs by parts, as figures; null where they are not known."""
    from soakrig.engine.preflight.vram_parts import device_parts

    host = entry.host_need
    try:
        card: Any = device_parts(entry, os.environ.get("HOME", "")).to_json()
    except (UsageError, ValueError):
        card = None
    return {"host": None if host is None else host.to_json(), "card": card, "kv_cap_bytes": entry.kv_cap_bytes}


def _bytes(text: str | None, what: str) -> int | None:
    from soakrig.engine.planning.quantity import parse_bytes

    return None if text is None else int(parse_bytes(text, what=what).value)


def _gib(text: str | None, what: str) -> float | None:
    found = _bytes(text, what)
    return None if found is None else found / GIB
