"""Traces for the planner: an engine's file or raw ids, and every file that is refused, with what was read of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plan_builders import captured, raw, traffic
from soakrig.engine.planning.trace import TraceShape, only_layers, open_trace, repeats_after, small_steps, split_trace
from soakrig.errors import UsageError

IDS = traffic(40, 6, 2, 16)
SHAPE = TraceShape(6, 2, 16)


def test_a_raw_trace_is_mapped_and_told(tmp_path: Path) -> None:
    found = open_trace(str(raw(tmp_path / "t.i16", IDS)), SHAPE)
    assert np.array_equal(found.trace.ids, IDS)
    assert found.rows == {"decode": 40, "prefill": 0, "padding": 0, "left_out": 0}
    assert (found.trace.header.layers, found.trace.header.top_k, found.trace.header.experts) == (tuple(range(6)), 2, 16)
    assert found.trace.first.all()
    assert found.notes == ()


def test_steps_of_several_rows(tmp_path: Path) -> None:
    found = open_trace(str(raw(tmp_path / "t.i16", IDS)), TraceShape(6, 2, 16, 3))
    assert [len(marks) for marks, _ in found.trace.steps()] == [3] * 13 + [1]
    assert found.notes == ("the last step has 1 of 3 rows",)


def test_an_engines_trace_says_it_all(tmp_path: Path) -> None:
    steps = [IDS[:1], IDS[1:3], IDS[3:40]]
    path = str(captured(tmp_path / "t.trace", steps, 16))
    for shape in (None, SHAPE, TraceShape(top_k=2)):
        found = open_trace(path, shape)
        assert found.rows == {"decode": 3, "prefill": 37, "padding": 0, "left_out": 0}
        assert np.array_equal(found.trace.ids, IDS)
    assert [len(marks) for marks, _ in small_steps(found.trace).steps()] == [1, 2]
    for shape, says in (
        (TraceShape(layers=5), "was written with --layers 6, and 5 was given"),
        (TraceShape(6, 4, 32), "written with --top-k 2, --experts 16, and 4, 32"),
        (TraceShape(rows_per_step=2), "marks its own steps"),
    ):
        with pytest.raises(UsageError, match=says):
            open_trace(path, shape)


@pytest.mark.parametrize("cut", [1, 11, 25])
def test_a_cut_off_raw_trace_is_refused(tmp_path: Path, cut: int) -> None:
    path = raw(tmp_path / "t.i16", IDS)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(UsageError, match=r"39 rows of 6 layers x 2 ids x 2 bytes = 24|38 rows of 6 layers"):
        open_trace(str(path), SHAPE)


def test_a_cut_off_engines_trace_is_refused_or_loses_its_last_step(tmp_path: Path) -> None:
    path = captured(tmp_path / "t.trace", [IDS[:2], IDS[2:4], IDS[4:7]], 16)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UsageError, match=r"is cut off: .* the last 23 are no whole row of 28") as refused:
        open_trace(str(path))
    assert "--allow-torn" in refused.value.remedy
    found = open_trace(str(path), allow_torn=True)
    assert np.array_equal(found.trace.ids, IDS[:4])
    assert found.rows["left_out"] == 2
    assert found.notes == ("the last step, cut off, was left out (2 rows)",)


def test_wrong_layers_that_do_not_divide_the_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"68 rows of 7 layers .* and 16 bytes over") as refused:
        open_trace(str(raw(tmp_path / "t.i16", np.tile(IDS, (2, 1, 1)))), TraceShape(7, 2, 16))
    assert "the size fits --layers" in refused.value.remedy
    assert "6" in refused.value.remedy


def test_wrong_layers_that_divide_the_file(tmp_path: Path) -> None:
    ids = traffic(1500, 6, 2, 16)
    path = str(raw(tmp_path / "t.i16", ids))
    assert open_trace(path, SHAPE).notes == ()
    assert repeats_after(ids) == 6
    with pytest.raises(UsageError, match="repeat themselves every 6 groups of 2, and --layers 4 was given") as refused:
        open_trace(path, TraceShape(4, 2, 16))
    assert "give --layers 6" in refused.value.remedy
    assert open_trace(path, TraceShape(12, 2, 16)).notes == (
        "the ids repeat themselves every 6 groups: is --layers 12 right?",
    )


def test_ids_without_skew_have_no_period() -> None:
    rng = np.random.default_rng(1)
    for layers, top_k, experts in ((1, 2, 8), (3, 4, 16), (7, 8, 64)):
        assert repeats_after(rng.integers(0, experts, size=(3000, layers, top_k)).astype(np.int16)) == 0


def test_wrong_top_k_shows_in_doubled_ids(tmp_path: Path) -> None:
    path = str(raw(tmp_path / "t.i16", traffic(300, 6, 2, 16)))
    (note,) = [one for one in open_trace(path, TraceShape(3, 4, 16)).notes if "twice" in one]
    assert "is --top-k 4 right?" in note


@pytest.mark.parametrize(("value", "experts"), [(16, 16), (-2, 16), (15, 15)])
def test_ids_beyond_the_experts_are_refused_with_their_place(tmp_path: Path, value: int, experts: int) -> None:
    ids = np.where(traffic(40, 6, 2, 16) >= 14, 3, traffic(40, 6, 2, 16)).astype(np.int16)
    ids[17, 4, 1] = value
    with pytest.raises(UsageError, match=f"row 17, layer 4: id {value}; -1 to {experts - 1} was expected"):
        open_trace(str(raw(tmp_path / "t.i16", ids)), TraceShape(6, 2, experts))


def test_sentinels_are_no_mistake(tmp_path: Path) -> None:
    ids = IDS.copy()
    ids[:, 2] = -1
    assert open_trace(str(raw(tmp_path / "t.i16", ids)), SHAPE).notes == ()


@pytest.mark.parametrize(
    ("content", "shape", "says"),
    [
        (b"", SHAPE, "has 0 bytes: 0 rows"),
        (b"\0" * 24, TraceShape(), "its shape has to be said"),
        (b"\0" * 24, TraceShape(6, 2), "its shape has to be said"),
        (b"\0" * 24, TraceShape(0, 2, 16), "--layers 0: 1 or more"),
        (b"\0" * 24, TraceShape(6, 2, 16, 0), "--rows-per-step 0: 1 or more"),
        (b"\0" * 24, TraceShape(6, 2, 40_000), "--experts 40000"),
        (b"\0" * 24, TraceShape(1, 12, 8), "no more ids than experts"),
        (b"SRTRACE1", None, "is no trace"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, shape: Any, says: str) -> None:
    path = tmp_path / "t.i16"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=says):
        open_trace(str(path), shape)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        open_trace(str(tmp_path / "none"), SHAPE)


def test_layers_can_be_left_out(tmp_path: Path) -> None:
    planned = open_trace(str(raw(tmp_path / "t.i16", IDS)), SHAPE)
    for layers in ([2, 3, 4], [0, 5], [3]):
        kept = only_layers(planned, layers).trace
        assert kept.header.layers == tuple(layers)
        assert np.array_equal(kept.ids, IDS[:, layers])
    with pytest.raises(UsageError, match=r"has no layer \[6\]; it has 0 to 5"):
        only_layers(planned, [1, 6])


def test_a_trace_is_split_between_steps(tmp_path: Path) -> None:
    trace = open_trace(str(raw(tmp_path / "t.i16", IDS)), TraceShape(6, 2, 16, 4)).trace
    first, rest = split_trace(trace, 0.3)
    assert (len(first.marks), len(rest.marks)) == (12, 28)
    assert np.array_equal(np.concatenate([first.ids, rest.ids]), IDS)
    for share in (0.0, 0.01, 1.0):
        with pytest.raises(UsageError, match="leaves nothing to fit on"):
            split_trace(trace, share)
