"""``soak measure profile``: where a decode step goes, by the engine's own profiler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from soakrig.clock import RealClock
from soakrig.engine.bundled import EMBEDDED
from soakrig.errors import InconclusiveError, PreflightRefusedError, RecordError
from soakrig.reproducers.measure.folder import MeasureFolder
from soakrig.reproducers.measure.sides import Bench, Side, running
from soakrig.reproducers.measure.step_table import read_trace, step_table
from soakrig.reproducers.measure.turns import TurnShape, one_turn
from soakrig.soak.client import ChatClient, Timeouts
from soakrig.soak.probe import probe

PROMPT_WORDS = 24
HOW = "--profiler-config.profiler=torch --profiler-config.torch_profiler_dir=DIR"


def measure_profile(
    bench: Bench,
    side: Side,
    folder: MeasureFolder,
    tokens: int,
    trace_dir: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Profile one answer of ``tokens`` tokens to a short prompt; the table as ``step_table``, with its ``verdict``.

    ``trace_dir``: where an attached engine writes its traces. Raises ``PreflightRefusedError`` where the engine has no
    profiler to start.
    """
    if not side.url and bench.engine == EMBEDDED:
        raise PreflightRefusedError(
            "the embedded engine has no /start_profile", remedy="Use --engine vllm or tiny-moe, or a URL."
        )
    traces = (folder.path / "traces").absolute() if trace_dir is None else trace_dir
    if not side.url:
        traces.mkdir(exist_ok=True)
        own = (
            "--profiler-config.profiler=torch",
            f"--profiler-config.torch_profiler_dir={traces}",
            "--profiler-config.torch_profiler_with_stack=false",
        )
        bench = replace(bench, flags=(*bench.flags, *own))
    elif trace_dir is None:
        raise PreflightRefusedError(
            "where the attached engine writes its traces is not known", remedy=f"Start it with {HOW}; give --trace-dir."
        )
    before = set(_traces(traces))
    tell(f"starting {side.text()}")
    with running(bench, side, folder.path / "engine") as target:
        tell(f"profiling {tokens} tokens")
        turn = asyncio.run(_profiled(ChatClient(target, RealClock(), Timeouts()), tokens))
        folder.observe({"what": "turn", **turn})
    return _result([path for path in _traces(traces) if path not in before], turn)


async def _profiled(client: ChatClient, tokens: int) -> dict[str, Any]:
    async with client:
        probed = await probe(client)
        shape = TurnShape(PROMPT_WORDS, tokens, extended=bool(probed.settings or probed.version))
        await one_turn(client, probed.model, shape, "warm-up")
        for path in ("/start_profile", "/stop_profile"):
            reply = await client.post(path, {})
            if reply is None or reply.status_code != 200:
                said = "no answer" if reply is None else f"status {reply.status_code}"
                raise PreflightRefusedError(
                    f"this engine has no profiler to start: POST {path} got {said}", remedy=f"vLLM has one with {HOW}."
                )
            if path == "/start_profile":
                turn = await one_turn(client, probed.model, shape, "profiled")
        return turn  # pyright: ignore[reportPossiblyUnboundVariable]


def _result(paths: list[Path], turn: dict[str, Any]) -> dict[str, Any]:
    tables: list[tuple[Path, dict[str, Any]]] = []
    for path in paths:
        table = step_table(read_trace(path))
        if table is not None:
            tables.append((path, table))
    if not paths:
        raise InconclusiveError(
            "the engine wrote no trace", remedy="Look into its log; is the folder the engine's own?"
        )
    if not tables:
        raise RecordError(
            f"no decode step is marked in {', '.join(path.name for path in paths)}",
            remedy="Steps are read by vLLM's annotations execute_context_.._generation_..",
        )
    path, table = max(tables, key=lambda one: one[1]["busy_ms"])
    verdict = "pass" if turn["outcome"] == "ok" else "fail"
    return {
        "schema": 1,
        "measures": "profile",
        "verdict": verdict,
        "exit_code": 0 if verdict == "pass" else 1,
        "reasons": [] if verdict == "pass" else [f"the profiled turn was {turn['outcome']}: {turn['why']}"],
        "trace": str(path),
        "output_tokens": turn["output_tokens"],
        "decode_s": turn["decode_s"],
        **table,
    }


def _traces(folder: Path) -> list[Path]:
    return sorted([*folder.rglob("*.pt.trace.json"), *folder.rglob("*.pt.trace.json.gz")]) if folder.is_dir() else []
