"""Figures: units that cancel or are refused, kinds that are never lost, and amounts with two readings asked back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soakrig.engine.planning.quantity import (
    KINDS,
    Figure,
    Kind,
    bytes_text,
    parse_bytes,
    parse_figure,
    parse_unit,
    total,
    unit_text,
)
from soakrig.errors import UsageError

F = Figure.of


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("48 GiB", 48 * 2**30),
        ("48GiB", 48 * 2**30),
        ("39.2 GB", 39_200_000_000),
        ("21,233,664 B", 21_233_664),
        ("21_233_664 B", 21_233_664),
        ("48e9 B", 48_000_000_000),
        ("13.5 MiB", 14_155_776),
        ("0 B", 0),
        ("0 GB", 0),
    ],
)
def test_amounts_are_whole_bytes(text: str, size: int) -> None:
    found = parse_bytes(text, "measured", "log")
    assert (found.value, found.kind, found.source) == (size, "measured", "log")
    assert isinstance(found.value, int)


def test_a_whole_number_of_gigabytes_is_asked_back_with_both_readings() -> None:
    with pytest.raises(UsageError) as refused:
        parse_bytes("48 GB", what="the tier")
    assert "the tier is '48 GB', which has two readings: 48,000,000,000 B" in refused.value.message
    assert "(44.70 GiB), and 51,539,607,552 B if GiB was meant" in refused.value.message
    assert refused.value.remedy == "write 48 GiB, or 48000000000 B"
    for text in ("125 GB", "16902 MB", "1.0 GB", "64 kB"):
        with pytest.raises(UsageError, match="two readings"):
            parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("48", "a number and a unit of bytes were expected"),
        ("GiB", "a number and a unit"),
        ("-3 GiB", "a number and a unit"),
        ("48 Gib", "'Gib' is no unit of bytes"),
        ("48 G", "'G' is no unit of bytes"),
        ("4 8 GiB", "a number and a unit"),
        ("", "a number and a unit"),
    ],
)
def test_other_amounts_are_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_bytes(text)


def test_the_nearest_unit_is_named() -> None:
    with pytest.raises(UsageError) as refused:
        parse_bytes("48 Gib")
    assert "GiB was probably meant" in refused.value.remedy
    with pytest.raises(UsageError) as refused:
        parse_figure("383 GB/sec", "GB/s")
    assert "'sec' in 'GB/sec' is no unit" in refused.value.message


def test_units_multiply_and_cancel() -> None:
    rows, row, link = F(318, "row/step"), F(21_233_664, "B/row"), F(383, "GB/s")
    moved = rows * row
    assert moved.to("GB/step") == pytest.approx(6.752305152)
    assert (moved / link).to("ms/step") == pytest.approx(17.630, abs=1e-3)
    assert unit_text((moved / link).dimensions) == "s/step"
    assert (F(6, "GB") / F(2, "GB")).dimensions == ()
    assert F(2, "row") * 3 == F(6, "row", "derived")
    assert 3 * F(2, "row") == F(6, "row", "derived")


def test_what_does_not_measure_the_same_is_refused() -> None:
    for wrong in (
        lambda: F(1, "B") + F(1, "s"),
        lambda: F(1, "B") - F(1, "row"),
        lambda: F(1, "B") < F(1, "s"),
        lambda: F(1, "B").to("s"),
        lambda: F(1, "B/step").share(F(1, "B/s")),
        lambda: total([F(1, "s")]),
    ):
        with pytest.raises(UsageError, match="a figure in"):
            wrong()


def test_kinds_are_never_lost() -> None:
    kinds = {kind: F(1, "B", kind) for kind in KINDS}
    assert (kinds["measured"] + kinds["measured"]).kind == "derived"
    assert (kinds["measured"] * 2).kind == "derived"
    assert (kinds["measured"] / kinds["modelled"]).kind == "modelled"
    assert (kinds["modelled"] - kinds["uncontrolled"]).kind == "uncontrolled"
    assert total(kinds.values()).kind == "uncontrolled"


@given(st.sampled_from(KINDS), st.sampled_from(KINDS))
@settings(deadline=None)
def test_the_worse_kind_wins_in_any_order(one: Kind, other: Kind) -> None:
    sums = {(F(1, "B", one) + F(2, "B", other)).kind, (F(2, "B", other) + F(1, "B", one)).kind}
    (found,) = sums
    assert KINDS.index(found) == max(KINDS.index(one), KINDS.index(other), KINDS.index("derived"))


@given(st.integers(0, 10**15), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
@settings(deadline=None)
def test_whole_amounts_come_back_to_the_byte(size: int, unit: str) -> None:
    assert parse_bytes(f"{size} {unit}").value == size * parse_unit(unit)[0]
    assert F(size, "B").to("B") == size


def test_texts_say_both_units() -> None:
    assert bytes_text(48 * 2**30) == "48.00 GiB (51,539,607,552 B)"
    assert bytes_text(12) == "12 B"
    assert F(1.5, "ms/row", "measured").text() == "0.0015 s/row, measured"
    assert F(1, "GiB", "measured", "log").to_json() == {
        "value": 2**30, "unit": "B", "kind": "measured", "source": "log",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["22.5", "x ms/step", "22.5 ms", "nan ms/step", "22.5 GB/s"])
def test_a_figure_of_another_unit_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="the fixed part is"):
        parse_figure(text, "ms/step", what="the fixed part")
