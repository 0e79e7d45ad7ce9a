"""``soak plan``: routing traces replayed, memory budgets reconciled and levers priced, before a server is stopped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from soakrig.cli import plan_budget, plan_fit, plan_pages, plan_tables
from soakrig.cli.output import emit_json, write_page
from soakrig.cli.plan_options import (
    AllowTorn,
    AsJson,
    Experts,
    Html,
    Layers,
    OnlyLayers,
    RowsPerStep,
    TopK,
    TraceFile,
    load_trace,
    parse_numbers,
)
from soakrig.errors import UsageError
from soakrig.reports.plan_page import plan_html
from soakrig.reports.terminal import report_console

if TYPE_CHECKING:
    from soakrig.engine.planning.curve import MissCurves
    from soakrig.engine.planning.replay import ReplayPolicy
    from soakrig.engine.planning.trace import PlannedTrace

Policy = Annotated[str, typer.Option(help="lru, static, lfru, clock, or opt (the best there could be).")]
Semantics = Annotated[
    str, typer.Option(help="step: as the engine, all ids of a step at once. sequential: one id after another.")
]
Train = Annotated[
    float | None, typer.Option(help="Share of the steps to fit on; the rest judges. Without it one trace does both.")
]

app = typer.Typer(
    no_args_is_help=True, help="Replay routing traces, share out slots, and price memory levers, without an engine."
)
app.command("budget")(plan_budget.budget)
app.command("levers")(plan_budget.levers)
app.command("inspect")(plan_budget.inspect)
app.command("fit")(plan_fit.fit)


@app.command("replay")
def replay(
    trace: TraceFile,
    layers: Layers = None,
    top_k: TopK = None,
    experts: Experts = None,
    slots: Annotated[str | None, typer.Option(help="Slots of each layer, or arena:N for one pool.")] = None,
    slot_map: Annotated[Path | None, typer.Option("--map", help="Slot map (JSON), as the engine reads it.")] = None,
    as_captured: Annotated[
        bool, typer.Option("--as-captured", help="The slots and policy of the engine that wrote the trace.")
    ] = False,
    policy: Policy = "lru",
    semantics: Semantics = "step",
    profile: Annotated[Path | None, typer.Option(help="Hot profile to start the slots from.")] = None,
    cold: Annotated[
        bool, typer.Option("--cold", help="Start from empty slots, whatever the trace's engine had.")
    ] = False,
    rows_per_step: RowsPerStep = 1,
    only_layers: OnlyLayers = None,
    allow_torn: AllowTorn = False,
    as_json: AsJson = False,
) -> None:
    """Say what given slots would have missed on a trace: the engine's own books, without weights."""
    from soakrig.engine.offload.profile import read_profile
    from soakrig.engine.offload.settings import POLICIES
    from soakrig.engine.planning.replay import (
        REPLAY_POLICIES,
        SEMANTICS,
        choose,
        replay_arena,
        replay_as_captured,
        replay_trace,
    )

    if [slots is not None, slot_map is not None, as_captured].count(True) != 1:
        raise UsageError(
            f"--slots {slots}, --map {slot_map}, --as-captured {as_captured}: one of the three was expected",
            remedy="give --slots 112, --map slots.json or --as-captured",
        )
    chosen, how = choose("--policy", policy, REPLAY_POLICIES), choose("--semantics", semantics, SEMANTICS)
    planned = load_trace(trace, layers, top_k, experts, rows_per_step, only_layers, allow_torn)
    arena = slots.removeprefix("arena:") if slots is not None and slots.startswith("arena:") else None
    if as_captured or arena is not None:
        _only_steps(how, profile, "--as-captured" if as_captured else f"--slots {slots}")
    if as_captured:
        found = replay_as_captured(planned)
    elif arena is not None:
        found = replay_arena(planned, _count(arena, f"--slots {slots}"), choose("--policy", policy, POLICIES))
    else:
        counts = _slots(planned, slots, slot_map)
        read = None if profile is None else read_profile(str(profile))
        found = replay_trace(planned, counts, chosen, how, profile=read, cold=cold)
    if as_json:
        emit_json(found.to_json())
        return
    plan_tables.print_replay(report_console(), found)


