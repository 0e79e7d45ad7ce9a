"""The search for the smallest load: floors are found, doubts are settled, and it goes on wherever it was cut off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimize_world import WHOLE, floor, play
from soakrig.bisect.minimize.decision import FAULTS, LEAST_FAULTS, Demand, Seen, turns_until
from soakrig.bisect.minimize.search import GIVE_UP_AT, SURE, Search
from soakrig.bisect.minimize.shape import LEAST, SIZES, Shape
from soakrig.errors import RecordError

REFERENCE = Seen(FAULTS, 30.0)


def test_a_floor_of_tools_and_context_is_found_within_a_quarter() -> None:
    off: list[tuple[int, str]] = []
    launches: list[int] = []
    for seed in range(100):
        path, count = play(floor(), seed)
        launches.append(count)
        best = path.best
        near = 8 <= best.tools <= 10 and 6000 <= best.context <= 7500 and 17 <= best.max_tokens <= 21
        if not (path.what == "minimal" and near and best.requests == best.conversations == 1 and not best.stream):
            off.append((seed, best.name))
    assert len(off) <= 3, off
    assert sum(launches) / 100 < 70


def test_what_nothing_is_needed_for_becomes_as_small_as_it_can_be() -> None:
    found = [play(floor(least_tools=0, least_context=0, least_tokens=1), seed) for seed in range(10)]
    assert {path.what for path, _ in found} == {"minimal"}
    assert sum(path.best == Shape(1, 1, 0, 1, 0, 200) for path, _ in found) >= 9
    assert sum(launches for _, launches in found) < 500


def test_what_everything_is_needed_for_stays_as_it_was() -> None:
    whole = floor(least_tools=50, least_context=13000, least_tokens=96)
    path, _ = play(
        lambda shape: whole(shape) if (shape.conversations, shape.requests, shape.stream) == (2, 12, 1) else 0.0, 5
    )
    assert (path.what, path.best) == ("minimal", WHOLE)


def test_a_load_that_keeps_an_eighth_of_the_hazard_is_not_taken_for_useful() -> None:
    whole = floor()
    kept = [play(lambda shape: whole(shape) or 1 / 48, seed)[0].best for seed in range(20)]
    assert sum(whole(shape) > 0 for shape in kept) >= 14, "they would pass for smaller ones by luck only"


def test_a_run_whose_fault_does_not_come_again_is_given_up() -> None:
    path, launches = play(floor(0.0), 0)
    assert path.what == "not again"
    assert launches <= GIVE_UP_AT // 20
    assert "no fault in" in path.why


def test_the_order_of_what_is_tried() -> None:
    """Smallest first, then the geometric middle; structure before sizes, which get a reference of their own."""
    known: dict[Shape, Seen] = {}

    def step() -> Shape | None:
        return Search(WHOLE, 8, lambda count: 200, Demand(), known).walk().next

    assert step() == WHOLE
    known[WHOLE] = REFERENCE
    one = WHOLE.with_("conversations", 1)
    assert step() == one
    known[one] = Seen(0, 400.0)
    assert step() == WHOLE.with_("requests", 1), "of two conversations there is nothing between one and two"
    known[WHOLE.with_("requests", 1)] = Seen(0, 400.0)
    assert step() == WHOLE.with_("requests", 3)
    known[WHOLE.with_("requests", 3)] = Seen(2, 4.0)
    assert step() == WHOLE.with_("requests", 2)
    known[WHOLE.with_("requests", 2)] = Seen(0, 400.0)
    assert step() == WHOLE.with_("requests", 3), "the reference of all sizes needs its faults"
    known[WHOLE.with_("requests", 3)] = Seen(5, 20.0)
    assert step() == WHOLE.with_("requests", 3).with_("stream", 0)


def test_later_evidence_turns_a_decision_round() -> None:
    small = WHOLE.with_("conversations", 1)
    known = {WHOLE: REFERENCE, small: Seen(2, 3.0)}
    assert Search(WHOLE, 8, lambda count: 200, Demand(), known).walk().best.conversations == 1
    known[small] = Seen(2, 600.0)
    assert Search(WHOLE, 8, lambda count: 200, Demand(), known).walk().best.conversations == 2


def test_in_doubt_the_reference_is_looked_at_again() -> None:
    known = {WHOLE: Seen(FAULTS, 6.0), WHOLE.with_("conversations", 1): Seen(2, 8.0)}
    path = Search(WHOLE, 8, lambda count: 200, Demand(), known).walk()
    assert path.next == WHOLE
    assert str(SURE) in path.why


def test_decisions() -> None:
    demand = Demand()
    assert demand.state(REFERENCE, Seen()) == "open"
    assert demand.state(REFERENCE, Seen(1, 1.0)) == "open", "one fault may be luck"
    assert demand.state(REFERENCE, Seen(LEAST_FAULTS, 12.0)) == "kept"
    assert demand.state(REFERENCE, Seen(LEAST_FAULTS, 40.0)) == "open"
    assert demand.state(REFERENCE, Seen(0, 30.0)) == "open"
    clean = demand.clean_until(REFERENCE, Seen())
    assert demand.state(REFERENCE, Seen(0, clean)) == "lost"
    assert demand.state(REFERENCE, Seen(0, clean - 1)) == "open"
    assert demand.chance(REFERENCE, Seen(0, clean)) <= 0.02 < demand.chance(REFERENCE, Seen(0, clean - 1))
    assert 60 < clean < 90, "(1 + x / 10)^-5 = 0.02 at x = 11.9 mean exposures of 6 turns"


@given(st.integers(0, 9), st.floats(0.5, 900.0), st.integers(2, 20), st.floats(2.0, 500.0))
def test_more_clean_work_never_brings_a_lost_load_back(faults: int, turns: float, known: int, exposure: float) -> None:
    demand, reference = Demand(), Seen(known, exposure)
    if demand.state(reference, Seen(faults, turns)) == "lost":
        assert demand.state(reference, Seen(faults, 1.5 * turns)) == "lost"
    assert demand.clean_until(reference, Seen(faults, turns)) >= 1


def test_the_check_at_the_end_gets_launches_that_can_tell() -> None:
    kept = Seen(4, 12.0)
    assert Demand().state(REFERENCE, kept) == "kept"
    assert Demand().clean_until(REFERENCE, kept) > 60


def test_turns_until() -> None:
    assert turns_until(1 / 6) == 17
    assert turns_until(1.0) == 1


def test_names_of_loads() -> None:
    assert WHOLE.name == "c2-r12-stream-m96-t50-x13000"
    assert Shape.read(WHOLE.name) == WHOLE
    assert set(LEAST) | {"context"} >= set(SIZES)
    with pytest.raises(RecordError, match="no load of a minimisation"):
        Shape.read("VLLM_MOE_DMA_STAGING=0")
