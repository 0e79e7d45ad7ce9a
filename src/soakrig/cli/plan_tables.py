"""What ``soak plan`` prints: tables for a terminal, and the objects of ``--json`` that are put together here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from soakrig.reports.series import sparkline

if TYPE_CHECKING:
    from soakrig.engine.planning.allocate import Allocation
    from soakrig.engine.planning.budget_file import Budget
    from soakrig.engine.planning.curve import MissCurves
    from soakrig.engine.planning.predict import Prediction
    from soakrig.engine.planning.replay import Replayed
    from soakrig.engine.planning.screens import Screened

GIB = 2**30
SHOWN_SIZES = 16
SHOWN_LAYERS = 12
Json = dict[str, Any]


def print_replay(console: Console, found: Replayed) -> None:
    """Totals with the hit rates by name, then the layers that miss most."""
    shown, rates = found.to_json(), found.hit_rates()
    total = found.slots.get(-1) or sum(found.slots.values())
    where = "in one arena" if -1 in found.slots else "in all"
    console.print(Text(f"{found.policy}, {found.semantics} semantics, {total} slots {where}", style="bold"))
    console.print(f"  slots started with: {found.hot_set}")
    console.print(f"  misses {found.misses:,} of {shown['accesses']:,} routed ids (derived)")
    console.print(f"  misses per step per layer {_number(found.misses_per_step_per_layer)}")
    for name, value in rates.items():
        if found.semantics == "step" or name == "per_access":
            console.print(f"  hit rate {name.replace('_', ' ')} {_rate(value)}")
    table = _table("layer", "slots", "misses", "per step", "per access", "per unique", "prefill misses")
    worst = sorted(shown["per_layer"], key=lambda one: -one["misses"])
    for one in worst[:SHOWN_LAYERS]:
        table.add_row(
            str(one["layer"]), "-" if one["slots"] is None else str(one["slots"]), f"{one['misses']:,}",
            _number(one["misses_per_step"]), _rate(one["hit_rate"]["per_access"]),
            _rate(one["hit_rate"]["per_unique"]), f"{one['large']['misses']:,}",
        )  # fmt: skip
    console.print(table)
    if len(worst) > SHOWN_LAYERS:
        console.print(f"  and {len(worst) - SHOWN_LAYERS} layers that miss less (--json has all)")


def curve_json(curves: MissCurves, sizes: Sequence[int] | None, rows: Mapping[str, int]) -> Json:
    """The object of ``soak plan curve --json`` for curves of all sizes."""
    wanted = list(range(curves.experts + 1)) if sizes is None else list(sizes)
    uniform = curves.uniform()
    rates = [curves.hit_rates(size) for size in wanted]
    return {
        "policy": curves.policy,
        "semantics": curves.semantics,
        "rows": dict(rows),
        "kind": curves.kind,
        "sizes": wanted,
        "misses_per_step_per_layer": [float(uniform[size]) for size in wanted],
        "hit_rate": {name: [one[name] for one in rates] for name in ("per_access", "per_unique", "per_step")},
        "per_layer": {
            str(layer): [int(curves.misses[at, size]) for size in wanted] for at, layer in enumerate(curves.layers)
        },
    }


def replays_json(replays: Sequence[Replayed], sizes: Sequence[int]) -> Json:
    """The same object for sizes that were replayed one by one."""
    listed = [one.to_json() for one in replays]
    rates = [one.hit_rates() for one in replays]
    return {
        "policy": replays[0].policy,
        "semantics": replays[0].semantics,
        "rows": dict(replays[0].rows),
        "kind": "derived",
        "sizes": list(sizes),
        "misses_per_step_per_layer": [one["misses_per_step_per_layer"] for one in listed],
        "hit_rate": {name: [one[name] for one in rates] for name in ("per_access", "per_unique", "per_step")},
        "per_layer": {
            str(layer): [one["per_layer"][at]["misses"] for one in listed] for at, layer in enumerate(replays[0].layers)
        },
    }


def print_curve(console: Console, shown: Json) -> None:
    """Misses and hit rates at some sizes, and what one more slot in every layer saves there."""
    sizes, misses = shown["sizes"], shown["misses_per_step_per_layer"]
    console.print(Text(f"{shown['policy']}, {shown['semantics']} semantics, from empty slots", style="bold"))
    steep = len(sizes) > SHOWN_SIZES
    every = max(1, -(-len(sizes) // SHOWN_SIZES))
    table = _table(
        "slots a layer", "misses per step per layer", "one more saves", "per access", "per unique", "per step"
    )
    for at in range(0, len(sizes), every):
        more = (misses[at] - misses[at + 1]) / (sizes[at + 1] - sizes[at]) if at + 1 < len(sizes) else None
        rates = [shown["hit_rate"][name][at] for name in ("per_access", "per_unique", "per_step")]
        table.add_row(str(sizes[at]), _number(misses[at]), _number(more), *map(_rate, rates))
    console.print(table)
    ascii_only = not (console.encoding or "").lower().startswith("utf")
    if steep:
        console.print(f"  {sparkline(misses, ascii_only=ascii_only)}  misses, 0 to {sizes[-1]} slots a layer")
    if (shown["policy"], shown["semantics"]) == ("lru", "step"):
        console.print("  curves break ties their own way, most at few slots; `soak plan replay` has the engine's count")


def allocation_json(
    maps: Sequence[Allocation], judged: MissCurves, held_out: bool, rows: Mapping[str, int], out: str | None
) -> Json:
    """The object of ``soak plan allocate --json``."""
    first = maps[0]
    accesses = max(int(judged.accesses.sum()), 1)
    return {
        "policy": judged.policy,
        "semantics": judged.semantics,
        "rows": dict(rows),
        "held_out": held_out,
        "concave_layers": judged.concave_layers(),
        "kind": judged.kind,
        "maps": [
            {
                "name": one.name, "slots": {str(layer): count for layer, count in one.slots.items()},
                "total": one.total, "misses": one.misses,
                "misses_per_step_per_layer": one.misses_per_step_per_layer,
                "misses_change": one.misses / first.misses - 1 if first.misses else 0.0,
                "hit_points": 100 * (first.misses - one.misses) / accesses, "exact": one.exact,
            }
            for one in maps
        ],
        "written": out,
    }  # fmt: skip


def print_allocation(console: Console, shown: Json) -> None:
    """The maps beside each other."""
    judged = "the rest of the trace" if shown["held_out"] else "the trace it was made from (flatters all but uniform)"
    console.print(Text(f"{shown['policy']}, {shown['semantics']} semantics, judged by {judged}", style="bold"))
    table = _table("map", "slots", "of a layer", "misses", "per step per layer", "against uniform", "hit points")
    for one in shown["maps"]:
        counts = one["slots"].values()
        table.add_row(
            one["name"], str(one["total"]), f"{min(counts)}-{max(counts)}", f"{one['misses']:,}",
            _number(one["misses_per_step_per_layer"]), f"{one['misses_change']:+.3%}", f"{one['hit_points']:+.3f}",
        )  # fmt: skip
    console.print(table)
    if shown["written"]:
        console.print(f"  the best map is in {shown['written']}: VLLM_MOE_HOT_SLOTS={shown['written']}")


def screen_json(
    found: Sequence[Screened],
    predictions: Sequence[Prediction],
    priced: Budget | None,
    layers: int,
    rows: Mapping[str, int],
) -> Json:
    """The object of ``soak plan screen --json``; bytes and headroom where the budget has a row's size and a link."""
    from soakrig.engine.planning.screens import headroom

    listed: list[Json] = []
    for one in predictions:
        entry = one.to_json()
        row, link = (None, None) if priced is None else (priced.row, priced.link)
        if row is not None:
            issued, saved = one.bytes(row, layers)
            entry |= {"bytes_issued": issued.to_json(), "bytes_saved": saved.to_json()}
            step = found[0].step
            if link is not None and step is not None:
                room = headroom(one, layers, row, link, step)
                entry |= {"spare": room.spare.to_json(), "extra": room.extra.to_json(), "fits": room.fits}
        listed.append(entry)
    return {"rows": dict(rows), "candidates": [one.to_json() for one in found], "predictors": listed}


