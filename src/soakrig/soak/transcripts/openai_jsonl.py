"""OpenAI-format JSONL: one request (the body of ``/v1/chat/completions``) or one message list a line; one session.

Fields: https://platform.openai.com/docs/api-reference/chat/create, and those that vLLM adds to it.
"""

from __future__ import annotations

from typing import Any

from soakrig.errors import UsageError
from soakrig.soak.transcripts.request import Request, check_fields, check_keys, check_messages, check_tools

FIELDS = frozenset(
    {"messages", "model", "tools", "tool_choice", "temperature", "top_p", "max_tokens", "max_completion_tokens", "seed",
     "stop", "stream", "stream_options", "frequency_penalty", "presence_penalty", "n", "user", "response_format",
     "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs", "logprobs", "top_logprobs", "metadata", "store",
     "service_tier", "top_k", "min_p", "repetition_penalty", "thinking_token_budget"}
)  # fmt: skip


def fits(data: Any) -> bool:
    """Whether a line's JSON value begins a transcript of this format."""
    if isinstance(data, list):
        return bool(data) and isinstance(data[0], dict) and "role" in data[0]
    return isinstance(data, dict) and "messages" in data


def read_line(data: Any, where: str) -> Request:
    """The request of a line. Raises ``UsageError``."""
    if isinstance(data, list):
        data = {"messages": data}
    if not isinstance(data, dict):
        raise UsageError(f"{where} is {type(data).__name__}, expected a request object or a list of messages")
    check_keys(data, FIELDS, where, {})
    check_fields(data, where)
    messages, tools = check_messages(data.get("messages"), where), check_tools(data.get("tools"), where)
    fields = {name: value for name, value in data.items() if name not in ("messages", "tools", "model")}
    return Request(where, messages, tools, fields)
