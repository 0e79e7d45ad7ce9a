"""The classifier, rule by rule, on the bytes of a stream."""

from __future__ import annotations

from typing import Any

import pytest

from soakrig.soak.classify import FAILED, LENIENCIES, TERMINAL, Outcome, classify
from soakrig.soak.reply import Ending, Reply
from wire.loopback import DONE, ROLE, call, delta, event, usage, words

STOP = delta(finish="stop")
USAGE_TAIL = event({"usage": {"prompt_tokens": 10, "completion_tokens": 8}})
GOOD = [ROLE, *words(), STOP, usage(), DONE]


def reply(*parts: bytes, ending: Ending = "eof", status: int | None = 200) -> Reply:
    came = Reply(status=status)
    for part in parts:
        came.feed(part, 1.0)
    came.finish(ending, 2.0, f"made {ending}")
    return came


def outcome(*parts: bytes, **options: Any) -> Outcome:
    return classify(reply(*parts), **options)


def calling(name: str, arguments: str, **options: Any) -> Outcome:
    return outcome(*call(name, arguments), **options)


def test_a_whole_answer_is_ok_with_every_way_to_end_one() -> None:
    assert outcome(*GOOD) == Outcome("ok")
    for reason in TERMINAL - {"tool_calls"}:
        assert outcome(ROLE, *words(), delta(finish=reason), DONE).name == "ok", reason


@pytest.mark.parametrize("reason", sorted(FAILED))
def test_a_finish_reason_by_which_the_engine_gives_up_is_an_error(reason: str) -> None:
    found = outcome(ROLE, *words(), delta(finish=reason), DONE)
    assert found.name == "error_frame"
    assert repr(reason) in found.why


def test_a_finish_reason_that_nobody_knows_ends_nothing() -> None:
    found = outcome(ROLE, *words(), delta(finish="paused"), DONE)
    assert (found.name, "'paused'" in found.why) == ("truncated", True)


def test_a_tool_that_was_not_offered() -> None:
    found = calling("rm_rf", '{"path": "/"}', tools={"list_dir", "read_file"})
    assert found.name == "tool_malformed"
    assert "'rm_rf' is none of the 2 tools offered" in found.why
    assert calling("list_dir", '{"path": "/"}', tools={"list_dir"}).name == "ok"
    assert calling("rm_rf", '{"path": "/"}', tools=None).name == "ok", "not known what was offered: not checked"
    assert calling("rm_rf", '{"path": "/"}', tools=()).name == "tool_malformed", "none was offered"


@pytest.mark.parametrize("arguments", ["[1, 2]", '"/srv"', "17", "null", "true"])
def test_arguments_that_are_json_but_no_object(arguments: str) -> None:
    found = calling("list_dir", arguments)
    assert found.name == "tool_malformed"
    assert "are no object" in found.why


def test_arguments_that_are_no_json_show_their_end() -> None:
    found = calling("list_dir", '{"path": ' + "x" * 200 + "END")
    assert found.name == "tool_malformed"
    assert "are no JSON" in found.why
    assert "END" in found.why


@pytest.mark.parametrize("arguments", ["", "{}", "  "])
def test_a_call_without_arguments_is_one_of_no_arguments(arguments: str) -> None:
    assert calling("list_dir", arguments).name == "ok"


def test_but_not_where_the_length_cut_it() -> None:
    parts = call("list_dir", "")
    parts[-3] = delta(finish="length")
    found = outcome(*parts)
    assert found.name == "tool_malformed"
    assert "was cut before its arguments" in found.why


@pytest.mark.parametrize("name", ["", "list dir", "list_dir</arg_key>", "a" * 129, "list\ndir"])
def test_a_name_that_is_no_function_name(name: str) -> None:
    found = calling(name, "{}")
    assert found.name == "tool_malformed"
    assert "is no function name" in found.why


def test_of_several_calls_every_one_is_looked_at() -> None:
    def part(index: int, arguments: str) -> bytes:
        function = {"name": "list_dir", "arguments": arguments}
        return delta(tool_calls=[{"index": index, "id": f"call_{index}", "type": "function", "function": function}])

    end = [delta(finish="tool_calls"), DONE]
    assert outcome(ROLE, part(0, "{}"), part(1, "{}"), *end).name == "ok"
    found = outcome(ROLE, part(0, "{}"), part(1, "[]"), *end)
    assert (found.name, found.why[:7]) == ("tool_malformed", "call 1:")


@pytest.mark.parametrize(
    "arguments",
    [
        '{"path": "/srv</arg_value>"}',
        '{"path": "<tool_call>list"}',
        '{"path": "<|im_end|>"}',
        '{"path": "\uff5c <\uff5cend"}',
        '{"pa>th": "/srv"}',
        '{"pa<th": "/srv"}',
    ],
)
def test_markup_in_arguments(arguments: str) -> None:
    found = calling("write_file", arguments)
    assert found.name == "tool_malformed"
    assert "markup in the arguments of write_file" in found.why


@pytest.mark.parametrize("text", ["a < b and b > c", "<div class='x'>", "x <| y", "List<String>"])
def test_code_with_angle_brackets_is_no_markup(text: str) -> None:
    assert calling("write_file", f'{{"text": "{text}"}}').name == "ok"


