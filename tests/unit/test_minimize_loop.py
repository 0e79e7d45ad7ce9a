"""The loop of a minimisation over a real journal: to its end, killed and taken up, stopped, stuck, without room."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from builders import T0, done, manifest
from minimize_world import SIGNATURE, Hazard, WorldExecutor, floor, material, no_start
from soakrig.bisect.campaign import ENDED, End
from soakrig.bisect.campaign_file import Campaign, read_campaign
from soakrig.bisect.journal import Journal
from soakrig.bisect.journal_rows import Turn
from soakrig.bisect.launch_result import LaunchResult
from soakrig.bisect.minimize import loop as minimize_loop
from soakrig.bisect.minimize.decision import Demand
from soakrig.bisect.minimize.hunt import Hunt
from soakrig.bisect.minimize.loads import is_the_fault, loads_seen
from soakrig.bisect.minimize.loop import SEARCH, Minimisation, MinimizeLoop, begin, reopen
from soakrig.bisect.minimize.products import write_products
from soakrig.bisect.minimize.requests import shaped
from soakrig.bisect.minimize.result import minimize_result
from soakrig.bisect.minimize.shape import Shape
from soakrig.clock import FakeClock
from soakrig.errors import RecordError, StoreError, UsageError
from soakrig.record.events import dump
from soakrig.record.request_log import read_requests

MATERIAL = material(conversations=2)
WORLD = floor(1 / 5, least_tools=4, least_context=2300)


class KilledError(BaseException):
    """Stands for the end of the process: nothing of it may be written any more."""


def start(folder: Path, **fields: Any) -> tuple[Minimisation, Journal]:
    hunt = Hunt.from_json({"reproducer": "replay", "signature": SIGNATURE, "turns": 1 << 24, **fields})
    return begin(folder, folder / "run", hunt, MATERIAL, Demand())


def go(journal: Journal, made: Minimisation, executor: WorldExecutor, **more: Any) -> End:
    return MinimizeLoop(journal, made, executor, clock=FakeClock(), **more).run()


def finish(
    folder: Path, hazard: Hazard = WORLD, seed: int = 1, **more: Any
) -> tuple[End, dict[str, Any], WorldExecutor]:
    executor = WorldExecutor(hazard, seed, **more)
    made, journal = start(folder)
    with journal:
        end = go(journal, made, executor)
        return end, minimize_result(journal, made, {}), executor


def test_to_the_end_with_its_result(tmp_path: Path) -> None:
    end, result, executor = finish(tmp_path)
    assert (end.kind, result["state"], result["exit_code"]) == ("decided", "finished", 0)
    to = result["to"]
    assert 4 <= to["tools"] <= 5
    assert (to["conversations"], to["requests"], to["stream"]) == (1, 1, False)
    assert to["faults"] >= 5
    assert to["hazard"]["low"] < 1 / 5 < to["hazard"]["high"]
    assert to["hazard"]["kind"] == "measured"
    assert to["context"]["kind"] == "derived", "no engine has counted it here"
    assert result["turns_to_fault"] > 5
    assert result["launches"] == len(executor.shapes)
    assert {one["axis"] for one in result["trials"]} >= {"conversations", "requests", "stream", "tools", "context"}
    assert orjson.loads(orjson.dumps(result)) == result


def test_every_launch_finds_its_load_on_disk(tmp_path: Path) -> None:
    looked: list[tuple[Shape, int]] = []

    def look(shape: Shape, number: int) -> None:
        bodies = [one.body for one in read_requests(tmp_path / "loads" / shape.name)]
        assert bodies == [one.body for lane in shaped(MATERIAL, shape) for one in lane]
        looked.append((shape, number))

    _, _, executor = finish(tmp_path, outcome=look)
    assert len(looked) == len(executor.shapes)
    assert {path.name for path in executor.loads} == {shape.name for shape, _ in looked}


@pytest.mark.parametrize("seed", range(4))
def test_killed_anywhere_it_goes_on_to_the_same_end(tmp_path: Path, seed: int) -> None:
    """A launch that nobody finished does not count, and no settled one is made twice."""
    executor, entries, kills = WorldExecutor(WORLD, seed), 3 + seed, 0
    made, journal = start(tmp_path)
    end: End | None = None
    while end is None:
        settled = {run.id: run for run in journal.runs() if run.state == "settled"}
        left = entries if kills < 8 else 1 << 30

        def killed(note: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise KilledError

        with journal:
            try:
                end = go(journal, made, executor, changed=killed)
            except KilledError:
                kills, entries = kills + 1, entries + 7
            now = {run.id: run for run in journal.runs()}
            assert {number: now[number] for number in settled} == settled
        if end is None:
            journal = Journal.resume(tmp_path / SEARCH)
            made = reopen(journal)
    assert end.kind == "decided"
    assert kills >= 5
    with Journal.read(tmp_path / SEARCH) as journal:
        result = minimize_result(journal, made, {})
        assert all(run.state == "settled" for run in journal.runs())
    assert (result["state"], result["launches"]) == ("finished", len(now))
    assert 4 <= result["to"]["tools"] <= 5
    assert result["void"] <= 8


def test_a_stop_ends_after_the_launch_and_says_what_is_known(tmp_path: Path) -> None:
    made, journal = start(tmp_path)
    executor = WorldExecutor(WORLD, 1)
    with journal:
        loop = MinimizeLoop(journal, made, executor, clock=FakeClock())
        loop.changed = lambda note: loop.stop.ask("Ctrl-C") if len(executor.shapes) == 9 else None
        end = loop.run()
        result = minimize_result(journal, made, {})
    assert (end.kind, end.why) == ("stopped", "stopped by Ctrl-C")
    assert len(executor.shapes) == 9
    assert (result["state"], result["exit_code"]) == ("stopped", 2)
    assert "not come to its end" in result["not_said"][0]


def test_the_budget_is_the_launches_own_time(tmp_path: Path) -> None:
    made, journal = start(tmp_path, budget=1e-9)
    with journal:
        end = go(journal, made, WorldExecutor(WORLD))
        assert (end.kind, len(journal.runs())) == ("budget", 1)
        assert minimize_result(journal, made, {})["state"] == "budget"
        journal.note("budget", seconds=3600.0)
        assert go(journal, made, WorldExecutor(WORLD, 1)).kind == "decided"


def test_launches_that_say_nothing_end_it_after_the_third(tmp_path: Path) -> None:
    end, result, executor = finish(tmp_path, outcome=lambda shape, number: no_start())
    assert end.kind == "wedged"
    assert "made up" in end.why
    assert len(executor.shapes) == 3
    assert (result["state"], result["exit_code"]) == ("stuck", 2)


def test_a_void_launch_between_others_is_made_again(tmp_path: Path) -> None:
    end, result, _ = finish(tmp_path, outcome=lambda shape, number: no_start() if number % 4 == 0 else None)
    assert end.kind == "decided"
    assert 4 <= result["to"]["tools"] <= 5
    assert result["void"] > 5


def test_a_load_with_another_fault_is_not_used(tmp_path: Path) -> None:
    def refused(shape: Shape, number: int) -> LaunchResult | None:
        return LaunchResult("faulted", 1, "turn malformed") if shape.tools == 0 else None

    _, result, executor = finish(tmp_path, floor(1 / 5, least_tools=0, least_context=0), outcome=refused)
    assert sum(shape.tools == 0 for shape in executor.shapes) == 3
    assert result["state"] == "finished"
    assert result["to"]["tools"] == 1
    assert "turn malformed" in next(one["why"] for one in result["trials"] if one["load"].count("-t0-"))


def test_a_run_that_does_not_fault_again(tmp_path: Path) -> None:
    end, result, _ = finish(tmp_path, floor(0.0))
    assert end.kind == "decided"
    assert (result["state"], result["exit_code"]) == ("not_again", 2)
    assert "no fault in" in result["why"]


def test_a_run_whose_load_meets_another_fault_each_time(tmp_path: Path) -> None:
    """A server that knows no such model, say: not 200 launches of that."""
    _, result, executor = finish(tmp_path, outcome=lambda shape, number: LaunchResult("faulted", 1, "turn http_error"))
    assert len(executor.shapes) == 3
    assert (result["state"], result["why"]) == ("not_again", "gives another fault: turn http_error")


def test_no_room_ends_it_before_a_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, journal = start(tmp_path)

    def full(folder: Path) -> None:
        raise StoreError("no room")

    monkeypatch.setattr(minimize_loop, "need_room", full)
    with journal, pytest.raises(StoreError, match="no room"):
        go(journal, made, WorldExecutor(WORLD))
    monkeypatch.undo()
    with Journal.resume(tmp_path / SEARCH) as journal:
        assert go(journal, reopen(journal), WorldExecutor(WORLD, 1)).kind == "decided"
        assert sum(note.what == ENDED for note in journal.notes()) == 1


def launch(
    journal: Journal, shape: Shape, *outcomes: str, signature: str | None, cap: float = 20, folder: str = ""
) -> None:
    run = journal.plan(shape.name, cap=cap)
    journal.move(run, "launching", folder=folder)
    for state in ("ready", "probing"):
        journal.move(run, state)  # type: ignore[arg-type]
    for number, outcome in enumerate(outcomes, 1):
        journal.turn(run, Turn(number, outcome))
    journal.move(run, "faulted" if signature else "clean", signature=signature)
    for state in ("teardown", "settled"):
        journal.move(run, state)  # type: ignore[arg-type]


def test_what_counts_as_the_fault(tmp_path: Path) -> None:
    made, journal = start(tmp_path)
    whole, small = made.whole, made.whole.with_("tools", 3)
    plain = small.with_("stream", 0)
    with journal:
        launch(journal, whole, "ok", "error_frame", signature=SIGNATURE)
        launch(journal, whole, "ok", "ok", "hung", signature="turn hung")
        launch(journal, small, "hung", signature="turn hung")
        launch(journal, small, "ok", "ok", signature=None)
        for status in (400, 500):
            folder = journal.folder / "runs" / f"s{status}"
            answered(folder, status)
            launch(journal, plain, "http_error", signature="turn http_error", folder=folder.name)
        loads = loads_seen(journal, MATERIAL, whole)
        runs = journal.runs()
        assert [is_the_fault(run, Shape.read(run.arm), MATERIAL, journal.folder) for run in runs] == [
            True, False, False, False, False, True,
        ]  # fmt: skip
        assert not is_the_fault(runs[5], plain.with_("stream", 1), MATERIAL, journal.folder), "a stream shows it itself"
    assert (loads.seen[whole].faults, loads.seen[whole].exposure) == (1, 5), "of the run's own load it is exposure"
    assert (loads.seen[small].faults, loads.seen[small].exposure) == (0, 2)
    assert (loads.seen[plain].faults, loads.seen[plain].exposure) == (1, 1), "a refused request says nothing"
    assert loads.refused == {}


def answered(folder: Path, status: int) -> None:
    """A run folder with one turn that got that status."""
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(manifest().model_dump_json())
    (folder / "events.jsonl").write_bytes(dump(done(1, T0, "http_error", status=status)))


def test_what_is_left_for_people(tmp_path: Path) -> None:
    made, journal = start(tmp_path, settings={"HF_TOKEN": "hush", "OMP_NUM_THREADS": "1"}, flags=['--x=a"b\\c'])
    journal.close()
    lanes = shaped(MATERIAL, made.whole.with_("requests", 1))
    files = write_products(tmp_path, lanes, made.hunt, 17)
    campaign = read_campaign(Path(files["campaign"]))
    assert (campaign.reproducer, campaign.turns, campaign.load.conversations) == ("replay", 17, 2)
    assert campaign.flags == ['--x=a"b\\c']
    text = Path(files["campaign"]).read_text()
    assert "hush" not in text
    assert "stands for a secret" in text
    assert tomllib.loads(text)["load"]["parameters"]["path"] == str(tmp_path / "load")
    assert [one.body for one in read_requests(tmp_path / "load")] == [one.body for lane in lanes for one in lane]
    script = Path(files["script"]).read_text()
    names: dict[str, Any] = {"__name__": "made"}
    exec(compile(script, "reproduce.py", "exec"), names)
    assert names["LOAD"] == [[one.body.decode() for one in lane] for lane in lanes]
    assert (names["SIGNATURE"], names["TURNS"]) == (SIGNATURE, 34)
    assert "soakrig." not in script
    assert "noqa" not in script
    assert os.stat(files["script"]).st_mode & 0o777 == 0o600


def test_a_bisect_s_folder_is_no_minimisation(tmp_path: Path) -> None:
    with Journal.create(tmp_path, {"format": 1}) as journal, pytest.raises(RecordError, match="no minimisation"):
        reopen(journal)
    _, journal = start(tmp_path / "other")
    journal.close()
    with pytest.raises(UsageError, match="not a campaign"):
        Campaign.from_json(journal.campaign)


def test_a_hunt_refuses_what_a_campaign_refuses() -> None:
    with pytest.raises(UsageError, match="'embedded' was meant"):
        Hunt.from_json({"engine": "embeded"}).check()
    refuse: Callable[[], Any] = Hunt.from_json({"kernel_log": "/no/such/log"}).check
    with pytest.raises((UsageError, RecordError)):
        refuse()