def print_screen(console: Console, shown: Json) -> None:
    """Candidates, then predictors."""
    console.print(Text("candidates at equal bytes", style="bold"))
    table = _table("candidate", "policy", "slots", "per step per layer", "misses", "step (modelled)", "step")
    for one in shown["candidates"]:
        step = "-" if one["step"] is None else f"{1000 * one['step']['value']:.2f} ms"
        change = "-" if one["step_change"] is None else f"{one['step_change']:+.2%}"
        table.add_row(
            one["name"], one["policy"], str(one["slots"]), _number(one["misses_per_step_per_layer"]),
            f"{one['misses_change']:+.2%}", step, change,
        )  # fmt: skip
    console.print(table)
    if not shown["predictors"]:
        return
    console.print(Text("predictors, judged on steps that they were not fitted on", style="bold"))
    table = _table("predictor", "rows issued", "precision", "recall", "issued a step", "saved a step", "fits the link")
    for one in shown["predictors"]:
        issued, saved = (
            f"{one[key]['value'] / 1e9:.3f} GB" if key in one else "-" for key in ("bytes_issued", "bytes_saved")
        )
        fits = {True: "yes", False: "no"}.get(one.get("fits"), "-")
        rates = (_rate(one["precision"]), _rate(one["recall"]))
        table.add_row(one["predictor"], str(one["issued_per_step"]), *rates, issued, saved, fits)
    console.print(table)


