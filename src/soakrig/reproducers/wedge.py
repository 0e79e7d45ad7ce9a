"""``wedge``: an engine that is stopped, and one that is killed, under load; and what is left of it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from soakrig.errors import UsageError
from soakrig.record.finding import Finding
from soakrig.record.manifest import Plan
from soakrig.reproducers.engine_control import EngineControl
from soakrig.reproducers.fresh import Ask, FreshConversation, user
from soakrig.reproducers.parameters import Parameter
from soakrig.reproducers.reproducer import LoadOptions, Reproducer, Scene, Way
from soakrig.reproducers.vram import vram_used
from soakrig.soak.conversation import Conversation
from soakrig.soak.probe import Probe
from soakrig.soak.reply import Reply

WAYS = Parameter("ways", "both", "how it is ended: by SIGTERM, by SIGKILL of its first process, or one engine each",
                 choices=("both", "term", "kill"))  # fmt: skip
TURNS = Parameter("turns", 3, "turns before each end", low=1, high=10_000)
STREAMS = Parameter("streams", 4, "streams that are under way when it comes", low=1, high=1024)
PATIENCE = Parameter("patience", 30.0, "seconds that the engine's processes have to be gone in", low=0.1, high=3600.0)
TOLERANCE_MIB = 64.0
"""What the driver may keep for itself from one launch to the next."""
_SIGNALS = {"term": signal.SIGTERM, "kill": signal.SIGKILL}
_UNDER_WAY_S = 20.0


def load(options: LoadOptions, probe: Probe) -> Sequence[Conversation]:
    """One conversation for each end."""

    def ask(turn: int, rng: object, chars: float) -> Ask | None:
        if turn > TURNS.of(options):
            return None
        text = f"Tell a long story about a ship and its crew, in many chapters. (Number {turn})"
        return Ask([user(text)], {"max_tokens": options.max_tokens, "temperature": options.temperature})

    return [FreshConversation(n, probe.model, options.seed, ask) for n in range(len(_ways(options)))]


def plan(options: LoadOptions) -> Plan:
    """The turns before each end; what is under way when it comes is no exposure."""
    return Plan(conversations=1, turns=TURNS.of(options) * len(_ways(options)))


def check(options: LoadOptions, way: Way) -> None:
    """Raises ``UsageError`` for an attached engine, which is never ended."""
    if way != "launched":
        raise UsageError("wedge ends the engine, and an attached one is never ended", remedy="Use --engine.")


async def procedure(scene: Scene) -> None:
    """Each way in turn, with an engine of its own."""
    stage, control = scene.stage, scene.control
    assert control is not None
    for number, (way, conversation) in enumerate(zip(_ways(scene.options), stage.conversations, strict=True)):
        if number and not await scene.start_again("wedge started it again"):
            return
        await stage.run([conversation])
        if stage.over or not await stage.let_go(f"wedge ends it by {_SIGNALS[way].name}"):
            return
        streams = [asyncio.create_task(stage.client.send(body)) for body in _bodies(scene)]
        try:
            await _under_way(scene, streams)
            if stage.over:
                return  # by Ctrl-C, say: what comes now is an end like any other's
            await _end_under_load(scene, control, way)
        finally:
            for one in streams:
                one.cancel()
            await asyncio.gather(*streams, return_exceptions=True)


async def _under_way(scene: Scene, streams: Sequence[asyncio.Task[Reply]]) -> None:
    stage, clock = scene.stage, scene.stage.clock
    end = clock.monotonic() + _UNDER_WAY_S
    while not stage.client.received() and clock.monotonic() < end and not stage.over:
        if all(one.done() for one in streams):
            return
        await clock.sleep(0.02)


async def _end_under_load(scene: Scene, control: EngineControl, way: str) -> None:
    stage, clock, options = scene.stage, scene.stage.clock, scene.options
    await asyncio.to_thread(control.survivors)  # what they have in shared memory is only seen while they live
    began = clock.monotonic()
    await asyncio.to_thread(control.hit, _SIGNALS[way])
    left = await asyncio.to_thread(control.wait_end, PATIENCE.of(options))
    took = clock.monotonic() - began
    text = f"after {_SIGNALS[way].name} under load, all processes were gone within {took:.2f} s"
    if left:
        names = ", ".join(f"{one.pid} ({one.name}) in state {one.state}" for one in left)
        text = f"{took:.0f} s after {_SIGNALS[way].name} under load, {len(left)} processes are still there: {names}"
    bound = f"<= {PATIENCE.of(options):g} s"
    says = "clean" if not left else "unknown" if stage.over and took < PATIENCE.of(options) else "fault"
    stage.find(Finding(f"survivors-{way}", text, round(took, 3), "s", bound=bound, says=says))
    stuck = await asyncio.to_thread(control.clean)
    if stuck:
        text = f"SIGKILL did not end {', '.join(stuck)}: only a reboot does"
        stage.find(Finding(f"unkillable-{way}", text, float(len(stuck)), "processes", says="fault"))
    memory = await asyncio.to_thread(control.shared_memory)
    text = f"left under /dev/shm: {', '.join(memory)}" if memory else "nothing of it is left under /dev/shm"
    stage.find(
        Finding(f"shm-{way}", text, float(len(memory)), "objects", bound="0", says="fault" if memory else "clean")
    )
    stage.find(await _vram(scene, control, way))


async def _vram(scene: Scene, control: EngineControl, way: str) -> Finding:
    """GPU memory against before the start; the driver gives it back a moment after a process is gone."""
    before, clock = control.vram_before, scene.stage.clock
    end = clock.monotonic() + PATIENCE.of(scene.options)
    while True:
        now = await asyncio.to_thread(vram_used, clock)
        if before is None and now is None:
            return Finding(f"vram-{way}", "there is no NVML here, and no GPU memory to look at", unit="MiB")
        if not isinstance(before, float) or not isinstance(now, float):
            why = before if isinstance(before, str) else now if isinstance(now, str) else "NVML was there only once"
            return Finding(f"vram-{way}", f"GPU memory was not measured: {why}", unit="MiB", says="unknown")
        more = now - before
        if more <= TOLERANCE_MIB or clock.monotonic() >= end or scene.stage.over:
            break
        await clock.sleep(1.0)
    text = f"{more:.0f} MiB more of GPU memory are in use than before the start"
    bound = f"<= {TOLERANCE_MIB:g} MiB"
    says = "fault" if more > TOLERANCE_MIB else "clean"
    return Finding(f"vram-{way}", text, round(more, 1), "MiB", "derived", bound, says)


def _ways(options: LoadOptions) -> tuple[str, ...]:
    ways = WAYS.of(options)
    return ("term", "kill") if ways == "both" else (ways,)


def _bodies(scene: Scene) -> list[bytes]:
    """Streams that are long enough to be under way when the end comes."""

    def ask(turn: int, rng: object, chars: float) -> Ask:
        text = f"Count from {turn} up to a thousand, in words, and do not stop early."
        return Ask([user(text)], {"max_tokens": 4 * scene.options.max_tokens, "temperature": 0.7})

    conversation = FreshConversation(9999, scene.stage.probe.model, scene.options.seed, ask)
    turns = [conversation.next_turn() for _ in range(STREAMS.of(scene.options))]
    return [turn.body for turn in turns if turn is not None]


WEDGE = Reproducer(
    name="wedge",
    summary="stop one engine and kill another under load, then count what is left of them",
    provokes="processes in D state that hold all GPU memory, workers that go on without their server, shared memory "
    "that nobody frees",
    seen="an illegal access with UVA off that left a thread in D state: a reset of the card is refused and only a "
    "reboot clears it; a killed vLLM server whose core and worker still generate a minute later",
    costs="two starts of the engine; where it does leave a thread in the kernel, the host needs a reboot",
    clean_means="these two ends left no process, no object under /dev/shm and no GPU memory; a wedge that takes a "
    "fault first needs the fault",
    signature=("finding survivors", "finding unkillable", "finding shm", "finding vram", "finding restart", "Xid"),
    load=load,
    parameters=(WAYS, TURNS, STREAMS, PATIENCE),
    uses=("seed", "max_tokens", "temperature"),
    usual=LoadOptions(tools=0, max_tokens=128),
    procedure=procedure,
    plan=plan,
    needs="an engine that this tool starts; GPU memory is judged where NVML is",
    check=check,
    vram=True,
)
