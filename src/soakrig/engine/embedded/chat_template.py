"""A conversation as prompt tokens, through the Jinja template beside this file."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .tokenizer import SPECIAL_TOKENS, Tokenizer


class ChatTemplate:
    """Renders messages and tools, then encodes: text by the tokenizer, special tokens by their ids.

    In the rendered text a special token is its name between two marks that are drawn anew in each process, so that
    nothing that a client sends can be taken for one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._mark = f"\x00{secrets.token_hex(8)}\x00"
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=False)
        environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
        source = resources.files("soakrig.engine.embedded").joinpath("chat_template.jinja").read_text(encoding="utf-8")
        self._template = environment.from_string(source.rstrip("\n"))
        self._special = {name: f"{self._mark}{name}{self._mark}" for name in SPECIAL_TOKENS}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        enable_thinking: bool = True,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The prompt's token ids.

        ``messages``: dicts with role, content, and for the assistant reasoning and tool_calls ({name, arguments as
        text}). ``extra`` holds further template variables. Raises ValueError where the template refuses.
        """
        try:
            text = self._template.render(
                {
                    **(extra or {}),
                    "messages": messages,
                    "tools": tools,
                    "special": self._special,
                    "enable_thinking": enable_thinking,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TemplateError as error:
            raise ValueError(f"the chat template cannot render these messages: {error}") from error
        ids: list[int] = []
        for number, part in enumerate(text.split(self._mark)):
            if number % 2:
                ids.append(self._tokenizer.special[part])
            elif part:
                ids += self._tokenizer.encode_part(part)
        return ids
