"""``repro.py`` and its payload: what sends a run's load again without soakrig."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files

from soakrig.reports.run_view import RunView

SCRIPT, PAYLOAD = "repro.py", "payload.jsonl"


@dataclass(frozen=True, slots=True)
class Payload:
    """The requests as ``repro.py`` reads them. ``how``: what stands for their text, in a sentence. ``kept_text``: it
    is the run's own. ``turns``: requests, all conversations together."""

    data: bytes
    how: str
    turns: int
    conversations: int
    kept_text: bool = False


def script(signature: str, *, simulated: bool, needs_kernel_log: bool) -> bytes:
    """``standalone.py`` with values of its own."""
    text = files("soakrig.reports.bundle").joinpath("standalone.py").read_text("utf-8")
    mark = "\n# SIMULATED: a planted fault took part in the run that this was made of.\n" if simulated else "\n"
    for pattern, value in (
        (r'^SIGNATURE: str = ""$', f"SIGNATURE: str = {signature!r}"),
        (r"^NEEDS_KERNEL_LOG: bool = False$", f"NEEDS_KERNEL_LOG: bool = {needs_kernel_log}"),
        (r"^SIMULATED: bool = False$", f"SIMULATED: bool = {simulated}"),
        (r"\n# What `soak bundle` writes out is .*\n", mark),
        (r" +# noqa: .*$", ""),
    ):
        text, count = re.subn(pattern, lambda _, value=value: value, text, flags=re.MULTILINE)
        assert count, f"the template has no {pattern}"
    return text.encode()


def fault_point(view: RunView) -> tuple[int, int] | None:
    """Conversation and turn of the run's fault, else of its first bad turn, else of the last that was over; None for a
    run without a turn."""
    for told in view.faults:
        if told.fault.turn is not None and told.fault.conversation is not None:
            return told.fault.conversation, told.fault.turn
    if view.result.first_bad is not None:
        return view.result.first_bad.conversation, view.result.first_bad.turn
    return (view.turns[-1].conversation, view.turns[-1].turn) if view.turns else None


def kernel_log_alone(view: RunView) -> bool:
    """Whether the run's fault showed in the kernel log and nowhere else: every turn was ok and the engine lives."""
    bad = any(count for name, count in view.result.outcomes.items() if name not in ("ok", "aborted"))
    return bool(view.faults) and not bad and view.result.engine.alive is not False
