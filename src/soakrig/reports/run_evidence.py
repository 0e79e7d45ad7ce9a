"""What a run froze when something went wrong (``evidence/``), read back for a report: bounded, and never trusted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

MOST_CASES = 50
MOST_BYTES = 4 << 20
"""Of one file; what is longer is told by its size alone."""
LOG_LINES = 40
"""Lines of the engine's log that a report shows."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A request's shape, without its text. None: not known."""

    conversation: int
    turn: int
    context_tokens: int | None
    request_bytes: int | None
    response_bytes: int | None
    status: int | None
    events: int | None
    messages: dict[str, int]
    tools: int | None
    max_tokens: int | None
    stream: bool | None


@dataclass(frozen=True, slots=True)
class Sampled:
    """One figure over the last 60 s before the case."""

    name: str
    values: list[float]


@dataclass(frozen=True, slots=True)
class Case:
    """One folder of ``evidence/``. ``time``: of its cause, seconds since the epoch."""

    name: str
    time: float | None
    cause: str
    shapes: list[Shape]
    samples: list[Sampled]
    log: str


def read_cases(folder: Path) -> tuple[list[Case], list[str]]:
    """The cases of a run in their order, and what of them could not be read, in words."""
    missing: list[str] = []
    try:
        found = sorted(path for path in (folder / "evidence").iterdir() if path.is_dir())
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"evidence: {error.strerror or error}"]
    if len(found) > MOST_CASES:
        missing.append(f"evidence: {len(found) - MOST_CASES} of {len(found)} cases are not shown")
    return [_case(path, missing) for path in found[:MOST_CASES]], missing


def _case(folder: Path, missing: list[str]) -> Case:
    cause = _json(folder / "cause.json", missing)
    event = cause if isinstance(cause, dict) else {}
    signal = event.get("signal")
    told = signal if isinstance(signal, dict) else event
    time = told.get("time", event.get("time"))
    text = str(told.get("raw") or told.get("why") or told.get("outcome") or told.get("how") or "")
    facts = sorted(path for path in folder.glob("c*-t*.json") if not path.name.endswith("-request.json"))
    return Case(
        name=folder.name,
        time=float(time) if isinstance(time, int | float) else None,
        cause=text,
        shapes=[shape for path in facts[:20] if (shape := _shape(path, missing)) is not None],
        samples=_samples(folder / "samples.jsonl", missing),
        log=_tail(folder / "engine-log-tail.txt", missing),
    )


def _shape(path: Path, missing: list[str]) -> Shape | None:
    facts = _json(path, missing)
    if not isinstance(facts, dict):
        return None
    kept = path.with_name(f"{path.stem}-request.json")
    body = _json(kept, missing) if kept.exists() else None
    request: dict[str, Any] = body if isinstance(body, dict) else {}
    messages: dict[str, int] = {}
    for message in request.get("messages") or ():
        role = str(message.get("role")) if isinstance(message, dict) else "?"
        messages[role] = messages.get(role, 0) + 1
    stream = request.get("stream")
    return Shape(
        conversation=_count(facts.get("conversation")) or 0,
        turn=_count(facts.get("turn")) or 0,
        context_tokens=_count(facts.get("context_tokens")),
        request_bytes=_count(facts.get("request_bytes")),
        response_bytes=_count(facts.get("response_bytes")),
        status=_count(facts.get("response_status")),
        events=_count(facts.get("events")),
        messages=messages,
        tools=len(request["tools"]) if isinstance(request.get("tools"), list) else None,
        max_tokens=_count(request.get("max_tokens")),
        stream=stream if isinstance(stream, bool) else None,
    )


def _samples(path: Path, missing: list[str]) -> list[Sampled]:
    found: dict[str, list[float]] = {}
    for line in _bytes(path, missing).splitlines():
        try:
            event: Any = orjson.loads(line)
            for name, value in event["values"].items():
                found.setdefault(f"{event['source']}.{name}", []).append(float(value))
        except (ValueError, TypeError, KeyError, AttributeError):  # a line cut by a full disk
            missing.append(f"{path.parent.name}/{path.name}: a broken line")
            break
    return [Sampled(name, values) for name, values in sorted(found.items())]


def _tail(path: Path, missing: list[str]) -> str:
    lines = _bytes(path, missing).decode("utf-8", "replace").splitlines()
    return "\n".join(lines[-LOG_LINES:])


def _json(path: Path, missing: list[str]) -> Any:
    raw = _bytes(path, missing)
    try:
        return orjson.loads(raw) if raw else None
    except ValueError:
        missing.append(f"evidence/{path.parent.name}/{path.name}: no JSON")
        return None


def _bytes(path: Path, missing: list[str]) -> bytes:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            missing.append(f"evidence/{path.parent.name}/{path.name}: {size} bytes, {MOST_BYTES} are read at most")
            return b""
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        missing.append(f"evidence/{path.parent.name}/{path.name}: {error.strerror or error}")
        return b""


def _count(value: object) -> int | None:
    return value if type(value) is int else None
