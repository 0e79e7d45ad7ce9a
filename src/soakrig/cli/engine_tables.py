"""How models, their state and their preflights are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from soakrig.engine.checkpoint import OwnWords, own_words
from soakrig.engine.preflight.checks import exit_code
from soakrig.engine.preflight.finding import Finding, gib
from soakrig.engine.registry import Registry, aliases
from soakrig.engine.registry_entry import Entry
from soakrig.engine.serving.state import ModelState
from soakrig.errors import SoakrigError
from soakrig.record.redaction import redact_flags, redact_settings
from soakrig.reports.terminal import report_console

_STYLES = {"ok": "green", "unknown": "yellow", "refused": "red", "ready": "green", "busy": "green", "stopped": "dim",
           "starting": "yellow", "stopping": "yellow"}  # fmt: skip


def plain_table(*titles: str) -> Table:
    """A table without lines; its last column wraps."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, overflow="fold", no_wrap=title != titles[-1])
    return table


def show_findings(console: Console, model: str, findings: Sequence[Finding]) -> None:
    """One line a preflight, and what it comes to."""
    table = plain_table("preflight", "state", "what was found, and what to do")
    for one in findings:
        state = f"{one.state}, forced" if one.forced else one.state
        words = one.text + (f"\n-> {one.remedy}" if one.remedy and one.state != "ok" else "")
        table.add_row(one.name, f"[{_STYLES[one.state]}]{state}[/]", _plain(words))
    console.print(table)
    standing = [one.name for one in findings if one.stands]
    blind = [one.name for one in findings if one.state == "unknown"]
    if standing:
        ending = f"{model} would be refused: {', '.join(standing)}"
    elif blind:
        ending = f"nothing refuses {model}, and this could not be seen: {', '.join(blind)}"
    else:
        ending = f"nothing stands in the way of {model}"
    console.print(ending, markup=False)


