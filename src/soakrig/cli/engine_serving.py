"""``soak engine list|preflight|serve|stop|status|logs|switch``: models of the registry, served on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

import typer

from soakrig.cli.engine_facts import gpu_facts
from soakrig.cli.engine_tables import (
    entry_json,
    findings_json,
    home_folder,
    models_json,
    show_command,
    show_entry,
    show_findings,
    show_models,
    show_states,
    table_console,
)
from soakrig.cli.output import emit, emit_json
from soakrig.cli.starting import Starting
from soakrig.engine import service
from soakrig.engine.bundled import preview
from soakrig.engine.launcher import log_tail
from soakrig.engine.preflight.checks import exit_code
from soakrig.engine.registry import Registry, left_out, load_registry, order_for
from soakrig.engine.registry_entry import NAME, Entry
from soakrig.engine.serving.folder import EngineFolder
from soakrig.engine.serving.state import CHANGING, SERVES
from soakrig.errors import RecordError, UsageError
from soakrig.reports.terminal import report_console

Name = Annotated[str, typer.Argument(help="A model of the registry.", metavar="MODEL")]
MaybeName = Annotated[
    str | None, typer.Argument(help="A model of the registry; all where left out.", metavar="[MODEL]")
]
RegistryFile = Annotated[
    Path | None,
    typer.Option(help="Models of your own (TOML); default $SOAKRIG_MODELS or ~/.config/soakrig/models.toml."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Force = Annotated[
    list[str] | None, typer.Option(metavar="PREFLIGHT", help="Override this preflight's refusal; it is recorded.")
]
Port = Annotated[int | None, typer.Option(help="Port on 127.0.0.1; 0 takes a free one (default: the registry's).")]
Context = Annotated[int | None, typer.Option(help="Context in tokens; the KV cap follows it.")]
Shutdown = Annotated[
    float | None,
    typer.Option("--shutdown-timeout", help="Seconds until what has not ended is killed (default: the registry's)."),
]


def list_models(model: MaybeName = None, registry: RegistryFile = None, as_json: AsJson = False) -> None:
    """Models, their state, their context, and what holds each slot. With MODEL: its configuration in full, beside what
    its checkpoint says of itself.

    Exit status 0.
    """
    found = load_registry(registry)
    console = table_console()
    if model is not None:
        entry = found.find(model)
        argv, env = preview(order_for(entry), Path("engine.port")) if _previewable(entry) else ([], {})
        if as_json:
            emit_json(entry_json(entry, argv, env, home_folder(os.environ)))
        else:
            show_entry(console, entry, argv, env, home_folder(os.environ))
        return
    states = {state.model: state for state in service.Host(found).states()}
    if as_json:
        emit_json(models_json(found, states))
    else:
        show_models(console, found, states)


def preflight(
    model: Name,
    force: Force = None,
    port: Port = None,
    context: Context = None,
    registry: RegistryFile = None,
    as_json: AsJson = False,
) -> None:
    """What would make a launch of MODEL fail or hurt the host, each with both numbers. Nothing is started.

    Exit status: 0 nothing stands in the way, 3 refused, 2 something could not be seen.
    """
    found = load_registry(registry)
    entry = _entry(found, model, port, context)
    findings = service.preflight(service.Host(found, gpu=gpu_facts), entry, force or ())
    if as_json:
        emit_json(findings_json(model, findings))
    else:
        show_findings(table_console(), model, findings)
    raise typer.Exit(exit_code(findings))


def serve(
    model: Name,
    port: Port = None,
    context: Context = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once it is ready; it outlives this terminal.")
    ] = False,
    force: Force = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and start nothing.")] = False,
    registry: RegistryFile = None,
    as_json: AsJson = False,
) -> None:
    """Check, start MODEL, and wait until it has answered a generation.

    Without --detach it serves until Ctrl-C, and ends with this command however that ends.

    Exit status: 0 ready (detached) or stopped as asked, 1 it did not start or ended by itself, 3 refused.
    """
    found = load_registry(registry)
    entry = _entry(found, model, port, context)
    if dry_run:
        _dry_run(entry, as_json)
        return
    with _host(found, entry) as host:
        started = service.serve(host, entry, force=force or (), owner=0 if detach else os.getpid())
    _tell_started(started, as_json)
    if not detach:
        raise typer.Exit(_wait(started))


def switch(
    model: Name,
    port: Port = None,
    context: Context = None,
    force: Force = None,
    shutdown_timeout: Shutdown = None,
    registry: RegistryFile = None,
    as_json: AsJson = False,
) -> None:
    """Stop what is in MODEL's slot, wait until its memory is really back, then serve MODEL, detached.

    What stopping does not change is checked first, so that a model that serves is not given up for one that cannot.
    """
    found = load_registry(registry)
    entry = _entry(found, model, port, context)
    with _host(found, entry) as host:
        started = service.switch(host, entry, force=force or (), shutdown_timeout=shutdown_timeout)
    _tell_started(started, as_json)


def stop(
    model: Name, shutdown_timeout: Shutdown = None, registry: RegistryFile = None, as_json: AsJson = False
) -> None:
    """Stop MODEL: ask it to end, then kill, then name what is left; free the shared memory that it leaked.

    Exit status: 0 nothing of it is left, 1 something is.
    """
    found = _whatever_loads(registry)
    notes = report_console(stderr=True)
    host = service.Host(found, gpu=gpu_facts, note=lambda text: notes.print(f"soak: {text}", markup=False))
    if shutdown_timeout is not None and not 0 <= shutdown_timeout < 1e6:
        raise UsageError(f"--shutdown-timeout {shutdown_timeout:g}: expected a number of seconds, 0 or more")
    done = service.stop(host, _known(found, host, model), shutdown_timeout)
    if as_json:
        emit_json(done.to_json())
    else:
        emit(f"{model}: " + ("stopped" if done.was_running else "was not running"))
        for one in done.left:
            emit(f"  left: pid {one.pid} ({one.name}) in state {one.state}; SIGKILL does not end it")
        for text in done.nobodys:
            emit(f"  {text}")
    raise typer.Exit(1 if done.left else 0)


def status(
    model: MaybeName = None,
    timeout: Annotated[float, typer.Option(help="Seconds that the canary may take.")] = 10.0,
    registry: RegistryFile = None,
    as_json: AsJson = False,
) -> None:
    """How MODEL is, seen now: its processes, its port, and whether a generation is answered.

    Exit status with MODEL: 0 ready or busy, 2 starting or stopping, else 1; without one 0.
    """
    found = _whatever_loads(registry)
    host = service.Host(found)
    if not 0 < timeout < 1e6:
        raise UsageError(f"--timeout {timeout:g}: expected a number of seconds above 0")
    states = host.states(None if model is None else [_known(found, host, model)], timeout)
    if as_json:
        emit_json({"models": [state.to_json() for state in states]})
    else:
        show_states(table_console(), states)
    if model is not None:
        state = states[0].state
        raise typer.Exit(0 if state in SERVES else 2 if state in CHANGING else 1)


def logs(
    model: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    supervisor: Annotated[
        bool, typer.Option("--supervisor", help="What was done to it and why, instead of what it wrote.")
    ] = False,
    registry: RegistryFile = None,
) -> None:
    """The log of MODEL's last launch; it works with the model down."""
    found = _whatever_loads(registry)
    folder = EngineFolder(_known(found, service.Host(found), model))
    path = folder.supervisor_log if supervisor else folder.engine_log
    if not path.exists():
        raise RecordError(f"{path} is not there: {model} was never started here", remedy="soak engine serve starts it.")
    if not follow:
        with path.open("r", encoding="utf-8", errors="replace") as file:
            for line in file:
                if not emit(line.rstrip("\n")):
                    return
        return
    emit(log_tail(path))
    with contextlib.suppress(KeyboardInterrupt):
        _follow(path)


