"""``--transcript`` of ``soak run``: which options go with it, what is said of it, and the load that it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from soakrig.errors import UsageError
from soakrig.record.manifest import Plan
from soakrig.soak.conversation import Conversation
from soakrig.soak.probe import Probe
from soakrig.soak.transcript import Transcript, open_transcript
from soakrig.soak.transcripts.mooncake import BLOCK_TOKENS

LATE_S = 1.0


def read_load(
    path: Path,
    *,
    max_tokens: int | None,
    conversations: int | None,
    anonymise: bool,
    seed: int,
    trace_block: int | None,
    trace_speed: float | None,
) -> Transcript:
    """The transcript of a run. Raises ``UsageError`` for what cannot be read, and for an option that means nothing to
    the format that was found (None: not given)."""
    found = open_transcript(
        path,
        max_tokens=512 if max_tokens is None else max_tokens,
        places=conversations,
        anonymise=anonymise,
        seed=seed,
        block_tokens=BLOCK_TOKENS if trace_block is None else trace_block,
        speed=1.0 if trace_speed is None else trace_speed,
    )
    form = found.recorded.form
    refused = {
        "--trace-block": (trace_block, form == "mooncake", "a trace"),
        "--trace-speed": (trace_speed, form == "mooncake", "a trace"),
        "--max-tokens": (
            max_tokens,
            form in ("openai", "sharegpt"),
            "one that does not say how long answers are",
        ),
    }
    for name, (value, fits, what) in refused.items():
        if value is not None and not fits:
            raise UsageError(f"{name} makes no sense with {path}, which is read as {form}; it is for {what}")
    return found


def transcript_plan(found: Transcript, turns: int | None, seconds: float | None) -> Plan:
    """The exposure: the transcript once, or so many turns or seconds of it. Raises ``UsageError`` for a trace, which
    has a clock of its own."""
    if found.recorded.form == "mooncake" and (turns is not None or seconds is not None):
        raise UsageError("--turns and --for make no sense with a trace, whose arrivals have times; cut the file")
    lanes = found.lanes
    return Plan(
        conversations=found.parallel,
        turns=None if seconds is not None else turns or max(lanes),
        seconds=seconds,
        lanes=lanes if turns is None and seconds is None else None,
    )


def transcript_conversations(found: Transcript, *, over_again: bool) -> Callable[[Probe], Sequence[Conversation]]:
    """What ``RunSpec.conversations`` takes."""
    return lambda probe: found.conversations(probe, over_again=over_again)


def lateness(late: Sequence[float]) -> str:
    """A line about arrivals that had to wait for a free place; empty where none did for long."""
    slow = [seconds for seconds in late if seconds > LATE_S]
    if not slow:
        return ""
    return (
        f"{len(slow)} of {len(late)} arrivals left more than {LATE_S:g} s late (at most {max(slow):.1f} s), as every "
        "place was taken: less load than the trace's. Give more --conversations or a smaller --trace-speed"
    )
