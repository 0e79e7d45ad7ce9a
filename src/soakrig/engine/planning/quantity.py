"""Figures that keep their unit and their kind: bytes inside, GiB, GB and ms only where a person reads or writes them.

Units multiply and divide as they do on paper, so that a mix of them shows: bytes a step times tokens a second is no
rate of a link, and is refused where one is expected.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, Literal, Self, get_args

from soakrig.errors import UsageError

Kind = Literal["measured", "derived", "modelled", "uncontrolled"]
"""``measured`` on a machine under control; ``derived`` by arithmetic from such figures; ``modelled`` where a model
stands between; ``uncontrolled`` where nobody held the rest still. What is made of several is the last that occurs."""
KINDS: tuple[Kind, ...] = get_args(Kind)
Dimensions = tuple[tuple[str, int], ...]
"""Base units with their powers, sorted by name."""

_SIZES: Mapping[str, int] = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_UNITS: Mapping[str, tuple[Fraction, str]] = {
    **{name: (Fraction(size), "B") for name, size in _SIZES.items()},
    **{name: (Fraction(1, size), "s") for name, size in (("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9))},
    **{name: (Fraction(1), name) for name in ("token", "step", "row", "slot", "layer", "access", "parameter")},
    "tok": (Fraction(1), "token"),
}
_BINARY = {"kB": "KiB", "MB": "MiB", "GB": "GiB", "TB": "TiB"}
_AMOUNT = re.compile(r"^\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:e[0-9]{1,2})?)\s*([A-Za-z]*)\s*$")


def parse_unit(text: str) -> tuple[Fraction, Dimensions]:
    """Factor to base units, and dimensions, of ``GB``, ``ms/row``, ``B*token/step/s`` or ``""`` (a plain number).

    Raises UsageError naming the part that is no unit, and the nearest that is.
    """
    factor, powers = Fraction(1), Counter[str]()
    for at, part in enumerate(text.split("/")) if text else ():
        sign = -1 if at else 1
        for name in part.split("*"):
            if name == "1" and not at:
                continue
            if name not in _UNITS:
                near = difflib.get_close_matches(name, _UNITS, n=1, cutoff=0.5)
                raise UsageError(
                    f"{name!r} in {text!r} is no unit", remedy=f"{near[0]} was probably meant" if near else _KNOWN
                )
            size, base = _UNITS[name]
            factor *= size**sign
            powers[base] += sign
    return factor, _dimensions(powers)


_KNOWN = f"units: {', '.join(_UNITS)}, joined by * and /"


def _dimensions(powers: Mapping[str, int]) -> Dimensions:
    return tuple(sorted((name, power) for name, power in powers.items() if power))


def unit_text(dimensions: Dimensions) -> str:
    """``B*token/s/step``: the base unit of these dimensions as text."""
    top = [name for name, power in dimensions for _ in range(power)]
    bottom = [name for name, power in dimensions for _ in range(-power)]
    return "/".join(["*".join(top) or ("1" if bottom else ""), *bottom])


def worst(kinds: Iterable[Kind]) -> Kind:
    """The kind of what is computed from figures of these kinds; ``derived`` at least."""
    return max((*kinds, "derived"), key=KINDS.index)


@dataclass(frozen=True, slots=True)
class Figure:
    """``value`` in base units (B, s, token, step, row, slot, layer, access), with where it comes from.

    Whole numbers of bytes stay whole. Arithmetic with plain numbers scales; with figures it combines units, kinds and
    nothing else (sources are for the reader of a ledger line, not of a sum).
    """

    value: float
    dimensions: Dimensions
    kind: Kind
    source: str = ""

    @classmethod
    def of(cls, value: float | Decimal, unit: str, kind: Kind = "derived", source: str = "") -> Self:
        """A figure in any unit: ``Figure.of(6.75, "GB/step", "measured")``. Raises UsageError for an unknown unit."""
        factor, dimensions = parse_unit(unit)
        return cls(_plain(Fraction(value) * factor), dimensions, kind, source)

    def to(self, unit: str) -> float:
        """The number in ``unit``. Raises UsageError where that measures something else."""
        factor, dimensions = parse_unit(unit)
        if dimensions != self.dimensions:
            raise UsageError(
                f"a figure in {unit_text(self.dimensions) or 'plain numbers'} was read as {unit or 'a plain number'}",
                remedy="units have to cancel: bytes a step need steps a second to make a rate, not tokens a second",
            )
        return float(Fraction(self.value) / factor)

    def share(self, of: Figure) -> float:
        """This over ``of``, both in the same unit."""
        return (self / of).to("")

    def __add__(self, other: Figure) -> Figure:
        self._alike(other, "added to")
        return Figure(self.value + other.value, self.dimensions, worst((self.kind, other.kind)))

    def __sub__(self, other: Figure) -> Figure:
        self._alike(other, "subtracted from")
        return Figure(self.value - other.value, self.dimensions, worst((self.kind, other.kind)))

    def __mul__(self, other: Figure | float) -> Figure:
        if not isinstance(other, Figure):
            return Figure(self.value * other, self.dimensions, worst((self.kind,)))
        powers = Counter[str](dict(self.dimensions))
        for name, power in other.dimensions:
            powers[name] += power
        return Figure(self.value * other.value, _dimensions(powers), worst((self.kind, other.kind)))

    __rmul__ = __mul__

    def __truediv__(self, other: Figure | float) -> Figure:
        if not isinstance(other, Figure):
            return Figure(self.value / other, self.dimensions, worst((self.kind,)))
        powers = Counter[str](dict(self.dimensions))
        for name, power in other.dimensions:
            powers[name] -= power
        return Figure(self.value / other.value, _dimensions(powers), worst((self.kind, other.kind)))

    def __lt__(self, other: Figure) -> bool:
        self._alike(other, "compared with")
        return self.value < other.value

    def __gt__(self, other: Figure) -> bool:
        return other < self

    def labelled(self, source: str, kind: Kind | None = None) -> Figure:
        """The same figure under another source, and another kind where one is given."""
        return Figure(self.value, self.dimensions, kind or self.kind, source)

    def text(self) -> str:
        """``48.00 GiB (51,539,607,552 B), measured``; other units as they are."""
        if self.dimensions == (("B", 1),):
            return f"{bytes_text(self.value)}, {self.kind}"
        return f"{self.value:.6g} {unit_text(self.dimensions)}".rstrip() + f", {self.kind}"

    def to_json(self) -> dict[str, Any]:
        """``value`` in base units, ``unit``, ``kind``, ``source``."""
        return {"value": self.value, "unit": unit_text(self.dimensions), "kind": self.kind, "source": self.source}

    def _alike(self, other: Figure, what: str) -> None:
        if self.dimensions != other.dimensions:
            raise UsageError(
                f"a figure in {unit_text(other.dimensions) or 'plain numbers'} was {what} one in "
                f"{unit_text(self.dimensions) or 'plain numbers'}",
                remedy="bring both to the same unit first",
            )


def _plain(value: Fraction) -> float:
    return value.numerator if value.denominator == 1 else float(value)


def total(figures: Iterable[Figure], unit: str = "B") -> Figure:
    """The sum; zero of ``unit`` for none."""
    found = Figure.of(0, unit)
    for figure in figures:
        found += figure
    return found


def bytes_text(value: float) -> str:
    """``48.00 GiB (51,539,607,552 B)``: both, so that nobody has to guess which gigabyte it was."""
    size = abs(value)
    for name in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _SIZES[name]:
            return f"{value / _SIZES[name]:,.2f} {name} ({value:,.0f} B)"
    return f"{value:,.0f} B"


def parse_bytes(text: str, kind: Kind = "measured", source: str = "", *, what: str = "the amount") -> Figure:
    """``48 GiB``, ``39.2 GB``, ``21233664 B``, ``48e9 B`` as bytes.

    Raises UsageError for anything without a unit, and **asks back** at a whole number of kB, MB, GB or TB: tools
    print GB for GiB (vLLM's tier of "48 GB" takes 48 GiB of /dev/shm), and 7 % of a card is at stake.
    """
    match = _AMOUNT.match(text)
    number, unit = (match[1].replace(",", "").replace("_", ""), match[2]) if match else ("", "")
    remedy = "write it with its unit: 48 GiB, 39.2 GB, 21233664 B"
    if not match or not unit:
        raise UsageError(f"{what} is {text!r}: a number and a unit of bytes were expected", remedy=remedy)
    if unit not in _SIZES:
        near = difflib.get_close_matches(unit, _SIZES, n=1, cutoff=0.5)
        raise UsageError(
            f"{what} is {text!r}: {unit!r} is no unit of bytes",
            remedy=f"{near[0]} was probably meant; {remedy}" if near else remedy,
        )
    try:
        value = Fraction(Decimal(number))
    except InvalidOperation as error:
        raise UsageError(f"{what} is {text!r}: {number!r} is no number", remedy=remedy) from error
    if unit in _BINARY and value and value.denominator == 1:
        binary = _BINARY[unit]
        as_decimal, as_binary = value * _SIZES[unit], value * _SIZES[binary]
        raise UsageError(
            f"{what} is {text!r}, which has two readings: {int(as_decimal):,} B if {unit} is {_SIZES[unit]:,} B "
            f"({float(as_decimal / _SIZES[binary]):.2f} {binary}), and {int(as_binary):,} B if {binary} was meant",
            remedy=f"write {float(value):g} {binary}, or {int(as_decimal)} B",
        )
    exact = value * _SIZES[unit]
    return Figure(round(exact), (("B", 1),), kind, source)


def parse_figure(
    text: str, unit: str, kind: Kind = "measured", source: str = "", *, what: str = "the figure"
) -> Figure:
    """``383 GB/s``, ``22.5 ms``, ``0.0554 ms/row``, which has to measure what ``unit`` measures.

    Rates and times have one reading, so nothing is asked back. Raises UsageError with what was expected.
    """
    number, _, rest = text.strip().partition(" ")
    rest = rest.strip()
    remedy = f"write it like 1.5 {unit}"
    try:
        value = Decimal(number)
    except InvalidOperation as error:
        raise UsageError(f"{what} is {text!r}: a number and a unit were expected", remedy=remedy) from error
    if not value.is_finite():
        raise UsageError(f"{what} is {text!r}: a finite number was expected", remedy=remedy)
    figure = Figure.of(value, rest, kind, source)
    if figure.dimensions != parse_unit(unit)[1]:
        raise UsageError(f"{what} is {text!r}: {rest or 'no unit'} does not measure what {unit} does", remedy=remedy)
    return figure
