"""When a vLLM is ready: it has answered a generation. Its /health is a flag that a frozen engine keeps at 200."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from soakrig.engine.launcher import EngineProcess
from soakrig.errors import EngineStartError

RETRY_S = 0.25
ANSWER_S = 30.0
"""How long one canary may take; the first one of a compiled model may be slow, and then another one is sent."""
LOOK_S = 0.5
_LOGGED = re.compile(r"^(?:\(\w+ pid=\d+\) )?INFO \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\] +(?P<text>.*\w.*)$")
_LOADING = re.compile(r"(?P<text>Loading \w+ checkpoint shards: +\d+%.*?)(?:\[|$)")
_CANARY = {"messages": [{"role": "user", "content": "Answer with one word: ready."}], "max_tokens": 1, "temperature": 0}


class Readiness:
    """Asks a starting engine, and tells how far it has come: ``progress`` gets what its log says last. Without
    ``canary`` an engine that names its model is ready: the first generation is then somebody else's."""

    def __init__(self, progress: Callable[[str], None], *, canary: bool = True) -> None:
        self._progress, self._canary = progress, canary
        self._client = httpx.Client(timeout=httpx.Timeout(ANSWER_S, connect=2.0), trust_env=False)
        self._ask_at = self._look_at = 0.0
        self._position: int | None = None

    def __call__(self, engine: EngineProcess) -> bool:
        """Whether the engine has answered. Raises ``EngineStartError`` when it refuses to chat at all."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._look(engine.log_path)
        if now < self._ask_at:
            return False
        try:
            return self._answered(engine.base_url)
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return False  # not there yet, or no answer of the kind: asked again
        finally:
            self._ask_at = time.monotonic() + RETRY_S

    def close(self) -> None:
        """Close the client."""
        self._client.close()

    def _answered(self, base_url: str) -> bool:
        listed = self._client.get(f"{base_url}/v1/models")
        if listed.status_code != 200:
            return False
        name = listed.json()["data"][0]["id"]
        if not self._canary:
            return True
        self._progress("waiting for its first answer")
        reply = self._client.post(f"{base_url}/v1/chat/completions", json={"model": name, **_CANARY})
        if 400 <= reply.status_code < 500:
            text = reply.text[:400].strip()
            raise EngineStartError(
                f"the engine refuses a chat request with status {reply.status_code}: {text}",
                remedy="A soak talks to /v1/chat/completions: serve a model that can chat, with a chat template.",
            )
        if reply.status_code != 200:
            return False
        answer: Any = reply.json()
        return bool(answer["choices"]) and answer["usage"]["completion_tokens"] >= 1

    def _look(self, log: Path) -> None:
        """Tell the newest message of the log."""
        with log.open("rb") as file:
            end = file.seek(0, 2)
            if self._position is None:
                self._position = end if end < 4096 else end - 4096
            file.seek(max(self._position, end - 16384))
            self._position = end
            lines = re.split(r"[\r\n]+", file.read().decode("utf-8", "replace"))
        for line in reversed(lines):
            found = _LOGGED.match(line) or _LOADING.search(line)
            if found:
                self._progress(found["text"].strip())
                return
