"""The index of a runs folder: every folder has a row, the folders are the truth, and nothing is lost with the file."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import T0, manifest
from campaign_results import running, single
from run_folders import long_run, write_run
from soakrig.bisect.journal import JOURNAL
from soakrig.bisect.minimize.loop import SEARCH
from soakrig.errors import RecordError
from soakrig.record.campaign import CAMPAIGN_RESULT
from soakrig.record.run_index import APPLICATION, INDEX, SCHEMA, RunIndex
from soakrig.record.run_summary import CAMPAIGN_JOURNAL, RunSummary
from soakrig.record.store import EVENTS, MANIFEST, RESULT, RunStore
from soakrig.reproducers.measure.folder import MeasureFolder


def rows_of(runs: Path, **options: Any) -> dict[str, RunSummary]:
    with RunIndex(runs, keep=True, **options) as index:
        index.refresh()
        return {row.id: row for row in index.rows()}


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 run folders of 20 turns, a second apart."""
    base = tmp_path_factory.mktemp("thousand")
    first = write_run(base / "r0000", long_run(20), turns=20)
    made = orjson.loads((first / MANIFEST).read_bytes())
    for n in range(1, 1000):
        folder = base / f"r{n:04d}"
        folder.mkdir()
        for name in (EVENTS, RESULT):
            os.link(first / name, folder / name)
        (folder / MANIFEST).write_bytes(orjson.dumps(made | {"run_id": folder.name, "created": T0 + n}))
    return base


def test_a_thousand_folders_are_indexed_in_under_10_seconds(thousand: Path) -> None:
    with RunIndex(thousand, keep=True) as index:
        began = time.perf_counter()
        assert index.refresh() == 1000
        assert time.perf_counter() - began < 10
        assert index.refresh() == 0, "nothing changed, nothing is read"
        rows = index.rows()
        assert [row.id for row in rows[:2]] == ["r0999", "r0998"]
        assert len(index.with_settings(rows[0].settings)) == 1000
    with RunIndex(thousand, keep=True) as again:
        assert again.refresh() == 0
    assert (thousand / INDEX).stat().st_mode & 0o777 == 0o600


def test_a_row_says_what_the_folder_says(tmp_path: Path) -> None:
    write_run(tmp_path / "bad", long_run(40, faults=2, bad_every=40), turns=40, created=5.0, launched="embedded")
    row = rows_of(tmp_path)["bad"]
    assert (row.kind, row.created, row.reproducer, row.engine, row.model) == ("run", 5.0, "agent-loop", "embedded", "m")
    assert (row.verdict, row.faults, row.exposure, row.ended) == ("fail", 2, 40, "completed")
    assert row.signatures == {"Xid 31 FAULT_PDE": 2}
    assert "Xid 31" in row.said
    assert row.settings
    assert (row.simulated, row.running, row.unread) == (False, False, "")


def test_changes_are_seen_and_only_they_are_read(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_run(tmp_path / name, long_run(3))
    with RunIndex(tmp_path, keep=True) as index:
        assert index.refresh() == 3
        result = json.loads((tmp_path / "b" / RESULT).read_text())
        result |= {"verdict": "inconclusive", "exit_code": 2}
        (tmp_path / "b" / RESULT).write_text(json.dumps(result))
        shutil.rmtree(tmp_path / "c")
        write_run(tmp_path / "d", long_run(3))
        assert index.refresh() == 2
        assert {row.id: row.verdict for row in index.rows()} == {"a": "pass", "b": "inconclusive", "d": "pass"}
        assert index.get("c") is None


def _no_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def _cut_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes()[:40])


def _newer(folder: Path) -> None:
    data = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(data | {"schema_": 2}))


def _no_result(folder: Path) -> None:
    (folder / RESULT).unlink()


def _cut_result(folder: Path) -> None:
    (folder / RESULT).write_bytes((folder / RESULT).read_bytes()[:100])


def _other_result(folder: Path) -> None:
    (folder / RESULT).write_text('{"schema": 9}')


def _cut_events(folder: Path) -> None:
    (folder / RESULT).unlink()
    events = folder / EVENTS
    events.write_bytes(events.read_bytes()[:-200])


def _broken_events(folder: Path) -> None:
    (folder / RESULT).unlink()
    (folder / EVENTS).write_bytes(b'{"kind": "no such"}\n')


def _no_events(folder: Path) -> None:
    (folder / RESULT).unlink()
    (folder / EVENTS).unlink()


