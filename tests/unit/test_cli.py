"""The command line: exit codes, what bad input gets, and JSON on standard output alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from builders import T0, alive, done, ended, kernel_live, manifest, sent, turns, xid
from soakrig.cli.main import invoke
from soakrig.engine.environment import engine_environment, parse_settings
from soakrig.engine.ports import stranger
from soakrig.errors import UsageError
from soakrig.record.duration import parse_duration
from soakrig.record.store import RunStore


def stored(folder: Path, *events: object, **fields: object) -> Path:
    store = RunStore.create(folder, manifest(**fields))
    for event in events:
        store.append(event)
    store.close()
    return store.folder


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["runn"], "Did you mean 'run'"),
        (["run", "--turn", "5"], "--turns"),
        (["run", "--turns", "many"], "--turns"),
        (["run", "--turns", "0"], "from 1 up"),
        (["run", "--conversations", "0"], "from 1 up"),
        (["run", "agent-lop"], "'agent-loop' was meant"),
        (["run", "--engine", "embeded"], "'embedded' was meant"),
        (["run", "--gate", "ttft < 1s"], "does not exist"),
        (["run", "--set", "NOVALUE"], "no NAME=VALUE"),
        (["run", "--set", "A=1", "--set", "A=2"], "twice"),
        (["run", "--accept", "anything"], "null-finish"),
        (["run", "--for", "soon"], "no duration"),
        (["run", "--for", "1h", "--turns", "3"], "give one"),
        (["run", "--url", "127.0.0.1:8000"], "no URL of a server"),
        (["run", "--url", "http://127.0.0.1:1", "--set", "A=1"], "--set makes no sense"),
        (["run", "--url", "http://127.0.0.1:1", "--arg=--x=1"], "--arg makes no sense"),
        (["run", "--url", "http://127.0.0.1:1", "--pid", "999999999"], "no such process"),
        (["run", "--url", "http://127.0.0.1:1", "--engine-log", "/nowhere/x"], "is no file"),
        (["run", "--url", "http://127.0.0.1:1", "--api-key-env", "NOT_SET_HERE"], "is not set"),
        (["run", "--pid", "1"], "without --url"),
        (["run", "--stall-timeout", "0"], "above 0"),
        (["run", "--temperature", "-1"], "0 to 5"),
        (["run", "--at-limit", "explode"], "stop-growing"),
        (["run", "--seed", "99999999999999999999"], "below 2^31"),
        (["run", "--max-tokens", "99999999999999999999"], "below 2^31"),
        (["run", "--tools", "-4"], "0 to 500"),
        (["run", "--port", "99999"], "not a TCP port"),
        (["run", "--keep-text"], "is for --transcript"),
        (["run", "--transcript", "x.jsonl", "--tools", "3"], "--tools makes no sense with --transcript"),
        (["run", "--transcript", "x.jsonl", "--seed", "3"], "--seed makes no sense with --transcript"),
        (["run", "--url", "http://[::1"], "no URL of a server"),
        (["run", "--url", "http://127.0.0.1:abc"], "no URL of a server"),
        (["run", "--url", "http://127.0.0.1:99999"], "no URL of a server"),
        (["run", "--url", "http://user:word@127.0.0.1:1"], "no URL of a server"),
        (["report", "/no/such/run"], "there is no run"),
        (["report", "x**"], "there is no run"),
        (["run", "--transcript", "/nowhere/t.jsonl"], "cannot be read"),
        (["run", "--kernel-log", "/nowhere/at/all"], "/nowhere/at/all"),
        (["watch", "--kernel-log", "/nowhere/at/all"], "/nowhere/at/all"),
        (["repro", "show", "agent"], "'agent-loop' was meant"),
        (["bisect", "A=1"], "at least one other"),
        (["bisect", "A=1,0", "--trns=5"], "--turns was meant"),
        (["bisect", "A=1,0", "--pair", "A"], "is no A+B"),
        (["bisect", "A=1,0", "--budget", "soon"], "--budget"),
        (["bisect", "VLLM_MOE_DMA_STAGNG=1,0"], "VLLM_MOE_DMA_STAGING was probably meant"),
        (["bisect", "VLLM_MOE_DMA_STAGING=1,"], "are both"),
        (["bisect", "--arg:--max-num-sqs=8,1"], "--max-num-seqs was probably meant"),
        (["bisect", "status", "--runs-dir", "/nowhere"], "there is no campaign"),
        (["bisect", "resume", "/nowhere"], "/nowhere"),
        (["bisect", "install-resume", "/nowhere"], "/nowhere"),
        (["report", "no-such-run"], "there is no run"),
    ],
)
def test_wrong_calls_exit_64_and_say_what_was_meant(
    argv: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke(argv) == 64
    out, err = capsys.readouterr()
    assert says in err
    assert out == ""
    assert list(tmp_path.glob("runs/*")) == [], "nothing was started and nothing is left"


def test_nothing_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke([]) == 64
    assert "Usage" in capsys.readouterr().out
    assert invoke(["--help"]) == 0
    assert invoke(["--version"]) == 0
    assert "soakrig 0." in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["run", "watch", "report", "doctor", "bisect", "repro list", "repro show"])
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke([*verb.split(), "--help"]) == 0
    assert len(capsys.readouterr().out) > 200


def test_nothing_listens_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        assert invoke(["run", "--url", url, "--runs-dir", str(tmp_path)]) == 3
    assert "nothing answered" in capsys.readouterr().err


def test_a_taken_port_is_refused_with_its_holder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert invoke(["run", "--port", str(port), "--runs-dir", str(tmp_path)]) == 3
    assert str(os.getpid()) in capsys.readouterr().err


LISTENING = """
import socket, sys
held = socket.create_server(("127.0.0.1", 0))
print(held.getsockname()[1], flush=True)
sys.stdin.read()
"""


def test_who_started_the_listener_and_what_it_started_are_not_doubted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        assert stranger(os.getpid(), url) == ""
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as below:
            assert stranger(below.pid, url) == "", "below the one that listens"
            below.communicate(b"\n")
    with subprocess.Popen([sys.executable, "-c", LISTENING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as listener:
        assert listener.stdout is not None
        assert stranger(os.getpid(), f"http://127.0.0.1:{int(listener.stdout.readline())}") == "", "it started it"
        listener.communicate()


def test_somebody_else_s_pid_is_doubted() -> None:
    """A sibling of the listener, not pid 1: that one may be an ancestor of this test in the same session."""
    with (
        subprocess.Popen([sys.executable, "-c", LISTENING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as listener,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as sibling,
    ):
        assert listener.stdout is not None
        doubt = stranger(sibling.pid, f"http://127.0.0.1:{int(listener.stdout.readline())}")
        assert f"pid {listener.pid} " in doubt
        assert f"not --pid {sibling.pid}" in doubt
        listener.communicate()
        sibling.communicate(b"\n")


@pytest.mark.parametrize(
    "argv", [["run", "--json", "--gate", "x"], ["run", "--json", "--turn", "5"], ["report", "--json", "no-such-run"]]
)
def test_json_is_one_object_when_a_call_fails_too(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke(argv) == 64
    failed = json.loads(capsys.readouterr().out)
    assert failed["exit_code"] == 64
    assert failed["error"]


@pytest.mark.parametrize("place", ["/proc/nowhere", "/dev/null"])
def test_a_runs_dir_that_cannot_be_made_is_inconclusive(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["run", "--runs-dir", place]) == 2
    assert "cannot make" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "3", '{"schema": 2}', '{"schema": 1, "verdict": "pass", "exit_code": 1}'])
def test_a_result_that_is_none_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stored(tmp_path, *CLEAN) / "result.json").write_text(text)
    assert invoke(["report", "--runs-dir", str(tmp_path)]) == 64
    assert "--rejudge" in capsys.readouterr().err


@pytest.mark.parametrize("exit_code", [99, 1])
def test_a_verdict_and_an_exit_code_that_contradict_each_other_are_refused(
    exit_code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stored(tmp_path, *CLEAN)
    invoke(["report", "--runs-dir", str(tmp_path), "--rejudge"])
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "exit_code": exit_code}))
    assert invoke(["report", "--runs-dir", str(tmp_path)]) == 64
    assert "contradict" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [(["--arg=--no-such-flag=1"], "--no-such-flag"), (["--set", "VLLM_MOE_DMA_STAGING=maybe"], "VLLM_MOE_DMA_STAGING")],
)
def test_what_the_engine_refuses_is_a_usage_error(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["run", "--runs-dir", str(tmp_path), *options]) == 64
    assert says in capsys.readouterr().err


CLEAN = [kernel_live(), *turns(1, 3), alive(), ended()]
FAULTY = [kernel_live(), *turns(1, 2), sent(3, T0 + 5), xid(31, T0 + 5.2), done(3, T0 + 6, "truncated"), alive()]


@pytest.mark.parametrize(("events", "code"), [(CLEAN, 0), (FAULTY, 1), (CLEAN[:-1], 2)])
def test_report_exits_with_the_run_s_code(
    events: list, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(tmp_path, *events)
    assert invoke(["report", "--runs-dir", str(tmp_path)]) == code
    out = capsys.readouterr().out
    assert {0: "PASS", 1: "FAIL", 2: "INCONCLUSIVE"}[code] in out


def test_report_json_is_one_object_with_the_contract_s_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(tmp_path, *FAULTY)
    assert invoke(["report", "--runs-dir", str(tmp_path), "--json"]) == 1
    out, _ = capsys.readouterr()
    result = json.loads(out)
    contract = {
        "schema", "run_id", "verdict", "exit_code", "reasons", "simulated", "exposure", "outcomes", "first_bad",
        "faults", "engine", "latency", "sources", "hazard", "settings", "fingerprint",
    }  # fmt: skip
    assert contract <= set(result)
    assert set(result["exposure"]) == {"turns", "prompt_tokens", "output_tokens", "busy_seconds"}
    fault = {
        "signature", "xid", "pci", "pid", "process", "source", "time", "turn", "conversation", "context_tokens",
        "seconds_under_load", "raw",
    }  # fmt: skip
    assert fault <= set(result["faults"][0])
    assert {"alive", "exit_status", "died_after_turn"} <= set(result["engine"])
    assert set(result["sources"]) == {"kernel_log", "nvml", "process", "engine_log", "metrics"}
    assert all(set(source) == {"state", "detail", "lost"} for source in result["sources"].values())
    assert set(result["hazard"]) == {"unit", "faults", "exposure", "upper_95"}
    assert {"p50", "p90", "p99"} == set(result["latency"]["ttft_s"])
    assert {"p10", "p50", "p90"} == set(result["latency"]["decode_tokens_per_s"])


def test_rejudge_replaces_a_result_that_does_not_follow_from_the_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stored(tmp_path, *FAULTY)
    assert invoke(["report", "--runs-dir", str(tmp_path), "--rejudge", "--json"]) == 1
    honest = json.loads(capsys.readouterr().out)
    (folder / "result.json").write_text(json.dumps({**honest, "verdict": "pass", "exit_code": 0}))
    assert invoke(["report", "--runs-dir", str(tmp_path), "--json"]) == 0, "what is stored is shown as it is"
    capsys.readouterr()
    assert invoke(["report", "--runs-dir", str(tmp_path), "--rejudge", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == honest == json.loads((folder / "result.json").read_text())


def test_a_result_that_was_cut_is_derived_again_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stored(tmp_path, *CLEAN)
    (folder / "result.json").write_text('{"verdict": "pa')
    assert invoke(["report", "--runs-dir", str(tmp_path)]) == 0
    assert "--rejudge" in capsys.readouterr().out
    assert (folder / "result.json").read_text() == '{"verdict": "pa', "only --rejudge replaces it"


def test_a_bug_of_ours_is_70(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("soakrig.cli.report.find_run", lambda *_: 1 / 0)
    assert invoke(["report"]) == 70
    err = capsys.readouterr().err
    assert "bug of soakrig" in err
    assert "ZeroDivisionError" in err


def test_durations() -> None:
    assert [parse_duration(text) for text in ("8h", "90m", "45s", "1h30m", "1.5h")] == [28800, 5400, 45, 5400, 5400]
    for text in ("", "8", "h", "0s", "1d", "-5m", "30m1h"):
        with pytest.raises(UsageError):
            parse_duration(text)


def test_the_engine_s_environment_is_of_known_names_only() -> None:
    caller = {"PATH": "/bin", "VLLM_X": "1", "CUDA_VISIBLE_DEVICES": "0", "SECRET": "s", "SOAKRIG_PLANT": "{}"}
    made = engine_environment({"VLLM_X": "2", "MINE": "yes"}, caller)
    assert made == {
        "PATH": "/bin", "VLLM_X": "2", "CUDA_VISIBLE_DEVICES": "0", "MINE": "yes", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    assert parse_settings(["A=1", "B=x=y"]) == {"A": "1", "B": "x=y"}


def test_turns_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pandas as pd

    stored(tmp_path, *FAULTY)
    table = tmp_path / "turns.csv"
    assert invoke(["report", "--runs-dir", str(tmp_path), "--csv", str(table)]) == 1
    rows = pd.read_csv(table)
    assert list(rows["turn"]) == [1, 2, 3]
    assert list(rows["outcome"]) == ["ok", "ok", "truncated"]
    assert rows["decode_tokens_per_s"].iloc[0] == pytest.approx(40.0)
    assert invoke(["report", "--runs-dir", str(tmp_path), "--csv", "/nowhere/x.csv"]) == 64
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["watch", "--once", "--kernel-log", "clean.log"], 0),
        (["watch", "--once", "--json", "--kernel-log", "clean.log"], 0),
        (["watch", "--once", "--kernel-log", "faulty.log"], 1),
        (["watch", "--once", "--json", "--kernel-log", "faulty.log"], 1),
        (["report"], 0),
        (["report", "--json"], 0),
        (["repro", "list"], 0),
        (["repro", "show", "agent-loop", "--json"], 0),
    ],
)
def test_a_reader_that_goes_away_changes_no_exit_code(argv: list[str], code: int, tmp_path: Path) -> None:
    stored(tmp_path / "runs", *CLEAN)
    (tmp_path / "clean.log").write_text("[ 1.5] usb 1-1: new device\n")
    (tmp_path / "faulty.log").write_text("[ 1.5] NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "soakrig", *argv], cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(writer)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
