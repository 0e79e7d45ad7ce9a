"""The reasoning memory: found by id or by place, never put over what a client sent, never somebody else's, bounded."""

from __future__ import annotations

from typing import Any

import pytest

from soakrig.engine.gateway.reasoning_memory import ENTRY_BYTES, ReasoningMemory, Said, place

USER = {"role": "user", "content": "Where is the parser?"}


def said(thought: str = "Look first.", content: str = "", ids: tuple[str, ...] = ("call_1",)) -> Said:
    return Said([content] if content else [], [thought], list(ids))


def turn(content: Any = None, ids: tuple[str, ...] = ("call_1",), **more: Any) -> dict[str, Any]:
    calls = [{"id": one, "type": "function", "function": {"name": "f", "arguments": "{}"}} for one in ids]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {}), **more}


def test_by_call_id_wherever_it_stands_now() -> None:
    memory = ReasoningMemory()
    memory.remember(place([USER]), said(ids=("call_1", "call_2")))
    for ids in (("call_1", "call_2"), ("call_2",)):
        history = [{"role": "user", "content": "compacted"}, turn("", ids), {"role": "tool", "content": "x"}]
        assert memory.restore(history) == 1
        assert history[1]["reasoning"] == history[1]["reasoning_content"] == "Look first."


def test_without_a_call_by_content_and_place() -> None:
    memory = ReasoningMemory()
    memory.remember(place([USER]), said(content="In src.\n", ids=()))
    found, parts = turn("In src.", ()), turn([{"type": "text", "text": "In src.\n"}], ())
    assert memory.restore([USER, found]) == memory.restore([USER, parts]) == 1
    assert memory.restore([{"role": "system", "content": "rules"}, USER, turn("In src.", ())]) == 1
    assert memory.restore([USER, turn("In lib.", ())]) == 0
    assert memory.restore([{"role": "user", "content": "Something else?"}, turn("In src.", ())]) == 0
    assert memory.restore([USER, USER, turn("In src.", ())]) == 0


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_what_a_client_sends_stays_and_fills_the_other_name(name: str) -> None:
    memory = ReasoningMemory()
    memory.remember(place([USER]), said())
    mine = turn(**{name: "My own."})
    assert memory.restore([USER, mine]) == 1
    assert (mine["reasoning"], mine["reasoning_content"]) == ("My own.", "My own.")
    both = turn(reasoning="a", reasoning_content="b")
    assert memory.restore([USER, both]) == 0
    assert (both["reasoning"], both["reasoning_content"]) == ("a", "b")
    for sent in ({"reasoning": "", "reasoning_content": "b"}, {"reasoning": "a", "reasoning_content": ""}):
        emptied = turn(**sent)
        assert memory.restore([USER, emptied]) == 0
        assert emptied == turn(**sent)


def test_an_empty_text_was_meant_and_null_was_not() -> None:
    memory = ReasoningMemory()
    memory.remember(place([USER]), said())
    emptied, nothing = turn(reasoning=""), turn(reasoning=None, reasoning_content=None)
    assert memory.restore([USER, emptied]) == 0
    assert emptied["reasoning"] == ""
    assert memory.restore([USER, nothing]) == 1
    assert nothing["reasoning"] == "Look first."


def test_an_id_that_stood_for_two_thoughts_finds_neither_but_the_place_does() -> None:
    memory = ReasoningMemory()
    other = [{"role": "user", "content": "Another conversation"}]
    memory.remember(place([USER]), said("One."))
    memory.remember(place(other), said("Two."))
    first, second, moved = turn(), turn(), turn()
    assert memory.restore([USER, first]) == memory.restore([*other, second]) == 1
    assert (first["reasoning"], second["reasoning"]) == ("One.", "Two.")
    assert memory.restore([{"role": "user", "content": "compacted"}, moved]) == 0
    assert "reasoning" not in moved


def agent(task: str, *, answer: str = "", ids: tuple[str, ...] = ("call_0",)) -> list[dict[str, Any]]:
    """A conversation up to its second answer; two of them differ in the task alone."""
    first = turn(answer, ids)
    return [{"role": "user", "content": task}, first, {"role": "tool", "tool_call_id": "call_0", "content": "ok"}]


@pytest.mark.parametrize("ids", [("call_0",), ()])
def test_two_conversations_with_equal_answers_keep_their_own_thoughts(ids: tuple[str, ...]) -> None:
    memory = ReasoningMemory()
    one, two = agent("Fix the parser."), agent("Write the docs.")
    memory.remember(place(one), said("The parser.", content="Done.", ids=ids))
    memory.remember(place(two), said("The docs.", content="Done.", ids=ids))
    for before, thought in ((one, "The parser."), (two, "The docs."), (one, "The parser.")):
        answer = turn("Done.", ids)
        memory.restore([*before, answer])
        assert answer["reasoning"] == thought
    pruned = turn("Done.", ids)
    memory.restore([*agent("Somebody else's."), pruned])
    assert "reasoning" not in pruned, "it may be the one or the other"


def test_a_rewritten_conversation_is_found_by_its_place_while_that_is_one_thought_s() -> None:
    memory = ReasoningMemory()
    before = [
        USER,
        turn("Reading.", ()),
        {"role": "tool", "content": "a long file"},
        {"role": "user", "content": "And?"},
    ]
    memory.remember(place(before), said("So far.", content="In src.", ids=()))
    before[2] = {"role": "tool", "content": "[removed]"}
    found = turn("In src.", ())
    assert memory.restore([*before, found]) == 1
    assert found["reasoning"] == "So far."
    memory.remember(place(before), said("Or so.", content="In src.", ids=()))
    again = turn("In src.", ())
    before[1] = turn("Rewritten.", ())
    assert memory.restore([*before, again]) == 0


def test_only_the_assistant_s_messages_and_only_with_reasoning() -> None:
    memory = ReasoningMemory()
    memory.remember(place([USER]), Said(["text"], [], ["call_1"]))
    assert len(memory) == 0
    memory.remember(place([USER]), said())
    users = [{**turn(), "role": role} for role in ("user", "tool", "system")]
    assert memory.restore(users) == 0


def test_the_oldest_entries_go_first_and_use_keeps_one() -> None:
    memory = ReasoningMemory(max_entries=4)
    for number in range(2):
        memory.remember(place([USER]), said(f"thought {number}", ids=(f"call_{number}",)))
    assert memory.restore([turn(ids=("call_0",))]) == 1
    memory.remember(place([USER]), said("thought 2", ids=("call_2",)))
    assert len(memory) == 4
    assert [memory.restore([turn(ids=(f"call_{n}",))]) for n in range(3)] == [1, 0, 1]


def test_bytes_are_bounded() -> None:
    memory = ReasoningMemory(max_bytes=20_000)
    for number in range(50):
        memory.remember(place([USER]), said("ü" * 1000, ids=(f"call_{number}",)))
        assert memory.size <= 20_000
        assert memory.size == len(memory) * (2000 + ENTRY_BYTES)
    assert memory.restore([turn(ids=("call_49",))]) == 1
    memory.remember(place([USER]), said("x" * 30_000, ids=("call_50",)))
    assert memory.size == len(memory) == 0, "a thought that alone is too long is not kept"


def test_parts_do_not_run_together() -> None:
    one, two = [{"role": "user", "content": "ab"}], [{"role": "usera", "content": "b"}]
    assert place(one) != place(two)
    memory = ReasoningMemory()
    memory.remember(place([USER]), said(content="a", ids=("b",)))
    assert memory.restore([USER, turn("ab", ())]) == 0
