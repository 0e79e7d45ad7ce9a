"""ShareGPT-like files: ``{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}``.

A JSON array of such objects or one a line. Speakers and the columns ``system`` and ``tools`` are those of
https://github.com/hiyouga/LLaMA-Factory (data/README.md, "Sharegpt Format"): human, gpt, observation, function_call;
the other names are those that vLLM's and other loaders take for the same.

Each answer on record becomes one request: everything before it. So a session grows as it grew then, whatever the
engine under test says now.
"""

from __future__ import annotations

from typing import Any

import orjson

from soakrig.errors import UsageError
from soakrig.soak.transcripts.request import Request, check_keys, check_tools

SPEAKERS = {
    "human": "user", "user": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant",
    "system": "system",
    "function_call": "call",
    "observation": "tool", "tool": "tool", "function_response": "tool",
}  # fmt: skip
"""Speaker -> role; a ``call`` is an assistant's message whose text is the call."""
SENT = frozenset({"conversations", "system", "tools"})
ABOUT = frozenset(
    {"id", "idx", "source", "dataset", "model", "model_name", "category", "topic", "title", "language", "lang", "views",
     "hash", "avatarUrl", "skip_prompt_formatting", "custom_instruction", "system_prompt", "task", "metadata"}
)  # fmt: skip
"""Columns of published files that describe a conversation and are no part of it: read over, and said so."""
NOT_SENT = {
    "images": "pictures cannot be sent", "image": "pictures cannot be sent", "videos": "films cannot be sent",
    "audios": "sound cannot be sent", "chosen": "a preference pair is no conversation",
    "rejected": "a preference pair is no conversation",
}  # fmt: skip
ENTRY = frozenset({"from", "value", "weight", "loss", "text", "markdown", "name"})
"""Keys of one entry; those beside from and value say how to train on it."""


def fits(data: Any) -> bool:
    """Whether a JSON value is a conversation of this format."""
    return isinstance(data, dict) and "conversations" in data


def read_conversation(data: Any, where: str, notes: set[str]) -> list[Request]:
    """The requests of one conversation, empty where nobody ever answers; what was read over goes to ``notes``.

    Raises ``UsageError`` naming what does not fit.
    """
    if not fits(data):
        raise UsageError(f'{where} is no conversation: expected {{"conversations": [...]}}, read {data!r:.80}')
    check_keys(data, SENT | ABOUT, where, NOT_SENT)
    notes.update(f"the column {name!r} is not sent" for name in set(data) & ABOUT)
    entries = data["conversations"]
    if not isinstance(entries, list):
        raise UsageError(f"{where}: conversations is {type(entries).__name__}, expected a list")
    tools = _tools(data.get("tools"), where)
    messages: list[dict[str, Any]] = []
    if system := data.get("system"):
        if not isinstance(system, str):
            raise UsageError(f"{where}: system is {system!r:.80}, expected text")
        messages.append({"role": "system", "content": system})
    requests: list[Request] = []
    calls: list[str] = []
    for number, entry in enumerate(entries, 1):
        message, is_answer = _message(entry, f"{where}, entry {number}", number, calls)
        if is_answer and messages and messages[-1]["role"] in ("user", "tool"):
            requests.append(Request(f"{where}, entry {number}", list(messages), tools))
        messages.append(message)
    if messages and messages[-1]["role"] in ("user", "tool"):  # the last question was never answered then
        requests.append(Request(f"{where}, after the last entry", messages, tools))
    return requests


def _message(entry: Any, where: str, number: int, calls: list[str]) -> tuple[dict[str, Any], bool]:
    """The message of an entry, and whether it was the model's. ``calls``: ids that still wait for their result."""
    if not isinstance(entry, dict) or not isinstance(entry.get("value"), str):
        raise UsageError(f'{where} is no {{"from": SPEAKER, "value": TEXT}}: {entry!r:.80}')
    check_keys(entry, ENTRY, where, {})
    speaker = entry.get("from")
    role = SPEAKERS.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        raise UsageError(f"{where}: nobody knows the speaker {speaker!r}", remedy=f"Known: {', '.join(SPEAKERS)}.")
    text: str = entry["value"]
    if role == "call":
        made = _calls(text, where, number)
        calls[:] = [call["id"] for call in made]
        return {"role": "assistant", "content": "", "tool_calls": made}, True
    if role == "tool":
        identity = calls.pop(0) if calls else f"call_{number}"
        return {"role": "tool", "tool_call_id": identity, "content": text}, False
    return {"role": role, "content": text}, role == "assistant"


def _calls(text: str, where: str, number: int) -> list[dict[str, Any]]:
    try:
        data = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{where}: the function call is no JSON: {text!r:.80}") from error
    made: list[dict[str, Any]] = []
    for place, call in enumerate(data if isinstance(data, list) else [data]):
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
            raise UsageError(f'{where}: a function call is {{"name": ..., "arguments": ...}}, read {call!r:.80}')
        given = call["arguments"]
        arguments = given if isinstance(given, str) else orjson.dumps(given).decode()
        function = {"name": call["name"], "arguments": arguments}
        made.append({"id": f"call_{number}_{place}", "type": "function", "function": function})
    return made


def _tools(value: Any, where: str) -> list[dict[str, Any]]:
    """Function definitions: a list, or the JSON text of one; bare or in OpenAI's wrapping."""
    if isinstance(value, str) and value.strip():
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise UsageError(f"{where}: tools is no JSON: {value!r:.80}") from error
    if not value:
        return []
    if isinstance(value, list) and all(isinstance(one, dict) and "function" not in one for one in value):
        value = [{"type": "function", "function": one} for one in value]
    return check_tools(value, where)
