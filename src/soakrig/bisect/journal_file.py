"""The journal's file: its tables, how it is opened, and what is said when it cannot be read or written."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from soakrig.errors import RecordError, StoreError

JOURNAL = "journal.sqlite"
APPLICATION = 0x536F616B  # "Soak"; https://sqlite.org/pragma.html#pragma_application_id
SCHEMA = 1
"""In ``user_version``. An older version of this tool refuses a newer number."""

_TABLES = (
    "CREATE TABLE campaign (id INTEGER PRIMARY KEY CHECK (id = 1), spec TEXT NOT NULL, created REAL NOT NULL) STRICT",
    """CREATE TABLE runs (
        id INTEGER PRIMARY KEY AUTOINCREMENT, arm TEXT NOT NULL, stratum TEXT NOT NULL, cap REAL NOT NULL,
        state TEXT NOT NULL, boot_id TEXT NOT NULL DEFAULT '', result TEXT, exposure REAL, signature TEXT,
        reason TEXT NOT NULL DEFAULT '', folder TEXT NOT NULL DEFAULT '', why TEXT NOT NULL, planned_at REAL NOT NULL
    ) STRICT""",
    # one run at a time on a host and card, whatever the caller believes
    "CREATE UNIQUE INDEX one_open_run ON runs (stratum) WHERE state != 'settled'",
    """CREATE TABLE turns (
        run INTEGER NOT NULL REFERENCES runs, conversation INTEGER NOT NULL, number INTEGER NOT NULL,
        outcome TEXT NOT NULL, exposure REAL NOT NULL, detail TEXT NOT NULL, time REAL NOT NULL,
        UNIQUE (run, conversation, number)
    ) STRICT""",
    """CREATE TABLE notes (
        id INTEGER PRIMARY KEY, run INTEGER REFERENCES runs, what TEXT NOT NULL, is_state INTEGER NOT NULL,
        time REAL NOT NULL, boot_id TEXT NOT NULL, detail TEXT NOT NULL
    ) STRICT""",
)


def create_file(path: Path, campaign: Mapping[str, Any], now: float) -> sqlite3.Connection | None:
    """Lay out a new journal; None where ``path`` holds a whole one already. A file that a kill left without tables is
    used. Raises ``StoreError``, or ``RecordError`` for a file of something else."""
    with reading(path), writing(path):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        db = _connect(path)
        try:
            if _pragma(db, "application_id") == APPLICATION:
                db.close()
                return None
            if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise RecordError(f"{path} is a database of something else", remedy="Give another folder.")
            _make_durable(db, path)
            db.execute("BEGIN IMMEDIATE")
            for table in _TABLES:
                db.execute(table)
            spec = orjson.dumps(dict(campaign)).decode()
            db.execute("INSERT INTO campaign VALUES (1, ?, ?)", (spec, now))
            db.execute(f"PRAGMA application_id = {APPLICATION}")
            db.execute(f"PRAGMA user_version = {SCHEMA}")
            db.execute("COMMIT")
        except BaseException:
            db.close()
            raise
        return db


def open_file(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open a journal, after a check of the whole file. Raises ``RecordError`` for what is none, is damaged or newer."""
    if not path.is_file():
        raise RecordError(f"{path.parent} holds no campaign: {path.name} is not there", remedy="Give its folder.")
    with reading(path):
        db = _connect(path, read_only=read_only)
        try:
            _check(db, path)
            if not read_only:
                with writing(path):
                    _make_durable(db, path)
        except BaseException:
            db.close()
            raise
    return db


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Turns what SQLite and the system say of a write into ``StoreError``. Damage stays for ``reading``."""
    try:
        yield
    except (sqlite3.OperationalError, OSError) as error:
        raise StoreError(
            f"cannot write {path}: {getattr(error, 'strerror', None) or error}",
            remedy="Free space or make it writable, then `soak bisect resume`: what was written before is whole.",
        ) from error


@contextmanager
def reading(path: Path) -> Generator[None]:
    """Turns what SQLite says of a file that it cannot read into ``RecordError``."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise RecordError(
            f"{path} cannot be read as a campaign's journal: {error}",
            remedy="The run folders beside it are whole in themselves: `soak report RUN` reads each.",
        ) from error


def _connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=10.0)


def _make_durable(db: sqlite3.Connection, path: Path) -> None:
    mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise StoreError(
            f"{path} is in journal mode {mode}, wal was expected: its file system cannot do that",
            remedy="Give a folder on a local disk.",
        )
    db.execute("PRAGMA synchronous = FULL")  # a commit that returned is on the disk: https://sqlite.org/wal.html
    db.execute("PRAGMA foreign_keys = ON")


def _check(db: sqlite3.Connection, path: Path) -> None:
    application, schema = _pragma(db, "application_id"), _pragma(db, "user_version")
    if application == 0 and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
        raise RecordError(f"{path} is empty: its campaign was never begun", remedy="Start the campaign anew.")
    if application != APPLICATION:
        raise RecordError(f"{path} is a database of something else", remedy="Give a campaign's folder.")
    if schema > SCHEMA:
        raise RecordError(
            f"{path} has format {schema}, up to {SCHEMA} was expected: a newer soakrig wrote it",
            remedy="Update soakrig; nothing was changed.",
        )
    damage = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if damage != "ok":
        raise sqlite3.DatabaseError(damage)


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])
