"""The reproducers by name."""

from __future__ import annotations

import difflib

from soakrig.errors import UsageError
from soakrig.reproducers.agent_loop import AGENT_LOOP
from soakrig.reproducers.amnesia import AMNESIA
from soakrig.reproducers.dead_proxy import DEAD_PROXY
from soakrig.reproducers.garbage import GARBAGE
from soakrig.reproducers.host_ram import HOST_RAM
from soakrig.reproducers.idle import IDLE
from soakrig.reproducers.kv_offload_shm import KV_OFFLOAD_SHM
from soakrig.reproducers.long_decode import LONG_DECODE
from soakrig.reproducers.long_prefill import LONG_PREFILL
from soakrig.reproducers.mixed_burst import MIXED_BURST
from soakrig.reproducers.replay import REPLAY
from soakrig.reproducers.reproducer import Reproducer
from soakrig.reproducers.restart_prefix import RESTART_PREFIX
from soakrig.reproducers.short_decode import SHORT_DECODE
from soakrig.reproducers.thinking_budget import THINKING_BUDGET
from soakrig.reproducers.tool_tags import TOOL_TAGS
from soakrig.reproducers.wedge import WEDGE

REPRODUCERS: dict[str, Reproducer] = {
    one.name: one
    for one in (
        AGENT_LOOP,
        LONG_PREFILL,
        MIXED_BURST,
        SHORT_DECODE,
        LONG_DECODE,
        RESTART_PREFIX,
        GARBAGE,
        THINKING_BUDGET,
        AMNESIA,
        TOOL_TAGS,
        DEAD_PROXY,
        KV_OFFLOAD_SHM,
        HOST_RAM,
        IDLE,
        WEDGE,
    )
}


def find_reproducer(name: str) -> Reproducer:
    """The reproducer of that name, or ``replay``, which is no row of the table: it has no load of its own. Raises
    ``UsageError`` with what was probably meant."""
    found = REPLAY if name == REPLAY.name else REPRODUCERS.get(name)
    if found is None:
        near = difflib.get_close_matches(name, REPRODUCERS, n=1, cutoff=0.5)
        raise UsageError(
            f"there is no reproducer {name!r}" + (f"; {near[0]!r} was meant?" if near else ""),
            remedy=f"`soak repro list` shows them: {', '.join(REPRODUCERS)}.",
        )
    return found
