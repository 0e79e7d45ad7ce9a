"""What a launch sets, by name: environment variables, flags, and keys inside a flag's JSON; and conditions on them."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_CONDITION = re.compile(r"^(?P<op><=|>=|==|!=|<|>)\s*(?P<value>\S.*)$")
_ORDERS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
EXPECTED = "one of < <= > >= == != and a value, such as '< 8192', or 'set' or 'unset', was expected"


def flag_key(flag: str) -> str:
    """The name that a flag sets: ``--no-enable_x=1`` and ``--enable-x`` are one."""
    return flag.partition("=")[0].lstrip("-").replace("_", "-").removeprefix("no-")


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """The text that ``--name`` has in ``flags`` (``--flag=value``, the last one wins), "" for a bare flag, None where
    it is not there. ``--a.b`` is found as such, and as key ``b`` of the JSON object that ``--a`` has."""
    for flag in reversed(flags):
        if _same(flag.partition("=")[0], name):
            return flag.partition("=")[2]
    head, dot, rest = name.partition(".")
    if not dot or (whole := flag_value(flags, head)) is None:
        return None
    try:
        found: Any = json.loads(whole)
    except ValueError:
        return None
    for part in rest.split("."):
        if not isinstance(found, dict) or part not in found:
            return None
        found = found[part]
    return found if isinstance(found, str) else json.dumps(found)


def _same(one: str, other: str) -> bool:
    return one.replace("_", "-") == other.replace("_", "-")


@dataclass(frozen=True, slots=True)
class LaunchValues:
    """The settings (environment) and flags of a launch, looked up by name: a name with ``--`` in front is a flag."""

    settings: Mapping[str, str]
    flags: Sequence[str]

    def get(self, name: str) -> str | None:
        """The text, or None where nothing sets it."""
        return flag_value(self.flags, name) if name.startswith("--") else self.settings.get(name)

    def number(self, name: str) -> float | None:
        """The value as a number, None where nothing sets it. Raises ValueError for a text that is none."""
        text = self.get(name)
        if text is None:
            return None
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{name} is {text!r}, a number was expected") from None


def check_condition(text: str) -> str:
    """``text`` where it is a condition. Raises ValueError saying what was expected."""
    text = text.strip()
    if text in ("set", "unset"):
        return text
    found = _CONDITION.match(text)
    if found is None:
        raise ValueError(f"{text!r} is no condition: {EXPECTED}")
    if found["op"] in _ORDERS:
        try:
            if math.isnan(float(found["value"])):
                raise ValueError
        except ValueError:
            raise ValueError(f"{text!r} compares with something that is no number") from None
    return text


def holds(values: LaunchValues, name: str, condition: str) -> bool:
    """Whether the launch's value of ``name`` fits. A name that nothing sets fits ``unset`` and ``!=`` only.

    Raises ValueError where a text is to be compared as a number and is none.
    """
    text = values.get(name)
    if condition in ("set", "unset"):
        return (text is not None) == (condition == "set")
    found = _CONDITION.match(condition)
    assert found is not None, condition
    if text is None:
        return found["op"] == "!="
    if found["op"] in _ORDERS:
        number = values.number(name)
        assert number is not None
        return _ORDERS[found["op"]](number, float(found["value"]))
    return _equal(text, found["value"]) == (found["op"] == "==")


def _equal(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other
