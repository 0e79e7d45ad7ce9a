"""`soak bundle` on run folders made on the spot."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bisect_stub import StubExecutor, campaign, create, guilty, loop
from builders import T0, ended, kernel_live
from run_folders import long_run, write_run
from seeded_run import seeded_run
from seeded_secrets import PROMPTS, SECRETS, members, survivors
from soakrig.cli.main import invoke
from soakrig.record.redactor import Redactor
from soakrig.record.store import RunReader
from soakrig.reports.bundle.bundle import our_words

FILES = {"engine.log", "events.jsonl", "issue.md", "kernel.log", "manifest.json", "payload.jsonl", "redactions.md",
         "report.html", "repro.py", "result.json", "settings.json"}  # fmt: skip


def bundled(run: Path, out: Path, *options: str, code: int = 0) -> dict[str, bytes]:
    assert invoke(["bundle", str(run), "--out", str(out), *options]) == code
    return members(out) if code == 0 else {}


def test_nothing_of_thirty_secrets_is_in_any_file(tmp_path: Path) -> None:
    run = seeded_run(tmp_path / "run", simulated=True)
    planted = survivors({path.name: path.read_bytes() for path in run.rglob("*") if path.is_file()})
    assert {what for _, what in planted} >= set(SECRETS)
    files = bundled(run, tmp_path / "b.tar.gz")
    assert set(files) == FILES
    assert survivors(files) == []


def test_what_an_upstream_reader_needs_is_there(tmp_path: Path) -> None:
    files = bundled(seeded_run(tmp_path / "run"), tmp_path / "b.tar.gz")
    issue = files["issue.md"].decode()
    for text in ("Xid 31", "turn 3 of conversation 0", "7,300 context tokens", "PCI:0000:01:00", "exit status -9",
                 "MMU", "exact 95 % interval", "NOT WATCHED", "--api-key=secret-", "No campaign is known"):  # fmt: skip
        assert text in issue
    assert b"SIMULATED" not in b"".join(data for name, data in files.items() if name != "repro.py")
    assert re.search(r"mail addresses \| mail-N \| [1-9]", files["redactions.md"].decode())
    kernel = files["kernel.log"].decode()
    assert "host-" in kernel
    assert "NVRM: Xid (PCI:0000:01:00): 31, pid=77" in kernel


def test_the_same_thing_is_called_the_same_in_every_file(tmp_path: Path) -> None:
    files = bundled(seeded_run(tmp_path / "run"), tmp_path / "b.tar.gz")
    kernel = re.search(r"15:04:35 (host-\d+) kernel", files["kernel.log"].decode())
    assert kernel is not None
    assert f"http://{kernel[1]}:8000" in files["settings.json"].decode()
    assert f"15:04:35 {kernel[1]} kernel" in files["issue.md"].decode()


def test_the_folder_in_the_archive_is_a_run_that_is_judged_alike(tmp_path: Path) -> None:
    run = seeded_run(tmp_path / "run")
    files = bundled(run, tmp_path / "b.tar.gz")
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, data in files.items():
        (copy / name).write_bytes(data)
    one, other = RunReader(run).judge().result(), RunReader(copy).judge().result()
    assert (one.verdict, one.outcomes, one.exposure) == (other.verdict, other.outcomes, other.exposure)
    assert invoke(["report", str(copy), "--rejudge"]) == 1


def test_simulated_stands_in_every_artefact(tmp_path: Path) -> None:
    files = bundled(seeded_run(tmp_path / "run", simulated=True), tmp_path / "b.tar.gz")
    unmarked = [name for name, data in files.items() if b"simulated" not in data.lower()]
    assert unmarked == []
    assert files["issue.md"].startswith(b"# SIMULATED: ")
    assert b'"simulated": true' in files["settings.json"]


def test_prompts_become_filler_of_as_many_requests(tmp_path: Path) -> None:
    files = bundled(seeded_run(tmp_path / "run"), tmp_path / "b.tar.gz")
    lines = [json.loads(line) for line in files["payload.jsonl"].splitlines()]
    assert [line["send"]["messages"] for line in lines if "send" in line] == [1, 3, 5]
    said = [line["message"] for line in lines if "message" in line]
    assert [one["role"] for one in said] == ["user", "assistant", "tool", "assistant", "user"]
    assert said[1]["tool_calls"][0]["id"] == said[2]["tool_call_id"] != "call_1"
    assert said[1]["tool_calls"][0]["function"]["name"] == "read_file"


def test_keep_text_keeps_prompts_and_hides_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = bundled(seeded_run(tmp_path / "run"), tmp_path / "b.tar.gz", "--keep-text")
    assert b"for our client Halvorsen Offshore before the audit" in files["payload.jsonl"]
    assert "PROMPTS ARE IN THIS ARCHIVE" in capsys.readouterr().err
    assert b"PROMPTS ARE IN THIS ARCHIVE" in files["issue.md"]
    assert {what for _, what in survivors(files)} <= set(_runs())


def _runs() -> list[str]:
    return [" ".join(words[n : n + 5]) for one in PROMPTS if (words := one.lower().split()) for n in range(len(words))]


def test_the_same_bytes_whoever_makes_it(tmp_path: Path) -> None:
    run = seeded_run(tmp_path / "run")
    for seed in ("1", "2"):
        argv = [sys.executable, "-m", "soakrig", "bundle", str(run), "--out", str(tmp_path / f"{seed}.tar.gz")]
        subprocess.run(argv, check=True, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True)
    one, other = (tmp_path / "1.tar.gz", tmp_path / "2.tar.gz")
    assert one.read_bytes() == other.read_bytes()
    with tarfile.open(one) as tar:
        entries = tar.getmembers()
    assert [entry.name for entry in entries] == sorted(f"run-bundle/{name}" for name in FILES)
    assert {(entry.mode, entry.mtime, entry.uid, entry.uname) for entry in entries} == {(0o600, 0, 0, "")}
    assert one.stat().st_mode & 0o777 == 0o600


def test_what_survives_is_refused_by_place_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variable's value that is a word of the report itself: redaction cannot take it out."""
    monkeypatch.setenv("SOME_API_KEY", "color-scheme")
    run = seeded_run(tmp_path / "run")
    bundled(run, tmp_path / "b.tar.gz", code=3)
    said = capsys.readouterr().err
    assert "report.html line" in said
    assert "the value of SOME_API_KEY" in said
    assert "color-scheme" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_redactor_that_misses_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Redactor, "text", lambda self, text: text)
    bundled(seeded_run(tmp_path / "run"), tmp_path / "b.tar.gz", code=3)
    said = capsys.readouterr().err
    assert "a mail address" in said
    assert not any(secret in said for secret in SECRETS.values())


