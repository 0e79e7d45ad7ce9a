"""How many tokens a text has: as the engine counts, where it can be asked, else by an estimate that says it is one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import httpx

from soakrig.errors import TargetError
from soakrig.soak.conversation import CHARS_PER_TOKEN
from soakrig.soak.target import Target

ASK_S = 30.0
NO_THINKING = {"enable_thinking": False}
"""What switches reasoning off in the chat templates of Qwen, GLM and others; templates without it read over it."""
_PROBE = "one two three"


class TokenCounts(Protocol):
    """``how``: who counts, in words. ``exact``: whether it is the engine's own count. ``extended``: whether the engine
    is one that knows ``ignore_eos`` and ``chat_template_kwargs``."""

    how: str
    exact: bool

    @property
    def extended(self) -> bool: ...

    def count(self, text: str, /) -> int:
        """Tokens of a text alone, without begin or end marks."""
        ...

    def overhead(self) -> int:
        """Tokens that the chat template puts around one user's message, thinking off."""
        ...


class EstimatedCounts:
    """One token for every ``CHARS_PER_TOKEN`` characters, and no template."""

    how = f"estimated, {CHARS_PER_TOKEN:g} characters a token"
    exact = extended = False

    def count(self, text: str) -> int:
        return max(1, round(len(text) / CHARS_PER_TOKEN)) if text else 0

    def overhead(self) -> int:
        return 0


class EngineCounts:
    """The engine's ``/tokenize``: vLLM's, SGLang's and the embedded engine's (``prompt``, answered with ``count``), or
    llama.cpp's (``content``, answered with ``tokens``). A context manager; blocks while it asks.

    Raises ``TargetError`` where an engine that has counted before does not answer any more.
    """

    exact = True

    def __init__(self, target: Target) -> None:
        self.how = "the engine's /tokenize"
        self._http = httpx.Client(
            base_url=target.base_url, headers=target.headers, timeout=httpx.Timeout(ASK_S), trust_env=False
        )
        self.count: Callable[[str], int] = lru_cache(1 << 16)(self._count)
        self._form: Callable[[str], dict[str, Any]] = _vllm_form
        self._overhead: int | None = None

    @property
    def extended(self) -> bool:
        return self._form is _vllm_form

    def available(self) -> bool:
        """Whether the engine can be asked; finds out how."""
        for form in (_vllm_form, _llama_form):
            self._form = form
            try:
                if self._count(_PROBE) > 0:
                    return True
            except TargetError:
                continue
        return False

    def overhead(self) -> int:
        if self._overhead is None:
            body = {"messages": [{"role": "user", "content": _PROBE}], "chat_template_kwargs": NO_THINKING}
            try:
                self._overhead = max(0, _tokens(self._post(body)) - self.count(_PROBE))
            except TargetError:
                self._overhead = 0  # llama.cpp counts texts only
        return self._overhead

    def _count(self, text: str) -> int:
        return _tokens(self._post(self._form(text))) if text else 0

    def _post(self, body: dict[str, Any]) -> Any:
        try:
            reply = self._http.post("/tokenize", json=body)
            if reply.status_code != 200:
                raise TargetError(f"POST /tokenize answered {reply.status_code}: {reply.text[:120].strip()}")
            return reply.json()
        except (httpx.HTTPError, ValueError) as error:
            raise TargetError(f"POST /tokenize was not answered: {error}") from error

    def __enter__(self) -> EngineCounts:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()


def _vllm_form(text: str) -> dict[str, Any]:
    return {"prompt": text, "add_special_tokens": False}


def _llama_form(text: str) -> dict[str, Any]:
    return {"content": text}


def _tokens(answer: Any) -> int:
    if isinstance(answer, dict):
        if type(count := answer.get("count")) is int:
            return count
        if isinstance(tokens := answer.get("tokens"), list):
            return len(tokens)
    raise TargetError(f"POST /tokenize answered without a count: {answer!r:.120}")
