"""Two operators' published arithmetic, figure by figure, from the planner's public calls.

``docs/seed-arithmetic.md`` says why those disagree that do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plan_builders import BUDGET
from soakrig.bisect.statistics import chance_of_so_few_crashes
from soakrig.engine.planning.budget_file import Budget, read_budget
from soakrig.engine.planning.checkpoint import ExpertShape
from soakrig.engine.planning.fit import host_need, kv_cache, kv_tier
from soakrig.engine.planning.ledger import Ledger, SlotPrice, pinned_bytes, slot_pools
from soakrig.engine.planning.levers import (
    Curve,
    Lever,
    OperatingPoint,
    ceiling,
    known_levers,
    local_slope,
    price_levers,
)
from soakrig.engine.planning.quantity import Figure, parse_bytes, total
from soakrig.engine.planning.steptime import StepModel, link_rate
from soakrig.engine.planning.trace import TraceShape, open_trace
from soakrig.errors import UsageError

ROOT = Path(__file__).parent.parent
LINES = (ROOT / "fixtures" / "planning" / "published_figures.jsonl").read_text().splitlines()
FIGURES: list[dict[str, Any]] = [json.loads(line) for line in LINES]
F = Figure.of

FLASH, LARGE = ExpertShape(4096, 2048), ExpertShape(6144, 2048)
SHARED = ExpertShape(4096, 2048, bits=16, scale_block=0)
FLASH_STEP = StepModel(F(34.8, "ms/step", "measured"), F(68.6, "ms/row", "measured"))
"""Of the first seed: its row is the whole routed traffic of a step."""
LADDER = Curve((33, 66, 99, 132, 165), (0.5735, 0.3854, 0.2602, 0.1701, 0.1038), "measured")
"""Misses per fetch by hot slots."""
RANKS = (0.269, 0.186, 0.137, 0.109, 0.091, 0.078, 0.069, 0.061)
LINK = F(383, "GB/s", "measured")
NOW = OperatingPoint(5792, 75, 4.24, 16, F(45.75, "token/s", "measured") * F(40.1172, "ms/step"))
PRICE = SlotPrice(LARGE.weights() * F(1, "row"), LARGE.scales() * F(1, "row"))


def point(misses: float, accesses: float, slots: int = 1, layers: int = 1) -> OperatingPoint:
    return OperatingPoint(slots, layers, misses, accesses, F(1, "token/step"))


def flash(experts: float, layers: int = 1) -> Figure:
    return FLASH.row() * F(1, "row") * experts * layers


def bank(matrices: int) -> Figure:
    return FLASH.weights(matrices) * F(288, "row")


def parts(*gib: float) -> float:
    return total(F(one, "GiB", "measured") for one in gib).to("GiB")


def percent(part: float, whole: float) -> float:
    return 100 * F(part, "B").share(F(whole, "B"))


def flash_ms(fraction: float) -> float:
    return FLASH_STEP.step(F(fraction, "row/step")).to("ms/step")


def flash_rate(fraction: float) -> float:
    return (F(1, "token/step") / FLASH_STEP.step(F(fraction, "row/step"))).to("token/s")


def pinned() -> tuple[Figure, Figure]:
    tensors = [bank(2), bank(1), FLASH.scales(2) * F(288, "row"), FLASH.scales(1) * F(288, "row")] * 5
    return pinned_bytes(tensors, rounded=True), pinned_bytes(tensors, rounded=False)


def moved() -> Figure:
    return NOW.rows() * LARGE.row()


def ledger(scales: bool = True) -> Ledger:
    price = PRICE if scales else SlotPrice(PRICE.weights, F(0, "B"))
    return Ledger(F(268.2, "GB", "measured"), F(17.7, "GB", "measured"), (), 5792, price, 75)


@pytest.fixture(scope="module")
def budget(tmp_path_factory: pytest.TempPathFactory) -> Budget:
    path = tmp_path_factory.mktemp("budget") / "card.toml"
    path.write_text(BUDGET)
    return read_budget(str(path))


def lever(budget: Budget, name: str) -> Any:
    assert budget.model is not None
    assert budget.now is not None
    assert budget.curve is not None
    found = price_levers(known_levers(budget.ledger), budget.ledger, budget.now, budget.model, budget.curve, 4.2)
    return next(one for one in found if name in one.lever.name)


def scale_lever(budget: Budget) -> Any:
    """The third lever as published: 643 slots, at the price with scales."""
    assert budget.model is not None
    assert budget.now is not None
    assert budget.curve is not None
    freed = budget.ledger.pools[1].amount
    return price_levers([Lever("scales", freed)], budget.ledger, budget.now, budget.model, budget.curve, 4.2)[0]


def trace_rows(path: Path) -> int:
    with path.open("wb") as file:
        file.truncate(98_882_784)  # of zeros: their number of rows is what is asked
    return open_trace(str(path), TraceShape(78, 8, 256)).rows["decode"]


CALLS: dict[str, Callable[[Budget, Path], float]] = {
    "A01": lambda b, p: FLASH.row().to("MiB/row"),
    "A03": lambda b, p: flash(288, 42).to("GiB"),
    "A05": lambda b, p: parts(163.27, 18.01),
    "A07": lambda b, p: parts(11.74, 2.36, 2.02, 1.58),
    "A08": lambda b, p: percent(125, 163.27),
    "A09": lambda b, p: percent(102, 163.27),
    "A10": lambda b, p: (F(4.43, "GiB/token") * F(125, "GiB").share(F(163.27, "GiB"))).to("GiB/token"),
    "A12": lambda b, p: bank(2).to("GiB"),
    "A13": lambda b, p: bank(1).to("GiB"),
    "A14": lambda b, p: flash(288, 5).to("GiB"),
    "A15": lambda b, p: pinned()[0].to("GiB"),
    "A16": lambda b, p: F(33.8, "GiB").share(F(19.0, "GiB")),
    "A18": lambda b, p: F(21.5, "GiB").share(F(19.0, "GiB")),
    "A19": lambda b, p: 100 * pinned()[0].share(pinned()[1]),
    "A20": lambda b, p: kv_cache(327_680, 17_200).to("B"),
    "A21": lambda b, p: (F(5_637_144_576, "B") - kv_cache(327_680, 17_200)).to("B"),
    "A23": lambda b, p: (F(4, "GiB") / F(272_771, "token")).to("kB/token"),
    "A25": lambda b, p: 100 * (F(17_200, "B/token").share(F(4, "GiB") / F(272_771, "token")) - 1),
    "A26": lambda b, p: percent(304_800, 327_680),
    "A27": lambda b, p: flash_ms(0.63),
    "A28": lambda b, p: flash_ms(0.77),
    "A30": lambda b, p: 100 * (FLASH_STEP.per_row * F(0.77, "row/step")).share(FLASH_STEP.step(F(0.77, "row/step"))),
    "A31": lambda b, p: flash_rate(0.0),
    "A32": lambda b, p: 100 * (1 - ((F(40, "ms/step") - FLASH_STEP.fixed) / FLASH_STEP.per_row).to("row/step")),
    "A37": lambda b, p: 100 * (1 - sum(RANKS[:4])),
    "A38": lambda b, p: flash_rate(0.63 / 2),
    "A41": lambda b, p: total((F(ms, "ms") for ms in (34.06, 18.98, 3.58, 1.38, 0.47)), "s").to("ms"),
    "A44": lambda b, p: (F(16.76, "token/s") - F(15.09, "token/s")).to("token/s"),
    "A45": lambda b, p: (F(0.75, "token/step") + F(0.53, "token/step")).to("token/step"),
    "A46": lambda b, p: percent(0.75 + 0.53, 2),
    "A47": lambda b, p: F(1762, "token/s").share(F(614, "token/s")),
    "A51": lambda b, p: (F(30_000, "token") / F(22.57, "s")).to("token/s"),
    "A52": lambda b, p: (F(304_800, "token") / F(205, "s")).to("token/s"),
    "A54": lambda b, p: host_need(F(125, "GiB"), F(16, "GiB")).total.to("GiB"),
    "A55": lambda b, p: (host_need(F(125, "GiB"), F(30, "GiB")).total - F(141, "GiB")).to("GiB"),
    "A56": lambda b, p: (F(168, "GiB") - F(110, "GiB")).to("GiB"),
    "A57": lambda b, p: flash(66, 33).to("GiB"),
    "A60": lambda b, p: 100 * (LADDER.at(48) - LADDER.at(54)),
    "A61": lambda b, p: 100 * (1 - LADDER.at(0.362 * 288)),
    "A63": lambda b, p: F(288, "row").share(F(64, "row")),
    "A64": lambda b, p: percent(1_812, 32_768),
    "A65": lambda b, p: 3_788 + 112,
    "A66": lambda b, p: 1e8 * chance_of_so_few_crashes(112, 5, 3_788, 0),
    "A68": lambda b, p: (F(14.5, "GiB") / F(2.1 * 524_288, "token")).to("B/token"),
    "A69": lambda b, p: (F(95.6, "GiB") - total(F(one, "GiB") for one in (17, 4.5, 5, 1))).to("GiB"),
    "A71": lambda b, p: (SHARED.row() * F(43, "row")).to("GiB"),
    "B01": lambda b, p: LARGE.weights().to("MB/row"),
    "B02": lambda b, p: LARGE.scales().to("MB/row"),
    "B03": lambda b, p: LARGE.row().to("MB/row"),
    "B05": lambda b, p: (F(75, "layer") * F(112, "slot/layer")).to("slot"),
    "B06": lambda b, p: slot_pools(8_400, PRICE)[1].amount.to("GB"),
    "B07": lambda b, p: slot_pools(5_792, PRICE)[1].amount.to("GB"),
    "B09": lambda b, p: (F(45.3, "GB") - F(19.8, "GB")).to("GB"),
    "B10": lambda b, p: ledger().worth(slot_pools(5_792, PRICE)[1].amount),
    "B10b": lambda b, p: ledger().worth(slot_pools(5_792, PRICE)[1].amount, scales=False),
    "B13": lambda b, p: b.ledger.accounted.to("GB"),
    "B14": lambda b, p: b.ledger.residual.to("GB"),
    "B15": lambda b, p: (F(39.2, "GB") + b.ledger.residual).to("GB"),
    "B16": lambda b, p: parse_bytes("48 GiB").to("GB"),
    "B19": lambda b, p: parse_bytes("268.2 GB").to("GiB"),
    "B20": lambda b, p: (F(744 * 10**9, "parameter") * F(0.5, "B/parameter")).to("GiB"),
    "B21": lambda b, p: 16 * (1 - 31_322_913 / 42_726_000),
    "B24": lambda b, p: NOW.rows().to("row/step"),
    "B25": lambda b, p: moved().to("GB/step"),
    "B26": lambda b, p: (moved() / LINK).to("ms/step"),
    "B28": lambda b, p: (LARGE.row() / LINK).to("ms/row"),
    "B29": lambda b, p: b.model.step(NOW.rows()).to("ms/step") if b.model else math.nan,
    "B31": lambda b, p: (F(6.75, "GB/step") * F(45.65, "token/s")).to("GB*token/step/s"),
    "B32": lambda b, p: percent(308, 383),
    "B34": lambda b, p: ceiling(NOW, b.model)[0] if b.model else math.nan,
    "B35": lambda b, p: ceiling(NOW, b.model)[1].to("token/s") if b.model else math.nan,
    "B36": lambda b, p: slot_pools(1_000, PRICE)[0].amount.to("GB"),
    "B37": lambda b, p: 100 * lever(b, "KV cache to host").linear_gain,
    "B38": lambda b, p: 100 * lever(b, "fp8").linear_gain,
    "B39": lambda b, p: 100 * scale_lever(b).linear_gain,
    "B40": lambda b, p: lever(b, "KV cache to host").linear_gain / scale_lever(b).linear_gain,
    "B41": lambda b, p: local_slope(Curve((80, 112), (4.61, 3.11), "measured"), point(4.61, 16, 6_000, 75)),
    "B42": lambda b, p: 100 * lever(b, "KV cache to host").gain,
    "B43": lambda b, p: point(5.10, 8).hit,
    "B44": lambda b, p: point(5.87, 8).hit,
    "B46": lambda b, p: (kv_tier(48) - parse_bytes("1 MiB")).to("MiB"),
    "B47": lambda b, p: parse_bytes("32 GiB").to("MiB"),
    "B49": lambda b, p: trace_rows(p / "rows.i16"),
    "B50": lambda b, p: point(4.74, 16).hit,
    "B51": lambda b, p: point(2.51, 16).hit,
    "B53": lambda b, p: (parse_bytes("48 GiB") / F(524_288, "token")).to("B/token"),
    "B54": lambda b, p: 0.7331112905490802 * (F(71_210, "step") * F(75 * 8, "access/step")).to("access"),
    "B55": lambda b, p: percent(3_104, 3_720_899),
    "B56": lambda b, p: 100 * F(3_104, "access").share(F(21_365, "step") * F(75 * 8, "access/step")),
    "B57": lambda b, p: (F(20.097824, "ms/step") / NOW.rows()).to("ms/row"),
    "B58": lambda b, p: point((1 - 0.61) * 8, 16).hit,
}  # fmt: skip


def test_every_figure_has_a_call() -> None:
    assert {one["id"] for one in FIGURES} == set(CALLS)


@pytest.mark.parametrize("figure", FIGURES, ids=[one["id"] for one in FIGURES])
def test_a_published_figure_is_reproduced_or_recomputed(figure: dict[str, Any], budget: Budget, tmp_path: Path) -> None:
    found = CALLS[figure["id"]](budget, tmp_path)
    near = max(figure["tol"], 1e-9 * abs(figure["recomputed"]))
    assert abs(found - figure["recomputed"]) <= near
    if figure["agrees"]:
        assert abs(found - figure["stated"]) <= near
    elif figure["agrees"] is False:
        assert abs(found - figure["stated"]) > figure["tol"], "it agrees, and the page says that it does not"


def test_the_page_on_the_arithmetic_names_every_figure_that_disagrees() -> None:
    page = (ROOT.parent / "docs" / "seed-arithmetic.md").read_text()
    named = {one["id"] for one in FIGURES if one["agrees"] is not True}
    assert [one for one in sorted(named) if f"| {one} " not in page] == []
    assert all(f"| {one['id']} " in page for one in FIGURES if one["id"] in ("B31", "B32"))


def test_gigabytes_a_step_times_tokens_a_second_is_no_rate_of_a_link() -> None:
    mixed = F(6.75, "GB/step", "derived") * F(45.65, "token/s", "measured")
    with pytest.raises(UsageError, match=r"B\*token/s/step was read as GB/s"):
        mixed.to("GB/s")
    with pytest.raises(UsageError, match=r"the rate of steps came in token/s; step/s was expected"):
        link_rate(F(6.75, "GB/step"), F(45.65, "token/s"))
    steps = F(1, "") / F(40.1172, "ms/step")
    assert link_rate(moved(), steps).to("GB/s") == pytest.approx(168.3, abs=0.1)
    assert link_rate(moved(), steps).share(LINK) == pytest.approx(0.44, abs=0.005)


def test_the_first_seeds_line_needs_more_than_its_link_has() -> None:
    rows = 42 * 8
    model = StepModel(F(34.8, "ms/step"), F(68.6 / rows, "ms/row"))
    with pytest.raises(UsageError, match=r"69\.3 GB/s, and the link has 51\.8 GB/s"):
        model.check_link(FLASH.row(), F(51.8, "GB/s"))
    model.check_link(FLASH.row(), F(70, "GB/s"))


def test_the_power_of_two_alone_explains_what_pinning_took() -> None:
    rounded, asked = pinned()
    assert (rounded.to("GiB"), asked.to("GiB")) == (33.75, 18.984375)
    assert np.isclose(rounded.share(asked), 16 / 9)
