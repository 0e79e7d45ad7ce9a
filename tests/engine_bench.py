"""A runner in the test's own process, with what is fed to it and what came back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from soakrig.engine.embedded.config import EngineConfig
from soakrig.engine.embedded.reply_script import ReplySpec
from soakrig.engine.embedded.runner import Runner
from soakrig.engine.embedded.sampling import SamplingParams
from soakrig.engine.embedded.sequence import from_request
from soakrig.engine.embedded.settings import Settings
from soakrig.engine.embedded.tokenizer import Tokenizer
from soakrig.engine.offload.plan import OffloadPlan

TOKENIZER = Tokenizer()
SMALL = {"hidden": 64, "layers": 2, "experts": 8, "top_k": 2, "max_model_len": 4096, "kv_tokens": 8192}


class Bench:
    """A runner, what is fed to it, and what came back by request."""

    def __init__(self, environment: dict[str, str] | None = None, **flags: Any) -> None:
        config = EngineConfig(**{**SMALL, **flags})
        settings = Settings.from_environment(environment or {})
        self.runner = Runner(config, OffloadPlan.build(settings, config.model_shape))
        self.events: dict[str, list[dict[str, Any]]] = {}
        self.prompt_counts: list[int] = []
        self.serial = 0

    def add(self, name: str, prompt: list[int], spec: ReplySpec | None = None, **message: Any) -> None:
        self.serial += 1
        sampling = message.pop("sampling", SamplingParams(temperature=0.0))
        message = {
            "id": name,
            "prompt": prompt,
            "max_tokens": 64,
            "sampling": asdict(sampling),
            "reply": asdict(spec or ReplySpec(text_tokens=40)),
            "logprobs": None,
            "prompt_logprobs": None,
            "stop": [],
            "planted": False,
            **message,
        }
        self.events[name] = []
        self.runner.scheduler.add(from_request(message, self.serial, TOKENIZER))

    def step(self) -> None:
        result = self.runner.step()
        self.prompt_counts.append(result.stats.prompt)
        for event in result.events:
            self.events[event["id"]].append(event)

    def run(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.runner.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"work is left after {limit} steps")

    def text(self, name: str, channel: str = "content") -> str:
        return "".join(event["t"] for event in self.events[name] if event.get("c") == channel)

    def end(self, name: str) -> dict[str, Any]:
        last = self.events[name][-1]
        assert "finish" in last
        return last


def prompt(number: int, length: int = 200) -> list[int]:
    return [(number * 7919 + place * 104729) % 4000 + 50 for place in range(length)]