def print_budget(console: Console, read: Budget) -> None:
    """Every pool, what is left over under its own name, and what that is worth."""
    ledger = read.ledger
    console.print(Text(f"memory of {read.device or 'the device'}", style="bold"))
    table = _table("owner", "GiB", "of capacity", "kind", "source")
    lines = [(pool.name, pool.amount) for pool in ledger.pools]
    lines += [("accounted", ledger.accounted), ("free", ledger.free), ("UNATTRIBUTED", ledger.residual)]
    for name, amount in [*lines, ("capacity", ledger.capacity)]:
        style = "bold" if name in ("accounted", "UNATTRIBUTED", "capacity") else None
        share = f"{amount.share(ledger.capacity):.1%}"
        table.add_row(name, f"{amount.value / GIB:,.2f}", share, amount.kind, amount.source, style=style)
    console.print(table)
    if ledger.price is not None:
        price = ledger.price
        console.print(
            f"  a slot costs {price.whole.value:,.0f} B, {price.scale_share:.1%} of it scales; without them "
            f"{price.weights.value:,.0f} B"
        )
        console.print(
            f"  the unattributed rest is worth {ledger.worth(ledger.residual):,.0f} slots, "
            f"{ledger.worth(ledger.residual, scales=False):,.0f} without scales, once its owner is known"
        )


def print_levers(console: Console, shown: Json) -> None:
    """Levers by what they buy, the line's figure beside the curve's, and the ceiling."""
    step, tokens = shown["step"]["value"], shown["tokens_per_second"]["value"]
    console.print(f"now: a step of {1000 * step:.2f} ms, {tokens:.2f} tokens a second")
    console.print(Text(f"levers, each alone, modelled on a {shown['curve']} curve", style="bold"))
    table = _table("lever", "frees GiB", "slots", "step", "tokens a second", "gain", "on the straight line")
    for one in shown["levers"]:
        ended = "+" if one["curve_ended"] else ""
        table.add_row(
            one["name"], f"{one['frees']['value'] / GIB:,.2f}", f"{one['slots']:,.0f}{ended}",
            f"{1000 * one['step']['value']:.2f} ms", f"{one['tokens_per_second']['value']:.2f}",
            f"{one['gain']:+.1%}", f"{one['linear']['gain']:+.1%}",
        )  # fmt: skip
    console.print(table)
    limit = shown["ceiling"]
    console.print(
        f"  if every miss were free: {limit['factor']:.2f} x, {limit['tokens_per_second']['value']:.1f} tokens a second"
    )
    if any(one["curve_ended"] for one in shown["levers"]):
        console.print("  + the curve ends before these slots; they are priced at its end")


def print_checkpoint(console: Console, shown: Json) -> None:
    """Parts, the experts' figures, and what goes where."""
    console.print(Text(f"{shown['name']}: {shown['bytes'] / GIB:,.2f} GiB in {shown['files']} files", style="bold"))
    table = _table("part", "GiB", "share")
    for part, size in shown["parts"].items():
        table.add_row(part, f"{size / GIB:,.2f}", f"{size / max(shown['bytes'], 1):.1%}")
    console.print(table)
    rows = sorted(set(shown["row_bytes"].values()))
    console.print(
        f"  {shown['layers']} layers with routed experts ({len(shown['draft_layers'])} of them draft), "
        f"{', '.join(map(str, shown['experts'])) or 'no'} experts, top-{shown['top_k']}, context {shown['max_context']}"
    )
    console.print(f"  a row: {', '.join(f'{size:,} B' for size in rows) or '-'}")
    for name, figure in shown.get("placement", {}).items():
        if isinstance(figure, dict):
            console.print(f"  {name}: {figure['value'] / GIB:,.2f} GiB ({figure['source']}, {figure['kind']})")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 1))
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at == 0 else "right", overflow="fold")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
