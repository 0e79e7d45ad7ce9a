"""Parameters of a reproducer: declared once with name, default, range and meaning; set by ``--param NAME=VALUE``."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from soakrig.errors import UsageError

if TYPE_CHECKING:
    from soakrig.reproducers.reproducer import LoadOptions

Value = bool | int | float | str
T = TypeVar("T", bool, int, float, str)
_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class Parameter(Generic[T]):
    """``low`` and ``high``: both ends are allowed; of a number. ``choices``: of a text. The default's type is the
    parameter's; ``help`` says what it is, with its unit."""

    name: str
    default: T
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()

    def of(self, options: LoadOptions) -> T:
        """The value that a load has."""
        return cast("T", options.parameters.get(self.name, self.default))

    def read(self, given: Value) -> T:
        """``given``, a text of the command line or a value of TOML, as this parameter's. Raises ``UsageError``."""
        value: Any = None
        kind = type(self.default)
        if kind is bool:
            value = given if isinstance(given, bool) else _WORDS.get(str(given).lower())
        elif isinstance(given, bool):
            value = None
        elif kind is str:
            value = str(given)
        else:
            try:
                value = kind(given)  # pyright: ignore[reportArgumentType]
                if not math.isfinite(value) or (kind is int and value != float(given)):
                    value = None
            except (ValueError, OverflowError):
                value = None
        if value is None or not self._allowed(value):
            raise UsageError(f"--param {self.name}={given}: expected {self.expected}", remedy=f"It is {self.help}.")
        return cast("T", value)

    def _allowed(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        low = self.low is None or value >= self.low
        return low and (self.high is None or value <= self.high)

    @property
    def expected(self) -> str:
        """What may stand there, in words."""
        if isinstance(self.default, bool):
            return "true or false"
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if isinstance(self.default, str):
            return "a text"
        what = "a whole number" if isinstance(self.default, int) else "a number"
        if self.low is not None and self.high is not None:
            return f"{what} from {_figure(self.low)} to {_figure(self.high)}"
        return what if self.low is None else f"{what} from {_figure(self.low)} up"

    def shown(self) -> dict[str, Any]:
        """For `soak repro show`."""
        return {"name": self.name, "default": self.default, "expected": self.expected, "help": self.help}


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


AnyParameter = Parameter[bool] | Parameter[int] | Parameter[float] | Parameter[str]


def read_parameters(reproducer: str, declared: Sequence[AnyParameter], given: Mapping[str, Value]) -> dict[str, Value]:
    """What was given, checked. Raises ``UsageError`` for an unknown name, with the nearest known one, and for a value
    that cannot be."""
    known = {one.name: one for one in declared}
    found: dict[str, Value] = {}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; {near[0]!r} was meant?" if near else ""
            listed = ", ".join(known) or "none"
            raise UsageError(
                f"--param {name}: {reproducer} has no such parameter{hint}",
                remedy=f"It has: {listed}. `soak repro show {reproducer}` explains them.",
            )
        found[name] = known[name].read(value)
    return found


def split_parameters(pairs: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` pairs of --param. Raises ``UsageError`` for anything else and for a name that is set twice."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--param {pair!r} is no NAME=VALUE", remedy="Example: --param prompt_tokens=4000")
        if name in found:
            raise UsageError(f"--param names {name} twice: {found[name]!r} and {value!r}", remedy="Name it once.")
        found[name] = value
    return found
