"""A Ray cluster of two raylets, and what a test needs to run one launch on it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ray_nodes import RayNodes
from soakrig.bisect.arm_launch import ArmLaunch, Teller
from soakrig.bisect.campaign_file import Campaign, merge_campaign
from soakrig.bisect.executors import Stratum
from soakrig.bisect.journal_rows import Turn
from soakrig.bisect.launch_result import LaunchResult
from soakrig.bisect.ray_executor import RayExecutor
from soakrig.bisect.stop import Stop
from soakrig.bisect.variables import parse_variables
from soakrig.engine.leftovers import marked

JOIN_S = 90.0


@pytest.fixture(scope="session")
def cluster() -> Generator[RayNodes]:
    """Two nodes with one CPU each, on one host; the token of the cluster is in the environment."""
    with pytest.MonkeyPatch.context() as patch, RayNodes() as nodes:
        nodes.add(num_cpus=1, resources={"second": 1})
        patch.delenv("RAY_ADDRESS", raising=False)
        for name, value in nodes.env.items():
            patch.setenv(name, value)
        yield nodes


@pytest.fixture
def executor(cluster: RayNodes) -> Generator[RayExecutor]:
    found = RayExecutor(cluster.address, schedule_s=40, answer_s=30)
    try:
        yield found
    finally:
        found.close()


class Recorder:
    """A teller that keeps what it is told, and does something at a call: ``at["probing"] = function``."""

    def __init__(self, **at: Callable[[Any], None]) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.at = at

    def _told(self, name: str, data: Any = None) -> None:
        self.calls.append((name, data))
        if name in self.at:
            self.at[name](data)

    def started(self, engine: Mapping[str, Any]) -> None:
        self._told("started", engine)

    def ready(self, facts: Mapping[str, Any]) -> None:
        self._told("ready", facts)

    def probing(self) -> None:
        self._told("probing")

    def turn(self, turn: Turn) -> None:
        self._told("turn", turn)

    def ended(self, result: LaunchResult) -> None:
        self._told("ended", result)

    def gone(self, left: list[str]) -> None:
        self._told("gone", left)

    def say(self, text: str) -> None:
        pass

    def progress(self, text: str) -> None:
        pass

    def names(self) -> list[str]:
        """What was told, each name once for a row of the same."""
        return [one for n, (one, _) in enumerate(self.calls) if n == 0 or self.calls[n - 1][0] != one]

    def of(self, name: str) -> list[Any]:
        """The data of every call of that name."""
        return [data for one, data in self.calls if one == name]

    @property
    def result(self) -> LaunchResult:
        """The last that was told."""
        return self.of("ended")[-1]


class World:
    """A campaign in a folder of its own, launched arm by arm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "campaign"
        self.kernel_log = folder / "kernel.log"
        self.kernel_log.touch()
        self.number = 0

    def campaign(self, plant: Mapping[str, Any] | None = None, **given: Any) -> Campaign:
        """Short turns on the embedded engine; ``plant``: its fault. The kernel's log is a file where nothing comes."""
        settings = {"VLLM_MOE_PREFILL_GROUPS": "1"} | ({"SOAKRIG_PLANT": json.dumps(plant)} if plant else {})
        return merge_campaign(
            Campaign(),
            {"turns": 6, "kernel_log": str(self.kernel_log), **given},
            load={"tools": 2, "max_tokens": 24},
            settings=settings,
            variables=parse_variables(["VLLM_MOE_DMA_STAGING=1,0"]),
        )

    def launch(self, campaign: Campaign, stratum: Stratum) -> ArmLaunch:
        """The control, under a mark that no other launch has."""
        self.number += 1
        mark = f"{self.folder}#{self.number}"
        return ArmLaunch(campaign, "control", self.number, self.folder, mark, stratum.card)

    def run(
        self, executor: RayExecutor, stratum: Stratum, campaign: Campaign, tell: Teller, stop: Stop | None = None
    ) -> ArmLaunch:
        """One launch, to its end and no longer than ``JOIN_S``; raises what the executor raises."""
        launch, raised = self.launch(campaign, stratum), list[BaseException]()

        def run() -> None:
            try:
                executor.run(launch, stratum, tell, stop or Stop())
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(JOIN_S)
        assert not thread.is_alive(), "the launch did not end"
        if raised:
            raise raised[0]
        return launch

    @staticmethod
    def left(launch: ArmLaunch) -> list[Any]:
        """Processes of a launch that still run."""
        return marked(launch.mark)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)
