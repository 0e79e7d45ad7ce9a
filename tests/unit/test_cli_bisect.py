"""The command line of ``soak bisect``: its verbs, the words that are variables, the dry run, and status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bisect_stub import StubExecutor, by_arm, campaign, create, guilty, loop
from soakrig.bisect.campaign import BUDGET
from soakrig.bisect.journal import Journal
from soakrig.bisect.price import Pace
from soakrig.bisect.stop import Stop
from soakrig.cli import main
from soakrig.cli.bisect import find_campaign
from soakrig.cli.campaign_plan import campaign_plan
from soakrig.cli.main import invoke
from soakrig.errors import UsageError

VARIABLE = "VLLM_MOE_DMA_STAGING=1,0"
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plan(capsys: Captured, *argv: str) -> dict[str, Any]:
    """What a dry run says as JSON; nothing else may be on standard output."""
    assert invoke(["bisect", *argv, "--dry-run", "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert list(Path().iterdir()) == [], "nothing is left"
    return json.loads(out)


def test_what_names_no_verb_begins_a_campaign(capsys: Captured) -> None:
    first = plan(capsys, VARIABLE)
    assert plan(capsys, "start", VARIABLE) == first
    assert plan(capsys, "--turns", "60", VARIABLE) == first, "options may come first"
    with pytest.raises(SystemExit) as ended:
        main.bisect([VARIABLE, "--dry-run", "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == first
    with pytest.raises(SystemExit) as ended:
        main.soak(["bisect", VARIABLE, "--dry-run", "--json"])
    assert json.loads(capsys.readouterr().out) == first


def test_both_console_scripts_are_installed_and_equal(tmp_path: Path) -> None:
    scripts = Path(sys.executable).parent
    said = [
        subprocess.run([scripts / name, *argv], capture_output=True, text=True, check=False)
        for name, argv in (("bisect", ["A=1"]), ("soak", ["bisect", "A=1"]))
    ]
    assert said[0].stderr == said[1].stderr
    assert [one.returncode for one in said] == [64, 64]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["resume"], "Missing argument 'DIR'"),
        (["resume", "/nowhere"], "/nowhere holds no campaign"),
        (["install-resume"], "Missing argument 'DIR'"),
        (["install-resume", "/nowhere", "--dry-run"], "/nowhere"),
        (["status", "/nowhere"], "/nowhere holds no campaign"),
        (["status"], "there is no campaign in runs"),
        (["resum", "DIR"], "'resum' is no NAME=control,value"),
        (["resume", "DIR", "--turns", "5"], "--turns"),
        (["status", "--budge", "8h"], "--budge"),
    ],
)
def test_the_verbs_are_found_and_refuse_what_is_not_theirs(capsys: Captured, argv: list[str], says: str) -> None:
    assert invoke(["bisect", *argv]) == 64
    out, err = capsys.readouterr()
    assert says in err.replace("\n", " ")
    assert out == ""


@pytest.mark.parametrize("argv", [[], ["--help"], ["start", "--help"], ["resume", "--help"], ["status", "-h"]])
def test_each_verb_explains_itself(capsys: Captured, argv: list[str]) -> None:
    assert invoke(["bisect", *argv]) in (0, 64)
    out, err = capsys.readouterr()
    assert "Usage" in out + err
    usage = (out + err).partition("Usage: ")[2].partition("\n")[0]
    assert usage.startswith("soak bisect")
    assert "start" not in usage, "nobody has to know its name"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--trns=5"], "there is no option --trns; --turns was meant?"),
        (["--trns", "5"], "there is no option --trns; --turns was meant?"),
        (["--at-lest=3"], "there is no option --at-lest; --at-least was meant?"),
        (["--dry-rn"], "--dry-run was meant?"),
        (["--jsn"], "--json was meant?"),
        (["--args=--threads=1"], "there is no option --args; --arg was meant?"),
        (["--sett=A=1"], "--set was meant?"),
        (["--zzzzzzzz"], "there is no option --zzzzzzzz"),
        (["-z"], "there is no option -z"),
        (["--max-num-seqs=8,1"], "as a variable is --arg:--max-num-seqs=8,1."),
        (["--max-num-seqs"], "as a variable is --arg:--max-num-seqs=control,value."),
    ],
)
def test_an_option_that_is_none_is_refused_with_the_nearest(capsys: Captured, words: list[str], says: str) -> None:
    for argv in ([VARIABLE, *words], [*words, VARIABLE]):
        assert invoke(["bisect", *argv, "--dry-run"]) == 64
        err = capsys.readouterr().err
        assert says in err
        assert ("was meant" in err) == (words not in (["--zzzzzzzz"], ["-z"]))


def test_words_that_are_flags_reach_the_variables(capsys: Captured) -> None:
    told = plan(capsys, VARIABLE, "--arg:--max-num-seqs=8,1", '--arg:--no-prefix-cache=,""')
    assert told["campaign"]["variables"] == {
        "VLLM_MOE_DMA_STAGING": ["1", "0"], "--max-num-seqs": ["8", "1"], "--no-prefix-cache": [{"unset": True}, ""],
    }  # fmt: skip
    arms = {arm["name"]: arm for arm in told["arms"]}
    assert arms["control"]["argv"][-1] == "--max-num-seqs=8"
    assert arms["all-off"]["argv"][-2:] == ["--max-num-seqs=1", "--no-prefix-cache"]
    assert arms["back:--max-num-seqs"]["changes"] == {"VLLM_MOE_DMA_STAGING": "0", "--no-prefix-cache": ""}


def test_every_option_reaches_the_campaign(capsys: Captured, tmp_path: Path) -> None:
    log = tmp_path.parent / f"{tmp_path.name}.log"
    log.touch()
    told = plan(
        capsys, VARIABLE, "VLLM_MOE_PREFILL_GROUPS=1,0", "CUDA_LAUNCH_BLOCKING=,1",
        "--pair", "VLLM_MOE_DMA_STAGING+CUDA_LAUNCH_BLOCKING", "--budget", "90m", "--executor", "ray",
        "--cooldown", "5s", "--notify", "json://127.0.0.1:1", "--allow-reboot", "2", "--engine", "embedded",
        "--set", "OMP_NUM_THREADS=1", "--arg=--threads=1", "--port", "8123", "--start-timeout", "3m",
        "--repro", "agent-loop", "--turns", "12", "--conversations", "2", "--tools", "3", "--seed", "4",
        "--max-tokens", "16", "--temperature", "0.5", "--context-limit", "4096", "--result-scale", "2",
        "--run-timeout", "1h", "--stall-timeout", "30s", "--kernel-log", str(log), "--confidence", "0.9",
        "--at-least", "3", "--signature", "Xid 31", "--unit", "output_tokens", "--max-bad", "2",
        "--hazard", "0.1", "--turn-seconds", "5", "--launch-seconds", "7",
    )  # fmt: skip
    spec = told["campaign"]
    assert (spec["budget"], spec["executor"], spec["allow_reboot"], spec["port"]) == (5400, "ray", 2, 8123)
    assert (spec["notify"], spec["settings"], spec["flags"]) == (
        ["[redacted]"], {"OMP_NUM_THREADS": "1"}, ["--threads=1"],
    )  # fmt: skip
    assert spec["limits"] == {
        "start": 180, "run": 3600, "stall": 30, "first_byte": 1800, "teardown": 120, "cooldown": 5, "max_bad": 2,
    }  # fmt: skip
    assert spec["load"] == {
        "conversations": 2, "tools": 3, "seed": 4, "max_tokens": 16, "temperature": 0.5, "context_limit": 4096,
        "at_limit": spec["load"]["at_limit"], "result_scale": 2,
    }  # fmt: skip
    assert (spec["turns"], spec["confidence"], spec["at_least"], spec["signature"], spec["unit"]) == (
        12, 0.9, 3, "Xid 31", "output_tokens",
    )  # fmt: skip
    assert (spec["reproducer"], spec["kernel_log"]) == ("agent-loop", str(log))
    assert spec["pairs"] == [["VLLM_MOE_DMA_STAGING", "CUDA_LAUNCH_BLOCKING"]]
    assert told["price"]["pace"] == {"hazard": 0.1, "cap": 12, "turn_s": 5, "launch_s": 7}


def test_a_dry_run_has_the_exact_argv_and_environment_of_every_arm_and_the_price(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_FORGOTTEN", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    told = plan(capsys, VARIABLE, "MY_API_KEY=one-key,two-key", "--set", "HF_TOKEN=hidden", "--arg=--threads=1")
    assert told["dry_run"] is True
    assert [arm["name"] for arm in told["arms"]] == [
        "control", "all-off", "VLLM_MOE_DMA_STAGING=0", "MY_API_KEY=[redacted]", "back:VLLM_MOE_DMA_STAGING",
        "back:MY_API_KEY",
    ]  # fmt: skip
    control, all_off, one, *_ = told["arms"]
    assert control["argv"][1:5] == ["-m", "soakrig.engine.embedded", "--port", "0"]
    assert control["argv"][-1] == "--threads=1"
    assert control["env"]["VLLM_MOE_DMA_STAGING"] == "1"
    assert control["env"]["CUDA_VISIBLE_DEVICES"] == "0"
    assert (one["role"], one["changes"], one["env"]["VLLM_MOE_DMA_STAGING"]) == (
        "one",
        {"VLLM_MOE_DMA_STAGING": "0"},
        "0",
    )
    assert all_off["changes"] == {"VLLM_MOE_DMA_STAGING": "0", "MY_API_KEY": "[redacted]"}
    text = json.dumps(told)
    for secret in ("one-key", "two-key", "hidden", "VLLM_FORGOTTEN"):
        assert secret not in text
    assert control["env"]["HF_TOKEN"] == control["env"]["MY_API_KEY"] == "[redacted]"
    price = told["price"]
    assert price["kind"] == "modelled"
    assert price["none_in_the_list"] != price["one_cause"]
    for name in ("one_cause", "none_in_the_list"):
        assert 0 < told["price"][name]["hours"] < told["price"][name]["hours_90"]
    assert invoke(["bisect", VARIABLE, "--dry-run", "--turn-seconds", "100"]) == 0
    shown = capsys.readouterr().out
    assert "VLLM_MOE_DMA_STAGING=0  (one)" in shown
    assert "price (modelled)" in shown
    assert list(Path().iterdir()) == []


def test_a_secret_flag_is_hidden_in_the_argv_too() -> None:
    spec = campaign("A", flags=["--api-key=s3cret"], variables={"--my-token": ["s3cret-1", "s3cret-2"]})
    told = campaign_plan(spec, Pace(0.1, 60, 10.0, 240.0))
    assert "s3cret" not in json.dumps(told)
    assert told["arms"][0]["argv"][-2:] == ["--api-key=[redacted]", "--my-token=[redacted]"]
    assert told["arms"][1]["changes"] == {"--my-token": "[redacted]"}


def test_the_command_line_wins_over_the_file_and_what_it_does_not_say_stays(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path.parent / f"{tmp_path.name}.toml"
    file.write_text(
        'turns = 7\nnotify = ["json://127.0.0.1:1"]\nflags = ["--threads=1"]\n'
        "[variables]\nVLLM_MOE_DMA_STAGING = [1, 0]\n"
    )
    told = plan(capsys, "-f", str(file))["campaign"]
    assert (told["turns"], len(told["notify"]), told["flags"]) == (7, 1, ["--threads=1"])
    told = plan(capsys, "-f", str(file), "--turns", "9", "CUDA_LAUNCH_BLOCKING=,1")["campaign"]
    assert (told["turns"], list(told["variables"])) == (9, ["VLLM_MOE_DMA_STAGING", "CUDA_LAUNCH_BLOCKING"])


@pytest.mark.parametrize(
    "argv",
    [[VARIABLE, "--turns", "0"], ["A=1"], [VARIABLE, "--trns=5"], ["resume", "/nowhere"], ["status", "/nowhere"]],
)
def test_what_fails_is_one_object_too(capsys: Captured, argv: list[str]) -> None:
    assert invoke(["bisect", *argv, "--json"]) == 64
    assert json.loads(capsys.readouterr().out)["exit_code"] == 64


def kept(name: str, *cause: str) -> Path:
    """A finished campaign in runs/NAME, or one that was stopped before its first launch where nothing is guilty."""
    spec, executor, stop = campaign("A", "B"), StubExecutor(guilty(*cause) if cause else by_arm({})), Stop()
    if not cause:
        stop.ask("Ctrl-C")
    with create(Path("runs", name), spec, executor) as journal:
        loop(journal, spec, executor, stop=stop).run()
    return Path("runs", name)


def test_status_shows_the_newest_and_exits_with_its_code(capsys: Captured) -> None:
    kept("20260102-000000-bisect-aaaa", "A")
    kept("20260101-000000-bisect-ffff")
    Path("runs", "20260103-000000-agent-loop-0000").mkdir()  # a run, no campaign
    assert invoke(["bisect", "status", "--json"]) == 0
    newest = json.loads(capsys.readouterr().out)
    assert (newest["campaign"], newest["state"], newest["cause"]) == ("20260102-000000-bisect-aaaa", "finished", ["A"])
    assert invoke(["bisect", "status", "latest", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == newest
    older = Path("runs", "20260101-000000-bisect-ffff")
    for name in (older.name, str(older), str(older.resolve())):
        assert invoke(["bisect", "status", name, "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["ended"] == "stopped by Ctrl-C"
    assert invoke(["bisect", "status", "--html", "a.html", "--md", "a.md"]) == 0
    assert "CLEARED" in capsys.readouterr().out
    assert "CLEARED" in Path("a.html").read_text()
    assert "CLEARED" in Path("a.md").read_text()
    assert invoke(["bisect", "status", "--html", "no/such/folder/a.html"]) == 64
    assert "cannot be written" in capsys.readouterr().err


def test_a_campaign_is_found_by_path_or_by_name_or_as_the_newest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no campaign in runs"):
        find_campaign("latest", Path("runs"))
    folder = kept("20260101-000000-bisect-ffff")
    assert find_campaign("latest", Path("runs")) == folder
    assert find_campaign(folder.name, Path("runs")) == folder
    assert find_campaign(str(folder), Path("elsewhere")) == folder
    assert find_campaign("no-such", Path("runs")) == Path("no-such"), "who opens it says so"


def test_status_disturbs_nobody_who_runs_it(capsys: Captured) -> None:
    folder = kept("20260101-000000-bisect-ffff")
    with Journal.resume(folder) as journal:
        journal.note(BUDGET, seconds=7200.0)
        assert invoke(["bisect", "status", "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["budget_hours"] == 2
        assert invoke(["bisect", "resume", str(folder), "--json"]) == 3
        refused = json.loads(capsys.readouterr().out)
        assert "run by another process" in refused["error"]
        assert journal.notes()[-1].what == BUDGET
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert invoke(["bisect", "status"]) == 2
    assert {name for name in before if "lock" not in name} <= {path.name for path in folder.iterdir()}
    assert os.listdir(folder)
