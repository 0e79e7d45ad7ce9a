"""The journal of a campaign: what was meant, what was done, what came of it; whole after a kill, a crash, a reboot.

One SQLite file in the campaign's folder, in WAL mode with ``synchronous=FULL``: a call that returned is on the disk.
Every call is one transaction. How the campaign uses it::

    with Journal.create(folder, campaign.to_json()) as journal:     # or Journal.resume(folder), see below
        run = journal.plan("VLLM_MOE_DMA_STAGING=0", cap=60)        # the choice, before anything is done
        journal.move(run, "launching", detail={"argv": [...]})      # INTENT FIRST: written, then launch
        engine = launch(...)
        journal.note("engine", run, pid=engine.pid, since=engine.create_time)
        journal.move(run, "ready")
        journal.move(run, "probing")                                # before the first request
        journal.turn(run, Turn(1, "ok"))                            # after every turn
        journal.turn(run, Turn(2, "error_frame"))
        journal.move(run, "faulted", exposure=2, signature="Xid 31")    # the result
        journal.move(run, "teardown")                               # before the engine is stopped
        journal.move(run, "settled")                                # after nothing of it is left

    evidence = Evidence(journal.arm_runs())                         # settled runs only, each once

A kill between the last turn and the result leaves a run that is ``interrupted``; its run folder may still show the
fault. ``note`` records any other intent
before it is carried out; ``note(REBOOT)`` before a reboot is what tells it from a crash of the host.

``resume`` first puts in order what was left, by the boot of each run (``recover``), and then the loop
1. tears down what ``to_tear_down()`` gives (the note "engine" has its process), ``teardown`` then ``settled``; a run
   that is ``interrupted`` may first become ``faulted`` where its run folder shows the fault;
2. launches, or moves to ``void``, what ``planned()`` gives; after a reboot the control comes first;
3. goes on planning.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from filelock import FileLock

from soakrig.bisect.evidence import ArmRun
from soakrig.bisect.journal_file import JOURNAL, create_file, open_file, reading, writing
from soakrig.bisect.journal_rows import RUNS, Note, RunRow, Turn, run_row
from soakrig.bisect.locks import lock_campaign
from soakrig.bisect.run_states import MAY_FOLLOW, STARTED, RunResult, RunState, as_result
from soakrig.errors import PreflightRefusedError, RecordError, StoreError, UsageError
from soakrig.soak.fingerprint import host_facts

REBOOT = "reboot"
"""The note that stands before a reboot that the campaign itself orders."""
HOST_LOST = "host lost"
"""Signature of a host that went down under a run."""
Now = Callable[[], float]


class Journal:
    """A campaign's journal. Held by one process at a time; may be called from any thread. A context manager.

    Every method that writes raises ``StoreError`` when the disk does not take it, and then nothing of the call is
    written; ``RecordError`` when the call contradicts what is written.
    """

    def __init__(self, folder: Path, db: sqlite3.Connection, boot_id: str, now: Now, lock: FileLock | None) -> None:
        """For the class methods below, which open one."""
        self.folder, self.boot_id = folder, boot_id
        self.recovered: tuple[RunRow, ...] = ()
        self._path, self._db, self._now, self._lock = folder / JOURNAL, db, now, lock
        self._mutex = threading.RLock()
        with reading(self._path):
            self.campaign: dict[str, Any] = orjson.loads(db.execute("SELECT spec FROM campaign").fetchone()[0])

    @classmethod
    def create(
        cls, folder: Path, campaign: Mapping[str, Any], *, boot_id: str | None = None, now: Now = time.time
    ) -> Self:
        """A new journal in ``folder``, made where it is missing. ``campaign``: JSON. ``boot_id``: None for this host's.

        Raises ``UsageError`` where one is there already, ``PreflightRefusedError`` where another process has it.
        """
        boot_id = boot_id or _this_boot()
        with writing(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = lock_campaign(folder)
        try:
            db = create_file(folder / JOURNAL, campaign, now())
            if db is None:
                raise UsageError(
                    f"{folder} holds a campaign already", remedy=f"Go on with it: soak bisect resume {folder}"
                )
            return cls(folder, db, boot_id, now, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def resume(
        cls,
        folder: Path,
        campaign: Mapping[str, Any] | None = None,
        *,
        boot_id: str | None = None,
        now: Now = time.time,
    ) -> Self:
        """The journal in ``folder``, put in order; ``recovered`` holds the runs that this changed.

        Raises ``RecordError`` for what is no journal or a newer one, ``UsageError`` where it is of another campaign
        than ``campaign`` (None takes whichever it is), ``PreflightRefusedError`` where another process has it.
        """
        boot_id = boot_id or _this_boot()
        if not (folder / JOURNAL).exists():
            open_file(folder / JOURNAL)  # says so, and leaves no lock behind
        lock = lock_campaign(folder)
        db: sqlite3.Connection | None = None
        try:
            db = open_file(folder / JOURNAL)
            journal = cls(folder, db, boot_id, now, lock)
            if campaign is not None:
                journal._refuse_another(campaign)
            journal.recovered = journal.recover("", boot_id)
        except BaseException:
            if db is not None:
                db.close()
            lock.release()
            raise
        return journal

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The journal in ``folder`` to look at, running or not: no lock is taken and nothing can be written."""
        return cls(folder, open_file(folder / JOURNAL, read_only=True), "", time.time, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of file and lock. May be called again."""
        with self._mutex:
            self._db.close()
            if self._lock is not None:
                self._lock.release()

    def plan(self, arm: str, *, cap: float, stratum: str = "", why: str = "") -> RunRow:
        """A new run of ``arm``, in state ``planned``. ``stratum``: the host and card. Its id is its place among the
        launches. Raises ``RecordError`` while another run of the stratum is not settled."""
        with self._transaction() as db:
            other = db.execute("SELECT id, arm, state FROM runs WHERE stratum = ? AND state != 'settled'", (stratum,))
            if (row := other.fetchone()) is not None:
                raise RecordError(
                    f"run {row[0]} of arm {row[1]} is {row[2]}, and a run of {arm} was to be planned beside it",
                    remedy="One run at a time on a host and card: settle it first.",
                )
            cursor = db.execute(
                "INSERT INTO runs (arm, stratum, cap, state, why, planned_at) VALUES (?, ?, ?, 'planned', ?, ?)",
                (arm, stratum, cap, why, self._now()),
            )
            number = int(cursor.lastrowid or 0)
            self._note(db, number, "planned", self.boot_id, {}, state=True)
            return self._row(number)

    def move(
        self,
        run: RunRow | int,
        to: RunState,
        *,
        boot_id: str | None = None,
        exposure: float | None = None,
        signature: str | None = None,
        reason: str = "",
        folder: str | None = None,
        turn: Turn | None = None,
        detail: Mapping[str, Any] | None = None,
    ) -> RunRow:
        """Bring a run into another state, as ``run_states.MAY_FOLLOW`` allows.

        ``boot_id``: of the host that it runs on, for ``launching`` on another one than this. ``exposure``: for
        ``faulted`` and ``clean``, where the sum of the turns' would not be right. ``signature``: for ``faulted``.
        ``reason``: for ``void``. ``folder``: its run folder, once known. ``turn``: its last turn, written with it.
        """
        with self._transaction() as db:
            old = self._row(_id(run))
            self._refuse_move(old, to, signature, reason)
            if turn is not None:
                self._add_turn(db, old, turn)
            values: dict[str, Any] = {"state": to}
            if folder is not None:
                values["folder"] = folder
            if to == "launching":
                values["boot_id"] = boot_id or self.boot_id
            if (result := as_result(to)) is not None:
                done = self._row(old.id).exposure
                signature = HOST_LOST if result == "host_lost" else signature  # never clean
                values |= {"result": result, "signature": signature, "reason": reason}
                values["exposure"] = done if exposure is None else exposure
                if result in ("faulted", "clean") and not 0 < values["exposure"] <= old.cap:
                    raise RecordError(
                        f"run {old.id} is to be {to} with exposure {values['exposure']:g}, above 0 and at most its cap "
                        f"of {old.cap:g} was expected",
                        remedy="A run without a turn is void.",
                    )
            sets = ", ".join(f"{name} = :{name}" for name in values)
            db.execute(f"UPDATE runs SET {sets} WHERE id = :id", values | {"id": old.id})  # noqa: S608
            self._note(db, old.id, to, boot_id or old.boot_id or self.boot_id, detail or {}, state=True)
            return self._row(old.id)

    def turn(self, run: RunRow | int, turn: Turn) -> None:
        """Record a turn that ended. Raises ``RecordError`` for one that is recorded, or a run that is not probing."""
        with self._transaction() as db:
            self._add_turn(db, self._row(_id(run)), turn)

    def note(self, what: str, run: RunRow | int | None = None, **detail: Any) -> None:
        """Record an intent before it is carried out, or a fact that a later resume needs."""
        with self._transaction() as db:
            boot_id = self.boot_id if run is None else self._row(_id(run)).boot_id or self.boot_id
            self._note(db, None if run is None else _id(run), what, boot_id, detail)

    def recover(self, stratum: str, boot_id: str) -> tuple[RunRow, ...]:
        """Put in order the run of a stratum that nobody carries on; ``boot_id``: of its host now.

        Started on this boot: ``interrupted``, to be torn down; where a result was known already, that stands. Started
        on another boot: the host went down. Without our own order that is ``host_lost``, unless the run had faulted or
        was void, which stands; by our order (``note(REBOOT)``) any result stands, and without one it is ``void``.
        Either way nothing of it runs any more, and it is settled. ``resume`` calls it for the stratum "".
        """
        changed: list[RunRow] = []
        with self._transaction() as db:
            for run in self._rows("stratum = ? AND state NOT IN ('planned', 'settled')", stratum):
                told = {"found": run.state, "boot_id_now": boot_id}
                if run.boot_id == boot_id:
                    if run.state in STARTED:
                        reason = "the tool ended in the midst of it"
                        self._conclude(db, run, "interrupted", run.exposure, None, reason, boot_id, told)
                        changed.append(self._row(run.id))
                    continue
                ordered = self._reboot_ordered(db, run)
                stands = run.result is not None if ordered else run.result in ("faulted", "void", "host_lost")
                if not stands and ordered:
                    reason = "rebooted by order of the campaign"
                    self._conclude(db, run, "void", run.exposure, None, reason, boot_id, told)
                elif not stands:
                    # the turn in flight went down with the host
                    exposure = min(run.cap, run.exposure + (run.state == "probing"))
                    reason = f"the host went down while the run was {run.state}"
                    self._conclude(db, run, "host_lost", exposure, HOST_LOST, reason, boot_id, told)
                elif run.state not in ("void", "host_lost", "teardown"):
                    self._note(db, run.id, "teardown", boot_id, told, state=True)
                db.execute("UPDATE runs SET state = 'settled' WHERE id = ?", (run.id,))
                self._note(db, run.id, "settled", boot_id, told, state=True)
                changed.append(self._row(run.id))
        return tuple(changed)

    def runs(self) -> tuple[RunRow, ...]:
        """Every run, in the order of planning."""
        with self._mutex, reading(self._path):
            return tuple(self._rows("1"))

    def planned(self) -> tuple[RunRow, ...]:
        """Runs that were chosen and not started."""
        return tuple(run for run in self.runs() if run.state == "planned")

    def to_tear_down(self) -> tuple[RunRow, ...]:
        """Runs that have a result, and of which something may still run."""
        return tuple(run for run in self.runs() if run.result is not None and run.state != "settled")

    def notes(self, run: RunRow | int | None = None) -> tuple[Note, ...]:
        """States and notes of a run, or of the campaign, oldest first."""
        with self._mutex, reading(self._path):
            number = None if run is None else _id(run)
            sql = "SELECT run, what, is_state, time, boot_id, detail FROM notes WHERE run IS ? ORDER BY id"
            return tuple(Note.of(row) for row in self._db.execute(sql, (number,)))

    def turns(self, run: RunRow | int) -> tuple[Turn, ...]:
        """The turns of a run, oldest first."""
        with self._mutex, reading(self._path):
            sql = "SELECT conversation, number, outcome, exposure, detail FROM turns WHERE run = ? ORDER BY rowid"
            return tuple(Turn.of(row) for row in self._db.execute(sql, (_id(run),)))

    def spans(self) -> dict[int, tuple[float, float]]:
        """When each launched run began and how far it is known to have gone, seconds since the epoch: what a later
        process wrote to put it in order is not its own time."""
        own = "SELECT run, time, what FROM notes WHERE run IS NOT NULL AND detail NOT LIKE '%\"found\"%'"
        sql = f"""
            SELECT run, min(CASE WHEN what = 'launching' THEN time END) AS began, max(time)
            FROM ({own} UNION ALL SELECT run, time, '' FROM turns) GROUP BY run HAVING began IS NOT NULL
        """  # noqa: S608  (constants)
        with self._mutex, reading(self._path):
            return {run: (began, last) for run, began, last in self._db.execute(sql)}

    def arm_runs(self) -> tuple[ArmRun, ...]:
        """Settled runs as the statistics take them, each once. Without the interrupted ones: that this tool ended says
        nothing of an arm, not even that it cannot be launched."""
        settled = (run for run in self.runs() if run.state == "settled")
        return tuple(run.evidence() for run in settled if run.result != "interrupted")

    def _refuse_another(self, campaign: Mapping[str, Any]) -> None:
        mine, asked = self.campaign, orjson.loads(orjson.dumps(dict(campaign)))
        other = sorted(name for name in {*mine, *asked} if mine.get(name) != asked.get(name))
        if other:
            raise UsageError(
                f"{self.folder} holds another campaign: {', '.join(other)} differ",
                remedy="Runs of different settings are not pooled: go on with it as it is, or start one elsewhere.",
            )

    def _refuse_move(self, run: RunRow, to: RunState, signature: str | None, reason: str) -> None:
        if to not in MAY_FOLLOW[run.state]:
            expected = ", ".join(sorted(MAY_FOLLOW[run.state])) or "nothing more"
            raise RecordError(
                f"run {run.id} of arm {run.arm} is {run.state} and was to become {to}; expected {expected}",
                remedy="A run gets one result and is settled once; `soak bisect resume` takes up what was left.",
            )
        if bool(signature) != (to == "faulted") or (to == "void" and not reason):
            raise RecordError(
                f"run {run.id} was to become {to} with signature {signature!r} and reason {reason!r}; expected a "
                "signature for faulted and only there, and a reason for void",
                remedy="A fault is told by its signature, a void run by its reason.",
            )

    def _add_turn(self, db: sqlite3.Connection, run: RunRow, turn: Turn) -> None:
        if run.state != "probing":
            raise RecordError(
                f"turn {turn.number} of run {run.id} came while the run is {run.state}, expected probing",
                remedy="Turns are recorded between `probing` and the result.",
            )
        try:
            db.execute("INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?)", (run.id, *turn.row(), self._now()))
        except sqlite3.IntegrityError as error:
            raise RecordError(
                f"turn {turn.number} of conversation {turn.conversation} of run {run.id} is recorded already",
                remedy="A turn is counted once.",
            ) from error

    def _conclude(
        self, db: sqlite3.Connection, run: RunRow, result: RunResult, exposure: float, signature: str | None,
        reason: str, boot_id: str, told: Mapping[str, Any],
    ) -> None:  # fmt: skip
        sql = "UPDATE runs SET state = ?, result = ?, exposure = ?, signature = ?, reason = ? WHERE id = ?"
        db.execute(sql, (result, result, exposure, signature, reason, run.id))
        self._note(db, run.id, result, boot_id, told, state=True)

    def _reboot_ordered(self, db: sqlite3.Connection, run: RunRow) -> bool:
        """Whether the last thing written on the run's boot is our order to reboot."""
        sql = "SELECT what, is_state FROM notes WHERE boot_id = ? ORDER BY id DESC LIMIT 1"
        row = db.execute(sql, (run.boot_id,)).fetchone()
        return row is not None and row[0] == REBOOT and not row[1]

    def _note(
        self, db: sqlite3.Connection, run: int | None, what: str, boot_id: str, detail: Mapping[str, Any], *,
        state: bool = False,
    ) -> None:  # fmt: skip
        sql = "INSERT INTO notes (run, what, is_state, time, boot_id, detail) VALUES (?, ?, ?, ?, ?, ?)"
        db.execute(sql, (run, what, int(state), self._now(), boot_id, orjson.dumps(dict(detail)).decode()))

    def _rows(self, which: str, *values: Any) -> list[RunRow]:
        return [run_row(row) for row in self._db.execute(RUNS.format(which), values)]

    def _row(self, number: int) -> RunRow:
        rows = self._rows("runs.id = ?", number)
        if not rows:
            raise RecordError(f"there is no run {number} in {self._path}", remedy="Plan it first.")
        return rows[0]

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        """All or nothing, on the disk when it is left."""
        with self._mutex, reading(self._path), writing(self._path):
            if self._lock is None:
                raise StoreError(f"{self._path} was opened to be read", remedy="Journal.resume opens it to be written.")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # a full disk may have ended it already
                    self._db.execute("ROLLBACK")
                raise


def _id(run: RunRow | int) -> int:
    return run.id if isinstance(run, RunRow) else run


def _this_boot() -> str:
    boot_id = str(host_facts()["boot_id"])
    if not boot_id:
        raise PreflightRefusedError(
            "/proc/sys/kernel/random/boot_id cannot be read, so a reboot could not be told from a crash of this tool",
            remedy="Mount /proc.",
        )
    return boot_id
