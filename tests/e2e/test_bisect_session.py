"""`soak bisect` as people use it: stopped, looked at, taken up again, tried dry, and with secrets in its settings."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bisect_engine import SMALL, STAGING, TURN, Bisect, earlier, engine_site, plant, small_campaign
from e2e.soaking import gone, wait_for
from soakrig.bisect.campaign import SESSION
from soakrig.bisect.journal import JOURNAL
from soakrig.record.events import TurnDone
from soakrig.record.store import RunReader

FAULT = plant(action="error_frame", when={STAGING: "1"})
SECRETS = ("tok-4711-zulu", "key-alpha-1", "key-beta-2", "flag-gamma-3")


@pytest.fixture
def bisect(tmp_path: Path) -> Iterator[Bisect]:
    with Bisect(tmp_path) as one:
        yield one


def test_one_ctrl_c_ends_after_the_turn_in_flight(bisect: Bisect) -> None:
    bisect.start(f"{STAGING}=1,0", turns=100_000)
    bisect.wait_turns(2)
    bisect.signal(signal.SIGINT)
    done = bisect.done(60)
    bisect.nothing_left(seconds=1.0)
    result = done.object
    assert (done.code, result["state"], result["ended"]) == (2, "paused", "stopped by Ctrl-C")
    (launch,) = result["launches"]
    assert (launch["result"], launch["state"], launch["reason"]) == ("interrupted", "settled", "stopped by Ctrl-C")
    events = list(RunReader(bisect.folder / launch["folder"]).events())
    turns = [event for event in events if isinstance(event, TurnDone)]
    assert "aborted" not in {event.outcome for event in turns}
    assert len(turns) == sum(event.kind == "sent" for event in events) == len(bisect.journal(lambda j: j.turns(1)))
    assert json.loads((bisect.folder / "campaign.json").read_text()) == result
    assert "paused" in (bisect.folder / "report.md").read_text()
    page = bisect.ask("status", str(bisect.folder)).out
    assert f"soak bisect resume {bisect.folder}" in " ".join(page.split())


def test_two_ctrl_c_end_at_once(bisect: Bisect) -> None:
    bisect.start(f"{STAGING}=1,0", turns=100_000)
    bisect.wait_turns(2)
    os.kill(worker(bisect), signal.SIGSTOP)  # so that a turn is in flight and stays there
    (run,) = bisect.launches()
    events = RunReader(bisect.folder / "runs" / run.folder).events
    wait_for("a turn in flight", lambda: [one.kind for one in events() if one.kind in ("sent", "turn")][-1] == "sent")
    bisect.signal(signal.SIGINT)
    bisect.signal(signal.SIGTERM)
    began = time.monotonic()
    done = bisect.done(60)
    assert time.monotonic() - began < 60, "the turn would have hung for two minutes"
    bisect.nothing_left(seconds=1.0)
    (launch,) = done.object["launches"]
    assert (done.code, done.object["state"]) == (2, "paused")
    assert launch["result"] in ("interrupted", "faulted"), "a stopped process is a fault where it was seen in time"


def worker(bisect: Bisect) -> int:
    engine = bisect.engine()
    children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    return int(children[0])


def test_ctrl_c_while_the_engine_starts(bisect: Bisect, tmp_path: Path) -> None:
    bisect.start(f"{STAGING}=1,0", "--set", f"PYTHONPATH={engine_site(tmp_path, 'time.sleep(600)')}")
    bisect.wait("the engine", lambda: len(bisect.marked()) > 1)
    bisect.signal(signal.SIGTERM)
    done = bisect.done(60)
    bisect.nothing_left(seconds=1.0)
    (launch,) = done.object["launches"]
    assert (done.code, launch["result"], launch["reason"]) == (2, "interrupted", "stopped by SIGTERM")


def test_a_running_campaign_is_looked_at_and_not_taken_twice(bisect: Bisect) -> None:
    bisect.start(f"{STAGING}=1,0", "--cooldown", "1h", *FAULT)
    bisect.wait("the first launch", lambda: bisect.launches() and bisect.launches()[0].state == "settled")

    seen = bisect.ask("status", str(bisect.folder), "--json")
    assert (seen.code, seen.object["state"], seen.err) == (2, "running", "")
    assert [one["result"] for one in seen.object["launches"]] == ["faulted"]
    assert seen.object["ended"] == ""
    page = bisect.ask("status", "--runs-dir", str(bisect.runs))
    assert (page.code, page.err) == (2, "")
    assert "running" in page.out
    assert bisect.folder.name in page.out

    second = bisect.ask("resume", str(bisect.folder), "--json")
    assert second.object["exit_code"] == second.code == 3
    assert str(bisect.folder / ".lock") in second.object["error"]
    assert bisect.process is not None
    assert bisect.process.poll() is None
    assert len(bisect.launches()) == 1

    bisect.signal(signal.SIGTERM)  # in the pause: at once
    done = bisect.done(60)
    assert (done.code, done.object["state"], done.object["ended"]) == (2, "paused", "stopped by SIGTERM")
    assert [one["result"] for one in done.object["launches"]] == ["faulted"]


def test_a_spent_budget_ends_it_and_a_larger_one_goes_on(bisect: Bisect) -> None:
    bisect.start(f"{STAGING}=1,0", "--budget", "1s", *FAULT)
    done = bisect.done()
    first = done.object
    assert (done.code, first["state"], len(first["launches"])) == (2, "finished", 1)
    assert "budget" in first["ended"]

    bisect.resume()
    same = bisect.done()
    assert (same.code, len(same.object["launches"]), same.object["arms"]) == (2, 1, first["arms"])

    bisect.resume("--budget", "1h")
    bisect.wait_turns(1, run=2)
    bisect.signal(signal.SIGTERM)
    result = bisect.done(60).object
    assert (len(result["launches"]), result["state"], result["budget_hours"]) == (2, "paused", 1.0)


def test_a_finished_campaign_stays_as_it_is(bisect: Bisect) -> None:
    campaign = small_campaign({STAGING: ["1", "0"]}, bisect.kernel_log)
    folder = earlier(bisect.runs / "campaign", campaign, *[("control", 4)] * 12, *[(f"{STAGING}=0", None)] * 40)
    results = []
    for _ in range(2):
        bisect.resume()
        done = bisect.done()
        assert (done.code, done.object["state"], done.object["cause"]) == (0, "finished", [STAGING])
        results.append(done.object)
    assert results[0] == results[1]
    assert len(results[0]["launches"]) == 52
    assert not (folder / "runs").exists(), "nothing was launched"
    assert sum(note.what == SESSION for note in bisect.journal(lambda journal: journal.notes())) == 2


def test_a_resume_from_another_shell_launches_alike(bisect: Bisect) -> None:
    """What the caller's shell had when the campaign began is what every launch gets."""
    bisect.environment = {**os.environ, "HF_HOME": "/first", "VLLM_MOE_HOT_SLOTS": "7"}
    assert bisect.start(f"{STAGING}=1,0", die=(TURN, 1)).wait(120) == -signal.SIGKILL
    bisect.nothing_left()
    bisect.environment = {**os.environ, "HF_HOME": "/second"}
    bisect.resume()
    bisect.wait("the second engine", lambda: any(one.id == 2 and one.state == "probing" for one in bisect.launches()))
    environ = Path(f"/proc/{bisect.engine(2)}/environ").read_bytes().split(b"\0")
    assert b"HF_HOME=/first" in environ
    assert not [word for word in environ if word.startswith(b"VLLM_MOE_HOT_SLOTS")], "an export is in no arm"
    bisect.signal(signal.SIGTERM)
    assert bisect.done(60).code == 2


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_dry_run_launches_nothing_and_leaves_no_folder(bisect: Bisect, options: list[str]) -> None:
    done = bisect.ask(f"{STAGING}=1,0", *SMALL, "--dry-run", "--runs-dir", str(bisect.runs), *options)
    assert (done.code, done.err) == (0, "")
    if options:
        plan = json.loads(done.out)
        assert done.out.count("\n") == 1
        assert plan["dry_run"] is True
        assert [arm["name"] for arm in plan["arms"]] == ["control", f"{STAGING}=0"]
        assert plan["arms"][1]["env"][STAGING] == "0"
        assert "--experts=8" in plan["arms"][1]["argv"]
    else:
        assert f"{STAGING}=0  (one)" in done.out
        assert "price (modelled)" in done.out
    assert not bisect.runs.exists()
    assert not bisect.marked()


