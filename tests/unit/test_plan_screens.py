"""Screens: candidates at equal bytes, and predictors against a plain model of what they would have fetched."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from plan_builders import raw, traffic
from soakrig.engine.planning.predict import PREDICTORS, Prediction, predict
from soakrig.engine.planning.quantity import Figure
from soakrig.engine.planning.replay import replay_arena, replay_trace, uniform_slots
from soakrig.engine.planning.screens import Candidate, headroom, screen
from soakrig.engine.planning.steptime import StepModel
from soakrig.engine.planning.trace import PlannedTrace, TraceShape, open_trace
from soakrig.errors import UsageError

F = Figure.of
LAYERS, TOP_K, EXPERTS = 3, 2, 16


@pytest.fixture
def planned(tmp_path: Path) -> PlannedTrace:
    return open_trace(
        str(raw(tmp_path / "t", traffic(300, LAYERS, TOP_K, EXPERTS))), TraceShape(LAYERS, TOP_K, EXPERTS)
    )


def test_candidates_are_compared_with_the_first(planned: PlannedTrace) -> None:
    even = uniform_slots(planned, 6)
    other = {0: 8, 1: 6, 2: 4}
    model = StepModel(F(20, "ms/step"), F(0.5, "ms/row"))
    candidates = [
        Candidate("now", "lru", even), Candidate("hot", "static", even), Candidate("map", "lru", other),
        Candidate("pool", "lru", {-1: 18}),
    ]  # fmt: skip
    found = screen(planned, candidates, model)
    expected = [
        replay_trace(planned, even), replay_trace(planned, even, "static"), replay_trace(planned, other),
        replay_arena(planned, 18),
    ]  # fmt: skip
    assert [one.misses for one in found] == [one.misses for one in expected]
    assert found[0].misses_change == found[0].step_change == 0.0
    for one in found[1:]:
        assert one.misses_change == pytest.approx(one.misses / found[0].misses - 1)
        assert one.step is not None
        assert one.step.to("ms/step") == pytest.approx(20 + 0.5 * one.misses_per_step_per_layer * LAYERS)
        assert one.step.kind == "modelled"
    assert screen(planned, candidates[:1])[0].to_json()["step"] is None


def test_unequal_bytes_are_no_comparison(planned: PlannedTrace) -> None:
    candidates = [
        Candidate("now", "lru", uniform_slots(planned, 6)),
        Candidate("more", "lru", uniform_slots(planned, 7)),
    ]
    with pytest.raises(UsageError, match="candidate more has 21 slots and now 18: equal bytes"):
        screen(planned, candidates)
    with pytest.raises(UsageError, match="an arena under opt"):
        screen(planned, [Candidate("pool", "opt", {-1: 18})])


def plain(planned: PlannedTrace, slots: int, share: float, most: int) -> dict[str, tuple[int, int, int]]:
    """issued, useful and misses of every predictor: dictionaries and lists, an LRU of steps."""
    ids = planned.trace.ids.tolist()
    cut = round(share * len(ids))
    counts = {name: [0, 0, 0] for name in PREDICTORS}
    for layer in range(LAYERS):
        after: dict[int, Counter[int]] = {one: Counter() for one in range(EXPERTS)}
        along: dict[int, Counter[int]] = {one: Counter() for one in range(EXPERTS)}
        often: Counter[int] = Counter()
        lasts: dict[int, int] = {}
        places: dict[int, int] = {}
        before: list[int] = []
        for step, row in enumerate(ids):
            now, beside = row[layer], row[layer - 1] if layer else []
            missing = [one for one in now if one not in places]
            if step >= cut:
                scores = {
                    "previous token": sum((after[one] for one in before), Counter()),
                    "adjacent layer": sum((along[one] for one in beside), Counter()),
                    "frequency": often,
                }
                for name, score in scores.items():
                    ranked = sorted((one for one in score if one not in places), key=lambda one: (-score[one], one))
                    counts[name][0] += len(ranked[:most])
                    counts[name][1] += len(set(ranked[:most]) & set(missing))
                    counts[name][2] += len(missing)
            else:
                for one in now:
                    often[one] += 1
                    for other in before:
                        after[other][one] += 1
                    for other in beside:
                        along[other][one] += 1
            for one in now:
                if one in places:
                    lasts[one] = step
            for one in missing:
                free = [slot for slot in range(slots) if slot not in places.values()]
                if free:
                    slot = free[0]
                else:
                    loose = [held for held in places if lasts[held] != step]
                    victim = min(loose, key=lambda held: (lasts[held], places[held]))
                    slot = places.pop(victim)
                places[one], lasts[one] = slot, step
            before = now
            assert len(places) <= slots
    return {name: (one[0], one[1], one[2]) for name, one in counts.items()}


@pytest.mark.parametrize("issued", [1, 2, 8])
def test_predictors_are_what_a_plain_model_says(planned: PlannedTrace, issued: int) -> None:
    slots = 6
    found = {
        one.predictor: one
        for one in predict(planned.trace, uniform_slots(planned, slots))
        if one.issued_per_step == issued
    }
    expected = plain(planned, slots, 0.5, issued)
    for name, one in found.items():
        assert (one.issued, one.useful, one.misses) == expected[name], name
        assert one.layer_steps == 150 * LAYERS
        assert one.precision == one.useful / one.issued
        assert one.recall == one.useful / one.misses
    assert found["adjacent layer"].issued < found["frequency"].issued, "the first layer has none before it"


def test_a_predictor_that_knows_is_found_out(tmp_path: Path) -> None:
    """Experts go round in a circle: the next is always known, and never in one slot."""
    ids = (np.arange(200, dtype=np.int16) % 8).reshape(-1, 1, 1)
    planned = open_trace(str(raw(tmp_path / "t", ids)), TraceShape(1, 1, 8))
    found = {(one.predictor, one.issued_per_step): one for one in predict(planned.trace, {0: 1})}
    first = found["previous token", 1]
    assert (first.precision, first.recall) == (1.0, 1.0)
    assert found["frequency", 1].precision == pytest.approx(1 / 4, abs=0.02), "two of eight: one is in the slot"
    assert found["adjacent layer", 8].issued == 0
    assert found["adjacent layer", 8].precision is None


def test_what_cannot_be_judged_is_refused(planned: PlannedTrace) -> None:
    with pytest.raises(UsageError, match="leaves nothing to fit on or to judge by"):
        predict(planned.trace, uniform_slots(planned, 6), 1.0)
    with pytest.raises(UsageError, match="its slots never change"):
        predict(planned.trace, uniform_slots(planned, 6), policy="static")


def test_headroom_of_the_link() -> None:
    one = Prediction("frequency", 4, issued=4_000, useful=400, misses=1_000, layer_steps=1_000)
    row, link = F(20_000_000, "B/row"), F(10, "GB/s")
    issued, saved = one.bytes(row, layers=10)
    assert (issued.to("MB/step"), saved.to("MB/step")) == (800, 80)
    room = headroom(one, 10, row, link, F(100, "ms/step"))
    assert room.spare.to("MB/step") == pytest.approx(1_000 - 200)
    assert room.extra.to("MB/step") == pytest.approx(720)
    assert room.fits
    assert not headroom(one, 10, row, link, F(90, "ms/step")).fits
