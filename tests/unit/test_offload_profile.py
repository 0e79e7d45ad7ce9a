"""Profiles and slot maps as files: round trip, atomic writing, and what is refused with what was read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from soakrig.engine.offload.layer_list import layer_list
from soakrig.engine.offload.profile import HotProfile, read_profile, write_profile
from soakrig.engine.offload.slot_map import SlotMap, read_slot_map, write_slot_map
from soakrig.errors import UsageError

PROFILE: dict[str, Any] = {
    "schema": "soakrig.hot_profile/1",
    "model": "m",
    "offload_gb": None,
    "experts": 4,
    "steps": 9,
    "counts": {"0": [0, 5, 9, 5], "7": [0, 0, 0, 0]},
}
SLOTS: dict[str, Any] = {"schema": "soakrig.slots/1", "experts": 4, "slots": {"0": 0, "7": 4}}


def put(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "file.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(path)


def test_a_profile_is_read_as_it_was_written_by_hand(tmp_path: Path) -> None:
    profile = read_profile(put(tmp_path, PROFILE))
    assert (profile.model, profile.offload_gb, profile.experts, profile.steps) == ("m", None, 4, 9)
    assert profile.layers == (0, 7)
    assert profile.counts[0].dtype == np.int64
    assert profile.counts[0].tolist() == [0, 5, 9, 5]


def test_the_hottest_come_first_ties_to_the_lower_number_and_the_unused_never(tmp_path: Path) -> None:
    profile = read_profile(put(tmp_path, PROFILE))
    assert profile.hottest(0, 4) == (2, 1, 3)
    assert profile.hottest(0, 2) == (2, 1)
    assert profile.hottest(0, 0) == profile.hottest(7, 4) == profile.hottest(1, 4) == ()


@given(st.data())
def test_a_written_profile_comes_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 6))
    row = st.lists(st.integers(0, 2**63 - 1), min_size=experts, max_size=experts)
    counts = data.draw(st.dictionaries(st.integers(0, 999), row, max_size=4))
    profile = HotProfile(
        model=data.draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1)),
        offload_gb=data.draw(st.none() | st.floats(0, 1e6)),
        experts=experts,
        steps=data.draw(st.integers(0, 2**53)),
        counts={layer: np.array(one, dtype=np.int64) for layer, one in counts.items()},
    )
    path = str(tmp_path_factory.getbasetemp() / "written.json")
    write_profile(path, profile)
    back = read_profile(path)
    assert (back.model, back.offload_gb, back.experts, back.steps) == (
        profile.model, profile.offload_gb, profile.experts, profile.steps,
    )  # fmt: skip
    assert {layer: one.tolist() for layer, one in back.counts.items()} == counts


def test_a_profile_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "hot.json"
    path.write_text("old")
    bad = HotProfile("m", None, 3, 1, {0: np.array([1, 2], dtype=np.int64)})
    with pytest.raises(ValueError, match="layer 0 has 2 counts, and 3 experts"):
        write_profile(str(path), bad)
    assert path.read_text() == "old"
    good = HotProfile("m", None, 2, 1, {0: np.array([1, 2], dtype=np.int64)})
    write_profile(str(path), good)
    assert json.loads(path.read_text())["counts"] == {"0": [1, 2]}
    link = tmp_path / "link.json"
    link.symlink_to(path)
    write_profile(str(link), replace(good, steps=7))
    assert link.is_symlink()
    assert json.loads(path.read_text())["steps"] == 7
    link.unlink()
    long = tmp_path / ("n" * 255)
    write_profile(str(long), good)
    long.unlink()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_profile(str(tmp_path / "folder"), good)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["folder", "hot.json"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"schema": "soakrig.hot_profile/2"}, "schema: .*soakrig.hot_profile/2"),
        ({"steps": None}, "steps: .*None"),
        ({"steps": -1}, "steps: .*'-1'"),
        ({"experts": 0}, "experts"),
        ({"experts": 5}, "layer 0 has 4 counts, and 5 experts"),
        ({"experts": "4"}, "experts: .*'4'"),
        ({"extra": 1}, "extra: .*not permitted"),
        ({"offload_gb": -3.0}, "offload_gb: .*'-3.0'"),
        ({"counts": {"0": [1, 2, 3]}}, "layer 0 has 3 counts, and 4 experts"),
        ({"counts": {"0": [1, 2, 3, -4]}}, "counts.0.3: .*'-4'"),
        ({"counts": {"0": [1, 2, 3, 0.5]}}, "counts.0.3: .*'0.5'"),
        ({"counts": {"0": [1, 2, 3, 2**63]}}, "counts.0.3"),
        ({"counts": {"00": [1, 2, 3, 4]}}, "counts.00"),
        ({"counts": {"-1": [1, 2, 3, 4]}}, "counts.-1"),
        ({"counts": {"layer0": [1, 2, 3, 4]}}, "counts.layer0"),
        ({"counts": [[1, 2, 3, 4]]}, "counts"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=rf"file.json is no hot profile: .*{named}") as caught:
        read_profile(put(tmp_path, {**PROFILE, **change}))
    assert "its keys: schema, model, offload_gb, experts, steps, counts" in caught.value.remedy


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"schema": ', b"[" * 100_000])
def test_broken_json_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UsageError, match="is no hot profile"):
        read_profile(put(tmp_path, content))
    with pytest.raises(UsageError, match="is no slot map"):
        read_slot_map(put(tmp_path, content))


def test_infinity_is_no_offload(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="offload_gb"):
        read_profile(put(tmp_path, json.dumps({**PROFILE, "offload_gb": float("inf")}).encode()))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone.json cannot be read: No such file"):
        read_profile(str(tmp_path / "gone.json"))


def test_a_key_that_is_missing_is_named(tmp_path: Path) -> None:
    content = {key: value for key, value in PROFILE.items() if key != "model"}
    with pytest.raises(UsageError, match="model: Field required"):
        read_profile(put(tmp_path, content))


def test_many_mistakes_are_counted_and_not_all_told(tmp_path: Path) -> None:
    content = {**PROFILE, "counts": {"0": [-1] * 4, "1": [-1] * 4}}
    with pytest.raises(UsageError, match="and 5 more") as caught:
        read_profile(put(tmp_path, content))
    assert len(str(caught.value)) < 1000


@given(st.dictionaries(st.integers(0, 999), st.integers(0, 16), min_size=1))
def test_a_written_slot_map_comes_back(tmp_path_factory: pytest.TempPathFactory, slots: dict[int, int]) -> None:
    path = str(tmp_path_factory.getbasetemp() / "slots.json")
    write_slot_map(path, SlotMap(16, slots))
    assert read_slot_map(path) == SlotMap(16, slots)
    assert [int(layer) for layer in json.loads(Path(path).read_text())["slots"]] == sorted(slots)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"schema": "soakrig.hot_profile/1"}, "schema"),
        ({"slots": {}}, "slots"),
        ({"slots": {"0": 5}}, "layer 0 is given 5 slots, and has 4 experts"),
        ({"slots": {"0": -1}}, "slots.0: .*'-1'"),
        ({"slots": {"0": True}}, "slots.0: .*'True'"),
        ({"slots": {" 0": 1}}, "slots. 0"),
        ({"per_layer": 4}, "per_layer: .*not permitted"),
    ],
)
def test_a_file_that_is_no_slot_map_is_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=rf"file.json is no slot map: .*{named}"):
        read_slot_map(put(tmp_path, {**SLOTS, **change}))
    assert read_slot_map(put(tmp_path, SLOTS)).slots == {0: 0, 7: 4}


def test_layers_are_listed_as_runs() -> None:
    assert layer_list([]) == "none"
    assert layer_list([5]) == "5 (1 layer)"
    assert layer_list([7, 0, 1, 2, 2]) == "0-2, 7 (4 layers)"