@app.command("curve")
def curve(
    trace: TraceFile,
    layers: Layers = None,
    top_k: TopK = None,
    experts: Experts = None,
    policy: Policy = "lru",
    semantics: Semantics = "step",
    sizes: Annotated[
        str | None, typer.Option(help="Slots a layer to show: 16,48,77-80. lfru, clock, opt need it.")
    ] = None,
    train: Train = None,
    rows_per_step: RowsPerStep = 1,
    only_layers: OnlyLayers = None,
    allow_torn: AllowTorn = False,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Say what every number of slots would have missed: all sizes of LRU or of a static hot set in one pass."""
    from soakrig.engine.planning.replay import REPLAY_POLICIES, SEMANTICS, choose, replay_trace, uniform_slots

    chosen, how = choose("--policy", policy, REPLAY_POLICIES), choose("--semantics", semantics, SEMANTICS)
    planned = load_trace(trace, layers, top_k, experts, rows_per_step, only_layers, allow_torn)
    wanted = None if sizes is None else parse_numbers("--sizes", sizes, planned.trace.header.experts)
    if chosen in ("lru", "static"):
        curves = _curves(planned, chosen, how, train)
        shown: Any = plan_tables.curve_json(curves, wanted, planned.rows)
    elif wanted is None or train is not None:
        raise UsageError(
            f"--policy {chosen} has no curve in one pass, and fits nothing",
            remedy="give --sizes 16,48,77 and no --train",
        )
    else:
        replays = [replay_trace(planned, uniform_slots(planned, size), chosen, how) for size in wanted]
        shown = plan_tables.replays_json(replays, wanted)
    if html is not None:
        write_page(html, plan_html(plan_pages.curve_page(shown, trace.name)))
    if as_json:
        emit_json(shown)
        return
    plan_tables.print_curve(report_console(), shown)


@app.command("allocate")
def allocate(
    trace: TraceFile,
    total: Annotated[str, typer.Option(help="Slots of all layers together, or bytes with --row: '100 GiB'.")],
    layers: Layers = None,
    top_k: TopK = None,
    experts: Experts = None,
    row: Annotated[str | None, typer.Option(help="What a slot costs, where --total is in bytes: '21233664 B'.")] = None,
    policy: Policy = "lru",
    semantics: Semantics = "step",
    least: Annotated[int, typer.Option(help="Fewest slots of a layer.")] = 0,
    most: Annotated[int | None, typer.Option(help="Most slots of a layer.")] = None,
    grain: Annotated[int, typer.Option(help="Give slots in lots of so many.")] = 1,
    train: Train = None,
    out: Annotated[Path | None, typer.Option(help="Write the best map here, as the engine reads it.")] = None,
    rows_per_step: RowsPerStep = 1,
    only_layers: OnlyLayers = None,
    allow_torn: AllowTorn = False,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Share slots out over the layers: the best map beside as many in each, and beside one weighted by demand."""
    from soakrig.engine.offload.slot_map import write_slot_map
    from soakrig.engine.planning.allocate import Limits
    from soakrig.engine.planning.allocate import allocate as share_out
    from soakrig.engine.planning.replay import SEMANTICS, choose
    from soakrig.engine.planning.trace import split_trace

    chosen = choose("--policy", policy, ("lru", "static"))
    how = choose("--semantics", semantics, SEMANTICS)
    planned = load_trace(trace, layers, top_k, experts, rows_per_step, only_layers, allow_torn)
    count = _total(total, row)
    if train is None:
        made = judged = _curves(planned, chosen, how, None)
    else:
        from dataclasses import replace

        first, rest = split_trace(planned.trace, train)
        made, judged = (_curves(replace(planned, trace=part), chosen, how, None) for part in (first, rest))
    maps = share_out(made, count, Limits(least, most, grain), judged)
    if out is not None:
        try:
            write_slot_map(str(out), maps[-1].slot_map(made.experts))
        except OSError as error:
            raise UsageError(
                f"--out {out} cannot be written: {error.strerror}", remedy="give a file to write"
            ) from error
    shown = plan_tables.allocation_json(
        maps, judged, made is not judged, planned.rows, None if out is None else str(out)
    )
    if html is not None:
        write_page(html, plan_html(plan_pages.allocation_page(shown, trace.name)))
    if as_json:
        emit_json(shown)
        return
    plan_tables.print_allocation(report_console(), shown)


@app.command("screen")
def screen(
    trace: TraceFile,
    slots: Annotated[int, typer.Option(help="Slots of each layer; every candidate has as many in all.")],
    layers: Layers = None,
    top_k: TopK = None,
    experts: Experts = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policies to compare (repeat); lru first by default.")
    ] = None,
    slot_map: Annotated[list[Path] | None, typer.Option("--map", help="Slot maps to compare (repeat).")] = None,
    arena: Annotated[bool, typer.Option("--arena", help="One pool for all layers as a candidate too.")] = False,
    best_map: Annotated[
        bool, typer.Option("--best-map", help="The best LRU map of this trace as a candidate.")
    ] = False,
    predictors: Annotated[bool, typer.Option("--predict", help="Judge predictors of the next experts too.")] = False,
    budget: Annotated[Path | None, typer.Option(help="Budget file with a [step] table, for step times.")] = None,
    train: Annotated[float, typer.Option(help="Share of the steps that predictors are fitted on.")] = 0.5,
    rows_per_step: RowsPerStep = 1,
    only_layers: OnlyLayers = None,
    allow_torn: AllowTorn = False,
    as_json: AsJson = False,
) -> None:
    """Compare policies and maps at equal bytes, and predictors by what they issue and what they save."""
    from soakrig.engine.offload.slot_map import read_slot_map
    from soakrig.engine.planning.allocate import allocate as share_out
    from soakrig.engine.planning.budget_file import read_budget
    from soakrig.engine.planning.predict import predict
    from soakrig.engine.planning.replay import REPLAY_POLICIES, choose, uniform_slots
    from soakrig.engine.planning.screens import Candidate
    from soakrig.engine.planning.screens import screen as compare

    asked = policy or ["lru", "static", "lfru", "clock", "opt"]
    names: list[ReplayPolicy] = [choose("--policy", one, REPLAY_POLICIES) for one in asked]
    planned = load_trace(trace, layers, top_k, experts, rows_per_step, only_layers, allow_torn)
    even = uniform_slots(planned, slots)
    candidates = [Candidate(f"uniform {slots}", name, even) for name in names]
    candidates += [Candidate(path.name, names[0], read_slot_map(str(path)).slots) for path in slot_map or ()]
    if best_map:
        best = share_out(_curves(planned, "lru", "step", None), sum(even.values()))[-1]
        candidates.append(Candidate("best map", "lru", best.slots))
    if arena:
        candidates.append(Candidate("arena", "lru" if names[0] == "opt" else names[0], {-1: sum(even.values())}))
    priced = None if budget is None else read_budget(str(budget))
    found = compare(planned, candidates, None if priced is None else priced.model)
    predictions = predict(planned.trace, even, train) if predictors else []
    shown = plan_tables.screen_json(found, predictions, priced, len(even), planned.rows)
    if as_json:
        emit_json(shown)
        return
    plan_tables.print_screen(report_console(), shown)


