"""``soak plan budget``, ``levers`` and ``inspect``: who owns memory, what it buys, what a model needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soakrig.cli import plan_pages, plan_tables
from soakrig.cli.output import emit_json, write_page
from soakrig.cli.plan_options import AsJson, Experts, Html, Layers, RowsPerStep, TopK, load_trace
from soakrig.errors import UsageError
from soakrig.reports.plan_page import plan_html
from soakrig.reports.terminal import report_console

if TYPE_CHECKING:
    from soakrig.engine.planning.budget_file import Budget

BudgetFile = Annotated[Path, typer.Argument(help="Budget of an engine on a card (TOML).", metavar="BUDGET")]
EngineLog = Annotated[Path | None, typer.Option(help="Log of vLLM's start: amounts for pools with a log key.")]
Nvml = Annotated[int | None, typer.Option(help="GPU whose capacity and free memory NVML tells.", metavar="INDEX")]


def budget(
    path: BudgetFile, engine_log: EngineLog = None, nvml: Nvml = None, html: Html = None, as_json: AsJson = False
) -> None:
    """Reconcile a memory budget: what is accounted for, what is free, and what nobody owns."""
    read = _read(path, engine_log, nvml)
    shown = {"device": read.device, **read.ledger.to_json()}
    if html is not None:
        write_page(html, plan_html(plan_pages.budget_page(shown, path.name)))
    if as_json:
        emit_json(shown)
        return
    plan_tables.print_budget(report_console(), read)


def levers(
    path: BudgetFile,
    trace: Annotated[Path | None, typer.Option(help="Trace whose LRU curve prices slots, instead of [curve].")] = None,
    layers: Layers = None,
    top_k: TopK = None,
    experts: Experts = None,
    rows_per_step: RowsPerStep = 1,
    engine_log: EngineLog = None,
    nvml: Nvml = None,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Price what memory could be traded for, on the curve and on the straight line, with the ceiling over all."""
    from soakrig.engine.planning.curve import lru_curves
    from soakrig.engine.planning.levers import Curve, ceiling, known_levers, price_levers

    read = _read(path, engine_log, nvml)
    curve = read.curve
    if trace is not None:
        curve = Curve.of(lru_curves(load_trace(trace, layers, top_k, experts, rows_per_step, None, False).trace))
    missing = [
        name
        for name, there in (
            ("[step] with fixed and per_row, or points", read.model),
            ("[slots], and misses and accesses in [step]", read.now),
            ("[curve] with points, or --trace", curve),
        )
        if there is None
    ]
    if read.model is None or read.now is None or curve is None:
        raise UsageError(f"{path} cannot price levers: {'; '.join(missing)} is missing", remedy="add it to the budget")
    found = price_levers(
        [*read.levers, *known_levers(read.ledger)], read.ledger, read.now, read.model, curve, read.slope
    )
    limit, tokens = ceiling(read.now, read.model)
    step = read.model.step(read.now.rows())
    shown: dict[str, Any] = {
        "step": step.to_json(),
        "tokens_per_second": (read.now.tokens / step).to_json(),
        "curve": curve.kind,
        "levers": [one.to_json() for one in found],
        "ceiling": {"gain": limit - 1, "factor": limit, "tokens_per_second": tokens.to_json(), "kind": "modelled"},
    }
    if html is not None:
        points = list(zip(curve.slots, curve.misses, strict=True))
        here = read.now.slots / read.now.layers
        page = plan_pages.levers_page(shown, read.ledger.to_json(), points, here, path.name)
        write_page(html, plan_html(page))
    if as_json:
        emit_json(shown)
        return
    plan_tables.print_levers(report_console(), shown)


def inspect(
    folder: Annotated[Path, typer.Argument(help="Folder of a checkpoint.", metavar="DIR")],
    offload: Annotated[str | None, typer.Option(help="Routed experts to leave the device: '125 GiB'.")] = None,
    slots: Annotated[str | None, typer.Option(help="Slots of each offloaded layer, or arena:N.")] = None,
    device: Annotated[str | None, typer.Option(help="Memory of the card: '95.6 GiB'.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a checkpoint is made of and what goes where at an offload; reads headers alone, no weights."""
    from soakrig.engine.planning import fit
    from soakrig.engine.planning.checkpoint import read_checkpoint
    from soakrig.engine.planning.quantity import parse_bytes

    found = read_checkpoint(str(folder))
    shown = found.to_json()
    if offload is not None or slots is not None:
        settings: dict[str, str] = {}
        if offload is not None:
            settings[fit.OFFLOAD] = repr(parse_bytes(offload, what="--offload").to("GiB"))
        if slots is not None:
            settings[fit.SLOTS] = slots
        placed = fit.placed(found, settings)
        shown["placement"] = placed.to_json()
        if device is not None:
            capacity = parse_bytes(device, what="--device")
            shown["placement"]["left"] = (
                (capacity - placed.device).labelled("for KV cache, activations, graphs").to_json()
            )
    elif device is not None:
        raise UsageError("--device without --offload or --slots has nothing to say", remedy="give one of them")
    if as_json:
        emit_json(shown)
        return
    plan_tables.print_checkpoint(report_console(), shown)


def _read(path: Path, engine_log: Path | None, nvml: int | None) -> Budget:
    from soakrig.engine.planning.budget_file import read_budget
    from soakrig.engine.planning.engine_memory import read_engine_log, read_nvml

    log = None if engine_log is None else read_engine_log(str(engine_log))
    return read_budget(str(path), log, None if nvml is None else read_nvml(nvml))
