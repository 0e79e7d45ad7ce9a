"""Rows under attack: engines that die between two turns, Ctrl-C while one is ended or started, servers that fail."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.soaking import Soak, wait_for
from reproducing import SMALL, embedded, found, its_own, soak_engine, soak_loopback
from soakrig.record.events import EngineSwitched, Event, FindingMade, TurnDone
from soakrig.record.store import RunReader
from wire import loopback

TINY = [*SMALL, "--max-model-len=1024", "--kv-tokens=2048"]


# -- an engine that dies between two turns -----------------------------------------------------------------------------


def after_finding(name: str) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, FindingMade) and event.finding.name == name


STAGES: dict[str, tuple[Callable[[Event], bool], int]] = {
    "after the cold turns": (lambda event: isinstance(event, TurnDone), 1),
    "before the warm turns": (after_finding("prefix-drift-cold"), 1),
    "before the eviction": (after_finding("prefix-drift-warm"), 2),
    "once it has come up again": (lambda event: isinstance(event, EngineSwitched) and event.action == "started", 3),
    "after the last turn": (after_finding("prefix-drift-restarted"), 4),
}
"""When the engine is killed -> the event, and the turns that were ok by then."""


def quick(*values: object, often: tuple[object, ...]) -> list[Any]:
    """Parameters of which only some are run every time."""
    return [pytest.param(one, marks=() if one in often else pytest.mark.slow) for one in values]


@pytest.mark.parametrize("stage", quick(*STAGES, often=("before the warm turns", "once it has come up again")))
def test_an_engine_that_dies_between_two_turns_is_dead(tmp_path: Path, stage: str) -> None:
    hit, turns = STAGES[stage]
    killed: list[int] = []

    def kill(event: Event, judge: object) -> None:
        if not killed and hit(event):
            assert control.engine is not None
            killed.append(control.engine.pid)
            os.kill(control.engine.pid, signal.SIGKILL)

    with embedded(tmp_path, flags=TINY) as control:
        parameters = {"prompts": 1, "prompt_tokens": 100}
        result = soak_engine(tmp_path, "restart-prefix", control, parameters=parameters, observer=kill)
    assert killed
    assert its_own(result, "restart-prefix"), result.reasons
    assert (result.engine.alive, result.outcomes["ok"]) == (False, turns)
    assert not any(one.says == "fault" for one in result.findings), "its death is the fault, and no drift"


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


class Row(Soak):
    """`soak run` of a row with a plan of its own."""

    def __init__(self, folder: Path, name: str, *options: str) -> None:
        small = [f"--arg={flag}" for flag in TINY]
        super().__init__(folder, name, *small, *options, small=False)
        at = self.argv.index("--turns")
        del self.argv[at : at + 2]

    def wait_switch(self, action: str) -> None:
        """Until the load has ended its engine, or started another."""

        def switched() -> bool:
            there = (self.run / "events.jsonl").exists()
            return there and any(one.kind == "switch" and one.action == action for one in self.events())

        wait_for(f"the engine is {action}", lambda: switched() or self.process.poll() is not None)
        assert self.process.poll() is None, self.errors.read_text()

    def nothing_runs(self) -> None:
        """No process names the test's folder: keepers and engines have it among their arguments."""

        def named() -> list[int]:
            found: list[int] = []
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    if str(self.folder).encode() in path.read_bytes():
                        found.append(int(path.parent.name))
                except OSError:
                    continue
            return [pid for pid in found if pid not in (os.getpid(), os.getppid(), self.process.pid)]

        wait_for("the end of all engines", lambda: not named(), 25.0)


RESTART = ("restart-prefix", "--param", "prompts=1", "--param", "prompt_tokens=100", "--param", "evict=false")
WEDGE = ("wedge", "--param", "turns=1", "--param", "streams=1", "--param", "ways=term", "--param", "patience=300")


@pytest.mark.parametrize(
    ("row", "often"),
    [
        pytest.param(RESTART, 1, id="restart-prefix-once"),
        pytest.param(RESTART, 2, id="restart-prefix-twice", marks=pytest.mark.slow),
        pytest.param(WEDGE, 1, id="wedge-once", marks=pytest.mark.slow),
        pytest.param(WEDGE, 2, id="wedge-twice"),
    ],
)
def test_ctrl_c_while_the_engine_is_ended_or_started(tmp_path: Path, row: tuple[str, ...], often: int) -> None:
    with Row(tmp_path, *row) as soak:
        soak.wait_switch("ended")
        began = time.monotonic()
        for _ in range(often):
            soak.process.send_signal(signal.SIGINT)
        result = soak.finish()
        assert time.monotonic() - began < 30
        soak.nothing_runs()
    assert (result["verdict"], result["ended"]) == ("inconclusive", "interrupted"), result["reasons"]
    assert result["faults"] == []
    assert not any(one["says"] == "fault" for one in result["findings"]), result["findings"]


def test_a_tool_that_is_killed_takes_the_second_engine_with_it(tmp_path: Path) -> None:
    with Row(tmp_path, *RESTART) as soak:
        soak.wait_switch("ended")
        second = soak.run / "engine-2/engine.log"
        wait_for("the second engine", lambda: second.exists() or soak.process.poll() is not None)
        soak.process.kill()
        soak.process.wait()
        soak.nothing_runs()
        assert RunReader(soak.run).stored_result() is None
        assert [one.action for one in soak.events() if one.kind == "switch"][:1] == ["ended"]


# -- servers that fail -------------------------------------------------------------------------------------------------


def failing(how: str) -> loopback.Route:
    async def route(x: loopback.Exchange) -> bool:
        if x.path in ("/v1/completions", "/tokenize"):
            if how == "hang":
                await asyncio.Event().wait()
            status = "404 Not Found" if how == "404" else "500 Internal Server Error"
            await x.json({"error": {"message": how}}, status)
            return True
        return await loopback.models(x)

    return route


@pytest.mark.parametrize(("how", "says"), [("404", "note"), ("500", "unknown"), ("hang", "unknown")])
@pytest.mark.parametrize(
    ("name", "finding", "options"),
    [("garbage", "canary-perplexity", {}), ("amnesia", "amnesia-mass", {"tools": 1, "parameters": {"states": 1}})],
)
def test_figures_that_an_engine_fails_to_give_are_unknown(
    tmp_path: Path, name: str, finding: str, options: dict[str, Any], how: str, says: str
) -> None:
    result = soak_loopback(tmp_path, name, loopback.good, failing(how), turns=1, first_byte=1.0, **options)
    assert found(result, finding).says == says
    if name == "garbage":
        assert result.verdict == ("pass" if says == "note" else "inconclusive")
