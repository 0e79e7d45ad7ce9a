"""``soak repro minimize``: from a faulting run to the smallest load that still faults often enough to be useful."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.status import Status

from soakrig.bisect.campaign import BUDGET, End, first_environment
from soakrig.bisect.executors import LocalExecutor
from soakrig.bisect.journal import Journal
from soakrig.bisect.journal_rows import RunRow
from soakrig.bisect.minimize.decision import Demand
from soakrig.bisect.minimize.hunt import hunt_for
from soakrig.bisect.minimize.loop import SEARCH, Minimisation, MinimizeLoop, begin, is_minimisation, reopen
from soakrig.bisect.minimize.material import read_material
from soakrig.bisect.minimize.products import write_products
from soakrig.bisect.minimize.requests import shaped
from soakrig.bisect.minimize.result import RESULT, minimize_result
from soakrig.bisect.minimize.shape import WORDS
from soakrig.bisect.stop import Stop
from soakrig.cli.campaign_session import ending_signals, preflight
from soakrig.cli.output import emit_json
from soakrig.engine.bundled import BUNDLED
from soakrig.engine.environment import parse_settings
from soakrig.errors import PreflightRefusedError, StoreError, UsageError
from soakrig.record.duration import parse_duration
from soakrig.record.store import RunReader, new_run_id, write_private
from soakrig.reports.terminal import report_console

_LOOK_S = 0.2


def minimize(
    run: Annotated[
        Path, typer.Argument(help="A run that faulted; or the folder of a minimisation, to go on with it.")
    ],
    budget: Annotated[
        str | None, typer.Option(help="No launch begins after it, all calls together (default: 8h).")
    ] = None,
    useful: Annotated[
        float | None, typer.Option(help="Share of the load's own chance a turn that a smaller one must keep "
                                   "(default: 0.5)."),
    ] = None,
    error: Annotated[
        float | None, typer.Option(help="Chance that a load of just that share is dropped (default: 0.02).")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help=f"Engine to launch: {', '.join(BUNDLED)} (default: the run's).")
    ] = None,
    model: Annotated[str | None, typer.Option(help="With --engine vllm: the checkpoint's folder.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Over the run's own settings.")
    ] = None,
    arg: Annotated[
        list[str] | None, typer.Option(metavar="--flag=value", help="Over the run's own flags.")
    ] = None,
    start_timeout: Annotated[str | None, typer.Option(help="Until the engine answers (default: 2m; vllm 30m).")] = None,
    kernel_log: Annotated[str | None, typer.Option(help="As of `soak run` (default: the run's).")] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where the folder is made.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one object.")] = False,
) -> None:  # fmt: skip
    """Make the load of a faulting run smaller, unattended, as long as it still faults often enough to be useful.

    Fewer conversations, requests, tools and tokens, shorter answers, no streaming: each is launched until it is known
    whether the fault still comes. Ends with the load, a campaign file for `soak bisect -f`, and a script that needs
    only Python and httpx and exits with 1 when the fault came. After Ctrl-C or a kill, call it with its own folder.

    Exit codes: 0 minimal, 2 not (yet): the budget is spent, it was stopped, or the fault did not come again.
    """
    seconds = parse_duration(budget) if budget is not None else None
    if seconds == 0:
        raise UsageError(f"--budget {budget}: expected more than nothing", remedy="Example: --budget 8h")
    run = next((path for path in (run, runs_dir / run) if path.exists()), run)
    if is_minimisation(run):
        _refuse_given(
            run, useful=useful, error=error, engine=engine, model=model, set=set_, arg=arg, kernel_log=kernel_log,
            start_timeout=start_timeout,
        )  # fmt: skip
        try:
            journal = Journal.resume(run / SEARCH)
        except PreflightRefusedError as held:
            raise PreflightRefusedError(
                f"the minimisation in {run} is run by another process", remedy="Wait for it, or end it with Ctrl-C."
            ) from held
        with journal:
            made = reopen(journal)
            preflight(made.hunt, fresh=False)
            if seconds is not None:
                journal.note(BUDGET, seconds=seconds)
            _go(journal, made, as_json=as_json)
    demand = Demand(**{k: v for k, v in {"useful": useful, "error": error}.items() if v is not None})
    if not 0.0 < demand.useful <= 1.0:
        raise UsageError(f"--useful {demand.useful:g}: expected above 0 and up to 1", remedy="Example: --useful 0.5")
    if not 0.0 < demand.error <= 0.2:
        raise UsageError(f"--error {demand.error:g}: expected above 0 and up to 0.2", remedy="Example: --error 0.02")
    material = read_material(run)
    hunt = hunt_for(
        RunReader(run).manifest, material.signature, engine=engine, model=model, settings=parse_settings(set_ or []),
        flags=tuple(arg or ()), kernel_log=kernel_log, budget=seconds or 8 * 3600.0,
        start=parse_duration(start_timeout) if start_timeout is not None else None,
    )  # fmt: skip
    preflight(hunt, fresh=True)
    made, journal = begin(runs_dir / new_run_id("minimize"), run, hunt, material, demand)
    with journal:
        _go(journal, made, as_json=as_json)


def _refuse_given(folder: Path, **given: Any) -> None:
    for name, value in given.items():
        if value:
            raise UsageError(
                f"--{name.replace('_', '-')} cannot be changed in {folder}, which goes on as it was begun",
                remedy="Only --budget can. Begin anew from the run for anything else.",
            )


def _go(journal: Journal, made: Minimisation, *, as_json: bool) -> None:
    notes = report_console(stderr=True)
    notes.print(f"minimisation {made.folder}", markup=False, soft_wrap=True)
    session = _Session(journal, made, notes)
    try:
        session.run()
        result = _keep(journal, made)
    except StoreError as error:
        raise StoreError(
            f"the minimisation had to stop: {error.message}",
            remedy=f"Make room, then `soak repro minimize {made.folder}`; nothing of it runs any more.",
        ) from error
    _print(report_console(stderr=as_json), result)
    if as_json:
        emit_json(result)
    raise typer.Exit(result["exit_code"])


def _keep(journal: Journal, made: Minimisation) -> dict[str, Any]:
    """Leave the result and what is made of it: of the smallest load that is known to fault, minimal or not."""
    found = minimize_result(journal, made, {})
    files: dict[str, str] = {}
    if found["to"]["faults"]:
        path = made.path(journal)
        requests = shaped(made.material, path.best)
        turns = -(-int(found["turns_to_fault"]) // len(requests))
        files = write_products(made.folder, requests, made.hunt, turns)
    result = found | {"files": files}
    try:
        write_private(
            made.folder / RESULT, orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        )
    except OSError as error:
        raise StoreError(f"cannot write in {made.folder}: {error.strerror or error}", remedy="Free space.") from error
    return result


class _Session:
    """A minimisation on this terminal: shows it, takes Ctrl-C. ``notes``: for people, standard error."""

    def __init__(self, journal: Journal, made: Minimisation, notes: Console) -> None:
        self.journal, self.made, self.notes = journal, made, notes
        self.stop = Stop()
        self._status: Status | None = None
        self._told = {run.id for run in journal.runs() if run.state == "settled"}
        self._error: BaseException | None = None

    def run(self) -> None:
        """To the end, or until Ctrl-C, SIGTERM or SIGHUP: the first ends after the turn in flight, the second at once.
        Raises ``StoreError`` when the journal can no longer be written."""
        executor = LocalExecutor(visible=(first_environment(self.journal) or {}).get("CUDA_VISIBLE_DEVICES"))
        with ExitStack() as stack:
            stack.callback(executor.close)
            asked = stack.enter_context(ending_signals())
            stack.enter_context(self._live())
            loop = MinimizeLoop(
                self.journal, self.made, executor, self.stop, changed=self._changed, progress=self._progress,
            )  # fmt: skip
            worker = threading.Thread(target=self._work, args=(loop,), name="minimize")
            worker.start()
            while worker.is_alive():
                worker.join(_LOOK_S)
                while not asked.empty():
                    self.stop.ask(asked.get())
        if self._error is not None:
            raise self._error

    @contextlib.contextmanager
    def _live(self) -> Generator[None]:
        if not self.notes.is_terminal:
            yield
            return
        with self.notes.status("...") as self._status:
            yield

    def _work(self, loop: MinimizeLoop) -> End | None:
        try:
            return loop.run()
        except BaseException as error:
            self._error = error
            return None

    def _changed(self, note: str) -> None:
        """After each entry of the journal. What is shown must never end a minimisation."""
        runs = self.journal.runs()
        with contextlib.suppress(OSError, ValueError):
            if note:
                self._say(note)
            for run in runs:
                if run.state == "settled" and run.id not in self._told:
                    self._told.add(run.id)
                    self._say(_line(run))
            if self._status is not None and runs:
                self._status.update(_line(runs[-1]))

    def _progress(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)

    def _say(self, text: str) -> None:
        self.notes.print(f"soak: {text}", markup=False, soft_wrap=True)


def _line(run: RunRow) -> str:
    what = {"faulted": f"fault at turn {run.exposure:g}", "clean": f"clean in {run.exposure:g} turns"}
    came = what.get(
        run.result or "", f"{run.result}: {run.reason}" if run.result else f"{run.state}, {run.turns} turns"
    )
    return f"launch {run.id}, {run.arm}: {came} [{run.why}]"


def _print(console: Console, result: dict[str, Any]) -> None:
    style = {"finished": "bold green"}.get(result["state"], "bold yellow")
    title = {"finished": "MINIMAL", "not_again": "NOT AGAIN"}.get(result["state"], "NOT MINIMAL YET")
    console.print(f"{title}: {result['signature']}", style=style, markup=False)
    if result["simulated"]:
        console.print("  SIMULATED: a fault is planted in the engine", style="bold yellow")
    console.print(f"  {result['why']}; {result['launches']} launches, {result['hours']:.2g} h", markup=False)
    before, after = result["from"], result["to"]
    for axis, words in WORDS.items():
        one, other = (load[axis]["value"] if axis == "context" else load[axis] for load in (before, after))
        how = f" ({after['context']['kind']})" if axis == "context" else ""
        same = "" if one != other else ", as it was"
        console.print(f"  {words}: {one} -> {other}{how}{same}", markup=False)
    for name, load in (("its own load", before), ("the smallest", after)):
        if load["hazard"] and load["faults"]:
            low, middle, high = (load["hazard"][key] for key in ("low", "estimate", "high"))
            text = f"{load['faults']} faults in {load['turns']:g} turns, {middle:.2g} a turn ({low:.2g} to {high:.2g})"
            console.print(f"  {name}: {text}", markup=False)
    if result["turns_to_fault"]:
        console.print(f"  expect the fault within {result['turns_to_fault']} turns (19 of 20 times)", markup=False)
    for text in result["not_said"]:
        console.print(f"  {text}", style="dim", markup=False)
    for name, path in result["files"].items():
        console.print(f"  {name}: {path}", markup=False, soft_wrap=True)
    console.print(result["folder"], markup=False, soft_wrap=True)
