"""What ``soak plan --html`` shows: the objects of ``--json`` as sections of a page, each with its plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from soakrig.reports.plan_charts import Bar, LinePlot, Look, Series, Style, bar_plot, line_plot
from soakrig.reports.plan_page import PlanPage, PlanPart, PlanTable

Json = Mapping[str, Any]
GIB = 2**30
X, Y = "slots in each layer", "misses per step and layer"


def curve_page(shown: Json, subject: str) -> PlanPage:
    """Of ``soak plan curve``: misses at every size, and what one more slot saves there."""
    sizes, misses = shown["sizes"], shown["misses_per_step_per_layer"]
    rates = shown["hit_rate"]
    names = ("per_access", "per_unique", "per_step")
    rows = [
        (str(size), _figure(misses[at]), *(_rate(rates[name][at]) for name in names)) for at, size in enumerate(sizes)
    ]
    columns = ("slots a layer", "misses per step and layer", "hit rate per access", "per unique", "per step")
    caption = f"{shown['policy']}, {shown['semantics']} semantics, from empty slots; {shown['kind']} from the trace."
    said = (
        f"{_figure(misses[0])} misses per step and layer with {sizes[0]} slots, {_figure(misses[-1])} with {sizes[-1]}"
    )
    whole = list(zip(sizes, misses, strict=True))
    return PlanPage(
        "Miss curve",
        subject,
        [f"{shown['policy']}, {shown['semantics']} semantics: {said}."],
        [
            PlanPart(
                "misses",
                "Misses by slots",
                "Misses fall as slots are added.",
                PlanTable(caption, columns, rows),
                _curve(whole),
            ),
            _marginal(whole, f"{shown['kind']} from the curve above."),
        ],
        _rows(shown["rows"]),
    )


def allocation_page(shown: Json, subject: str) -> PlanPage:
    """Of ``soak plan allocate``: the maps beside each other, and the best one layer by layer."""
    maps = shown["maps"]
    judged = (
        "the rest of the trace" if shown["held_out"] else "the trace it was made from, which flatters all but uniform"
    )
    caption = f"Judged by {judged}; {shown['kind']}."
    columns = ("map", "slots", Y, "against uniform", "hit points")
    rows = [
        (one["name"], str(one["total"]), _figure(one["misses_per_step_per_layer"]), f"{one['misses_change']:+.3%}",
         f"{one['hit_points']:+.3f}")
        for one in maps
    ]  # fmt: skip
    best, uniform = maps[-1], maps[0]
    said = f"The best map of {best['total']} slots against as many in each layer: {best['misses_change']:+.3%} misses."
    missed = [one["misses_per_step_per_layer"] for one in maps]
    bars = [Bar(one["name"], 0.0, value, f"{value:.4f}") for one, value in zip(maps, missed, strict=True)]
    both: list[tuple[Json, Style]] = [(uniform, "dashed"), (best, "solid")]
    layers = sorted(best["slots"], key=int)
    by_layer = [Series(one["name"], _by_layer(one["slots"], layers), style, steps=True) for one, style in both]
    counts = [best["slots"][layer] for layer in layers]
    spread = f"From {min(counts)} to {max(counts)} slots in a layer."
    table = [(layer, str(uniform["slots"][layer]), str(best["slots"][layer])) for layer in layers]
    return PlanPage(
        "Slots over layers",
        subject,
        [said, f"Judged by {judged}.", *([f"Written to {shown['written']}."] if shown["written"] else [])],
        [
            PlanPart(
                "maps", "Maps beside each other", "Shorter is better.",
                PlanTable(caption, columns, rows), bar_plot(bars, Y),
            ),
            PlanPart(
                "layers", "The best map, layer by layer", spread,
                PlanTable("Slots of each layer.", ("layer", "uniform", "best"), table),
                line_plot(by_layer, "layer, from its number to the next", "slots"),
            ),
        ],
        [("policy", shown["policy"]), ("semantics", shown["semantics"]), *_rows(shown["rows"])],
    )  # fmt: skip


def budget_page(shown: Json, subject: str) -> PlanPage:
    """Of ``soak plan budget``: who owns the memory."""
    part = ledger_part(shown)
    return PlanPage(f"Memory of {shown['device'] or 'the device'}", subject, [part.summary], [part])


def levers_page(
    shown: Json, ledger: Json, points: Sequence[tuple[float, float]], here: float, subject: str
) -> PlanPage:
    """Of ``soak plan levers``: each lever alone, the curve that prices them, and the ledger that they come from.

    ``points``: the curve, slots a layer and misses; ``here``: slots a layer as the engine runs.
    """
    now, limit = shown["tokens_per_second"]["value"], shown["ceiling"]
    top = limit["tokens_per_second"]["value"]
    levers = shown["levers"]
    bars = [Bar("as it runs", 0.0, now, f"{now:.2f}", "plain")]
    for one in levers:
        line = now * (1 + one["linear"]["gain"])
        rate = one["tokens_per_second"]["value"]
        bars.append(
            Bar(one["name"], now, rate, f"{rate:.2f} ({one['gain']:+.1%})", "filled", line, f"straight line {line:.2f}")
        )
    bars.append(Bar("if every miss were free", now, top, f"{top:.2f} ({limit['gain']:+.1%})", "open"))
    rows = [
        (one["name"], f"{one['frees']['value'] / GIB:,.2f}", f"{one['slots']:,.0f}{'+' if one['curve_ended'] else ''}",
         f"{1000 * one['step']['value']:.2f}", f"{one['tokens_per_second']['value']:.2f}", f"{one['gain']:+.1%}",
         f"{one['linear']['gain']:+.1%}")
        for one in levers
    ]  # fmt: skip
    columns = ("lever", "frees GiB", "slots", "step ms", "tokens a second", "gain", "on the straight line")
    best = f"{levers[0]['name']} buys most: {levers[0]['gain']:+.1%}. " if levers else "There is no lever. "
    said = f"{best}If every miss were free it would be {limit['factor']:.2f} times as fast: the most there is."
    alone = f"Each lever stands alone and begins at the {now:.2f} tokens a second of now: gains do not add up."
    notes = list[str]()
    if any(one["curve_ended"] for one in levers):
        notes.append("+ the curve ends before these slots; they are priced at its end.")
    caption = (
        f"All modelled, on a curve that is {shown['curve']}. A bar ends at the curve's price, its mark is the line's."
    )
    return PlanPage(
        "Levers",
        subject,
        [said],
        [
            PlanPart(
                "levers", "What each lever would buy", alone, PlanTable(caption, columns, rows),
                bar_plot(bars, "tokens a second", (now, "now")), notes,
            ),
            PlanPart(
                "misses", "The curve that prices them", f"Misses fall along it from now on, {here:.4g} slots a layer.",
                PlanTable(f"The curve is {shown['curve']}.", (X, Y), [(_figure(x), _figure(y)) for x, y in points]),
                _curve(points, here),
            ),
            _marginal(points, "From the curve above."),
            ledger_part(ledger),
        ],
    )  # fmt: skip


def ledger_part(shown: Json) -> PlanPart:
    """Pools after each other, then what nobody owns, then what is free: together the capacity."""
    owned: Look = "filled"
    residual: Json = shown["unattributed"]["amount"]
    others: list[tuple[str, Json, Look]] = [("UNATTRIBUTED", residual, "open"), ("free", shown["free"], "plain")]
    lines: list[tuple[str, Json, Look]] = [(str(pool["name"]), pool, owned) for pool in shown["pools"]]
    lines += others
    capacity = shown["capacity"]["value"]
    bars: list[Bar] = []
    rows: list[tuple[str, ...]] = []
    end = 0.0
    for name, amount, look in lines:
        start, end = end, end + amount["value"] / GIB
        share = f"{amount['value'] / capacity:.1%}"
        bars.append(Bar(name, start, end, f"{amount['value'] / GIB:,.2f} ({share})", look))
        rows.append((name, f"{amount['value'] / GIB:,.2f}", share, amount["kind"], amount["source"]))
    rows.append(
        ("capacity", f"{capacity / GIB:,.2f}", "100.0%", shown["capacity"]["kind"], shown["capacity"]["source"])
    )
    said = (
        f"{shown['accounted']['value'] / GIB:,.2f} of {capacity / GIB:,.2f} GiB have an owner, "
        f"{shown['free']['value'] / GIB:,.2f} are free, and {residual['value'] / GIB:,.2f} are unattributed."
    )
    notes = ["What is unattributed is no headroom until somebody names its owner."]
    if "slots_with_scales" in shown["unattributed"]:
        rest = shown["unattributed"]
        notes.append(
            f"It would be worth {rest['slots_with_scales']:,.0f} slots, "
            f"{rest['slots_without_scales']:,.0f} without scales."
        )
    table = PlanTable("GiB; each amount with its kind.", ("owner", "GiB", "of capacity", "kind", "source"), rows)
    return PlanPart("ledger", "Who owns the memory", said, table, bar_plot(bars, "GiB"), notes)


def _curve(points: Sequence[tuple[float, float]], here: float | None = None) -> LinePlot | None:
    dots = len(points) <= 33
    mark = None if here is None else (here, "now")
    return line_plot([Series("misses", points, dots=dots)], X, Y, mark)


def _by_layer(slots: Mapping[str, int], layers: Sequence[str]) -> list[tuple[float, float]]:
    """Slots of each layer, the last one held for as wide as the others."""
    places: list[tuple[float, float]] = [(int(layer), slots[layer]) for layer in layers]
    return [*places, (places[-1][0] + 1, places[-1][1])]


def _marginal(points: Sequence[tuple[float, float]], kind: str) -> PlanPart:
    """What one more slot in every layer saves, from each size to the next."""
    saved = [(x, (y - after) / (to - x), to) for (x, y), (to, after) in pairwise(points) if to > x]
    drawn = [(x, value) for x, value, _ in saved] + [(saved[-1][2], saved[-1][1])] if saved else []
    said = "A single size has no next one."
    if saved:
        most = max(saved, key=lambda one: one[1])
        said = (
            f"One more slot in every layer saves {_figure(most[1])} misses per step and layer at {_figure(most[0])} "
            f"slots, where it saves most, and {_figure(saved[-1][1])} at {_figure(saved[-1][0])}."
        )
    rows = [(f"{_figure(x)} to {_figure(to)}", _figure(value)) for x, value, to in saved]
    table = PlanTable(kind[0].upper() + kind[1:], ("slots a layer", "misses saved by one more"), rows)
    plot = line_plot([Series("saved", drawn, steps=True)], X, "misses saved by one more slot")
    return PlanPart("marginal", "What one more slot is worth", said, table, plot)


def _rows(rows: Json) -> list[tuple[str, str]]:
    return [(f"{kind.replace('_', ' ')} rows", f"{count:,}") for kind, count in rows.items()]


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:.4g}" if abs(value) >= 1 else f"{value:.4f}"
