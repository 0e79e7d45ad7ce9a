"""The states of a run of an arm, and which may follow which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

RunState = Literal[
    "planned", "launching", "ready", "probing", "faulted", "clean", "void", "host_lost", "interrupted", "teardown",
    "settled",
]  # fmt: skip
"""``planned``: chosen, nothing started. ``launching``: the engine is being started, or is about to be. ``ready``: it
answers. ``probing``: turns are sent. Then the result; then ``teardown`` of what was started; ``settled`` is final."""

RunResult = Literal["faulted", "clean", "void", "host_lost", "interrupted"]
"""``host_lost``: the host went down or was reset, by nobody's order: a fault class of its own. ``interrupted``: the
tool itself ended in the midst of it, on a host that stayed up; such a run does not count."""

RESULTS: tuple[RunResult, ...] = get_args(RunResult)

MAY_FOLLOW: Mapping[RunState, frozenset[RunState]] = {
    "planned": frozenset({"launching", "void"}),
    "launching": frozenset({"ready", "void", "host_lost", "interrupted"}),
    "ready": frozenset({"probing", "void", "host_lost", "interrupted"}),
    "probing": frozenset({"faulted", "clean", "void", "host_lost", "interrupted"}),
    # a check after the load may still find that the variable was not in effect, or a foreign process on the card
    "faulted": frozenset({"teardown", "void"}),
    "clean": frozenset({"teardown", "void", "host_lost"}),
    "void": frozenset({"teardown", "settled"}),
    # the record of the load may show a fault that the tool had no time to write down; clean it never is
    "interrupted": frozenset({"teardown", "faulted", "host_lost"}),
    "host_lost": frozenset({"settled"}),
    "teardown": frozenset({"settled", "void", "host_lost"}),
    "settled": frozenset(),
}
"""Whatever is not here is refused: a run gets one result and is settled once."""

STARTED: frozenset[RunState] = frozenset({"launching", "ready", "probing"})
"""Something of it may run, and no result is known."""


def as_result(state: str) -> RunResult | None:
    """``state`` where it is a result."""
    return next((result for result in RESULTS if result == state), None)
