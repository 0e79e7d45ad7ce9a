"""``host-ram``: memory of the host that is resident against what was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soakrig.engine.keeper import descendants, every_stat
from soakrig.errors import UsageError
from soakrig.record.finding import Finding
from soakrig.reproducers import short_decode
from soakrig.reproducers.parameters import Parameter
from soakrig.reproducers.reproducer import LoadOptions, Reproducer, Scene, Way
from soakrig.soak.conversation import Conversation
from soakrig.soak.probe import Probe

ASKED = Parameter("asked_gib", 0.0, "what was asked to be kept in host memory, in GiB; 0: as the engine or its "
                  "CPU_OFFLOAD_GB says", low=0.0, high=1e5)  # fmt: skip
BASE = Parameter("base_gib", 16.0, "what an engine holds beside that, in GiB, where it does not count its own", low=0.0)
RATIO = Parameter("max_ratio", 1.25, "most resident bytes for each that was asked for", low=1.0, high=100.0)
ABOVE = Parameter(
    "max_above_gib", 30.0, "most that the peak of the start may lie above what was asked, in GiB", low=0.0
)
_GIB = 1 << 30
_KEYS = ("VmHWM", "RssAnon", "RssShmem")


@dataclass(frozen=True)
class HostMemory:
    """Bytes of a process tree, summed: what is resident now and not a file's, and the peak of each process."""

    resident: int = 0
    peak: int = 0
    processes: int = 0


def tree_memory(pid: int, root: Path = Path("/proc")) -> HostMemory:
    """What ``pid`` and all below it have, from ``status`` of each (proc(5): VmHWM, RssAnon, RssShmem). Shared pages
    count once a process, and a process that has ended counts no more."""
    pids = [pid, *(stat.pid for stat in descendants([pid], every_stat()))]
    found = [one for one in (_status(root / str(each) / "status") for each in pids) if one]
    resident = sum(one.get("RssAnon", 0) + one.get("RssShmem", 0) for one in found)
    return HostMemory(resident, sum(one.get("VmHWM", 0) for one in found), len(found))


def load(options: LoadOptions, probe: Probe) -> Sequence[Conversation]:
    """Short turns, so that what is taken at the first request is there."""
    return short_decode.load(options, probe)


def check(options: LoadOptions, way: Way) -> None:
    """Raises ``UsageError`` where the engine's process is not known."""
    if way == "url":
        raise UsageError("host-ram reads the memory of the engine's process", remedy="Add --pid PID.")


async def procedure(scene: Scene) -> None:
    """The turns, then the memory of the process tree and of the engine's own books."""
    stage = scene.stage
    await stage.run()
    pid = stage.target.pid
    if pid is None or not stage.wanted:
        return
    memory = await asyncio.to_thread(tree_memory, pid)
    for finding in judged(memory, scene.options, stage.probe, asked_by(pid)):
        stage.find(finding)


def judged(memory: HostMemory, options: LoadOptions, probe: Probe, variable: float | None) -> list[Finding]:
    """The findings on ``memory``; ``variable``: CPU_OFFLOAD_GB of the engine's process, None where it has none."""
    if not memory.processes:
        return [Finding("host-resident", "the engine's process was not found, and its memory not seen", says="unknown")]
    gib = memory.resident / _GIB
    found = [
        Finding(
            "host-resident",
            f"{memory.processes} processes hold {gib:.2f} GiB that are no file's",
            round(gib, 3),
            "GiB",
        )
    ]
    asked, resident, whose = _asked(memory, options, probe, variable)
    if asked <= 0:
        text = "nothing is asked to be kept in host memory, so that there is nothing to compare: --set CPU_OFFLOAD_GB=N"
        return [*found, Finding("host-ratio", text, says="unknown")]
    ratio, most = resident / asked, RATIO.of(options)
    text = f"{resident / _GIB:.3g} GiB are resident for {asked / _GIB:.3g} GiB that were asked for ({whose})"
    found.append(
        Finding(
            "host-ratio", text, round(ratio, 4), "x", "derived", f"<= {most:g} x", "fault" if ratio > most else "clean"
        )
    )
    above, limit = (memory.peak - asked) / _GIB, ABOVE.of(options)
    text = (
        f"the peaks of the processes come to {memory.peak / _GIB:.3g} GiB, {above:.3g} above what was asked for (an "
        "upper bound of the start's own peak: they need not have come together)"
    )
    return [
        *found,
        Finding(
            "host-peak",
            text,
            round(above, 3),
            "GiB",
            "derived",
            f"<= {limit:g} GiB",
            "fault" if above > limit else "clean",
        ),
    ]


def asked_by(pid: int) -> float | None:
    """CPU_OFFLOAD_GB of a process's environment in GiB; None where it is not set or may not be read."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return next(float(word[15:]) for word in words if word.startswith(b"CPU_OFFLOAD_GB="))
    except (OSError, StopIteration, ValueError):
        return None


def _asked(memory: HostMemory, options: LoadOptions, probe: Probe, variable: float | None) -> tuple[float, float, str]:
    """Bytes asked for and resident, and who says so: the engine's own books where it keeps them."""
    offload: Any = probe.settings.get("offload")
    books: Any = offload.get("memory") if isinstance(offload, dict) else None
    if ASKED.name not in options.parameters and isinstance(books, dict) and books.get("bank_bytes_asked"):
        return (
            float(books["bank_bytes_asked"]),
            float(books["bank_bytes_resident"]),
            "the engine's own books, its expert bank",
        )
    asked = (ASKED.of(options) or variable or 0.0) * _GIB
    base = BASE.of(options)
    return asked, max(0.0, memory.resident - base * _GIB), f"of the process tree, less {base:g} GiB for the rest"


def _status(path: Path) -> dict[str, int]:
    try:
        lines: Iterable[str] = path.read_text("ascii", "replace").splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines)
    return {row[0][:-1]: int(row[1]) * 1024 for row in rows if len(row) >= 2 and row[0][:-1] in _KEYS}


HOST_RAM = Reproducer(
    name="host-ram",
    summary="a few turns, and the host memory of the engine against what it was asked to keep there",
    provokes="pinned memory that is rounded up to powers of two, and a loader whose passing copies cost more than what "
    "they load: on a box without swap the kernel ends the session",
    seen="19.0 GiB of weights in 33.8 GiB of host memory, 21.5 with exact sizes; 110 GiB of offload that peaked near "
    "168 on its way",
    costs="seconds beside the engine's start",
    clean_means="ratio and peak are within the bounds that the report names; helpers of the loader that have ended are "
    "not in the peak",
    signature=("finding host-",),
    load=load,
    cap=4,
    parameters=(ASKED, BASE, RATIO, ABOVE),
    uses=("seed", "max_tokens", "temperature"),
    usual=LoadOptions(tools=0, max_tokens=32, temperature=0.0),
    procedure=procedure,
    needs="the engine's process: one that this tool starts, or --pid; and something that is offloaded (CPU_OFFLOAD_GB)",
    check=check,
)