@pytest.mark.parametrize(
    "arguments",
    ['{"a": "%s"}', '{"a": {"b": "%s"}}', '{"a": ["x", "%s"]}', '{"a": [{"b": "%s"}]}'],
)
def test_an_argument_without_information_wherever_it_stands(arguments: str) -> None:
    found = calling("write_file", arguments % ("!" * 256))
    assert found.name == "tool_malformed"
    assert "carries no information" in found.why


def test_degenerate_reasoning_before_a_good_answer() -> None:
    loop = [delta(reasoning="!!!!") for _ in range(64)]
    found = outcome(ROLE, *loop, *words(), STOP, DONE)
    assert found.name == "degenerate"
    assert found.why.startswith("reasoning: ")
    found = outcome(ROLE, *[delta(content="!!!!") for _ in range(64)], STOP, DONE)
    assert found.why.startswith("content: ")


@pytest.mark.parametrize("text", [" ", "\n\n\t ", "\u200b", "\ufeff\u200e", "\u2060", "\0\0", "\ufffd", " \0\n\ufffd"])
def test_content_that_shows_nothing_is_no_answer(text: str) -> None:
    found = outcome(ROLE, delta(content=text), STOP, usage(), DONE)
    assert found.name == "answerless"
    assert found.why == "no content and no call, finish reason 'stop'"
    assert outcome(ROLE, delta(content=text + "a"), STOP, usage(), DONE).name == "ok"


def test_reasoning_alone_is_no_answer_and_is_counted() -> None:
    found = outcome(ROLE, delta(reasoning="hmm "), delta(reasoning="well"), STOP, DONE)
    assert (found.name, found.why) == ("answerless", "8 characters of reasoning only, finish reason 'stop'")


def test_a_call_needs_no_content() -> None:
    assert calling("list_dir", '{"path": "/srv"}') == Outcome("ok")


def test_usage_in_a_chunk_without_choices_is_refused_unless_accepted() -> None:
    parts = [ROLE, *words(), STOP, USAGE_TAIL, DONE]
    refused = outcome(*parts)
    assert refused.name == "malformed"
    assert "--accept usage-tail" in refused.why
    others = set(LENIENCIES) - {"usage-tail"}
    assert outcome(*parts, accept=others).name == "malformed"
    assert outcome(*parts, accept={"usage-tail"}) == Outcome("ok", accepted=["usage-tail"])


def test_a_leniency_that_was_not_needed_is_not_said() -> None:
    assert outcome(*GOOD, accept=set(LENIENCIES)) == Outcome("ok")


def test_every_leniency_that_was_needed_is_said() -> None:
    parts = [ROLE, *words(), STOP, USAGE_TAIL]
    found = outcome(*parts, accept=set(LENIENCIES))
    assert (found.name, sorted(found.accepted)) == ("ok", ["no-terminator", "usage-tail"])


def test_no_leniency_accepts_a_stream_with_no_end_at_all() -> None:
    found = outcome(ROLE, *words(3), accept=set(LENIENCIES))
    assert (found.name, found.why) == ("truncated", "neither finish reason nor terminator after 3 deltas")


@pytest.mark.parametrize(
    ("parts", "name"),
    [(GOOD, "ok"), ([ROLE, *words(), STOP], "truncated"), ([ROLE, *words(), DONE], "truncated")],
    ids=["after everything", "before the terminator", "without a finish reason"],
)
def test_a_reset_is_harmless_only_after_finish_reason_and_terminator(parts: list[bytes], name: str) -> None:
    assert classify(reply(*parts, ending="reset"), accept=set(LENIENCIES)).name == name


@pytest.mark.parametrize(
    ("parts", "status"), [(GOOD, 200), ([], None), ([ROLE], 200), ([], 500)], ids=["whole", "unsent", "begun", "500"]
)
def test_a_turn_that_this_tool_cut_is_aborted_whatever_had_come(parts: list[bytes], status: int | None) -> None:
    found = classify(reply(*parts, ending="cut_by_tool", status=status))
    assert found == Outcome("aborted", "this tool ended the turn")


def test_a_dead_engine_outranks_everything() -> None:
    for ending in ("eof", "cut_by_tool", "stalled", "refused"):
        assert classify(reply(*GOOD, ending=ending), engine_dead=True).name == "post_mortem"


def test_an_error_object_outranks_a_whole_answer() -> None:
    found = outcome(ROLE, *words(), event({"error": {"message": "EngineDeadError"}}), STOP, usage(), DONE)
    assert found == Outcome("error_frame", "EngineDeadError")


def test_a_status_other_than_200_keeps_its_body() -> None:
    came = Reply(status=503, body=b" upstream gone \n")
    came.finish("eof", 1.0)
    assert classify(came) == Outcome("http_error", "status 503: upstream gone")
    came.body = b""
    assert classify(came) == Outcome("http_error", "status 503: empty body")


def test_silence_says_how_much_had_come() -> None:
    assert classify(reply(ROLE, *words(2), ending="stalled")).why == "made stalled (after 3 events)"
    assert classify(reply(ending="stalled")).why == "made stalled (before any data)"


def test_an_empty_200_says_what_came() -> None:
    assert outcome(DONE) == Outcome("empty_200", "only the terminator")
    assert outcome(b": ping\n\n") == Outcome("empty_200", "no data event (8 bytes)")