def _curves(planned: PlannedTrace, policy: str, semantics: str, train: float | None) -> MissCurves:
    from soakrig.engine.planning.curve import lru_curves, static_curves
    from soakrig.engine.planning.trace import split_trace

    if policy == "lru":
        if train is not None:
            raise UsageError("--train with --policy lru: LRU is fitted to nothing", remedy="leave --train out")
        how: Literal["step", "sequential"] = "sequential" if semantics == "sequential" else "step"
        return lru_curves(planned.trace, how)
    if semantics == "sequential":
        raise UsageError("a static hot set misses the same in any order", remedy="leave --semantics out")
    if train is None:
        return static_curves(planned.trace)
    first, rest = split_trace(planned.trace, train)
    return static_curves(rest, first)


def _slots(planned: PlannedTrace, slots: str | None, slot_map: Path | None) -> dict[int, int]:
    from soakrig.engine.offload.slot_map import read_slot_map
    from soakrig.engine.planning.replay import uniform_slots

    if slot_map is None:
        return uniform_slots(planned, _count(str(slots), f"--slots {slots}"))
    read = read_slot_map(str(slot_map))
    if read.experts != planned.trace.header.experts:
        raise UsageError(
            f"--map {slot_map} was made for {read.experts} experts a layer, and the trace has "
            f"{planned.trace.header.experts}",
            remedy="give a map of this model",
        )
    return dict(read.slots)


def _count(text: str, what: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise UsageError(f"{what}: a whole number of slots was expected", remedy="give --slots 112, or arena:8400")
    return int(text)


def _total(total: str, row: str | None) -> int:
    from soakrig.engine.planning.quantity import parse_bytes

    if row is None:
        return _count(total, f"--total {total} without --row")
    budget, price = parse_bytes(total, what="--total"), parse_bytes(row, what="--row")
    if price.value <= 0:
        raise UsageError(f"--row {row}: more than nothing was expected", remedy="give the bytes of one slot")
    return int(budget.value // price.value)


def _only_steps(semantics: str, profile: Path | None, what: str) -> None:
    if semantics != "step" or profile is not None:
        raise UsageError(
            f"{what} with --semantics {semantics}, --profile {profile}: it is replayed as the engine ran, in steps",
            remedy="leave them out",
        )
