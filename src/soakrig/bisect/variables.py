r"""The variables of a campaign as an operator writes them: ``NAME=control,value[,value]`` and ``--arg:--flag=...``.

The first value is the control's, that of the failing set-up. Values are separated by commas:

==================  ==========================================  ================================
written             an environment variable                     a launch flag
==================  ==========================================  ================================
(nothing)           not in the environment                      not on the command line
``""``              there, and empty                            the bare flag, ``--flag``
``8``               ``NAME=8``                                  ``--flag=8``
``\,`` ``\\`` ``\"``  a comma, a backslash, a quote within a value
==================  ==========================================  ================================

So ``VLLM_MOE_DMA_STAGING=1,`` compares 1 with unset, and ``'--arg:--enforce-eager=,""'`` absent with given (in a shell,
quote the whole word). A lone quote needs no backslash.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from soakrig.engine import launch_values
from soakrig.engine.bundled import BUNDLED, EMBEDDED
from soakrig.engine.embedded.flags import parse_flags
from soakrig.engine.embedded.settings import VARIABLES as EMBEDDED_VARIABLES
from soakrig.engine.embedded.settings import Settings as EmbeddedSettings
from soakrig.engine.launcher import MARK
from soakrig.engine.offload.settings import NEAR, OffloadSettings
from soakrig.engine.offload.settings import Variable as Setting
from soakrig.engine.vllm.settings import VARIABLES as VLLM_VARIABLES
from soakrig.engine.vllm.settings import VllmSettings
from soakrig.errors import UsageError

ARG = "--arg:"
"""Before a variable that is a launch flag."""
Value = str | None
"""None: not set, or not given."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FLAG = re.compile(r"--?[A-Za-z][A-Za-z0-9._-]*")
_PART = re.compile(r'\\(?P<escaped>[,\\"])|(?P<plain>[^\\,])', re.DOTALL)
_EMPTY = '""'
_FORM = "Write NAME=control,value or --arg:--flag=control,value, as in VLLM_MOE_DMA_STAGING=1,0."
_QUOTES = "Nothing between commas means not set; '\"\"' in single quotes means empty, or the bare flag."


@dataclass(frozen=True)
class Variable:
    """One environment variable or launch flag. ``name``: with its dashes where it is a flag. ``values``: two or more,
    no two alike, the control's first. Raises ``UsageError`` for anything else."""

    name: str
    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        if self.is_flag:
            if not _FLAG.fullmatch(self.name):
                raise UsageError(f"{self.name!r} is no launch flag", remedy="Example: --arg:--max-num-seqs=8,1")
        elif not _NAME.fullmatch(self.name):
            raise UsageError(f"{self.name!r} is no name of an environment variable", remedy=_FORM)
        if self.name == MARK:
            raise UsageError(f"{MARK} is set by this tool", remedy="It marks the processes of a launch: leave it out.")
        if len(self.values) < 2:
            raise UsageError(
                f"{self.name} has {len(self.values)} value{'' if len(self.values) == 1 else 's'}, the control's and "
                "at least one other were expected",
                remedy=f"{_FORM} {_QUOTES}",
            )
        for place, value in enumerate(self.values):
            if value in self.values[:place]:
                raise UsageError(
                    f"{self.name} has the value {write_value(value) or '(not set)'} twice, each once was expected",
                    remedy=_QUOTES,
                )
            if value is not None and not value.isprintable():
                raise UsageError(
                    f"{self.name} has the value {value!r}, printable text was expected",
                    remedy="A control character cannot be told apart in a report; give a file's path instead.",
                )

    @property
    def is_flag(self) -> bool:
        return self.name.startswith("-")

    @property
    def control(self) -> Value:
        return self.values[0]

    @property
    def others(self) -> tuple[Value, ...]:
        return self.values[1:]

    @property
    def off(self) -> Value:
        """Its value in the arms that have everything off: the first that is not the control's."""
        return self.values[1]

    @property
    def key(self) -> str:
        """What it sets: two variables of one key cannot be told apart."""
        return flag_key(self.name) if self.is_flag else self.name

    def written(self) -> str:
        """The word that ``parse_variable`` reads as this variable."""
        return f"{ARG if self.is_flag else ''}{self.name}={','.join(write_value(value) for value in self.values)}"


def flag_key(flag: str) -> str:
    """What a flag sets: ``--no-enable_x=1`` and ``--enable-x`` are one, as they are to vLLM."""
    return f"--{launch_values.flag_key(flag)}"


def write_value(value: Value) -> str:
    """A value as it is written; no two values are written alike."""
    if value is None:
        return ""
    if value == "":
        return _EMPTY
    text = value.replace("\\", "\\\\").replace(",", "\\,")
    return text.replace('"', '\\"') if text == _EMPTY else text


