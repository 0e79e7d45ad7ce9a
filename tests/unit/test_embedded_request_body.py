"""Request bodies: unknown fields by name, neutral values, and what does not fit together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from soakrig.engine.embedded.request_body import ChatRequest, CompletionRequest, RequestError, parse

USER = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def chat(**fields: Any) -> ChatRequest:
    return parse(json.dumps({"messages": USER, **fields}).encode(), ChatRequest)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"temprature": 1}, "temprature", "temperature was probably meant"),
        ({"frobnicate": 1}, "frobnicate", "no field"),
        ({"n": 2}, "n", "not implemented"),
        ({"n": True}, "n", "not implemented"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "not implemented"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not implemented"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not implemented"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "oracle", "content": "x"}]}, "messages.0.role", "assistant"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages.0.colour", "not permitted"),
        ({"top_logprobs": 2}, None, "needs logprobs"),
        ({"top_logprobs": 50, "logprobs": True}, "top_logprobs", "less than or equal to 20"),
        ({"stream_options": {"include_usage": True}}, None, "only for stream"),
        ({"stream": True, "prompt_logprobs": 1}, None, "not available with stream"),
        ({"tools": [TOOL, TOOL]}, None, "'f' more than once"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, None, "'g'"),
        ({"tool_choice": "required"}, None, "no tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "schema": {}}}]},
            "tools.0.function.schema",
            "permitted",
        ),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, None, "true or false"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str | None, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    error = caught.value.body["error"]
    assert caught.value.status == 400
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param or error["param"].startswith(param)
        assert param.rpartition(".")[2] in error["message"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff"])
def test_a_body_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError, match="the body is"):
        parse(raw, ChatRequest)


def test_neutral_values_and_callers_labels_are_taken() -> None:
    request = chat(
        n=1, frequency_penalty=0.0, presence_penalty=0, logit_bias={}, response_format={"type": "text"}, user="me",
        metadata={"a": 1}, store=True, top_k=-1, temperature=None, stop=None, logprobs=None, reasoning_effort="high",
    )  # fmt: skip
    assert request.temperature == 1.0
    assert request.stop == []
    assert request.top_k == -1


def test_both_names_of_reasoning_and_of_the_limit_are_read() -> None:
    request = chat(
        messages=[*USER, {"role": "assistant", "content": None, "reasoning_content": "r"}],
        max_tokens=5,
        max_completion_tokens=7,
    )
    assert request.messages[1].reasoning_content == "r"
    assert request.limit == 7
    assert chat(max_tokens=5).limit == 5
    assert chat().limit is None


def test_content_parts_are_joined_and_pictures_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].text == "ab"
    with pytest.raises(RequestError):
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_a_completion_takes_text_or_ids_but_one_prompt() -> None:
    assert parse(b'{"prompt": "a"}', CompletionRequest).prompt == "a"
    assert parse(b'{"prompt": ["a"]}', CompletionRequest).prompt == "a"
    assert parse(b'{"prompt": [1, 2]}', CompletionRequest).prompt == [1, 2]
    with pytest.raises(RequestError, match="one prompt"):
        parse(b'{"prompt": ["a", "b"]}', CompletionRequest)
    with pytest.raises(RequestError, match="messages is no field"):
        parse(b'{"prompt": "a", "messages": []}', CompletionRequest)
