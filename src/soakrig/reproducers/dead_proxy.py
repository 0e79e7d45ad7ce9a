"""``dead-proxy``: what answers for an engine that is dead."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Sequence

from soakrig.errors import UsageError
from soakrig.record.finding import Finding
from soakrig.record.manifest import Plan
from soakrig.record.outcome import OutcomeName
from soakrig.reproducers import short_decode
from soakrig.reproducers.fresh import Ask, FreshConversation, user
from soakrig.reproducers.parameters import Parameter
from soakrig.reproducers.reproducer import LoadOptions, Reproducer, Scene, Way
from soakrig.soak.classify import classify
from soakrig.soak.conversation import Conversation
from soakrig.soak.probe import Probe
from soakrig.soak.watch import proc

TURNS = Parameter("turns", 3, "turns through the living engine first", low=1, high=10_000)
AFTER = Parameter("after", 4, "requests that are sent to the dead one", low=1, high=1000)
KILL = Parameter("kill", False, "allow SIGKILL of an attached engine (--pid), which this tool did not start")
GONE_S = 10.0
HONEST: frozenset[OutcomeName] = frozenset({"refused", "http_error", "error_frame"})
"""What a client can tell from an answer."""


def load(options: LoadOptions, probe: Probe) -> Sequence[Conversation]:
    """Short turns."""
    return short_decode.load(options, probe)


def plan(options: LoadOptions) -> Plan:
    """The turns before the death; what comes after it is no exposure."""
    return Plan(conversations=1, turns=TURNS.of(options))


def check(options: LoadOptions, way: Way) -> None:
    """Raises ``UsageError`` where there is no engine that may be killed."""
    if way == "url":
        raise UsageError(
            "dead-proxy kills the engine behind the URL, and does not know its process",
            remedy="Add --pid PID of the engine (not of the proxy) and --param kill=true.",
        )
    if way == "pid" and not KILL.of(options):
        raise UsageError(
            "dead-proxy would kill the engine of --pid, which this tool did not start",
            remedy="Add --param kill=true if that is meant.",
        )


async def procedure(scene: Scene) -> None:
    """Turns, the engine's death, and what is answered from then on."""
    stage = scene.stage
    await stage.run()
    if stage.over:
        return
    control, pid = scene.control, stage.target.pid
    if control is not None:
        part = await asyncio.to_thread(control.part)
        pid = part.pid if part is not None else pid
    if pid is None or not await stage.let_go("dead-proxy kills it"):
        return
    born = proc.create_time(pid)
    os.kill(pid, signal.SIGKILL)
    end = stage.clock.monotonic() + GONE_S
    while proc.is_alive(pid, born)[0] and stage.clock.monotonic() < end:
        await stage.clock.sleep(0.05)
    if proc.is_alive(pid, born)[0]:
        stage.find(Finding("dead-engine", f"process {pid} did not end by SIGKILL", says="unknown"))
        return
    await _ask_the_dead(scene)


async def _ask_the_dead(scene: Scene) -> None:
    stage, options = scene.stage, scene.options

    def ask(turn: int, rng: object, chars: float) -> Ask:
        return Ask([user(f"Is anybody there? ({turn})")], {"max_tokens": options.max_tokens, "temperature": 0})

    conversation = FreshConversation(9999, stage.probe.model, options.seed, ask)
    seen: Counter[OutcomeName] = Counter()
    for number in range(AFTER.of(options)):
        turn = conversation.next_turn()
        if turn is None or (stage.over and number):
            break
        outcome = classify(await stage.client.send(turn.body), accept=stage.accept)
        seen[outcome.name] += 1
        if outcome.name not in HONEST and seen[outcome.name] == 1:
            said = "a whole answer" if outcome.name == "ok" else outcome.name
            name = "post_mortem" if outcome.name == "ok" else outcome.name
            text = (
                f"request {number + 1} after the engine's death got {said}: {outcome.why or 'nothing tells the death'}"
            )
            stage.find(Finding(f"after-death-{name}", text, float(number + 1), "requests", says="fault"))
    if seen.keys() <= HONEST:
        told = ", ".join(f"{count} {name}" for name, count in seen.items())
        text = f"every request after the engine's death failed in the open: {told}"
        stage.find(Finding("after-death", text, float(sum(seen.values())), "requests", says="clean"))


DEAD_PROXY = Reproducer(
    name="dead-proxy",
    summary="a few turns, then the engine is killed, and what stands before it goes on being asked",
    provokes="HTTP 200 with an empty or a cut stream for an engine that is dead; whole answers from nowhere",
    seen='a proxy that scored 26 turns after the engine\'s death as "60 ok, 0 failed"; routers that close a stream '
    "with a made-up stop",
    costs="an engine: it is killed. Seconds beside its start",
    clean_means="requests to the dead engine failed in a way that a client can see; streams that were under way when "
    "it died are the business of every other load",
    signature=("finding after-death-", "turn empty_200"),
    load=load,
    parameters=(TURNS, AFTER, KILL),
    uses=("seed", "max_tokens", "temperature"),
    usual=LoadOptions(tools=0, max_tokens=32, temperature=0.0),
    procedure=procedure,
    plan=plan,
    needs="an engine that this tool starts (its server then stands for the proxy), or --url of a proxy with --pid of "
    "the engine behind it and --param kill=true",
    check=check,
)
