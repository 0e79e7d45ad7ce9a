"""The engine of ``soak run``: started and watched over, or attached."""

from __future__ import annotations

import contextlib
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from soakrig.cli.starting import Starting
from soakrig.engine.bundled import Order, launch_bundled
from soakrig.engine.launcher import EngineProcess
from soakrig.engine.ports import refuse_if_taken, stranger
from soakrig.errors import SoakrigError, StoreError, UsageError
from soakrig.record.store import MANIFEST
from soakrig.reports.terminal import report_console
from soakrig.reproducers.engine_control import EngineControl
from soakrig.reproducers.reproducer import LoadOptions, Reproducer, Way
from soakrig.soak.run import RunSpec
from soakrig.soak.target import Target, check_pid, parse_url


def attached(url: str, pid: int | None, engine_log: Path | None, model: str, api_key_env: str) -> Target:
    """A running server. Raises ``UsageError`` for what cannot be; doubts about ``pid`` go to standard error."""
    key = ""
    if api_key_env:
        key = os.environ.get(api_key_env, "")
        if not key:
            raise UsageError(f"--api-key-env {api_key_env}: the variable is not set", remedy="Export it first.")
    if engine_log is not None and not engine_log.is_file():
        raise UsageError(f"--engine-log {engine_log} is no file", remedy="Give the file that the engine writes.")
    base = parse_url(url)
    if pid is not None:
        check_pid(pid)
        doubt = stranger(pid, base)
        if doubt:
            report_console(stderr=True).print(f"soak: {doubt}", style="yellow", markup=False)
    return Target(
        base,
        model,
        pid=pid,
        engine_log=engine_log,
        api_key=key,
    )


def recorded(order: Order | None, options: LoadOptions | None) -> dict[str, Any]:
    """What the record keeps of an order and of --param: names and values, secrets hidden."""
    kept = order.recorded() if order is not None else {}
    if options is not None and options.parameters:
        kept["parameters"] = dict(options.parameters)
    return kept


def suited(chosen: Reproducer, options: LoadOptions, order: Order | None, pid: int | None) -> Order | None:
    """The order as the load wants it. Raises where the load cannot be run in this way, before anything is started."""
    way: Way = "launched" if order is not None else "url" if pid is None else "pid"
    if chosen.check is not None:
        chosen.check(options, way)
    return chosen.order(options, order) if order is not None and chosen.order is not None else order


def launched(stack: ExitStack, spec: RunSpec, order: Order, notes: Console, *, vram: bool = False) -> EngineControl:
    """Start an engine with its log in the run's folder; ``stack`` ends it, and whatever the load starts in its place.
    ``vram``: as of ``EngineControl``. Raises as ``launch_bundled``."""
    refuse_if_taken(order.port)
    folder = spec.runs_dir / spec.run_id
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"cannot make {folder}: {error.strerror or error}", remedy="Give another --runs-dir."
        ) from error

    def start(number: int) -> EngineProcess:
        if number > 1:  # in mid-run: its log is one of its own, and the live view has the terminal
            return launch_bundled(order, folder / f"engine-{number}", give_up=lambda: control.give_up())
        with Starting(notes) as starting:
            return launch_bundled(order, folder, starting.note, starting.progress)

    unused = stack.enter_context(ExitStack())
    control = stack.enter_context(EngineControl(start, vram=vram))
    try:
        control.start()
    except SoakrigError:
        with contextlib.suppress(OSError):
            folder.rmdir()  # refused before anything was started: there is no log to keep
        raise
    unused.callback(_drop_unused, folder)  # runs after the engine has stopped; its log stays where it did not start
    return control


def engine_words(spec: RunSpec) -> str:
    """The engine's log of a run, its last MiB; empty where there is none."""
    try:
        with (spec.runs_dir / spec.run_id / "engine.log").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - (1 << 20)))
            return log.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _drop_unused(folder: Path) -> None:
    """Remove the folder of a run that was refused before it began."""
    if not (folder / MANIFEST).exists():
        shutil.rmtree(folder, ignore_errors=True)