def _follow(path: Path) -> None:
    """Lines as they come; a new file of that name (the next launch's) is read from its beginning."""
    file = path.open("r", encoding="utf-8", errors="replace")
    file.seek(0, os.SEEK_END)
    try:
        while True:
            line = file.readline()
            if line:
                if not emit(line.rstrip("\n")):
                    return
                continue
            with contextlib.suppress(OSError):
                if path.stat().st_ino != os.fstat(file.fileno()).st_ino:
                    file.close()
                    file = path.open("r", encoding="utf-8", errors="replace")
            time.sleep(0.2)
    finally:
        file.close()


def _entry(found: Registry, model: str, port: int | None, context: int | None) -> Entry:
    entry = found.find(model)
    if context is not None and not 1 <= context < 1 << 48:
        raise UsageError(f"--context {context}: expected a number of tokens")
    if port is not None and not 0 <= port <= 65535:
        raise UsageError(f"--port {port} is no port", remedy="A port is a number from 0 (any free one) to 65535.")
    changed: dict[str, Any] = {} if port is None else {"port": port}
    return entry.with_context(context).model_copy(update=changed)


def _whatever_loads(registry: Path | None) -> Registry:
    """The registry, or an empty one where it is broken, which is told: a model can be stopped all the same."""
    try:
        return load_registry(registry)
    except UsageError as error:
        report_console(stderr=True).print(f"soak: going on without the registry: {error.message}", markup=False)
        return Registry({}, ())


