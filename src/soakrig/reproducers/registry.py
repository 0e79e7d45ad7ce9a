"""The reproducers by name."""

from __future__ import annotations

import difflib

from soakrig.errors import UsageError
from soakrig.reproducers.agent_loop import AGENT_LOOP
from soakrig.reproducers.reproducer import Reproducer

REPRODUCERS: dict[str, Reproducer] = {r.name: r for r in (AGENT_LOOP,)}


def find_reproducer(name: str) -> Reproducer:
    """The reproducer of that name. Raises ``UsageError`` with what was probably meant."""
    found = REPRODUCERS.get(name)
    if found is None:
        near = difflib.get_close_matches(name, REPRODUCERS, n=1, cutoff=0.5)
        raise UsageError(
            f"there is no reproducer {name!r}" + (f"; {near[0]!r} was meant?" if near else ""),
            remedy=f"`soak repro list` shows them: {', '.join(REPRODUCERS)}.",
        )
    return found