def _older(folder: Path) -> None:
    """As an earlier version of this schema left it: without what was added since."""
    for name, added in ((MANIFEST, ("load",)), (RESULT, ("unknown", "offload"))):
        data = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({key: value for key, value in data.items() if key not in added}))


BROKEN = [
    (_no_manifest, "unreadable", "", "manifest.json cannot be read"),
    (_cut_manifest, "unreadable", "", "manifest.json cannot be read"),
    (_newer, "unreadable", "", "manifest.json cannot be read"),
    (_no_result, "run", "pass", ""),
    (_cut_result, "run", "pass", "was cut: judged from the events"),
    (_other_result, "run", "", "result.json cannot be read"),
    (_cut_events, "run", "inconclusive", ""),
    (_broken_events, "run", "", "events.jsonl line 1 is no event"),
    (_no_events, "run", "", "events.jsonl cannot be read"),
    (_older, "run", "pass", ""),
]


@pytest.mark.parametrize(("harm", "kind", "verdict", "unread"), BROKEN, ids=lambda one: getattr(one, "__name__", ""))
def test_no_folder_is_missing(tmp_path: Path, harm: Any, kind: str, verdict: str, unread: str) -> None:
    write_run(tmp_path / "fine", long_run(5), turns=5)
    harm(write_run(tmp_path / "harmed", long_run(5), turns=5))
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "latest").symlink_to("fine")
    (tmp_path / "a-file").touch()
    rows = rows_of(tmp_path)
    assert set(rows) == {"fine", "harmed"}
    assert (rows["harmed"].kind, rows["harmed"].verdict) == (kind, verdict)
    assert unread in rows["harmed"].unread
    assert bool(unread) == bool(rows["harmed"].unread)
    assert rows["fine"].verdict == "pass"


@given(st.data())
def test_any_cut_of_any_file_leaves_a_row(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    base = tmp_path_factory.mktemp("cut")
    folder = write_run(base / "run", long_run(4, faults=1), turns=4)
    name = data.draw(st.sampled_from([MANIFEST, RESULT, EVENTS]))
    raw = (folder / name).read_bytes()
    (folder / name).write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    if data.draw(st.booleans()):
        (folder / RESULT).unlink()
    with RunIndex(base, keep=False) as index:
        index.refresh()
        (row,) = index.rows()
    assert row.verdict or row.unread


def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "plain", long_run(3))
    os.rename(os.fsencode(folder), os.fsencode(tmp_path) + b"/odd-\xff\n")
    assert set(rows_of(tmp_path)) == {"odd-\\xff\n"}


def test_a_run_that_goes_on_and_its_end_without_a_result(tmp_path: Path) -> None:
    made = manifest(run_id="now")
    store = RunStore.create(tmp_path, made)
    with RunIndex(tmp_path, keep=True) as index:
        index.refresh()
        assert [(row.running, row.verdict) for row in index.rows()] == [(True, "")]
        store.close()
        index.refresh()
        assert [(row.running, row.verdict) for row in index.rows()] == [(False, "inconclusive")]


def test_campaigns_and_their_launches(tmp_path: Path) -> None:
    night, now = tmp_path / "night", tmp_path / "now"
    write_run(night / "runs" / "run-0004", long_run(7, faults=1), turns=60)
    write_run(night / "runs" / "run-0099", long_run(7, faults=1), turns=60)
    (night / CAMPAIGN_RESULT).write_bytes(orjson.dumps(single().to_json()))
    now.mkdir()
    (now / JOURNAL).write_bytes(b"no database")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / CAMPAIGN_RESULT).write_text("{")
    rows = rows_of(tmp_path, campaigns=lambda folder: running())
    assert (rows["night"].kind, rows["night"].verdict, rows["night"].ended) == (
        "campaign", "single", "every arm is settled",
    )  # fmt: skip
    assert rows["night"].faults == 17
    assert (rows["now"].running, rows["now"].simulated) == (True, True)
    assert rows["broken"].kind == "unreadable"
    assert "campaign.json cannot be read" in rows["broken"].unread
    launches = {name: row for name, row in rows.items() if row.campaign}
    assert {name: row.counted for name, row in launches.items()} == {
        "night/runs/run-0004": True, "night/runs/run-0099": False,
    }  # fmt: skip
    assert launches["night/runs/run-0004"].kind == "launch"
    assert JOURNAL == CAMPAIGN_JOURNAL