def test_values_of_this_shell_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEPLOY_SECRET", "blue elephant")
    run = write_run(tmp_path / "run", long_run(4, faults=1))
    (run / "engine.log").write_text("we say blue elephant here\n")
    files = bundled(run, tmp_path / "b.tar.gz")
    assert b"we say secret-1 here" in files["engine.log"]


def test_without_requests_the_load_is_made_from_sizes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", long_run(6, faults=1), text_kept=False)
    files = bundled(run, tmp_path / "b.tar.gz")
    lines = [json.loads(line) for line in files["payload.jsonl"].splitlines()]
    words = [len(line["message"]["content"].split()) for line in lines if "message" in line]
    assert words == [7100, 100, 100, 100, 100, 100]
    assert b"Made from sizes alone" in files["issue.md"]


def test_a_run_without_a_turn_has_no_reproducer(tmp_path: Path) -> None:
    files = bundled(write_run(tmp_path / "run", [kernel_live(), ended(T0 + 1)]), tmp_path / "b.tar.gz")
    assert set(files) == FILES - {"repro.py", "payload.jsonl"}
    assert b"there is nothing to send" in files["issue.md"]


def test_truncated_events_are_told_and_what_is_whole_is_there(tmp_path: Path) -> None:
    run = seeded_run(tmp_path / "run")
    data = (run / "events.jsonl").read_bytes()
    (run / "events.jsonl").write_bytes(data[:-40])
    (run / "result.json").unlink()
    files = bundled(run, tmp_path / "b.tar.gz")
    assert len(files["events.jsonl"].splitlines()) == len(data.splitlines()) - 1
    assert b"the run was cut off" in files["issue.md"]
    assert survivors(files) == []


@pytest.mark.parametrize("cut", [0, 1, 200, 1000, 1900])
def test_a_run_cut_at_any_byte_is_bundled(tmp_path: Path, cut: int) -> None:
    run = seeded_run(tmp_path / "run")
    (run / "events.jsonl").write_bytes((run / "events.jsonl").read_bytes()[:cut])
    (run / "result.json").unlink()
    assert survivors(bundled(run, tmp_path / "b.tar.gz")) == []


def test_bad_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = seeded_run(tmp_path / "run")
    none = tmp_path / "none"
    none.mkdir()
    cases = [
        ([str(none)], "there is no run"),
        ([str(run), "--out", str(tmp_path / "no" / "b.tar.gz")], "its folder does not exist"),
        ([str(run), "--out", str(none)], "it is a folder"),
        ([str(run), "--out", "/proc/b.tar.gz"], "cannot be written"),
        ([str(run), "--campaign", str(none), "--out", str(tmp_path / "b.tar.gz")], "no folder of a campaign"),
        ([str(run), "--url", "nonsense", "--out", str(tmp_path / "b.tar.gz")], "no URL"),
        ([str(run), "--url", "http://127.0.0.1:1", "--out", str(tmp_path / "b.tar.gz")], "does not count tokens"),
    ]
    for argv, said in cases:
        assert invoke(["bundle", *argv, "--json"]) == 64, argv
        told = json.loads(capsys.readouterr().out)
        assert said in told["error"]
        assert told["exit_code"] == 64
    (run / "events.jsonl").write_bytes(b"{}\n" + (run / "events.jsonl").read_bytes())
    assert invoke(["bundle", str(run), "--out", str(tmp_path / "b.tar.gz")]) == 64
    assert "events.jsonl line 1 is no event" in capsys.readouterr().err
    assert not (tmp_path / "b.tar.gz").exists()


def test_the_scripts_words_are_plain_text_for_everybody() -> None:
    assert {"fault", "engine", "kernel"} <= our_words()
    assert not {"oneoperatorq", "titan"} & our_words()


def test_the_arms_of_the_runs_campaign_are_told(tmp_path: Path) -> None:
    """The run lies in its campaign's folder, or the campaign is named."""
    place = tmp_path / "bisect-of-oneoperatorq"
    spec = campaign("A", "B")
    executor = StubExecutor(guilty("A"))
    with create(place, spec, executor) as journal:
        loop(journal, spec, executor).run()
    inside, outside = seeded_run(place / "run-of-it"), seeded_run(tmp_path / "run")
    for run, options in ((inside, ()), (outside, ("--campaign", str(place)))):
        files = bundled(run, tmp_path / "b.tar.gz", *options)
        issue = files["issue.md"].decode()
        assert re.search(r"\| `A=0` \| CLEARED to at least [\d.]+", issue)
        assert "`bisect-of-user-" in issue
        assert survivors(files) == []
    assert "No campaign is known" in bundled(outside, tmp_path / "b.tar.gz")["issue.md"].decode()
