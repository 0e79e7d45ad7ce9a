"""Budgets: what is owned, what nobody owns, what levers buy, and every budget that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plan_builders import BUDGET
from soakrig.engine.planning.budget_file import Budget, read_budget
from soakrig.engine.planning.engine_memory import read_engine_log, read_nvml
from soakrig.engine.planning.ledger import Ledger, Pool
from soakrig.engine.planning.levers import Curve, OperatingPoint, ceiling, known_levers, price_levers, straight
from soakrig.engine.planning.quantity import Figure
from soakrig.engine.planning.steptime import StepModel, StepWork, floors
from soakrig.errors import UsageError

F = Figure.of
STUB = Path(__file__).parent.parent / "fixtures" / "nvml_stub"


def read(folder: Path, text: str = BUDGET, **more: Any) -> Budget:
    path = folder / "card.toml"
    path.write_text(text)
    return read_budget(str(path), **more)


def test_the_residual_is_a_line_of_its_own(tmp_path: Path) -> None:
    ledger = read(tmp_path).ledger
    shown = ledger.to_json()
    assert [one["name"] for one in shown["pools"]] == [
        "expert slots: weights", "expert slots: scales", "KV cache", "other",
    ]  # fmt: skip
    assert ledger.accounted.value + ledger.free.value + ledger.residual.value == ledger.capacity.value
    assert shown["unattributed"]["amount"]["value"] == 268_200_000_000 - 17_700_000_000 - ledger.accounted.value
    assert shown["unattributed"]["slots_with_scales"] == pytest.approx(1731.9, abs=0.1)
    assert shown["unattributed"]["slots_without_scales"] == pytest.approx(1948.4, abs=0.1)
    assert shown["slots"]["scale_share"] == pytest.approx(0.111, abs=1e-3)
    # One pool is of another day: nothing that is summed with it is better than that.
    assert {one["name"]: one["kind"] for one in shown["pools"]}["other"] == "uncontrolled"
    assert shown["accounted"]["kind"] == shown["unattributed"]["amount"]["kind"] == "uncontrolled"


def test_a_sum_above_the_capacity_is_refused_with_all_numbers(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        read(tmp_path, BUDGET.replace('"39.2 GB"', '"90 GiB"'))
    assert "the budget sums above its capacity" in refused.value.message
    for number in (
        "271,161,753,600 B) in pools",
        "17,700,000,000 B) free",
        "268,200,000,000 B)",
        "20,661,753,600 B) too",
    ):
        assert number in refused.value.message
    assert "other 90.00 GiB" in refused.value.message
    with pytest.raises(UsageError, match="sums above its capacity") as refused:
        Ledger(F(10.5, "GB"), F(0, "B"), (Pool("a", F(10, "GiB")),))
    assert "read as GB where GiB was written, the pools would fit" in refused.value.remedy


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"48 GiB"', '"48 GB"', "pool 'KV cache' is '48 GB', which has two readings: 48,000,000,000 B"),
        ('"268.2 GB"', '"268.2"', "capacity is '268.2': a number and a unit of bytes"),
        ("[capacity]", "[capacty]", "capacty: an unknown key; 'capacity' was probably meant"),
        ('role = "kv"', 'rle = "kv"', "pool.0.rle: an unknown key; 'role' was probably meant"),
        ("per_row =", "per_rows =", "step.per_rows: an unknown key; 'per_row' was probably meant"),
        ('role = "kv"', 'role = "KV"', "pool.0.role: "),
        ('kind = "measured"\nsource = "engine log"', 'kind = "guessed"', r"capacity.kind: .*\(read: 'guessed'\)"),
        ('kind = "uncontrolled"\n', "", "an amount was given without its kind"),
        ('amount = "39.2 GB"', "", "either amount, or each and count, or log"),
        ("count = 5792", "count = -1", "slots.count"),
        ("count = 5792", 'count = "5792"', r"slots.count: .*\(read: '5792'\)"),
        ("22.5 ms/step", "22.5 ms", "step.fixed is '22.5 ms': ms does not measure what ms/step does"),
        ("0.0554 ms/row", "0.0354 ms/row", r"599\.8 GB/s, and the link has 383\.0 GB/s"),
        ("tokens_per_second = 45.75", "tokens_per_second = 45.75\ntokens_per_step = 2", "say the same; give one"),
        ('fixed = "22.5 ms/step"', "", "either fixed and per_row, or points"),
        ("[80, 4.61]", "[80, 4.91]", "slots rising and misses not, were expected"),
        ("schema = ", "schema = 1\n# ", "schema: "),
        ("[[pool]]", "[[pool", "is no TOML"),
    ],
)
def test_budgets_that_are_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in BUDGET
    with pytest.raises(UsageError, match=says):
        read(tmp_path, BUDGET.replace(old, new, 1))


def test_a_budget_needs_capacity_and_free_or_nvml(tmp_path: Path) -> None:
    text = 'schema = "soakrig.budget/1"\n'
    with pytest.raises(UsageError, match=r"has no \[capacity\]") as refused:
        read(tmp_path, text)
    assert "--nvml" in refused.value.remedy
    found = read(tmp_path, text, nvml=(F(80, "GiB", "measured"), F(3, "GiB", "measured"))).ledger
    assert found.residual.to("GiB") == 77
    with pytest.raises(UsageError, match="no price of a slot"):
        found.worth(found.residual)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_budget(str(tmp_path / "none.toml"))


LOG = """
INFO 11-29 [gpu_model_runner.py:5150] Model loading took 101.25 GiB memory and 93.100000 seconds
INFO 11-29 [gpu_worker.py:760] Available KV cache memory: 47.5 GiB
INFO 11-29 [gpu_model_runner.py:6582] Graph capturing finished in 21 secs, took 1.43 GiB
INFO 11-29 [gpu_worker.py:760] Available KV cache memory: 48.0 GiB
"""


def test_an_engines_log_fills_the_pools_that_name_it(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(LOG)
    log = read_engine_log(str(path))
    assert {name: one.to("GiB") for name, one in log.items()} == {"weights": 101.25, "kv": 48.0, "graphs": 1.43}
    assert (log["kv"].kind, log["kv"].source) == ("measured", "engine.log, line 5")
    text = BUDGET.replace('amount = "48 GiB"\nkind = "derived"', 'log = "kv"')
    assert read(tmp_path, text, log=log).ledger.pools[2].amount == log["kv"]
    with pytest.raises(UsageError, match="engine log's line on kv, and none was given"):
        read(tmp_path, text)
    with pytest.raises(UsageError, match="line on kv, and it has graphs"):
        read(tmp_path, text, log={"graphs": log["graphs"]})
    reserved = (
        "Initial free memory 93.1 GiB, reserved 5.25 GiB memory for KV Cache as specified by kv_cache_memory_bytes\n"
    )
    path.write_text(reserved)
    assert read_engine_log(str(path))["kv"].to("GiB") == 5.25
    path.write_text("nothing of the kind\n")
    with pytest.raises(UsageError, match="has no line on memory"):
        read_engine_log(str(path))


def test_nvml_is_read_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state.json"
    monkeypatch.setenv("PYTHONPATH", str(STUB))
    monkeypatch.setenv("NVML_STUB_STATE", str(state))
    state.write_text(json.dumps({"gpu": {"total": 96 << 30, "used": 90 << 30}}))
    capacity, free = read_nvml(0)
    assert (capacity.to("GiB"), free.to("GiB"), free.kind, free.source) == (96, 6, "measured", "NVML, GPU 0")
    state.write_text(json.dumps({"init": "NVMLError_DriverNotLoaded"}))
    with pytest.raises(UsageError, match=r"NVML told nothing of GPU 0: .*DriverNotLoaded"):
        read_nvml(0)
    with pytest.raises(UsageError, match="NVML told nothing of GPU 0: no output"):
        read_nvml(0, python="/bin/true")


def test_levers_are_priced_on_the_curve_with_the_line_beside(tmp_path: Path) -> None:
    budget = read(tmp_path)
    assert budget.model is not None
    assert budget.now is not None
    assert budget.curve is not None
    found = price_levers(known_levers(budget.ledger), budget.ledger, budget.now, budget.model, budget.curve, 4.2)
    assert [one.lever.name for one in found] == [
        "KV cache to host memory", "the unattributed rest, if it can be had", "KV cache in fp8",
        "scale copies off the device",
    ]  # fmt: skip
    assert all(one.gain < one.linear_gain for one in found), "the curve flattens"
    scales = found[-1]
    assert (round(scales.slots), round(scales.slots_at_old_price, 1)) == (724, 643.6)
    for one in found:
        rows = Figure.of(one.misses * 75, "row/step")
        assert one.step == budget.model.step(rows)
        assert one.step.kind == "modelled"
        assert one.tokens_per_second.to("token/s") == pytest.approx(45.75 * (1 + one.gain))
        assert one.to_json()["linear"]["gain"] == one.linear_gain
    factor, tokens = ceiling(budget.now, budget.model)
    assert factor > 1 + max(one.linear_gain for one in found)
    assert tokens.to("token/s") == pytest.approx(45.75 * factor)


def test_a_lever_beyond_the_curve_is_priced_at_its_end_and_says_so(tmp_path: Path) -> None:
    budget = read(tmp_path, BUDGET + '\n[[lever]]\nname = "a second card"\nfrees = "96 GiB"\n')
    assert budget.model is not None
    assert budget.now is not None
    assert budget.curve is not None
    (found,) = price_levers(budget.levers, budget.ledger, budget.now, budget.model, budget.curve)
    assert found.curve_ended
    assert found.misses == pytest.approx(4.24 * 2.51 / budget.curve.at(5792 / 75))
    with pytest.raises(UsageError, match=r"the curve goes from 77\.2 to 128"):
        budget.curve.at(129)


def test_the_straight_line_never_goes_below_no_miss() -> None:
    now = OperatingPoint(100, 10, 4.0, 16, F(1, "token/step"))
    assert straight(now, 10**6, 4.2) == 0.0
    assert straight(now, 0, 4.2) == 4.0


@pytest.mark.parametrize(("slots", "misses"), [((1,), (2,)), ((1, 1), (2, 1)), ((1, 2), (1, 2)), ((1, 2), (1, -1))])
def test_no_curve(slots: tuple[float, ...], misses: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="slots rising and misses not"):
        Curve(slots, misses, "measured")


def test_a_step_is_fitted_from_points() -> None:
    points = [(F(rows, "row/step"), F(22.5 + 0.06 * rows, "ms/step", "measured")) for rows in (100, 200, 318)]
    model = StepModel.fit(points)
    assert model.fixed.to("ms/step") == pytest.approx(22.5)
    assert model.per_row.to("ms/row") == pytest.approx(0.06)
    assert model.worst_error == pytest.approx(0, abs=1e-9)
    assert model.step(F(50, "row/step")).kind == "modelled"
    crooked = StepModel.fit([*points, (F(150, "row/step"), F(35, "ms/step"))])
    assert crooked.worst_error is not None
    assert crooked.worst_error > 0.02
    with pytest.raises(UsageError, match="1 different numbers of missed rows: two"):
        StepModel.fit([points[0], points[0]])
    with pytest.raises(UsageError, match="neither can be negative"):
        StepModel.fit([(F(100, "row/step"), F(30, "ms/step")), (F(200, "row/step"), F(20, "ms/step"))])
    with pytest.raises(UsageError, match="the time of a step came in s; s/step was expected"):
        StepModel.fit([(F(100, "row/step"), F(30, "ms"))])


def test_points_of_a_budget_are_fitted(tmp_path: Path) -> None:
    text = BUDGET.replace(
        'fixed = "22.5 ms/step"\nper_row = "0.0554 ms/row"', 'points = [[318, "40.1 ms/step"], [0, "22.5 ms/step"]]'
    )
    model = read(tmp_path, text).model
    assert model is not None
    assert model.per_row.to("ms/row") == pytest.approx(17.6 / 318)
    assert model.per_row.kind == "modelled"


def test_floors_of_a_step() -> None:
    """The published step: 318 missed rows of 21.2 MB, of 75 x 14 computed ones, at 383 GB/s; and a slow host memory."""
    row = F(21_233_664, "B/row")
    work = StepWork(F(40, "GB/step"), F(1_050, "row/step"), F(318, "row/step"), F(1, "GB/step"), row)
    found = floors(work, F(7_100, "GB/s"), F(383, "GB/s"))
    assert found.link.to("ms/step") == pytest.approx(17.63, abs=0.01)
    assert found.hbm.to("ms/step") == pytest.approx((41e9 + 1_050 * 21_233_664) / 7.1e9)
    assert found.overlap == found.link
    assert found.serial.to("ms/step") == pytest.approx(found.link.to("ms/step") + found.hbm.to("ms/step"))
    assert found.distance(F(40.1, "ms/step", "measured")) == pytest.approx(40.1 / 17.63, abs=0.01)
    slow = floors(work, F(7_100, "GB/s"), F(383, "GB/s"), host=F(200, "GB/s"))
    assert slow.link.to("ms/step") == pytest.approx(318 * 21_233_664 / 200e6)
    assert {one["kind"] for one in found.to_json().values()} == {"modelled"}
    with pytest.raises(UsageError, match="device bandwidth came in B; B/s was expected"):
        floors(work, F(7_100, "GB"), F(383, "GB/s"))
