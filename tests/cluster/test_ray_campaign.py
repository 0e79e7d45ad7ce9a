"""A whole campaign over two strata at once, and clusters that are not there or have nothing to give."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time

import pytest

from cluster.conftest import World
from ray_nodes import RayNodes
from soakrig.bisect.arm_launch import ArmLaunch, Teller
from soakrig.bisect.arms import CONTROL
from soakrig.bisect.campaign import CampaignLoop
from soakrig.bisect.evidence import Evidence
from soakrig.bisect.executors import Stratum
from soakrig.bisect.journal import Journal
from soakrig.bisect.journal_rows import RunRow
from soakrig.bisect.ray_executor import RayExecutor
from soakrig.bisect.stop import Stop
from soakrig.bisect.verdicts import judge
from soakrig.errors import PreflightRefusedError

pytestmark = pytest.mark.ray

CAMPAIGN_S = 240.0


def test_each_host_is_judged_by_its_own_controls_and_both_work_at_once(
    executor: RayExecutor, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = {"action": "exit", "hazard": 0.5, "when": {"VLLM_MOE_DMA_STAGING": "1"}}
    campaign = world.campaign(plant, turns=8, confidence=0.8, at_least=1.0, executor="ray")
    hosts = [one.name for one in executor.strata]
    run_there, may_begin = executor.run, threading.Event()

    def run_late(launch: ArmLaunch, stratum: Stratum, tell: Teller, stop: Stop) -> None:
        """The second host begins when the first has nearly its baseline: it must not live on that."""
        assert stratum.name == hosts[0] or may_begin.wait(CAMPAIGN_S)
        run_there(launch, stratum, tell, stop)

    monkeypatch.setattr(executor, "run", run_late)
    with Journal.create(world.folder, campaign.to_json()) as journal:

        def changed(note: str) -> None:
            if sum(run.result == "faulted" for run in journal.runs()) >= 2:
                may_begin.set()

        loop = CampaignLoop(journal, campaign, executor, changed=changed)
        thread = threading.Thread(target=loop.run, daemon=True)
        thread.start()
        thread.join(CAMPAIGN_S)
        loop.stop.ask("the test")
        thread.join(60)
        assert not thread.is_alive()
        runs, spans = journal.runs(), journal.spans()
        evidence = Evidence(journal.arm_runs())
    verdicts = judge(evidence, [one.arm for one in campaign.arms], campaign.rule)
    assert verdicts["VLLM_MOE_DMA_STAGING=0"].word == "CLEARED"
    assert {run.state for run in runs} == {"settled"}
    assert {run.stratum for run in runs} == set(hosts)

    def overlap(one: RunRow, other: RunRow) -> bool:
        (began, ended), (other_began, other_ended) = spans[one.id], spans[other.id]
        return began < other_ended and other_began < ended

    late = next(run for run in runs if run.stratum == hosts[1])
    pairs = list(itertools.combinations([run for run in runs if run is not late and run.result != "void"], 2))
    assert any(overlap(*pair) for pair in pairs if pair[0].stratum != pair[1].stratum), "both at once"
    assert not any(overlap(*pair) for pair in pairs if pair[0].stratum == pair[1].stratum), "one at a time on each"

    of_arm = [run for run in runs if run.arm != CONTROL]
    assert of_arm
    for run in of_arm:
        before = [one for one in runs if one.id < run.id and one.stratum == run.stratum and one.arm == CONTROL]
        assert sum(one.result == "faulted" for one in before) >= campaign.rule.min_control_faults, run
    for host in hosts:
        alone = Evidence(tuple(run for run in evidence.runs if run.stratum == host))
        for arm in (one.name for one in campaign.arms):
            assert evidence.totals(arm).get(host) == alone.totals(arm).get(host), "on its own host's clock"
        others = Evidence(tuple(run for run in evidence.runs if run.stratum != host or run.arm != CONTROL))
        assert host not in others.totals("VLLM_MOE_DMA_STAGING=0"), "without controls of its own it says nothing"


def test_cards_that_others_have_are_left_out_and_none_at_all_is_refused(
    cluster: RayNodes, executor: RayExecutor
) -> None:
    with pytest.raises(PreflightRefusedError, match=r"has 2 nodes, .* not given to us within 2 s"):
        RayExecutor(cluster.address, schedule_s=2)
    assert executor.machine(executor.strata[0])["kernel"], "the connection is the first one's, and stays"
    first, second = executor.strata
    executor._drop(executor._seats[1])
    other = RayExecutor(cluster.address, schedule_s=8)
    try:
        assert len(other.strata) == 1
        assert len(other.left_out) == 1
        assert "not given to us within 8 s" in other.left_out[0]
        assert other.machine(other.strata[0])["boot_id"] == first.boot_id
        assert executor.clear("a mark of nobody", second) == [], "that needs no card"
    finally:
        other.close()
    assert "error" not in executor.machine(second), "given back"


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nobody.invalid:6379", "6379"])
def test_no_cluster_is_refused_at_once(address: str) -> None:
    began = time.monotonic()
    with pytest.raises(PreflightRefusedError, match=f"no Ray cluster answers at {address}: ") as raised:
        RayExecutor(address)
    assert "ray start --head" in raised.value.remedy
    assert time.monotonic() - began < 30


def test_no_cluster_of_this_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(PreflightRefusedError, match=r"no Ray cluster answers at 127\.0\.0\.1:9: "):
        RayExecutor()


@pytest.mark.parametrize("address", ["local", "ray://127.0.0.1:10001"])
def test_what_cannot_choose_hosts_is_refused(address: str) -> None:
    with pytest.raises(PreflightRefusedError, match=f"{address}; HOST:PORT of a running cluster's head was expected"):
        RayExecutor(address)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PreflightRefusedError, match="executor ray needs ray") as raised:
        RayExecutor()
    assert "pip install 'soakrig[ray]'" in raised.value.remedy


def test_a_cluster_that_does_not_take_our_token_is_refused_with_the_reason(cluster: RayNodes) -> None:
    code = "import sys; from soakrig.bisect.ray_executor import RayExecutor; RayExecutor(sys.argv[1])"
    env = {**os.environ, **cluster.env, "RAY_AUTH_TOKEN": "another one", "RAY_NUM_REDIS_GET_RETRIES": "2"}
    argv = [sys.executable, "-c", code, cluster.address]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert "PreflightRefusedError: no Ray cluster answers at" in done.stderr
    assert "AuthenticationError" in done.stderr.split("PreflightRefusedError")[-1]
