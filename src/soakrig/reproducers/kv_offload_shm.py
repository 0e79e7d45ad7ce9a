"""``kv-offload-shm``: a KV-offload tier against what /dev/shm has room for."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace

from soakrig.engine.bundled import EMBEDDED, Order
from soakrig.engine.shm import FOLDER
from soakrig.errors import PreflightRefusedError, UsageError
from soakrig.record.finding import Finding
from soakrig.record.manifest import Plan
from soakrig.reproducers import short_decode
from soakrig.reproducers.parameters import Parameter
from soakrig.reproducers.reproducer import LoadOptions, Reproducer, Scene, Way
from soakrig.soak.conversation import Conversation
from soakrig.soak.probe import Probe

TIER = Parameter("tier_gib", 0.0, "size of the tier in GiB; 0: as --arg=--kv-offloading-size says", low=0.0, high=1e6)
FORCE = Parameter("force", False, "start the engine although the tier does not fit, to see how it ends")
TURNS = Parameter("turns", 4, "short turns once it is up", low=1, high=10_000)
SIZE_FLAG = "--kv-offloading-size"
"""vLLM's (0.32): GiB, by the native backend a file under /dev/shm."""
_GIB, _MIB = 1 << 30, 1 << 20
_LINE = re.compile(
    r"Insufficient space in (?P<place>/\S+)[^\n]*?: (?P<needed>\d+) MiB required, (?P<free>\d+) MiB free"
)


def load(options: LoadOptions, probe: Probe) -> Sequence[Conversation]:
    """Short turns: the question is answered by the start."""
    return short_decode.load(options, probe)


def plan(options: LoadOptions) -> Plan:
    """A few turns."""
    return Plan(conversations=1, turns=TURNS.of(options))


def check(options: LoadOptions, way: Way) -> None:
    """Raises ``UsageError`` for an attached engine: its start is over."""
    if way != "launched":
        raise UsageError(
            "kv-offload-shm is about an engine's start, and an attached one has started", remedy="Use --engine vllm."
        )


def order(options: LoadOptions, wanted: Order) -> Order:
    """The order with the tier's flags. Raises ``PreflightRefusedError`` with both numbers where it does not fit, and
    for an engine without such a tier; ``UsageError`` where no size is said, or two."""
    if wanted.name == EMBEDDED:
        raise PreflightRefusedError(
            "the embedded engine has no KV-offload tier", remedy="Use --engine vllm --model FOLDER."
        )
    said = [flag.partition("=")[2] for flag in wanted.flags if flag.partition("=")[0].replace("_", "-") == SIZE_FLAG]
    tier = TIER.of(options)
    if bool(said) == (tier > 0):
        raise UsageError(
            f"the tier's size is said {'twice' if said else 'nowhere'}: it takes --param tier_gib=N or "
            f"--arg={SIZE_FLAG}=N",
            remedy="Say it once.",
        )
    try:
        size = float(said[-1]) if said else tier
    except ValueError as error:
        raise UsageError(f"--arg={SIZE_FLAG}={said[-1]}: a number of GiB was expected") from error
    refuse_too_large(size, FORCE.of(options))
    if said:
        return wanted
    return replace(wanted, flags=[*wanted.flags, f"{SIZE_FLAG}={size:g}", "--kv-offloading-backend=native"])


def refuse_too_large(size_gib: float, force: bool) -> None:
    """Raises ``PreflightRefusedError`` with both numbers where a tier does not fit into what is free."""
    needed, free = size_gib * _GIB, shutil.disk_usage(FOLDER).free
    if needed > free and not force:
        raise PreflightRefusedError(
            f"a KV-offload tier of {needed / _MIB:.0f} MiB does not fit into {FOLDER}, which has {free / _MIB:.0f} MiB "
            "free: the engine would load for minutes and die",
            remedy=f"Enlarge {FOLDER} (a container: --shm-size or --ipc=host), or see it die with --param force=true.",
        )


async def procedure(scene: Scene) -> None:
    """The engine is up, so the tier fitted; a few turns, and what is left of the place."""
    free = shutil.disk_usage(FOLDER).free / _MIB
    await scene.stage.run()
    text = f"the engine came up with its tier; {FOLDER} has {free:.0f} MiB free beside it"
    scene.stage.find(Finding("kv-tier", text, free, "MiB", says="clean"))


def start_failed(said: str) -> list[Finding]:
    """Both numbers, from the dying engine's own words and from the file system."""
    line = _LINE.search(said)
    free = shutil.disk_usage(FOLDER).free / _MIB
    if line is None:
        return []
    needed, told = float(line["needed"]), float(line["free"])
    return [
        Finding(
            "kv-tier",
            f"the engine died at its start: {needed:.0f} MiB required in {line['place']}, {told:.0f} MiB free by its "
            f"own words, {free:.0f} MiB now",
            needed,
            "MiB",
            bound=f"<= {told:.0f} MiB",
            says="fault",
        )
    ]


KV_OFFLOAD_SHM = Reproducer(
    name="kv-offload-shm",
    summary="a start with a KV-offload tier, refused before it is larger than /dev/shm",
    provokes="an engine that builds all of its layers and then dies, as its KV tier does not fit into /dev/shm",
    seen="49,151 MiB required and 32,768 MiB free, in a container whose default nobody had raised; read at first as a "
    "verdict on KV offloading",
    costs="one start of the engine; none where it is refused",
    clean_means="the tier fitted here and now; it says nothing about whether offloading helps",
    signature=("finding kv-tier", "engine death"),
    load=load,
    parameters=(TIER, FORCE, TURNS),
    uses=("seed", "max_tokens", "temperature"),
    usual=LoadOptions(tools=0, max_tokens=32, temperature=0.0),
    procedure=procedure,
    plan=plan,
    needs="vLLM with a card, started by this tool (vLLM's native KV offloading does not exist on a CPU)",
    check=check,
    order=order,
    start_failed=start_failed,
    not_in_bisect="its question is answered by the start, before there is a turn to count",
)
