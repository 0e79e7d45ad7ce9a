"""``idle``: nothing at all, for a while."""

from __future__ import annotations

from collections.abc import Sequence

from soakrig.record.finding import Finding
from soakrig.record.manifest import Plan
from soakrig.reproducers.parameters import Parameter
from soakrig.reproducers.reproducer import LoadOptions, Reproducer, Scene
from soakrig.soak.conversation import Conversation
from soakrig.soak.probe import Probe

SECONDS = Parameter("seconds", 600.0, "how long nothing is sent, in seconds", low=0.1, high=1e7)


def load(options: LoadOptions, probe: Probe) -> Sequence[Conversation]:
    """No conversation."""
    return []


def plan(options: LoadOptions) -> Plan:
    """A load that would have lasted so long: what is missing of it is what the report says."""
    return Plan(conversations=1, seconds=SECONDS.of(options))


async def procedure(scene: Scene) -> None:
    """Watch, and send nothing."""
    clock = scene.stage.clock
    began = clock.monotonic()
    await scene.stage.wait(SECONDS.of(scene.options))
    scene.stage.find(
        Finding(
            "idle",
            "nothing was sent: a quiet time without load is no clean run, however long it is",
            round(clock.monotonic() - began, 3),
            "s",
            says="unknown",
        )
    )


IDLE = Reproducer(
    name="idle",
    summary="nothing at all, for a while, under the same watchers: the negative control",
    provokes="nothing; what comes now does not need the load",
    seen='"14 hours clean" that had been 14 hours without a request, and a setting blamed for what came after them',
    costs="the time that it is given, and nothing else",
    clean_means="there is no clean run: it earns no exposure and ends inconclusive; a fault that comes in it fails",
    signature=("Xid", "engine death"),
    load=load,
    parameters=(SECONDS,),
    uses=(),
    usual=LoadOptions(tools=0),
    procedure=procedure,
    plan=plan,
    not_in_bisect="it earns no exposure, so that no arm could be judged by it",
)