def split_values(text: str) -> tuple[Value, ...]:
    """The values of ``control,value,...``. Raises ``UsageError`` for a backslash before anything but a comma, a
    backslash or a quote."""
    values: list[Value] = []
    at, began, value = 0, 0, ""
    while at <= len(text):
        part = _PART.match(text, at)
        if part is not None:
            value += part["escaped"] or part["plain"]
            at = part.end()
            continue
        if text[at : at + 1] == "\\":
            raise UsageError(
                f"{text!r} has a backslash before {text[at + 1 : at + 2]!r}, a comma, a backslash or a quote was "
                "expected",
                remedy="Write two backslashes for one.",
            )
        values.append("" if text[began:at] == _EMPTY else value or None)
        at = began = at + 1
        value = ""
    return tuple(values)


def parse_variable(word: str) -> Variable:
    """One word of the command line. Raises ``UsageError`` with what was read and what was expected."""
    name, equals, values = word.removeprefix(ARG).partition("=")
    if word.startswith("-") and not word.startswith(ARG):
        raise UsageError(f"{word!r} is no variable", remedy=f"A launch flag is written {ARG}{word}")
    if not equals:
        raise UsageError(f"{word!r} is no NAME=control,value: there is no '='", remedy=_FORM)
    if word.startswith(ARG) and not name.startswith("-"):
        raise UsageError(f"{word!r}: after {ARG} a flag with its dashes was expected", remedy=f"{ARG}--{name}={values}")
    try:
        return Variable(name, split_values(values))
    except UsageError as error:
        raise UsageError(f"{word!r}: {error.message}", remedy=error.remedy) from error


def parse_variables(words: Sequence[str]) -> tuple[Variable, ...]:
    """All words of the command line. Raises ``UsageError``, also where two name the same thing."""
    return distinct([parse_variable(word) for word in words])


def distinct(variables: Sequence[Variable]) -> tuple[Variable, ...]:
    """``variables``, unless two set the same thing: that is a ``UsageError``."""
    seen: dict[str, Variable] = {}
    for variable in variables:
        other = seen.setdefault(variable.key, variable)
        if other is not variable:
            raise UsageError(
                f"{other.name} and {variable.name} set the same thing; one variable with all its values was expected"
                if other.name != variable.name
                else f"{variable.name} is named twice, once with all its values was expected",
                remedy="Example: VLLM_MOE_HOT_SLOTS=64,32,0",
            )
    return tuple(variables)


def known_settings(engine: str) -> Mapping[str, Setting]:
    """The variables that a bundled engine reads and reports on ``/soakrig/settings``: name -> default and reader.

    Any other variable may still matter to a library below (``OMP_NUM_THREADS``), but that it took effect is shown by
    the environment of the process alone. Empty for an engine that is not bundled.
    """
    if engine == EMBEDDED:
        return EMBEDDED_VARIABLES
    return VLLM_VARIABLES if engine in BUNDLED else {}


def check_variables(engine: str, variables: Sequence[Variable]) -> None:
    """Refuse what could not take effect, with a ``UsageError``: a name that is nearly one that ``engine`` reads, a
    value that it would refuse, two values that are one to it (``1`` and unset, where 1 is the default).

    Values that name files are looked at on this machine.
    """
    known = known_settings(engine)
    for variable in variables:
        if variable.is_flag:
            continue
        if variable.name not in known:
            _refuse_near_miss(engine, variable.name, known)
            continue
        setting = known[variable.name]
        seen: dict[str, Value] = {}
        for value in variable.values:
            effective = repr(_read(engine, variable.name, setting, value))
            if effective in seen:
                first, second = (write_value(one) or "unset" for one in (seen[effective], value))
                raise UsageError(
                    f"{variable.name}: {first} and {second} are both {effective} to the {engine} engine, two values "
                    "that differ were expected",
                    remedy="An arm that changes nothing says nothing: give another value.",
                )
            seen[effective] = value


def check_settings(engine: str, settings: Mapping[str, str], flags: Sequence[str]) -> None:
    """Refuse, with the engine's own ``UsageError``, settings that do not go together and, for the embedded engine,
    flags that it has not. What vLLM makes of its flags is known only once it starts."""
    known = known_settings(engine)
    for name in settings:
        if known and name not in known:
            _refuse_near_miss(engine, name, known)
    if known:
        reader: type[OffloadSettings] = EmbeddedSettings if engine == EMBEDDED else VllmSettings
        reader.from_environment(settings)
    if engine == EMBEDDED:
        parse_flags(list(flags))


def _read(engine: str, name: str, setting: Setting, value: Value) -> object:
    if value is None:
        return setting.default
    try:
        return setting.read(value)
    except (ValueError, OSError) as error:
        raise UsageError(
            f"{name}={value!r} makes no sense to the {engine} engine: {error}", remedy="Give another value."
        ) from error


def _refuse_near_miss(engine: str, name: str, known: Mapping[str, Setting]) -> None:
    near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=NEAR)
    if near:
        raise UsageError(
            f"{name} is no variable of the {engine} engine, {near[0]} was probably meant",
            remedy=f"Write {near[0]}; a variable that nobody reads makes a void arm.",
        )
