"""The agent loop: its shape, its growth, its determinism."""

from __future__ import annotations

import json
from typing import Any

import pytest

from soakrig.errors import UsageError
from soakrig.soak.agent.loop import AgentConversation, AgentOptions
from soakrig.soak.agent.tools import all_tools, tools
from soakrig.soak.classify import Outcome
from soakrig.soak.conversation import Turn
from soakrig.soak.reply import Reply, ToolCall

OK = Outcome("ok")


def says(text: str = "", *, tool: str = "", arguments: str = "{}", prompt_tokens: int | None = None) -> Reply:
    reply = Reply(status=200)
    if text:
        reply.content = [text]
    if tool:
        reply.calls = {0: ToolCall("call_x", tool, [arguments])}
    if prompt_tokens is not None:
        reply.usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 5}
    return reply


def conversation(**options: Any) -> AgentConversation:
    return AgentConversation(AgentOptions(**{"model": "m", "tool_count": 5, **options}), 0)


def body(turn: Turn) -> dict[str, Any]:
    return json.loads(turn.body)


def test_fifty_tools_are_some_25_kb_of_valid_schemas() -> None:
    made = tools(50)
    size = len(json.dumps(made, separators=(",", ":")))
    assert 22_000 < size < 28_000
    names = [tool["function"]["name"] for tool in made]
    assert len(set(names)) == 50
    for tool in made:
        parameters = tool["function"]["parameters"]
        assert set(parameters["required"]) <= set(parameters["properties"])
        assert all("description" in p and "type" in p for p in parameters["properties"].values())


def test_more_tools_than_the_table_has_keep_their_names_apart() -> None:
    names = [tool["function"]["name"] for tool in tools(120)]
    assert len(set(names)) == 120
    with pytest.raises(UsageError, match="0 to 500"):
        tools(501)
    assert len(all_tools()) == 50


def test_the_first_turn_is_system_and_task_with_all_tools() -> None:
    first = body(conversation().next_turn())
    assert [m["role"] for m in first["messages"]] == ["system", "user"]
    assert len(first["tools"]) == 5
    assert first["stream"] is True
    assert first["stream_options"] == {"include_usage": True}
    assert first["tool_choice"] == "auto"


def test_a_tool_call_is_kept_and_answered_and_the_prefix_is_only_appended_to() -> None:
    talk = conversation()
    one = talk.next_turn()
    talk.answered(says(tool="read_file", arguments='{"path": "a.py"}'), OK)
    two = talk.next_turn()
    messages = body(two)["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool"]
    assert messages[2]["tool_calls"][0]["function"] == {"name": "read_file", "arguments": '{"path": "a.py"}'}
    assert messages[3]["tool_call_id"] == "call_x" == messages[2]["tool_calls"][0]["id"]
    assert len(messages[3]["content"]) > 40
    assert two.messages[:2] == one.messages[:2]
    shared = one.body.index(b"]", one.body.index(b'"messages"'))
    assert two.body[:shared] == one.body[:shared], "byte for byte the same prefix"


def test_plain_text_gets_a_user_or_a_scripted_call_so_that_the_shape_stays() -> None:
    talk = conversation()
    last_roles = set()
    for _ in range(40):
        talk.next_turn()
        talk.answered(says("I looked at it and it is fine."), OK)
        messages = [json.loads(m) for m in talk.prompt.messages]
        assistant, answer = messages[-2], messages[-1]
        assert assistant["content"] == "I looked at it and it is fine."
        last_roles.add(answer["role"])
        if answer["role"] == "tool":
            call = assistant["tool_calls"][0]
            schema = next(t for t in talk.definitions if t["function"]["name"] == call["function"]["name"])
            given = json.loads(call["function"]["arguments"])
            assert set(schema["function"]["parameters"]["required"]) <= set(given)
    assert last_roles == {"user", "tool"}


def test_a_failed_turn_is_answered_by_the_script() -> None:
    talk = conversation()
    talk.next_turn()
    talk.answered(says("half a sen"), Outcome("truncated", "cut"))
    assert b"half a sen" not in b"".join(talk.prompt.messages)
    assert len(talk.prompt.messages) == 4


def test_without_tools_the_user_goes_on() -> None:
    talk = conversation(tool_count=0)
    assert "tools" not in body(talk.next_turn())
    talk.answered(says("text"), OK)
    assert json.loads(talk.prompt.messages[-1])["role"] == "user"


def test_the_estimate_follows_the_engine_s_own_count() -> None:
    talk = conversation()
    talk.next_turn()
    talk.answered(says("ok then", prompt_tokens=5000), OK)
    estimate = talk.next_turn().context_tokens
    assert 5000 < estimate < 5800


def test_at_the_limit_the_conversation_starts_over_with_another_task() -> None:
    talk = conversation(context_limit=8000, max_tokens=500)
    first = talk.next_turn()
    talk.answered(says("ok", prompt_tokens=7400), OK)
    second = talk.next_turn()
    assert (second.turn, second.part) == (2, 1)
    assert len(second.messages) == 2
    assert second.messages[1] != first.messages[1]
    assert second.context_tokens < 7400


def test_or_it_stops_growing_and_sends_the_same_again() -> None:
    talk = conversation(context_limit=8000, max_tokens=500, at_limit="stop-growing")
    talk.next_turn()
    talk.answered(says("ok", prompt_tokens=7400), OK)
    second = talk.next_turn()
    assert len(second.messages) == 2
    talk.answered(says("ok", prompt_tokens=7400), OK)
    assert talk.next_turn().messages == second.messages


def test_same_seed_same_bytes_other_conversation_other_bytes() -> None:
    def bodies(seed: int, number: int) -> list[bytes]:
        talk = AgentConversation(AgentOptions("m", seed=seed, tool_count=3), number)
        out = []
        for n in range(8):
            out.append(talk.next_turn().body)
            talk.answered(says(tool="list_dir") if n % 2 else says("fine"), OK)
        return out

    assert bodies(1, 0) == bodies(1, 0)
    assert bodies(1, 0) != bodies(1, 1)
    assert bodies(1, 0) != bodies(2, 0)


def test_result_scale_stretches_tool_results() -> None:
    def size(scale: float) -> int:
        talk = conversation(result_scale=scale)
        for _ in range(20):
            talk.next_turn()
            talk.answered(says(tool="read_file"), OK)
        return talk.prompt.size

    assert size(4.0) > 2 * size(1.0)
