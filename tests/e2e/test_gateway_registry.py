"""The gateway in front of the registry's models while they are started, switched, stopped and killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.serving import Box, Load
from e2e.soaking import wait_for
from gateway_process import GatewayProcess
from soakrig.engine.serving.processes import Launch, find_launch

CHAT = "/v1/chat/completions"
POLICIES = """
[models.{one}.policies]
min_output_tokens = 24
[models.{one}.policies.presets]
{one}-low = {{ reasoning_effort = "low" }}
"""


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[tuple[Box, GatewayProcess]]:
    with Box(tmp_path, POLICIES) as box, GatewayProcess(tmp_path, "", env=box.env) as gateway:
        yield box, gateway


def ask(gateway: GatewayProcess, model: str, **more: Any) -> httpx.Response:
    said = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **more}
    return gateway.client.post(CHAT, json=said)


def frozen_at_its_start(box: Box, name: str) -> int:
    """The engine's first process, stopped before it listens."""
    found: list[int] = []

    def there() -> bool:
        launch: Launch | None = find_launch(name, box.root)
        if launch is None or launch.root is None:
            return False
        os.kill(launch.root.pid, signal.SIGSTOP)
        found.append(launch.root.pid)
        return True

    wait_for(f"the engine of {name}", there, 30.0)
    return found[0]


def test_a_model_that_is_not_there_that_loads_that_serves_and_that_is_killed(stand: tuple[Box, GatewayProcess]) -> None:
    box, gateway = stand
    unknown = ask(gateway, "nonsense")
    assert unknown.status_code == 404
    assert {box.one, box.two, "embedded"} <= set(unknown.json()["error"]["message"].split("there are: ")[1].split(", "))
    absent = ask(gateway, box.one)
    assert (absent.status_code, absent.json()["error"]["type"]) == (502, "engine_unreachable")
    assert f"the engine {box.one} is not there: stopped, never started here" in absent.json()["error"]["message"]
    assert f"`soak engine serve {box.one}`" in absent.json()["error"]["message"]
    assert gateway.client.get("/v1/models").status_code == 502

    box.start("serve", box.one, "--detach")
    pid = frozen_at_its_start(box, box.one)
    wait_for("503 while it starts", lambda: ask(gateway, box.one).status_code == 503, 10.0)
    loading = ask(gateway, box.one)
    assert (loading.status_code, loading.headers["retry-after"]) == (503, "5")
    assert f"pid {pid} does not listen yet" in loading.json()["error"]["message"]
    os.kill(pid, signal.SIGCONT)
    box.ready_within(box.one)

    for name in (box.one, f"{box.one}-low"):
        answer = ask(gateway, name, ignore_eos=True)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == box.one
        assert answer.json()["usage"]["completion_tokens"] == 24, "the registry's policy raised the budget"
    assert (
        gateway.metric(f'soakrig_gateway_policy_total{{effect="request",model="{box.one}",policy="min_output_tokens"')
        == 2
    )
    listed = {row["id"] for row in gateway.client.get("/v1/models").json()["data"]}
    assert listed == {box.one, f"{box.one}-low"}, "only what serves"
    assert gateway.client.get("/health", params={"model": box.one}).status_code == 200

    launch = box.launch(box.one)
    assert launch.root is not None
    os.kill(launch.root.pid, signal.SIGKILL)
    box.gone(box.one)
    wait_for("the record of its end", lambda: "ended by itself" in box.status(box.one)["why"])
    dead = ask(gateway, box.one)
    assert dead.status_code == 502
    assert "ended by itself, exit status -9" in dead.json()["error"]["message"]


def test_switch_under_load_through_the_gateway(stand: tuple[Box, GatewayProcess]) -> None:
    """No client takes what broke off for an answer, and the next request finds the other model on the same port."""
    box, gateway = stand
    box.json("serve", box.one, "--detach")
    load = Load(int(gateway.url.rpartition(":")[2]), model=box.one)
    load.flows()
    box.json("switch", box.two)
    assert set(load.finish()) == {"error frame"}
    served = ask(gateway, box.two)
    assert (served.status_code, served.json()["model"]) == (200, box.two)
    gone = ask(gateway, box.one)
    assert gone.status_code == 502
    assert "asked to stop" in gone.json()["error"]["message"]
    assert find_launch(box.one, box.root) is None
    box.json("stop", box.two)
    box.json("serve", box.two, "--detach", "--port", "0")
    assert ask(gateway, box.two).status_code == 200, "at whatever port it is now"