def test_no_secret_gets_into_what_is_told(bisect: Bisect, tmp_path: Path) -> None:
    """In fixed settings, in a variable and its arm, and in the words of a launch that is void because of one."""
    token, alpha, beta, _ = SECRETS
    again = f"""
if os.environ["MY_API_KEY"] == "{beta}" and not os.path.exists("{tmp_path}/once"):
    open("{tmp_path}/once", "w").close()
    os.environ["MY_API_KEY"] = "{alpha}"  # an engine that was started by a script of somebody's own
    os.execv(sys.executable, sys.orig_argv)
"""
    settings = {"HF_TOKEN": token, "PYTHONPATH": engine_site(tmp_path, again)}
    campaign = small_campaign({"MY_API_KEY": [alpha, beta]}, bisect.kernel_log, settings=settings)
    earlier(bisect.runs / "campaign", campaign, *[("control", turn) for turn in (1, 2, 3, 5)])
    bisect.resume()
    bisect.wait("two launches of the arm", lambda: any(run.id == 6 and run.turns for run in bisect.launches()))
    bisect.signal(signal.SIGTERM)
    done = bisect.done()
    void, last = done.object["launches"][4:6]
    assert void["result"] == "void"
    assert "MY_API_KEY=[redacted] was asked for" in void["reason"]
    assert last["result"] in ("interrupted", "clean")
    told = done.out + done.err
    told += bisect.ask("status", str(bisect.folder), "--json").out + bisect.ask("status", str(bisect.folder)).out
    for path in bisect.folder.rglob("*"):
        told += f"{path}\n"
        if path.is_file() and not path.name.startswith(JOURNAL) and path.suffix != ".log":
            told += path.read_bytes().decode("utf-8", "replace")
    assert "HF_TOKEN" in told
    assert "MY_API_KEY=[redacted]" in told
    assert [secret for secret in SECRETS if secret in told] == []
    assert oct((bisect.folder / JOURNAL).stat().st_mode)[-3:] == "600", "it has them, to launch again"


