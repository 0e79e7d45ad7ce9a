"""The index of a runs folder: one row a run or campaign, made from the folders, so that a list takes no reading.

It is never the truth. It may be deleted at any time, is brought up to date by size and time of the files, and where it
is broken or of another version it is made anew. Several processes may use it at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import orjson

from soakrig.errors import RecordError
from soakrig.record.run_summary import (
    LAUNCHES,
    CampaignReader,
    RunSummary,
    is_campaign,
    stamp,
    summarize_campaign,
    summarize_other,
    summarize_run,
    unreadable,
)
from soakrig.record.store import MANIFEST

Answer = TypeVar("Answer")
INDEX = ".index.sqlite"
APPLICATION = 0x536F4978  # "SoIx"; https://sqlite.org/pragma.html#pragma_application_id
SCHEMA = 1
"""In ``user_version``. Any other number means: made by another version, make it anew."""

TRIES = 3
_JSON = ("signatures", "launch_results")
_FLAGS = ("settings_known", "counted", "simulated", "running")
_COLUMNS = tuple(field.name for field in fields(RunSummary))
_TYPES = {"created": "REAL", "faults": "INTEGER", "exposure": "INTEGER"} | dict.fromkeys(_FLAGS, "INTEGER")
_LAYOUT = ", ".join(["stamp TEXT NOT NULL", *(f"{name} {_TYPES.get(name, 'TEXT')}" for name in _COLUMNS)])
_TABLES = (f"CREATE TABLE folders ({_LAYOUT}, PRIMARY KEY (id))", "CREATE INDEX by_settings ON folders (settings)")
_WRITE = f"INSERT OR REPLACE INTO folders VALUES ({', '.join('?' * (len(_COLUMNS) + 1))})"  # noqa: S608  (our names)
_READ = f"SELECT {', '.join(_COLUMNS)} FROM folders"  # noqa: S608


class RunIndex:
    """Rows of the folders below ``runs_dir``. A context manager; may be used from any thread.

    ``keep``: in a file (``.index.sqlite`` there, or below the user's cache where that cannot be written); otherwise a
    file that is there is used, and without one the rows live in memory. ``campaigns``: reads a campaign's journal.
    ``place``: the file, None for memory.
    """

    def __init__(self, runs_dir: Path, *, keep: bool, campaigns: CampaignReader | None = None) -> None:
        self.runs_dir, self._campaigns = runs_dir, campaigns
        self._lock = threading.Lock()
        self.place: Path | None = None
        self._db = self._open(keep=keep)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def refresh(self) -> int:
        """Bring the rows up to date; how many were read anew. Raises ``RecordError`` where the runs folder itself
        cannot be read. A file that was deleted or got broken meanwhile is made anew."""
        with self._lock:
            if self.place is not None and not self.place.exists():
                self._reopen()
            return self._insisting(self._refresh)

    def rows(self) -> list[RunSummary]:
        """Every row, the newest first."""
        return self._query("ORDER BY created DESC, id DESC")

    def get(self, name: str) -> RunSummary | None:
        """The row of that id, and of no other: what a page is asked for is looked up here and nowhere else."""
        return next(iter(self._query("WHERE id = ?", name)), None)

    def with_settings(self, settings: str) -> list[RunSummary]:
        """Runs and launches with these settings, the oldest first."""
        return self._query("WHERE settings = ? AND settings != '' ORDER BY created, id", settings)

    def launches(self, campaign: str) -> list[RunSummary]:
        """Those of a campaign, by name."""
        return self._query("WHERE campaign = ? AND campaign != '' ORDER BY id", campaign)

    def folder(self, row: RunSummary) -> Path:
        """Where it is."""
        return self.runs_dir / row.id

    def _query(self, rest: str, *values: str) -> list[RunSummary]:
        def read() -> list[Any]:
            return self._db.execute(f"{_READ} {rest}", values).fetchall()

        def read_anew() -> list[Any]:
            self._refresh()
            return read()

        with self._lock:
            try:
                found = read()
            except sqlite3.DatabaseError:
                self._reopen()
                found = self._insisting(read_anew)
        return [_row(one) for one in found]

    def _insisting(self, do: Callable[[], Answer]) -> Answer:
        """``do``; again with the file made anew where it was deleted or broken meanwhile, and at last in memory."""
        for _ in range(TRIES):
            try:
                return do()
            except sqlite3.DatabaseError:
                self._reopen()
        self._db.close()
        self.place, self._db = None, _in_memory()
        return do()

    def _refresh(self) -> int:
        known: dict[str, tuple[str, bool, str]] = {
            name: (made, bool(running), launches)
            for name, made, running, launches in self._db.execute(
                "SELECT id, stamp, running, launch_results FROM folders"
            )
        }
        seen: set[str] = set()
        fresh: list[tuple[str, RunSummary]] = []

        def look(folder: Path, name: str, campaign: str = "", result: str | None = None) -> RunSummary | None:
            seen.add(name)
            made = f"{stamp(folder)} {result}"
            before = known.get(name)
            if before is not None and before[0] == made and not before[1]:
                return None
            row = self._summarize(folder, name, campaign, result)
            fresh.append((made, row))
            return row

        for folder in _folders(self.runs_dir):
            name = _name(folder)
            row = look(folder, name)
            launches = row.launch_results if row is not None else orjson.loads(known[name][2])
            if (row.kind == "campaign" if row is not None else launches) or is_campaign(folder):
                with contextlib.suppress(RecordError):  # a campaign without a launch has no such folder
                    for one in _folders(folder / LAUNCHES):
                        look(one, f"{name}/{LAUNCHES}/{_name(one)}", name, launches.get(one.name))
        gone = [(name,) for name in known if name not in seen]
        if fresh or gone:
            with self._transaction():
                self._db.executemany(_WRITE, [(made, *_values(row)) for made, row in fresh])
                self._db.executemany("DELETE FROM folders WHERE id = ?", gone)
        return len(fresh)

    def _summarize(self, folder: Path, name: str, campaign: str, result: str | None) -> RunSummary:
        try:
            if not campaign and is_campaign(folder):
                return summarize_campaign(folder, name, self._campaigns)
            other = None if (folder / MANIFEST).exists() else summarize_other(folder, name)
            return other or summarize_run(folder, name, campaign=campaign, launch_result=result)
        except Exception as error:  # no folder may hide the others
            return unreadable(folder, name, f"it cannot be read: {type(error).__name__}: {error}", campaign=campaign)

    @contextlib.contextmanager
    def _transaction(self) -> Generator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _reopen(self) -> None:
        self._db.close()
        self._db = self._open(keep=self.place is not None)

    def _open(self, *, keep: bool) -> sqlite3.Connection:
        for place in self._places(keep=keep):
            with contextlib.suppress(sqlite3.Error, OSError):
                db = _open_file(place)
                self.place = place
                return db
        self.place = None
        return _in_memory()

    def _places(self, *, keep: bool) -> list[Path]:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "soakrig"
        named = hashlib.sha256(os.fsencode(self.runs_dir.resolve())).hexdigest()[:16]
        places = [self.runs_dir / INDEX, cache / f"index-{named}.sqlite"]
        if not keep:
            return [place for place in places if place.exists()]
        with contextlib.suppress(OSError):
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        return places


def _in_memory() -> sqlite3.Connection:
    return _laid_out(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))


def _open_file(place: Path) -> sqlite3.Connection:
    """An index that is there, or a new one in its place; one of something else is left alone. Raises ``sqlite3.Error``
    or ``OSError`` where there can be none."""
    if place.exists():
        db: sqlite3.Connection | None = None
        try:
            db = _connect(place)
            mark, schema = _pragma(db, "application_id"), _pragma(db, "user_version")
            if mark == APPLICATION and schema == SCHEMA:
                db.execute("BEGIN IMMEDIATE")  # can it be written?
                db.execute("ROLLBACK")
                db.execute(f"{_READ} LIMIT 1").fetchall()
                if db.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok":
                    return db
            if mark not in (0, APPLICATION):
                raise OSError(f"{place} is a database of something else")
        except sqlite3.OperationalError as error:
            if "locked" in str(error) or "readonly" in str(error):
                _close(db)
                raise
        except sqlite3.DatabaseError:
            pass
        except OSError:
            _close(db)
            raise
        _close(db)
    return _create(place)


def _create(place: Path) -> sqlite3.Connection:
    """Lay it out beside and rename: another process sees a whole index or none."""
    beside = place.with_name(f"{place.name}.{secrets.token_hex(4)}.part")
    try:
        os.close(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        _laid_out(_connect(beside)).close()
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)
    return _connect(place)


def _laid_out(db: sqlite3.Connection) -> sqlite3.Connection:
    for table in _TABLES:
        db.execute(table)
    db.execute(f"PRAGMA application_id = {APPLICATION}")
    db.execute(f"PRAGMA user_version = {SCHEMA}")
    return db


def _connect(place: Path) -> sqlite3.Connection:
    uri = f"{place.absolute().as_uri()}?mode=rw"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=10.0)
    # it can be made anew; and a journal file could meet the database that another process puts in its place
    try:
        db.execute("PRAGMA synchronous = OFF")
        db.execute("PRAGMA journal_mode = MEMORY")
    except sqlite3.Error:
        db.close()
        raise
    return db


def _close(db: sqlite3.Connection | None) -> None:
    if db is not None:
        db.close()


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])


def _folders(parent: Path) -> list[Path]:
    """Its folders by name; hidden ones and links (``latest``) are none of ours."""
    try:
        with os.scandir(parent) as found:
            names = [one.name for one in found if one.is_dir(follow_symlinks=False) and not one.name.startswith(".")]
    except OSError as error:
        raise RecordError(
            f"{parent} cannot be read ({error.strerror or error})", remedy="Give the folder of runs with --runs-dir."
        ) from error
    return [parent / name for name in sorted(names)]


def _name(folder: Path) -> str:
    """The folder's name as text that any file and page can hold."""
    return os.fsencode(folder.name).decode("utf-8", "backslashreplace")


def _values(row: RunSummary) -> list[Any]:
    values: dict[str, Any] = {name: getattr(row, name) for name in _COLUMNS}
    return [orjson.dumps(values[name]).decode() if name in _JSON else values[name] for name in _COLUMNS]


def _row(values: Sequence[Any]) -> RunSummary:
    named: dict[str, Any] = dict(zip(_COLUMNS, values, strict=True))
    for name in _JSON:
        named[name] = orjson.loads(named[name])
    for name in _FLAGS:
        named[name] = bool(named[name])
    return RunSummary(**named)
