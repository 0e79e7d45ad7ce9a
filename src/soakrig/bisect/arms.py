"""The arms of a campaign: what each of them sets, in full, and how it differs from the control."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from soakrig.bisect.evidence import Arm, Role
from soakrig.bisect.variables import Value, Variable, distinct, flag_key, write_value
from soakrig.errors import UsageError
from soakrig.record.redaction import HIDDEN, is_secret

CONTROL = "control"

BASE = re.compile(
    r"^(PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_.*|TZ|TMPDIR|LD_LIBRARY_PATH|VIRTUAL_ENV|PYTHONPATH|XDG_CACHE_HOME|"
    r"CUDA_HOME|CUDA_PATH|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|NVIDIA_VISIBLE_DEVICES|NVIDIA_DRIVER_CAPABILITIES|"
    r"HF_HOME|HF_HUB_CACHE|HF_TOKEN|SSL_CERT_FILE|CC|CXX)$"
)
"""Variables of the caller that every arm gets: where things are, and nothing that tunes an engine. ``soak run`` passes
more on; here a forgotten ``export VLLM_...`` would be in every arm without being in the record."""


@dataclass(frozen=True)
class PlannedArm:
    """An arm with all that it sets.

    ``arm``: name, role and variables as the statistics have them. ``values``: of every variable, by name, in the order
    of the campaign. ``settings``: environment variables by name, the fixed ones included. ``unset``: names that must
    not be in the environment at all. ``flags``: of the engine's command line, the fixed ones first.
    """

    arm: Arm
    values: Mapping[str, Value]
    settings: Mapping[str, str]
    unset: tuple[str, ...]
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.arm.name

    @property
    def role(self) -> Role:
        return self.arm.role

    @property
    def value(self) -> Value:
        """The value of a one-variable arm; None for the others, and where it is unset."""
        return self.values[self.arm.variables[0]] if self.role == "one" else None

    def changed(self, control: PlannedArm) -> tuple[str, ...]:
        """Names of the variables in which it differs from ``control``."""
        return tuple(name for name, value in self.values.items() if value != control.values[name])

    def environment(self, caller: Mapping[str, str]) -> dict[str, str]:
        """The whole environment to start from: ``BASE`` of ``caller``'s, then the settings. What a launcher adds of
        its own is the same for every arm."""
        base = {name: value for name, value in caller.items() if BASE.match(name) and name not in self.unset}
        return {**base, **self.settings}


def plan_arms(
    variables: Sequence[Variable],
    *,
    settings: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    pairs: Sequence[tuple[str, str]] = (),
) -> tuple[PlannedArm, ...]:
    """The arms, the control first. ``settings`` and ``flags`` are fixed in all of them; ``pairs`` names variables.

    ============================  ==========  ======================================================================
    name                          role        differs from the control in
    ============================  ==========  ======================================================================
    ``control``                   control     nothing
    ``all-off``                   all_off     every variable: each at its first other value
    ``NAME=value``                one         that variable; one arm for each of its other values
    ``back:NAME``                 add_back    every variable but that one
    ``pair:NAME+OTHER``           pair        every variable but those two
    ============================  ==========  ======================================================================

    The control's re-runs (A/A) are launches of the arm ``control``. Names depend on nothing but the variable's name and
    value, written as in ``variables.write_value``, so they last when variables are added; of a secret its place stands
    for the value. One variable alone has no all-off or add-back arm: they would be its own arm and the control. Of two,
    ``back:A`` sets the same as the arm of B; it is kept, as a repeat under the role that the read-out asks for.

    Raises ``UsageError`` for no variable, a fixed setting or flag that a variable sets too, and an impossible pair.
    """
    if not variables:
        raise UsageError("there is no variable to bisect over", remedy="Name one: VLLM_MOE_DMA_STAGING=1,0")
    distinct(variables)
    fixed = _Fixed(variables, settings or {}, tuple(flags))
    names = tuple(variable.name for variable in variables)
    arms = [fixed.arm(CONTROL, "control", (), {})]
    if len(variables) > 1:
        arms.append(fixed.arm("all-off", "all_off", names, _off(variables)))
    for variable in variables:
        for value in variable.others:
            name = f"{variable.name}={_shown(variable, value)}"
            arms.append(fixed.arm(name, "one", (variable.name,), {variable.name: value}))
    if len(variables) > 1:
        arms += [fixed.arm(f"back:{name}", "add_back", (name,), _off(variables, name)) for name in names]
    wanted = _ordered(pairs, names)
    arms += [fixed.arm(f"pair:{'+'.join(pair)}", "pair", pair, _off(variables, *pair)) for pair in wanted]
    return tuple(arms)


@dataclass(frozen=True)
class _Fixed:
    """What all arms share."""

    variables: Sequence[Variable]
    settings: Mapping[str, str]
    flags: tuple[str, ...]

    def __post_init__(self) -> None:
        given = {flag_key(flag): flag for flag in self.flags if flag.startswith("-")}
        for variable in self.variables:
            if not variable.is_flag and variable.name in self.settings:
                fixed = f"{variable.name}={self.settings[variable.name]}"
            elif variable.is_flag and variable.key in given:
                fixed = given[variable.key]
            else:
                continue
            raise UsageError(
                f"{fixed} is fixed in every arm, and {variable.written()} varies it; one of the two was expected",
                remedy="Leave the fixed one out: the first value of a variable is the control's.",
            )

    def arm(self, name: str, role: Role, of: tuple[str, ...], changes: Mapping[str, Value]) -> PlannedArm:
        """The control with ``changes``."""
        values = {one.name: changes.get(one.name, one.control) for one in self.variables}
        settings, unset, flags = dict(self.settings), list[str](), list(self.flags)
        for one in self.variables:
            value = values[one.name]
            if one.is_flag:
                if value is not None:
                    flags.append(f"{one.name}={value}" if value else one.name)
            elif value is None:
                unset.append(one.name)
            else:
                settings[one.name] = value
        frozen = MappingProxyType(values), MappingProxyType(settings)
        return PlannedArm(Arm(name, role, of), *frozen, tuple(unset), tuple(flags))


def _shown(variable: Variable, value: Value) -> str:
    """The value as a name may have it, which stands in reports and in names of folders: of a secret, its place."""
    if value is None or not is_secret(variable.name):
        return write_value(value)
    return HIDDEN if len(variable.others) == 1 else f"{HIDDEN} {variable.others.index(value) + 1}"


def _off(variables: Sequence[Variable], *but: str) -> dict[str, Value]:
    return {one.name: one.off for one in variables if one.name not in but}


def _ordered(pairs: Sequence[tuple[str, str]], names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs in the order of the variables. Raises ``UsageError``."""
    asked: set[tuple[str, str]] = set()
    for pair in pairs:
        text = "+".join(pair)
        unknown = [name for name in pair if name not in names]
        if unknown or len(set(pair)) != 2:
            what = f"{unknown[0]!r} is none of the variables" if unknown else "two different variables were expected"
            raise UsageError(f"pair {text}: {what}", remedy=f"Variables: {', '.join(names)}.")
        if len(names) < 3:
            raise UsageError(
                f"pair {text}: with two variables in all, that is the control", remedy="Leave the pair out."
            )
        one, other = sorted(pair, key=names.index)
        if (one, other) in asked:
            raise UsageError(f"pair {text} is named twice, once was expected", remedy="Leave one out.")
        asked.add((one, other))
    return [pair for pair in itertools.combinations(names, 2) if pair in asked]