def test_no_secret_gets_into_a_dry_run(bisect: Bisect) -> None:
    token, alpha, beta, gamma = SECRETS
    words = [f"MY_API_KEY={alpha},{beta}", "--set", f"HF_TOKEN={token}", f"--arg:--served-model-name=plain,{gamma}"]
    for options in ([], ["--json"]):
        done = bisect.ask(*words, "--dry-run", *options)
        assert done.code == 0, done.err
        assert [secret for secret in SECRETS[:3] if secret in done.out + done.err] == []
        assert gamma in done.out, "this one is none"


DOUBLE_FORK = """
import glob
out = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
alive = [path for path in glob.glob(out + "/daemon-*") if os.path.exists("/proc/" + path.rpartition("-")[2])]
if alive:
    open(out + "/left-of-the-launch-before", "w").close()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        open(out + f"/daemon-{os.getpid()}", "w").close()
        os.closerange(0, 1024)
        os.execve("/bin/sleep", ["sleep", "600"], {})
    os._exit(0)
os.wait()
"""


def test_a_double_forking_engine_leaves_no_process(bisect: Bisect, tmp_path: Path) -> None:
    """A process in a session of its own, with no environment, and no parent that knows it."""
    bisect.start(f"{STAGING}=1,0", "--set", f"PYTHONPATH={engine_site(tmp_path, DOUBLE_FORK)}", *FAULT)

    def daemons() -> list[int]:
        return [int(path.name.rpartition("-")[2]) for path in tmp_path.glob("daemon-*")]

    try:
        bisect.wait_turns(1, run=2)
        assert len(daemons()) == 2
        assert sorted(map(gone, daemons())) == [False, True], "only that of the second launch may be there"
        bisect.kill()
        bisect.nothing_left(daemons())
        bisect.resume(die=(TURN, 1))
        assert bisect.done().code == -signal.SIGKILL
        assert len(daemons()) == 3
        bisect.nothing_left(daemons())
        assert not (tmp_path / "left-of-the-launch-before").exists()
    finally:
        for pid in daemons():
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
