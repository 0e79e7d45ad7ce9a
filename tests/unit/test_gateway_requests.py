"""Policies and what they do to a request: presets, efforts, budgets, and how they are read."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from soakrig.engine.gateway.budgets import TEMPLATE_TOKENS, add_thinking_budget, raise_small
from soakrig.engine.gateway.effort import asked_effort, fill_preset, map_words
from soakrig.engine.gateway.policies import Policies, Preset, ThinkingBudget, parse_policies, read_policies
from soakrig.errors import UsageError

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
LOW = Preset(chat_template_kwargs={"reasoning_effort": "low", "clear_thinking": False})


@pytest.mark.parametrize(
    ("sent", "filled"),
    [
        ({}, {"chat_template_kwargs": {"reasoning_effort": "low", "clear_thinking": False}}),
        (
            {"chat_template_kwargs": {"reasoning_effort": "high"}},
            {"chat_template_kwargs": {"reasoning_effort": "high", "clear_thinking": False}},
        ),
        ({"chat_template_kwargs": {"reasoning_effort": "high", "clear_thinking": True}}, None),
        ({"reasoning_effort": "max"}, {"reasoning_effort": "max", "chat_template_kwargs": {"clear_thinking": False}}),
        (
            {"chat_template_kwargs": None},
            {"chat_template_kwargs": {"reasoning_effort": "low", "clear_thinking": False}},
        ),
    ],
)
def test_a_preset_fills_gaps_only(sent: dict[str, Any], filled: dict[str, Any] | None) -> None:
    fields = copy.deepcopy(sent)
    assert fill_preset(fields, LOW, CHAT) == (filled is not None)
    assert fields == (sent if filled is None else filled)


def test_a_preset_s_top_level_effort() -> None:
    preset = Preset(reasoning_effort="high")
    for sent, effort in (({}, "high"), ({"reasoning_effort": "low"}, "low"), ({"reasoning_effort": None}, "high")):
        fields: dict[str, Any] = dict(sent)
        fill_preset(fields, preset, CHAT)
        assert fields["reasoning_effort"] == effort
    inside: dict[str, Any] = {"chat_template_kwargs": {"reasoning_effort": "low"}}
    assert not fill_preset(inside, preset, CHAT)
    for path in ("/tokenize", "/v1/completions"):
        fields = {}
        assert not fill_preset(fields, preset, path)
        assert fields == {}


def test_a_preset_in_the_responses_api() -> None:
    fields: dict[str, Any] = {"reasoning": {"summary": "auto"}}
    assert fill_preset(fields, LOW, RESPONSES)
    assert fields == {"reasoning": {"summary": "auto", "effort": "low"}}
    assert not fill_preset(fields, Preset(reasoning_effort="high"), RESPONSES)


def test_words_that_the_template_does_not_know() -> None:
    words = {"medium": "high", "xhigh": "max"}
    fields: dict[str, Any] = {"reasoning_effort": "medium", "chat_template_kwargs": {"reasoning_effort": "xhigh"}}
    assert map_words(fields, words)
    assert fields == {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "max"}}
    assert not map_words(fields, words)
    responses: dict[str, Any] = {"reasoning": {"effort": "medium"}}
    assert map_words(responses, words)
    assert responses == {"reasoning": {"effort": "high"}}
    assert not map_words({"reasoning_effort": 3, "reasoning": "medium"}, words)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "-"),
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "max"}}, "max"),
        ({"reasoning": {"effort": "high"}}, "high"),
        ({"reasoning_effort": "x" * 100}, "other"),
        ({"reasoning_effort": ["low"]}, "other"),
    ],
)
def test_the_effort_that_is_counted(fields: dict[str, Any], word: str) -> None:
    assert asked_effort(fields) == word


class Counting:
    """Says how long a prompt is, and remembers that it was asked."""

    def __init__(self, tokens: int | None) -> None:
        self.tokens, self.asked = tokens, 0

    async def __call__(self) -> int | None:
        self.asked += 1
        return self.tokens


def raised(fields: dict[str, Any], *, context: int | None = 32768, size: int = 400, count: int | None = 100,
           path: str = CHAT, least: int = 8192) -> tuple[dict[str, Any], bool, int]:  # fmt: skip
    counting = Counting(count)
    changed = asyncio.run(raise_small(fields, path, least, context, size, counting))
    return fields, changed, counting.asked


def test_a_small_budget_is_raised_and_never_lowered() -> None:
    assert raised({"max_tokens": 200}) == ({"max_tokens": 8192}, True, 0)
    assert raised({"max_completion_tokens": 16}) == ({"max_completion_tokens": 8192}, True, 0)
    both = {"max_tokens": 9000, "max_completion_tokens": 16}
    assert raised(both) == ({"max_tokens": 9000, "max_completion_tokens": 8192}, True, 0)
    assert raised({"max_output_tokens": 1}, path=RESPONSES) == ({"max_output_tokens": 8192}, True, 0)
    for same in ({"max_tokens": 8192}, {"max_tokens": 20000}, {}, {"max_tokens": None}, {"max_tokens": 0}):
        assert raised(dict(same)) == (same, False, 0)
    for odd in ({"max_tokens": True}, {"max_tokens": "200"}, {"max_tokens": 1.5}):
        assert raised(dict(odd)) == (odd, False, 0), "the engine says what it thinks of these"
    assert raised({"max_tokens": 200}, path="/v1/completions") == ({"max_tokens": 200}, False, 0)


def test_a_raised_budget_fits_the_context() -> None:
    assert raised({"max_tokens": 200}, size=100_000, count=30_000) == ({"max_tokens": 2768}, True, 1)
    assert raised({"max_tokens": 200}, size=100_000, count=32_600) == ({"max_tokens": 200}, False, 1)
    assert raised({"max_tokens": 200}, size=100_000, count=40_000) == ({"max_tokens": 200}, False, 1)
    edge = 32768 - 8192 - TEMPLATE_TOKENS
    assert raised({"max_tokens": 200}, size=edge)[2] == 0
    assert raised({"max_tokens": 200}, size=edge + 1)[2] == 1
    assert raised({"max_tokens": 200}, size=10**9, context=None) == ({"max_tokens": 8192}, True, 0)
    assert raised({"max_tokens": 200}, size=90_000, count=None) == ({"max_tokens": 2768}, True, 1), "3 bytes a token"


@pytest.mark.parametrize(
    ("sent", "budget"),
    [
        ({}, 10_000),
        ({"max_tokens": 2000}, 1500),
        ({"max_tokens": 32_768}, 10_000),
        ({"max_tokens": 9, "max_completion_tokens": 4000}, 3000),
        ({"max_tokens": 1}, 1),
    ],
)
def test_a_thinking_budget_is_the_least_of_both(sent: dict[str, Any], budget: int) -> None:
    fields = dict(sent)
    assert add_thinking_budget(fields, CHAT, ThinkingBudget(fixed=10_000, share=0.75))
    assert fields == {**sent, "thinking_token_budget": budget}


def test_a_thinking_budget_that_is_there_stays() -> None:
    policy = ThinkingBudget(fixed=10, share=0.5)
    assert not add_thinking_budget({"thinking_token_budget": 99}, CHAT, policy)
    assert not add_thinking_budget({}, RESPONSES, policy)
    assert add_thinking_budget({"thinking_token_budget": None}, CHAT, policy)


def test_policies_from_the_command_line() -> None:
    assert parse_policies([]) == Policies()
    texts = [
        "restore_reasoning",
        "sanitize-tool-tags=true",
        "min_output_tokens=8192",
        "thinking_token_budget=10000,0.75",
    ]
    texts.append(
        'presets={"low": {"chat_template_kwargs": {"reasoning_effort": "low"}}, "max": {"reasoning_effort": "max"}}'
    )
    assert parse_policies(texts) == Policies(
        restore_reasoning=True,
        sanitize_tool_tags=True,
        min_output_tokens=8192,
        thinking_token_budget=ThinkingBudget(fixed=10000, share=0.75),
        presets={
            "low": Preset(chat_template_kwargs={"reasoning_effort": "low"}),
            "max": Preset(reasoning_effort="max"),
        },
    )
    assert parse_policies(["thinking_token_budget=500"]).thinking_token_budget == ThinkingBudget(fixed=500)


def test_every_policy_is_off_by_default() -> None:
    off = Policies()
    assert not off.edits_answers
    assert not off.edits_requests
    assert set(off.model_dump(exclude_defaults=True)) == set()


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["restore_reasonning"], "restore_reasoning was probably meant"),
        (["capture=flase"], "capture"),
        (['capture="false"'], "valid boolean"),
        (["min_output_tokens=0"], "min_output_tokens"),
        (["min_output_tokens=many"], "min_output_tokens"),
        (["min_output_tokens"], "min_output_tokens"),
        (["thinking_token_budget=x"], "FIXED,SHARE"),
        (["thinking_token_budget=100,2"], "less than or equal to 1"),
        (["thinking_token_budget=100,nan"], "share"),
        (['presets={"low": {"chat_template_kwarg": {}}}'], "chat_template_kwargs was probably meant"),
        (["restore_reasoning", "restore-reasoning"], "twice"),
        (["zzz"], "Known here: restore_reasoning"),
    ],
)
def test_what_is_no_policy_is_refused_by_name(texts: list[str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_policies(texts)
    assert says in str(caught.value)


def test_a_table_of_the_registry() -> None:
    read = read_policies({"thinking_token_budget": {"fixed": 10000, "share": 0.75}}, "models.glm53.policies")
    assert read.thinking_token_budget == ThinkingBudget(fixed=10000, share=0.75)
    with pytest.raises(UsageError, match=r"models\.glm53\.policies: thinking_token_budget\.fixd"):
        read_policies({"thinking_token_budget": {"fixd": 3, "fixed": 1}}, "models.glm53.policies")
    assert read_policies({"thinking_token_budget": {"fixed": 1, "share": 1}}, "x").thinking_token_budget is not None
