"""Launches on a real Ray cluster: faulting, clean, stopped, refused by the journal, cut off by deaths of all kinds."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.conftest import Recorder, World
from e2e.soaking import wait_for
from ray_nodes import RayNodes
from soakrig.bisect.executors import LocalExecutor, Stratum
from soakrig.bisect.launch_result import LaunchResult
from soakrig.bisect.ray_executor import RayExecutor, _given_card
from soakrig.bisect.stop import Stop
from soakrig.engine.leftovers import marked
from soakrig.errors import StoreError
from soakrig.soak.fingerprint import host_facts

pytestmark = pytest.mark.ray

HOST = os.uname().nodename
LONG = {"turns": 100_000}
"""More turns than any test waits for."""


def environment(pid: int) -> dict[str, str]:
    """That a process was started with."""
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.partition("=")[::2] for pair in pairs if pair)


def at_turn(number: int, do: Callable[[], None]) -> Callable[[Any], None]:
    return lambda turn: do() if turn.number == number else None


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_two_nodes_on_one_host_are_two_strata_with_names_that_last(cluster: RayNodes, executor: RayExecutor) -> None:
    assert executor.strata == (
        Stratum(f"{HOST} cpu", None, str(host_facts()["boot_id"])),
        Stratum(f"{HOST} cpu #2", None, str(host_facts()["boot_id"])),
    )
    assert executor.left_out == []
    before, handler = executor.strata, signal.getsignal(signal.SIGTERM)
    executor.close()
    again = RayExecutor(cluster.address)
    try:
        assert signal.getsignal(signal.SIGTERM) is handler, "a campaign has its own"
        assert again.strata == before
        assert again.machine(before[1])["boot_id"] == host_facts()["boot_id"]
    finally:
        again.close()


def test_a_launch_that_faults_is_told_as_on_this_host(executor: RayExecutor, world: World) -> None:
    campaign = world.campaign({"action": "exit", "hazard": 1, "after": 3})
    there, here = Recorder(), Recorder()
    launch = world.run(executor, executor.strata[1], campaign, there)
    LocalExecutor().run(world.launch(campaign, Stratum()), Stratum(), here, Stop())
    assert there.names() == here.names() == ["started", "ready", "probing", "turn", "ended", "gone"]
    assert there.result == here.result
    assert (there.result.result, there.result.exposure) == ("faulted", 4)
    assert [turn.outcome for turn in there.of("turn")[:3]] == [turn.outcome for turn in here.of("turn")[:3]]
    assert there.of("gone") == [[]]
    assert there.of("ready") == here.of("ready"), "the proof of treatment"
    (started,) = there.of("started")
    assert started["host"] == HOST
    assert Path(started["folder"]) == launch.runs_dir / launch.run_id
    assert (launch.runs_dir / launch.run_id / "events.jsonl").exists()
    assert world.left(launch) == []


def test_no_variable_of_ray_reaches_the_engine(executor: RayExecutor, world: World) -> None:
    import ray  # reads the token's place when it is imported: the cluster comes first

    def touch(host: object) -> dict[str, str]:
        os.environ["PATH"] += ":/only/in/the/worker"
        return dict(os.environ)

    worker = ray.get(executor._seats[1].host.__ray_call__.remote(touch))
    assert {"OMP_NUM_THREADS", "RAY_JOB_ID"} <= worker.keys(), "Ray sets others now: look for those"
    engine: dict[str, str] = {}
    tell = Recorder(started=lambda started: engine.update(environment(started["pid"])))
    world.run(executor, executor.strata[1], world.campaign(), tell)
    assert (tell.result.result, tell.result.exposure) == ("clean", 6)
    assert {"SOAKRIG_LAUNCH", "VLLM_MOE_DMA_STAGING", "VLLM_MOE_PREFILL_GROUPS"} <= engine.keys()
    assert [name for name in engine if name.startswith(("RAY_", "OMP_", "PYTHONBREAK"))] == []
    assert (engine["PATH"], engine.get("HOME")) == (os.environ["PATH"], os.environ.get("HOME"))


def test_a_card_is_a_stratum_by_the_name_that_ray_gives_it(cluster: RayNodes, world: World) -> None:
    import ray

    raylet = cluster.add(num_cpus=1, num_gpus=2, env_vars={"CUDA_VISIBLE_DEVICES": "3,5", "OMP_NUM_THREADS": "7"})
    try:
        executor = RayExecutor(cluster.address, schedule_s=40)
        try:
            assert [(one.name, one.card) for one in executor.strata] == [(f"{HOST} gpu 3", "3"), (f"{HOST} gpu 5", "5")]
            seen: dict[str, Any] = {}
            tell = Recorder(started=lambda started: seen.update(environment(started["pid"])))
            world.run(executor, executor.strata[1], world.campaign(turns=2), tell)
            assert tell.result.result == "clean"
            assert seen["CUDA_VISIBLE_DEVICES"] == "5"
            assert "OMP_NUM_THREADS" not in seen, "exported before `ray start`, it is still in no record"
            # both actors die between two launches: whichever card Ray gives first, each stratum gets its own
            for seat in executor._seats:
                kill(ray.get(seat.host.__ray_call__.remote(lambda host: os.getpid())))
            assert all("ActorDiedError" in executor.machine(stratum)["error"] for stratum in executor.strata)
            for stratum in reversed(executor.strata):
                world.run(executor, stratum, world.campaign(turns=1), tell)
                assert tell.result.result == "clean"
                assert seen["CUDA_VISIBLE_DEVICES"] == stratum.card
            for seat in executor._seats:
                assert ray.get(seat.host.__ray_call__.remote(_given_card)) == seat.stratum.card
        finally:
            executor.close()
    finally:
        cluster.remove(raylet)


def test_a_folder_that_cannot_be_made_there_is_replaced_and_told(executor: RayExecutor, world: World) -> None:
    world.folder.write_text("a file in the place of the campaign's folder")
    tell = Recorder()
    launch = world.run(executor, executor.strata[0], world.campaign(turns=1), tell)
    assert tell.result.result == "clean"
    folder = Path(tell.of("started")[0]["folder"])
    assert folder.name == launch.run_id
    assert folder.parent != launch.runs_dir
    assert (folder / "result.json").exists()
    shutil.rmtree(folder.parent.parent)


def test_a_node_that_dies_makes_the_launch_void_and_its_stratum_is_gone(
    cluster: RayNodes, world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    raylet = cluster.add(num_cpus=1, resources={"third": 1})
    executor = RayExecutor(cluster.address, schedule_s=40, answer_s=30)
    try:
        third = executor.strata[2]
        tell = Recorder(turn=at_turn(3, lambda: kill(raylet)))
        launch = world.run(executor, third, world.campaign(**LONG), tell)
        assert tell.names() == ["started", "ready", "probing", "turn", "ended", "gone"]
        assert tell.result.result == "void"
        assert tell.result.reason.startswith(f"host lost: {third.name}: ")
        assert tell.of("gone") == [[]]
        wait_for("the engine's end", lambda: not world.left(launch), 30)
        assert [one.name for one in executor.strata] == [f"{HOST} cpu", f"{HOST} cpu #2"]
        assert "no more in the cluster" in executor.machine(third)["error"]
        assert executor.clear(launch.mark, third) == []
        again = Recorder()
        world.run(executor, third, world.campaign(), again)
        assert again.names() == ["ended", "gone"]
        assert (again.result.result, again.result.reason.split(":")[0]) == ("void", "host not to be had")
        assert capfd.readouterr().out == "", "standard output is for --json"
    finally:
        executor.close()
        cluster.remove(raylet)


def test_a_worker_that_is_killed_leaves_no_engine_and_the_stratum_stays(executor: RayExecutor, world: World) -> None:
    stratum, worker = executor.strata[1], list[int]()
    tell = Recorder(
        started=lambda started: worker.append(started["worker"]), turn=at_turn(3, lambda: kill(worker[0]))
    )  # fmt: skip
    launch = world.run(executor, stratum, world.campaign(**LONG), tell)
    assert (tell.result.result, tell.names()[-2:]) == ("void", ["ended", "gone"])
    assert tell.result.reason.startswith(f"host lost: {stratum.name}: ActorDiedError: ")
    assert tell.of("gone") == [[]]
    assert world.left(launch) == [], "told gone, so it is"
    assert stratum in executor.strata
    again = Recorder()
    world.run(executor, stratum, world.campaign(turns=2), again)
    assert again.result == LaunchResult("clean", 2.0)


def test_a_clean_launch_whose_host_dies_before_its_engine_is_gone_is_void(executor: RayExecutor, world: World) -> None:
    worker = list[int]()

    def die(result: LaunchResult) -> None:
        if result.result == "clean":
            kill(worker[0])

    tell = Recorder(started=lambda started: worker.append(started["worker"]), ended=die)
    launch = world.run(executor, executor.strata[1], world.campaign(turns=2), tell)
    assert [result.result for result in tell.of("ended")] == ["clean", "void"]
    assert tell.names()[-1] == "gone"
    assert world.left(launch) == []


def test_a_fault_that_was_told_stays_when_the_host_dies_after_it(executor: RayExecutor, world: World) -> None:
    worker = list[int]()
    tell = Recorder(started=lambda started: worker.append(started["worker"]), ended=lambda _: kill(worker[0]))
    world.run(executor, executor.strata[1], world.campaign({"action": "exit", "hazard": 1, "after": 1}), tell)
    assert [result.result for result in tell.of("ended")] == ["faulted"]
    assert tell.of("gone") == [[]]


def test_a_host_that_is_silent_is_lost(cluster: RayNodes, world: World) -> None:
    executor = RayExecutor(cluster.address, schedule_s=40, answer_s=4)
    try:
        worker = list[int]()
        tell = Recorder(
            started=lambda started: worker.append(started["worker"]),
            turn=at_turn(3, lambda: os.kill(worker[0], signal.SIGSTOP)),
        )
        launch = world.run(executor, executor.strata[1], world.campaign(**LONG), tell)
        assert tell.result.result == "void"
        assert "silent for 4 s" in tell.result.reason
        assert world.left(launch) == []
    finally:
        executor.close()


def test_a_stop_ends_the_launch_after_the_turn_in_flight(executor: RayExecutor, world: World) -> None:
    stop = Stop()
    tell = Recorder(turn=at_turn(3, lambda: stop.ask("Ctrl-C")))
    launch = world.run(executor, executor.strata[1], world.campaign(**LONG), tell, stop)
    assert (tell.result.result, tell.result.reason) == ("interrupted", "stopped by Ctrl-C")
    assert tell.names()[-1] == "gone"
    assert world.left(launch) == []


def test_a_stop_from_before_the_launch_reaches_it_too(executor: RayExecutor, world: World) -> None:
    stop = Stop()
    stop.ask("SIGTERM")
    tell = Recorder()
    launch = world.run(executor, executor.strata[1], world.campaign(**LONG), tell, stop)
    assert (tell.result.result, tell.result.reason) == ("interrupted", "stopped by SIGTERM")
    assert world.left(launch) == []


@pytest.mark.parametrize("call", ["started", "turn", "ended", "gone"])
def test_what_the_journal_refuses_ends_the_launch_and_is_raised(
    executor: RayExecutor, world: World, call: str
) -> None:  # fmt: skip
    error = StoreError("the disk is full")

    def refuse(_: Any) -> None:
        raise error

    campaign = world.campaign(turns=100_000 if call in ("started", "turn") else 1)
    tell = Recorder(**{call: refuse})
    with pytest.raises(StoreError) as raised:
        world.run(executor, executor.strata[1], campaign, tell)
    assert raised.value is error
    assert tell.names()[-1] == call, "nothing is told after it"
    assert marked(f"{world.folder}#{world.number}") == []


DRIVER = """
import json, sys
from pathlib import Path
from cluster.conftest import Recorder, World
from soakrig.bisect.ray_executor import RayExecutor, _given_card
from soakrig.bisect.stop import Stop
world = World(Path(sys.argv[2]))
executor = RayExecutor(sys.argv[1])
launch = world.launch(world.campaign(turns=100_000), executor.strata[1])
def say(turn):
    if turn.number == 3:
        print(launch.mark, flush=True)
executor.run(launch, executor.strata[1], Recorder(turn=say), Stop())
"""


def test_a_driver_that_is_killed_leaves_no_engine(cluster: RayNodes, tmp_path: Path) -> None:
    env = {**os.environ, **cluster.env, "PYTHONPATH": str(Path(__file__).parent.parent)}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, cluster.address, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env
    )
    with driver:
        assert driver.stdout is not None
        mark = driver.stdout.readline().strip()
        assert marked(mark)
        driver.kill()
    wait_for("the engine's end", lambda: not marked(mark), 40)
