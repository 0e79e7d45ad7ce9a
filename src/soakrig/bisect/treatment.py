"""Proof of treatment: whether an arm's variables took effect in the engine that was launched for it.

Three things are read, each where it can be: the environment of the engine's processes (``/proc/PID/environ``, what
they were started with), its command line, and what the engine itself says on ``/soakrig/settings``. The engine's log
is read for what vLLM says of a variable that it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from soakrig.bisect.arms import PlannedArm
from soakrig.bisect.engine_words import flags_in_log, read_log, unknown_variable
from soakrig.bisect.variables import Value, flag_key, write_value
from soakrig.engine.keeper import descendants, every_stat
from soakrig.engine.launcher import MARK
from soakrig.engine.offload.settings import Variable as Setting
from soakrig.record.redaction import HIDDEN, is_secret, redact_flags, redact_settings

Proof = Literal["settings", "log", "environment", "argv"]
"""``settings``: the engine reports the value as its own. ``log``: its log shows that it took the flag in.
``environment``, ``argv``: it was started with it; that anything reads it is not shown."""
_PLANT = "SOAKRIG_PLANT"
_ASSIGNMENT = re.compile(r"[^=\0]+=")


@dataclass(frozen=True)
class Treatment:
    """``proofs``: by variable, the strongest that was found. ``failure``: what contradicts the arm, empty where
    nothing does."""

    proofs: Mapping[str, Proof]
    failure: str = ""


def prove_treatment(
    arm: PlannedArm, pid: int, known: Mapping[str, Setting], report: Mapping[str, Any] | None, log: Path | None = None
) -> Treatment:
    """Look at the engine of process ``pid``.

    ``known``: the settings that this engine reads (``variables.known_settings``). ``report``: the body of its
    ``/soakrig/settings``, None where it has none. ``log``: its log.
    """
    environment, argv = _environment(pid), _words(pid, "cmdline")
    if environment is None or argv is None:
        return Treatment({}, f"environment and argv of the engine's process {pid} cannot be read: has it ended?")
    failure = _in_environment(arm, environment) or _in_children(arm, pid) or _in_argv(arm, argv)
    if failure:
        return Treatment({}, failure)
    proofs: dict[str, Proof] = {name: "argv" if name.startswith("-") else "environment" for name in arm.values}
    told = report.get("settings") if report is not None else None
    for name in arm.values:
        setting = known.get(name)
        if setting is None or name == _PLANT:
            continue
        if not isinstance(told, Mapping):
            return Treatment({}, f"the engine does not say on /soakrig/settings whether {name} is in effect")
        failure = _in_report(name, arm.values[name], setting, told.get(name))
        if failure:
            return Treatment({}, failure)
        proofs[name] = "settings"
    return _in_log(proofs, arm, read_log(log))


def process_facts(pid: int) -> dict[str, Any]:
    """``pid``, and ``argv`` and ``environment`` as the kernel has them, secrets hidden; None where they cannot be
    read."""
    argv, environment = _words(pid, "cmdline"), _environment(pid)
    return {
        "pid": pid,
        "argv": None if argv is None else redact_flags(argv),
        "environment": None if environment is None else redact_settings(environment),
    }


def _in_environment(arm: PlannedArm, environment: Mapping[str, str]) -> str:
    for name, value in arm.settings.items():
        found = environment.get(name)
        if found != value:
            return f"{_given(name, value)} was asked for and the engine's environment has {_shown(name, found)}"
    for name in arm.unset:
        if name in environment:
            return f"{name} was to be unset and the engine's environment has {_shown(name, environment[name])}"
    return ""


def _in_children(arm: PlannedArm, pid: int) -> str:
    """What the engine started (its workers) has the variables too, unless they are its own to set."""
    wanted = {name: arm.settings[name] for name in arm.values if name in arm.settings}
    for stat in descendants([pid], every_stat()):
        environment = _environment(stat.pid)
        if environment is None or MARK not in environment:
            continue
        for name, value in wanted.items():
            if environment.get(name) != value:
                found = _shown(name, environment.get(name))
                return f"{_given(name, value)} is in the engine's environment, and its process {stat.pid} has {found}"
    return ""


def _in_argv(arm: PlannedArm, argv: list[str]) -> str:
    for flag in arm.flags:
        if flag not in argv:
            return f"{redact_flags([flag])[0]} was asked for and is not on the engine's command line"
    for name, value in arm.values.items():
        if not name.startswith("-"):
            continue
        given = [word for word in argv if word.startswith("-") and flag_key(word) == flag_key(name)]
        expected = None if value is None else f"{name}={value}" if value else name
        if [word for word in given if word != expected]:
            asked, words = redact_flags([expected or f"no {name}"])[0], ", ".join(redact_flags(given))
            return f"{asked} was asked for and the engine's command line has {words}"
    return ""


def _in_report(name: str, value: Value, setting: Setting, told: object) -> str:
    if not isinstance(told, Mapping) or "value" not in told:
        return f"{name} is not among the settings that the engine reports"
    try:
        expected = setting.default if value is None else setting.read(value)
    except (ValueError, OSError) as error:
        return f"{name}={value} makes no sense here: {error}"
    effective = told["value"]  # pyright: ignore[reportUnknownVariableType]
    if _json(expected) != _json(effective):
        return f"{name} was to be {_shown(name, value)} and the engine reports {effective!r} as in effect"
    if told.get("obeyed") is False:  # pyright: ignore[reportUnknownMemberType]
        return f"the engine reports that it does not obey {name}"
    return ""


def _in_log(proofs: dict[str, Proof], arm: PlannedArm, text: str) -> Treatment:
    # what the plug-in reads and reports is unknown to vLLM itself
    unknown = unknown_variable(text, [name for name, proof in proofs.items() if proof != "settings"])
    if unknown:
        return Treatment({}, f"the engine's log says that it does not know {unknown}")
    shown, failure = flags_in_log(text, arm.values)
    return Treatment({**proofs, **dict.fromkeys(shown, "log")}, failure)


def _json(value: object) -> bytes:
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SORT_KEYS)


def _shown(name: str, value: Value) -> str:
    if value is not None and is_secret(name):
        return HIDDEN
    return "it not" if value is None else write_value(value) or '""'


def _given(name: str, value: str) -> str:
    return f"{name}={HIDDEN if is_secret(name) else value}"


def _environment(pid: int) -> dict[str, str] | None:
    """None also where a process has written its title over it, as vLLM's workers do (setproctitle): what is left of it
    is no evidence."""
    words = _words(pid, "environ")
    if words is None or not all(_ASSIGNMENT.match(word) for word in words):
        return None
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _words(pid: int, name: str) -> list[str] | None:
    """The NUL-separated words of a file of ``/proc/PID``; None where it cannot be read or is empty (a zombie)."""
    try:
        data = Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return None
    return data.decode("utf-8", "surrogateescape").rstrip("\0").split("\0") if data else None
