"""What `soak run` refuses about transcripts before anything is sent, and what it plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soakrig.cli.main import invoke
from soakrig.cli.transcript_load import lateness, read_load, transcript_plan
from soakrig.errors import UsageError
from soakrig.soak.transcript import Transcript

ARRIVAL = {"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [1]}
TALK = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}] * 2}
ASK = [{"role": "user", "content": "x"}]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_text((json.dumps(ARRIVAL) + "\n") * 100)
    Path("talk.jsonl").write_text((json.dumps(TALK) + "\n") * 3)
    Path("ask.jsonl").write_text(json.dumps(ASK) + "\n")
    Path("odd.jsonl").write_text('{"prompt": "x"}\n')


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--anonymise"], "--anonymise makes no sense without --transcript"),
        (["--trace-block", "16"], "--trace-block makes no sense without --transcript"),
        (["--transcript", "trace.jsonl", "--anonymise"], "holds nobody's text"),
        (["--transcript", "trace.jsonl", "--turns", "5"], "make no sense with a trace"),
        (["--transcript", "trace.jsonl", "--max-tokens", "9"], "--max-tokens makes no sense"),
        (["--transcript", "trace.jsonl", "--trace-block", "4"], "1 hash_ids for 20 tokens, expected 5 at 4"),
        (["--transcript", "trace.jsonl", "--trace-speed", "-1"], "from 0 up"),
        (["--transcript", "talk.jsonl", "--trace-speed", "2"], "which is read as sharegpt; it is for a trace"),
        (["--transcript", "ask.jsonl", "--trace-block", "2"], "which is read as openai; it is for a trace"),
        (["--transcript", "ask.jsonl", "--seed", "2"], "--seed makes no sense"),
        (["--transcript", "odd.jsonl"], "odd.jsonl line 1 fits no format"),
    ],
)
def test_wrong_calls_exit_64(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["run", "--url", "http://127.0.0.1:9", *argv]) == 64
    assert says in " ".join(capsys.readouterr().err.split())


def load(name: str, conversations: int | None = None) -> Transcript:
    return read_load(
        Path(name), max_tokens=None, conversations=conversations, anonymise=False, seed=0, trace_block=None,
        trace_speed=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "places", "plan"),
    [
        ("trace.jsonl", None, (64, 100)), ("trace.jsonl", 5, (5, 100)), ("talk.jsonl", None, (1, 6)),
        ("talk.jsonl", 9, (3, 6)), ("ask.jsonl", None, (1, 1)), ("ask.jsonl", 4, (4, 4)),
    ],
)  # fmt: skip
def test_the_plan_is_the_whole_transcript(name: str, places: int | None, plan: tuple[int, int]) -> None:
    found = transcript_plan(load(name, places), None, None)
    assert (found.conversations, found.total_turns) == plan


def test_turns_or_seconds_send_it_over_again() -> None:
    found = transcript_plan(load("talk.jsonl", 2), 50, None)
    assert (found.conversations, found.turns, found.lanes, found.total_turns) == (2, 50, None, 100)
    assert transcript_plan(load("talk.jsonl"), None, 30.0).seconds == 30.0
    with pytest.raises(UsageError, match="cut the file"):
        transcript_plan(load("trace.jsonl"), None, 30.0)


def test_late_arrivals_are_told() -> None:
    assert lateness([0.0, 0.4]) == ""
    assert lateness([0.0, 3.5, 2.0]).startswith("2 of 3 arrivals left more than 1 s late (at most 3.5 s)")
