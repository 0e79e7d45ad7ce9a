"""LiteLLM's proxy in front of the gateway: turns pass with their reasoning restored, deaths stay deaths."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from e2e.soaking import wait_for
from e2e.test_embedded_process import Engine, running
from e2e.test_gateway_clients import MODEL, SMALL, blocks, rendered, stream_turn
from gateway_process import GatewayProcess

pytestmark = pytest.mark.litellm

ROOT = Path(__file__).resolve().parents[2]
KEY = "sk-" + "0123456789abcdef" * 2
TURNS = 6


@pytest.fixture
def program() -> Path:
    path = Path(os.environ.get("SOAKRIG_LITELLM", ROOT / ".venv-litellm/bin/litellm"))
    if not path.exists():
        pytest.skip(f"{path} is not there; `make litellm-env` makes it, or set SOAKRIG_LITELLM")
    return path


@pytest.fixture
def chain(program: Path, tmp_path: Path) -> Iterator[tuple[openai.OpenAI, Engine, GatewayProcess]]:
    """Client -> LiteLLM -> gateway -> engine."""
    with ExitStack() as stack:
        engine = stack.enter_context(running(tmp_path, *SMALL))
        gateway = stack.enter_context(GatewayProcess(tmp_path, engine.base, "--policy", "restore_reasoning"))
        behind = {"model": f"openai/{MODEL}", "api_base": f"{gateway.url}/v1", "api_key": "none", "max_retries": 0}
        models = [{"model_name": MODEL, "litellm_params": behind}]
        config: dict[str, Any] = {"model_list": models, "router_settings": {"num_retries": 0}}
        (tmp_path / "litellm.yaml").write_text(json.dumps(config))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY, "NO_PROXY": "*"}
        with (tmp_path / "litellm.log").open("wb") as log:
            argv = [
                str(program),
                "--config",
                str(tmp_path / "litellm.yaml"),
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
            ]
            proxy = subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, **quiet}, cwd=tmp_path)
        stack.callback(proxy.wait)
        stack.callback(proxy.kill)

        def up() -> bool:
            assert proxy.poll() is None, (tmp_path / "litellm.log").read_text()
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health/liveliness", timeout=2).status_code == 200
            except httpx.HTTPError:
                return False

        wait_for("LiteLLM", up, 180)
        sdk = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0, timeout=60)
        yield stack.enter_context(sdk), engine, gateway


def test_turns_pass_and_a_death_stays_a_death(chain: tuple[openai.OpenAI, Engine, GatewayProcess]) -> None:
    sdk, engine, gateway = chain
    messages: list[Any] = [{"role": "user", "content": "Find the parser."}]
    for turn in range(TURNS):
        message, _, _ = stream_turn(sdk, messages, seed=turn)
        messages.append(message)
        calls = message.get("tool_calls", ())
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "three files"} for call in calls]
        if not calls:
            messages.append({"role": "user", "content": f"Go on, step {turn}."})
    assert len([one for one in blocks(rendered(gateway.url, messages)[0]) if one]) == TURNS
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    stream = sdk.chat.completions.create(stream=True, max_tokens=9000, extra_body={"ignore_eos": True}, **asked)
    next(iter(stream))
    engine.process.kill()
    with pytest.raises(openai.APIError, match="broke off in the middle"):
        for _ in stream:
            pass
    wait_for("the end of the engine", lambda: engine.process.poll() is not None)
    with pytest.raises(openai.APIStatusError, match="cannot be reached") as caught:
        sdk.chat.completions.create(**asked)
    assert caught.value.status_code == 502
