"""``soak watch``: the kernel-log watcher alone."""

from __future__ import annotations

import io
import sys
import threading
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from soakrig.cli.output import emit_json
from soakrig.clock import RealClock
from soakrig.record.incident import IncidentGrouper
from soakrig.record.signal import Signal, SourceState
from soakrig.reports.terminal import LastingConsole
from soakrig.soak.watch.kernel_log import KernelLogWatcher
from soakrig.soak.watch.xid_catalogue import advice

_STYLES = {"fault": "bold red", "warning": "yellow", "info": "dim"}


def watch(
    kernel_log: Annotated[
        str,
        typer.Option(
            "--kernel-log",
            metavar="auto|kmsg|journal|dmesg|PATH",
            help="Where the kernel log is read: auto takes the first of kmsg, journal and dmesg that can be read. PATH "
            "is a text log or a file or FIFO of /dev/kmsg records; it may appear later if its folder exists.",
        ),
    ] = "auto",
    once: Annotated[
        bool,
        typer.Option("--once", help="Read the log from its oldest record to its end; exit 1 if there was a fault."),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object a signal on standard output, people's text on standard error."
        ),
    ] = False,
) -> None:
    """Watch the kernel log for GPU faults, OOM kills, hung tasks and PCIe errors.

    Exit status: 0 no fault seen, 1 a fault, 2 the log could not be read. Faults that a program wrote into the kernel
    log (injected) are shown and do not count.
    """
    clock = RealClock()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a log's text may be none of the terminal's encoding
    notes = LastingConsole(stderr=True, highlight=False)
    out = LastingConsole(highlight=False)
    watcher = KernelLogWatcher(kernel_log, clock, once=once)
    grouper = IncidentGrouper()
    faults = 0
    try:
        _note_state(notes, watcher.open())
        waiting = threading.Event()
        while once or not out.quiet:  # a reader that went away ends the following, and no reading to the end
            seen = watcher.poll()
            for signal in seen.signals:
                faults += signal.severity == "fault" and not signal.injected
                incident = grouper.add(signal)
                if as_json:
                    out.quiet = not emit_json(signal_object(signal)) or out.quiet
                else:
                    out.print(_line(signal), soft_wrap=True)
                    if not once and incident is not None and incident.count == 1:
                        out.print(f"  {escape(advice(signal))}", soft_wrap=True)
            if seen.state is not None:
                _note_state(notes, seen.state)
            if watcher.finished:
                break
            if not seen.signals:
                clock.wait(waiting, 0.01 if once else watcher.interval)
    except KeyboardInterrupt:
        notes.print("stopped")
    finally:
        watcher.close()
    if not as_json:
        _summary(out, grouper)
    if faults:
        raise typer.Exit(1)


def signal_object(signal: Signal) -> dict[str, Any]:
    """A signal as ``--json`` prints it; ``time`` is epoch seconds, null where the log does not say it."""
    return {
        "kind": signal.kind,
        "xid": signal.xid,
        "pci": signal.pci,
        "pid": signal.pid,
        "process": signal.process,
        "engine": signal.engine,
        "client": signal.client,
        "fault_type": signal.fault_type,
        "access": signal.access,
        "address": signal.address,
        "injected": signal.injected,
        "raw": signal.raw,
        "time": signal.time or None,
        "severity": signal.severity,
        "signature": signal.signature,
    }


def _line(signal: Signal) -> str:
    style = _STYLES[signal.severity]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(signal.time)) if signal.time else "-"
    parts = [f"[{style}]{signal.severity:<7}[/]", when, escape(signal.signature or signal.kind)]
    if signal.pci:
        parts.append(f"GPU {signal.pci}" if signal.kind == "xid" else signal.pci)
    if signal.process or signal.pid is not None:
        parts.append(escape(f"named in the line: {signal.process or '?'} (pid {signal.pid})"))
    if signal.injected:
        parts.append("[magenta]injected: written by a program[/]")
    return "  ".join(parts) + f"\n  [dim]{escape(signal.raw.strip())}[/]"


def _summary(out: Console, grouper: IncidentGrouper) -> None:
    """One paragraph an incident: what, how many lines, and what to do."""
    count = len(grouper.incidents)
    out.print("no incident" if not count else f"{count} incident{'s' if count > 1 else ''}")
    for incident in grouper.incidents:
        head = incident.headline
        span = f"{incident.last - incident.first:.3f} s"
        origin = ", injected" if head.injected else ""
        out.print(
            f"[bold]{escape(incident.signature)}[/]{f' on {head.pci}' if head.pci else ''}{origin}: {incident.count} "
            f"line(s) within {span} ({len(incident.precursors)} before, {len(incident.aftermath)} after)",
            soft_wrap=True,
        )
        out.print(f"  {escape(advice(head, incident.signals))}", soft_wrap=True)


def _note_state(notes: Console, state: SourceState) -> None:
    notes.print(f"kernel log: {state.state}: {escape(state.detail)}", soft_wrap=True)
