"""Made-up worlds for tests of ``soakrig.bisect.minimize``: a hazard for each load, and a recorded run to begin with."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from soakrig.bisect.arm_launch import ArmLaunch, Teller
from soakrig.bisect.executors import Stratum
from soakrig.bisect.journal_rows import Turn
from soakrig.bisect.launch_result import LaunchResult, void
from soakrig.bisect.minimize.decision import Demand, Seen
from soakrig.bisect.minimize.material import Material
from soakrig.bisect.minimize.search import Path as SearchPath
from soakrig.bisect.minimize.search import Search
from soakrig.bisect.minimize.shape import Shape
from soakrig.bisect.stop import Stop
from soakrig.record.request_log import StoredRequest
from soakrig.soak.agent.tools import tools

Hazard = Callable[[Shape], float]
SIGNATURE = "turn error_frame"
WHOLE = Shape(conversations=2, requests=12, stream=1, max_tokens=96, tools=50, context=13000)


def floor(hazard: float = 1 / 6, *, least_tools: int = 8, least_context: int = 6000, least_tokens: int = 17) -> Hazard:
    """A fault that needs so many tools, so much context, so long an answer; below that it never comes."""

    def of(shape: Shape) -> float:
        enough = shape.tools >= least_tools and shape.context >= least_context and shape.max_tokens >= least_tokens
        return hazard if enough else 0.0

    return of


def play(hazard: Hazard, seed: int, *, limit: int = 400) -> tuple[SearchPath, int]:
    """A search to its end, and how many launches it took."""
    rng, known = random.Random(seed), dict[Shape, Seen]()
    for launches in range(limit):
        path = Search(WHOLE, 8, lambda count: 200 + 20 * count, Demand(), known).walk()
        if path.next is None:
            return path, launches
        turn = next((n for n in range(1, path.turns + 1) if rng.random() < hazard(path.next)), None)
        before = known.get(path.next, Seen())
        known[path.next] = Seen(before.faults + (turn is not None), before.exposure + (turn or path.turns))
    return path, limit


def material(conversations: int = 1, turns: int = 6, count: int = 12, **fields: Any) -> Material:
    """What a run of growing conversations would give: some 200 tokens more a turn, 3 bytes of messages a token."""
    definitions = tools(count)
    head: dict[str, Any] = {
        "model": "m", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 96,
        "tool_choice": "auto", "tools": definitions, **fields,
    }  # fmt: skip
    if not count:
        del head["tools"], head["tool_choice"]
    lanes: list[tuple[StoredRequest, ...]] = []
    for number in range(conversations):
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You work with tools. " * 20},
            {"role": "user", "content": f"Task {number}: find out why the build fails, and mend it."},
        ]
        lane: list[StoredRequest] = []
        for turn in range(1, turns + 1):
            parts = tuple(orjson.dumps(one) for one in messages)
            lane.append(StoredRequest(number, turn, orjson.dumps(head)[:-1], parts, {"seed": turn}))
            call = {"id": f"c{turn}", "type": "function", "function": {"name": "read_file", "arguments": "{}"}}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"c{turn}", "content": f"line {turn}: all is well here. " * 20},
            ]
        lanes.append(tuple(lane))
    fixed = len(orjson.dumps(definitions)) / 3.5 if count else 20.0
    return Material(SIGNATURE, tuple(lanes), fixed, 3.0, False)


class WorldExecutor:
    """Stands in for launches, and for nothing else: what comes of one is drawn from ``hazard``."""

    def __init__(
        self, hazard: Hazard, seed: int = 0, outcome: Callable[[Shape, int], LaunchResult | None] | None = None
    ):
        self.hazard, self.rng, self.outcome = hazard, random.Random(seed), outcome
        self.shapes: list[Shape] = []
        self.loads: list[Path] = []
        self.cleared: list[str] = []
        self.closed = False

    @property
    def strata(self) -> list[Stratum]:
        return [Stratum()]

    def machine(self, stratum: Stratum) -> dict[str, Any]:
        return {}

    def run(self, launch: ArmLaunch, stratum: Stratum, tell: Teller, stop: Stop) -> None:
        shape = Shape.read(launch.arm)
        self.shapes.append(shape)
        self.loads.append(Path(str(launch.campaign.load.parameters["path"])))
        cap = int(launch.campaign.cap)
        scripted = self.outcome(shape, len(self.shapes)) if self.outcome is not None else None
        if scripted is not None and scripted.result == "void":
            tell.ended(scripted)
            tell.gone([])
            return
        tell.started({"pid": 1, "since": 0.0})
        tell.ready({"proofs": {}})
        tell.probing()
        if scripted is not None:
            tell.turn(Turn(1, "ok"))
            tell.ended(scripted)
            tell.gone([])
            return
        struck = next((n for n in range(1, cap + 1) if self.rng.random() < self.hazard(shape)), None)
        tell.turn(Turn(struck or cap, "error_frame" if struck else "ok"))  # the last; each costs a write to the disk
        tell.ended(LaunchResult("faulted", struck, SIGNATURE) if struck else LaunchResult("clean", cap))
        tell.gone([])

    def clear(self, mark: str, stratum: Stratum) -> list[str]:
        self.cleared.append(mark)
        return []

    def close(self) -> None:
        self.closed = True


def no_start() -> LaunchResult:
    return void("the engine did not start: made up")