def test_what_else_this_tool_leaves_is_no_broken_run(tmp_path: Path) -> None:
    with MeasureFolder(tmp_path, "speed", {}) as folder:
        pass
    (tmp_path / "m" / SEARCH).mkdir(parents=True)
    (tmp_path / "m" / SEARCH / JOURNAL).touch()
    rows = rows_of(tmp_path)
    assert {row.kind for row in rows.values()} == {"other"}
    assert "soak measure" in rows[folder.path.name].said
    assert "soak repro minimize" in rows["m"].said


def test_a_journal_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    def refuses(folder: Path) -> Any:
        raise RecordError(f"{folder} is damaged")

    (tmp_path / "c").mkdir()
    (tmp_path / "c" / JOURNAL).touch()
    assert "is damaged" in rows_of(tmp_path, campaigns=refuses)["c"].unread


def _newer_index(place: Path) -> None:
    with sqlite3.connect(place) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    db.close()


def _torn(place: Path) -> None:
    place.write_bytes(place.read_bytes()[:5000])


def _without_table(place: Path) -> None:
    with sqlite3.connect(place) as db:
        db.execute("DROP TABLE folders")
    db.close()


SPOILT = [
    lambda place: place.unlink(),
    lambda place: place.write_bytes(b""),
    lambda place: place.write_bytes(b"no database at all, but long enough to be read as one" * 40),
    _torn,
    _newer_index,
    _without_table,
]


@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("open_meanwhile", [False, True])
def test_a_spoilt_index_is_made_anew(tmp_path: Path, spoil: Any, open_meanwhile: bool) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, long_run(3))
    before = rows_of(tmp_path)
    if open_meanwhile and spoil is not _newer_index:
        with RunIndex(tmp_path, keep=True) as index:
            index.refresh()
            spoil(tmp_path / INDEX)
            assert {row.id: row for row in index.rows()} == before
            index.refresh()
            assert {row.id: row for row in index.rows()} == before
    else:
        spoil(tmp_path / INDEX)
    assert rows_of(tmp_path) == before
    with sqlite3.connect(tmp_path / INDEX) as db:
        assert db.execute("PRAGMA user_version").fetchone()[0] == SCHEMA
        assert db.execute("PRAGMA application_id").fetchone()[0] == APPLICATION
    db.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [INDEX, "a", "b"]


def test_a_database_of_something_else_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    runs = tmp_path / "runs"
    write_run(runs / "a", long_run(3))
    with sqlite3.connect(runs / INDEX) as db:
        db.execute("PRAGMA application_id = 42")
        db.execute("CREATE TABLE precious (x)")
    db.close()
    before = (runs / INDEX).read_bytes()
    assert set(rows_of(runs)) == {"a"}
    assert (runs / INDEX).read_bytes() == before
    assert len(list((cache / "soakrig").glob("index-*.sqlite"))) == 1


def test_where_nothing_can_be_written_the_rows_live_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "a", long_run(3))
    (runs / INDEX).mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with RunIndex(runs, keep=True) as index:
        assert index.refresh() == 1
        assert index.place is None
        assert [row.id for row in index.rows()] == ["a"]


def test_without_keep_nothing_is_written(tmp_path: Path) -> None:
    write_run(tmp_path / "a", long_run(3))
    with RunIndex(tmp_path, keep=False) as index:
        assert index.refresh() == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_runs_folder_that_is_not_there(tmp_path: Path) -> None:
    with RunIndex(tmp_path / "none", keep=True) as index, pytest.raises(RecordError, match="none cannot be read"):
        index.refresh()
    assert not (tmp_path / "none").exists()


WRITER = """
import sys
from pathlib import Path
from soakrig.record.run_index import RunIndex
sys.stdin.readline()
for _ in range(15):
    with RunIndex(Path(sys.argv[1]), keep=True) as index:
        index.refresh()
        assert len(index.rows()) == 40, len(index.rows())
    if sys.argv[2] == "deletes":
        (Path(sys.argv[1]) / ".index.sqlite").unlink(missing_ok=True)
print("done")
"""


def test_several_processes_at_once_one_of_which_deletes_it(tmp_path: Path) -> None:
    for n in range(40):
        write_run(tmp_path / f"r{n:02d}", long_run(3), created=float(n))
    argv = [sys.executable, "-W", "error", "-c", WRITER, str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    writers = [subprocess.Popen([*argv, how], **pipes) for how in ("keeps", "keeps", "deletes")]
    for writer in writers:
        writer.stdin.write(b"\n")  # type: ignore[union-attr]
        writer.stdin.flush()  # type: ignore[union-attr]
    for writer in writers:
        out, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors.decode()
        assert out == b"done\n"
    assert len(rows_of(tmp_path)) == 40