def findings_json(model: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """The object of ``soak engine preflight --json``."""
    code = exit_code(findings)
    verdict = {0: "ok", 2: "unknown"}.get(code, "refused")
    return {
        "model": model,
        "verdict": verdict,
        "exit_code": code,
        "findings": [one.to_json() for one in findings],
    }


def models_json(registry: Registry, states: Mapping[str, ModelState]) -> dict[str, Any]:
    """The object of ``soak engine list --json``."""
    rows: list[dict[str, Any]] = []
    for name, state in states.items():
        entry = registry.models.get(name)
        row: dict[str, Any] = {"model": name, "in_registry": entry is not None}
        if entry is not None:
            row |= {
                "backend": entry.backend, "context": entry.context, "validated_context": entry.validated_context,
                "slot": entry.slot, "served_name": entry.model_name, "aliases": list(aliases(entry)),
            }  # fmt: skip
        rows.append({**row, **{key: value for key, value in state.to_json().items() if key != "model"}})
    return {"files": [str(path) for path in registry.files], "models": rows, "slots": _slots(registry, states)}


def show_models(console: Console, registry: Registry, states: Mapping[str, ModelState]) -> None:
    """One line a model, then who holds which slot."""
    table = plain_table("model", "backend", "state", "context", "slot", "where, and why")
    for name, state in states.items():
        entry = registry.models.get(name)
        where = f"{state.url}  {state.why}" if state.url else state.why
        if state.leaked:
            where += f"; leaked {gib(sum(state.leaked.values()))} of shared memory"
        backend, context, slot = ("?", "?", "") if entry is None else (entry.backend, f"{entry.context:,}", entry.slot)
        table.add_row(name, backend, f"[{_STYLES.get(state.state, 'red')}]{state.state}[/]", context, slot or "-",
                      _plain(where))  # fmt: skip
    console.print(table)
    for slot, holder in _slots(registry, states).items():
        console.print(f"slot {slot}: {holder or 'free'}", markup=False)


def _slots(registry: Registry, states: Mapping[str, ModelState]) -> dict[str, str]:
    slots = {entry.slot: "" for entry in registry.models.values() if entry.slot}
    for name, state in states.items():
        entry = registry.models.get(name)
        if entry is not None and entry.slot and state.state != "stopped":
            slots[entry.slot] = name
    return slots


def entry_json(entry: Entry, argv: Sequence[str], env: Mapping[str, str], home: str) -> dict[str, Any]:
    """One model in full: what the registry says, the command that it comes to, and the checkpoint's own figures."""
    data = entry.model_dump(mode="json")
    data["settings"] = redact_settings(entry.settings)
    data["flags"] = redact_flags(entry.flags)
    found, why = _checkpoint(entry, home)
    return {
        "model": entry.name,
        "registry": data,
        "command": {"argv": redact_flags(argv), "env": redact_settings(env)},
        "checkpoint": found.to_json() if found is not None else None,
        "checkpoint_why": why,
    }


def show_entry(console: Console, entry: Entry, argv: Sequence[str], env: Mapping[str, str], home: str) -> None:
    """The effective configuration beside what the checkpoint says of itself, then the command; where that cannot be put
    together here (``argv`` empty), the settings and flags that it would have."""
    found, why = _checkpoint(entry, home)
    table = plain_table("", "registry", "checkpoint")
    table.columns[1].no_wrap = False
    seen = found if found is not None else OwnWords("not read")
    said = seen.config
    valid = f", {entry.validated_context:,} validated" if entry.validated_context else ", none validated"
    cap = f"{entry.kv_cap_bytes:,} bytes" if entry.kv_cap_bytes else "-"
    need = entry.host_need_gib
    rows = [
        ("context", f"{entry.context:,}{valid}", _count(said.max_positions)),
        ("KV cache", cap, "-"),
        ("utilisation", f"{entry.gpu_memory_utilization:g}" if entry.gpu_memory_utilization else "-", "-"),
        ("experts", "-", f"{_count(said.experts)}, top {_count(said.top_k)}" if said.experts else "-"),
        ("layers x width", "-", f"{_count(said.layers)} x {_count(said.hidden)}" if said.layers else "-"),
        ("numbers", "-", " ".join(part for part in (said.dtype, said.quantisation) if part) or "-"),
        ("weights", "-", gib(seen.weight_bytes) if seen.weight_bytes else "-"),
        ("host memory", f"{need:g} GiB" if need is not None else "not said", "-"),
        ("served as", ", ".join((entry.model_name, *aliases(entry))), said.architecture or "-"),
        ("source", entry.backend, seen.source),
    ]
    for row in rows:
        table.add_row(*(_plain(cell) for cell in row))
    console.print(table)
    if why:
        console.print(f"{why}", markup=False, soft_wrap=True)
    if argv:
        show_command(console, argv, env)
    else:
        console.print("the engine or the checkpoint is missing here; the launch would have", markup=False)
        show_command(console, entry.rendered_flags, entry.settings)


def show_command(console: Console, argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Environment and arguments, secrets hidden, one a line."""
    for name, value in sorted(redact_settings(env).items()):
        console.print(f"{name}={value}", markup=False, soft_wrap=True)
    console.print(" \\\n  ".join(redact_flags(argv)), markup=False, soft_wrap=True)


def show_states(console: Console, states: Sequence[ModelState]) -> None:
    """Everything known of each model's processes."""
    for state in states:
        console.print(f"{state.model}: [{_STYLES.get(state.state, 'red')}]{state.state}[/]")
        facts = [state.why]
        if state.url:
            facts.append(state.url)
        if state.processes:
            facts.append(f"pid {state.pid or '-'}, supervisor {state.supervisor or '-'}, "
                         f"{len(state.processes)} processes, up {state.uptime_s:.0f} s")  # fmt: skip
            facts.append(f"{gib(state.held_bytes)} of host memory")
        if state.cgroup:
            facts.append(f"cgroup {state.cgroup}")
        if state.forced:
            facts.append(f"forced past {', '.join(state.forced)}")
        facts += [f"leaked /dev/shm/{name}, {gib(size)}" for name, size in state.leaked.items()]
        for fact in facts:
            if fact:
                console.print(f"  {fact}", markup=False, soft_wrap=True)


def table_console() -> Console:
    """For standard output, 100 columns as all reports."""
    return report_console()


def _checkpoint(entry: Entry, home: str) -> tuple[OwnWords | None, str]:
    try:
        return own_words(entry, home), ""
    except SoakrigError as error:
        return None, error.message


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def home_folder(environ: Mapping[str, str]) -> str:
    """The caller's home."""
    return environ.get("HOME") or str(Path.home())