def _known(found: Registry, host: service.Host, model: str) -> str:
    """A model that is in the registry, or was served here before it left it."""
    return model if NAME.match(model) and (host.root / model).is_dir() else found.find(model).name


def _previewable(entry: Entry) -> bool:
    """Whether the command can be put together here: it takes the engine, and for vLLM the checkpoint."""
    findings = service.preflight(service.Host(Registry({}, ())), entry, names=("engine", "checkpoint"))
    return all(one.state == "ok" for one in findings)


def _dry_run(entry: Entry, as_json: bool) -> None:
    argv, env = preview(order_for(entry), Path("engine.port"))
    if as_json:
        emit_json(entry_json(entry, argv, env, home_folder(os.environ)))
    else:
        show_command(table_console(), argv, env)


@contextlib.contextmanager
def _host(found: Registry, entry: Entry) -> Generator[service.Host]:
    """The host, told on standard error what goes on."""
    with Starting(report_console(stderr=True)) as starting:
        if ignored := left_out(entry):
            starting.note(f"exported here and not passed on, as the registry decides: {', '.join(ignored)}")
        yield service.Host(found, gpu=gpu_facts, note=starting.note, progress=starting.progress)


def _tell_started(started: service.Started, as_json: bool) -> None:
    name, forced = started.entry.name, [one.name for one in started.findings if one.forced]
    if as_json:
        emit_json({"model": name, "served_name": started.entry.model_name, "url": started.url, "pid": started.pid,
                   "seconds": started.seconds, "forced": forced})  # fmt: skip
    else:
        emit(f"{name} is ready at {started.url} (pid {started.pid}, {started.seconds:.1f} s)")


def _wait(started: service.Started) -> int:
    """Serve until Ctrl-C, SIGTERM, SIGHUP or the engine's own end; the supervisor's exit status."""

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            started.process.send_signal(signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    notes = report_console(stderr=True)
    for line in started.lines:
        if "ended" in line:
            told = line["ended"]
            left = f"; left: {', '.join(told['left'])}" if told["left"] else ""
            notes.print(f"soak: {started.entry.name}: {told['why']}{left}", markup=False)
    status = started.process.wait()
    sys.stdout.flush()
    return status if status in (0, 1) else 1
