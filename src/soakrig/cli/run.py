"""``soak run``: soak an engine and end in a verdict that holds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from rich.console import Console

from soakrig.cli.bisect import read_campaign_result
from soakrig.cli.engine_choice import engine_order
from soakrig.cli.output import emit_json
from soakrig.cli.starting import Starting
from soakrig.clock import RealClock
from soakrig.engine.bundled import BUNDLED, EMBEDDED, Order, launch_bundled
from soakrig.engine.environment import parse_settings
from soakrig.engine.launcher import EngineProcess
from soakrig.engine.ports import refuse_if_taken, stranger
from soakrig.errors import SoakrigError, StoreError, UsageError
from soakrig.record.corrections import corrections_beside
from soakrig.record.duration import parse_duration
from soakrig.record.gates import FIGURES, parse_gate
from soakrig.record.manifest import Plan
from soakrig.record.result import Result
from soakrig.record.store import MANIFEST, new_run_id
from soakrig.reports.live import LiveView
from soakrig.reports.terminal import print_report, report_console
from soakrig.reproducers.agent_loop import AGENT_LOOP
from soakrig.reproducers.registry import find_reproducer
from soakrig.reproducers.reproducer import LoadOptions
from soakrig.soak.agent.tools import tools as tool_definitions
from soakrig.soak.classify import LENIENCIES
from soakrig.soak.client import Timeouts
from soakrig.soak.conversation import AtLimit, Conversation
from soakrig.soak.probe import Probe
from soakrig.soak.run import RunSpec, SoakRun
from soakrig.soak.target import Target, check_pid, parse_url
from soakrig.soak.transcript import Line, TranscriptConversation, read_transcript, transcript_facts
from soakrig.soak.watch.kernel_log import KernelLogWatcher

DEFAULT_TURNS = 60
GATE_HELP = f"Fail the run when this does not hold: 'ttft_p99 < 20s'. Figures: {', '.join(FIGURES)}."
LOAD, ENGINE, WATCH, ENDING = "The load", "The engine", "What is watched", "Verdict and output"


def run(
    reproducer: Annotated[
        str, typer.Argument(help="Load shape; `soak repro list` names them.", metavar="[REPRODUCER]")
    ] = "agent-loop",
    engine: Annotated[
        str | None,
        typer.Option(help=f"Engine to start and stop: {', '.join(BUNDLED)} (default: {EMBEDDED}), or a model of the "
                          "registry (`soak engine list`).",
                     rich_help_panel=ENGINE),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Attach to a running OpenAI-compatible server; it is never stopped.", rich_help_panel=ENGINE),
    ] = None,
    pid: Annotated[
        int | None, typer.Option(help="Process of the attached server, so that it is watched.", rich_help_panel=ENGINE)
    ] = None,
    engine_log: Annotated[
        Path | None, typer.Option(help="Log of the attached server, so that it is watched.", rich_help_panel=ENGINE)
    ] = None,
    model: Annotated[
        str, typer.Option(help="With --engine vllm: the checkpoint's folder. With --url: the name to ask for (default: "
                          "the first one served).", rich_help_panel=ENGINE),
    ] = "",
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable that holds the server's API key.", rich_help_panel=ENGINE)
    ] = "",
    port: Annotated[
        int, typer.Option(help="Port of the started engine; 0 takes a free one.", rich_help_panel=ENGINE)
    ] = 0,
    start_timeout: Annotated[
        float | None, typer.Option(help="Most seconds until the started engine answers (default: 120; vllm 1800).",
                                   rich_help_panel=ENGINE),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Environment variable of the started engine.",
                     rich_help_panel=ENGINE),
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(metavar="--flag=value", help="Flag of the started engine, as --arg=--flag=value.",
                     rich_help_panel=ENGINE),
    ] = None,
    turns: Annotated[
        int | None, typer.Option(help="Turns of each conversation (default: 60).", rich_help_panel=LOAD)
    ] = None,
    for_: Annotated[
        str | None, typer.Option("--for", help="Load for so long instead: 8h, 90m, 45s.", rich_help_panel=LOAD)
    ] = None,
    conversations: Annotated[int, typer.Option(help="Conversations in parallel.", rich_help_panel=LOAD)] = 1,
    tools: Annotated[int, typer.Option(help="Tool definitions in every request.", rich_help_panel=LOAD)] = 50,
    seed: Annotated[int, typer.Option(help="Same seed, same bytes, given the same replies.", rich_help_panel=LOAD)] = 0,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of one reply.", rich_help_panel=LOAD)] = 512,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.", rich_help_panel=LOAD)] = 0.7,
    context_limit: Annotated[
        int | None, typer.Option(help="Context limit in tokens, where the engine does not say.", rich_help_panel=LOAD)
    ] = None,
    at_limit: Annotated[
        str, typer.Option(help="At the context limit: restart the conversation, or stop-growing.", rich_help_panel=LOAD)
    ] = "restart",
    result_scale: Annotated[
        float, typer.Option(help="Length of tool results, as a multiple.", rich_help_panel=LOAD)
    ] = 1.0,
    transcript: Annotated[
        Path | None,
        typer.Option(help="Send this instead: OpenAI-format JSONL, or a run folder (byte for byte).",
                     rich_help_panel=LOAD),
    ] = None,
    keep_text: Annotated[
        bool,
        typer.Option("--keep-text", help="Keep a transcript's text in the run folder (0600).",
                     rich_help_panel=LOAD),
    ] = False,
    kernel_log: Annotated[
        str, typer.Option(help="auto, kmsg, journal, dmesg, none, or the path of a log.", rich_help_panel=WATCH)
    ] = "auto",
    stall_timeout: Annotated[
        float, typer.Option(help="Seconds of silence on an open connection that make a turn hung. Before the first "
                            "byte more is allowed while the engine's own counters move.", rich_help_panel=WATCH),
    ] = 120.0,
    first_byte_timeout: Annotated[
        float, typer.Option(help="Most seconds until the first byte, counters moving or not.", rich_help_panel=WATCH)
    ] = 1800.0,
    gate: Annotated[
        list[str] | None,
        typer.Option(metavar="'FIGURE < LIMIT'", help=GATE_HELP,
                     rich_help_panel=ENDING),
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(help="Accept a known gap in the engine's protocol: " + ", ".join(LENIENCIES) + ".",
                     rich_help_panel=ENDING),
    ] = None,
    max_bad: Annotated[
        int, typer.Option(help="Stop after so many turns that are not ok (0: never).", rich_help_panel=ENDING)
    ] = 10,
    on_fault: Annotated[
        str, typer.Option(help="At a fault in the kernel log, a process or the engine's log: stop or continue.",
                          rich_help_panel=ENDING),
    ] = "stop",
    runs_dir: Annotated[Path, typer.Option(help="Where run folders are made.", rich_help_panel=ENDING)] = Path("runs"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print result.json's object on standard output.", rich_help_panel=ENDING)
    ] = False,
) -> None:  # fmt: skip
    """Soak an engine: re-send growing, tool-heavy conversations, watch engine and machine, and end in a verdict.

    \b
    Examples:
      soak run                              60 turns on the embedded engine
      soak run --turns 600 --gate 'ttft_p99 < 20s'
      soak run --engine tiny-moe            vLLM with a tiny model made on the spot
      soak run --engine vllm --model ~/models/Qwen3-30B-A3B --arg=--max-model-len=32768
      soak run --engine glm53               a model of the registry, after its preflights
      soak run --url http://127.0.0.1:8000 --pid 4242 --for 8h
      soak run --set VLLM_MOE_DMA_STAGING=0 --arg=--max-num-seqs=1
      soak run --transcript runs/latest     send a run again, byte for byte

    Exit codes: 0 pass, 1 fail, 2 inconclusive, 3 refused, 64 usage error.

    Ctrl-C once ends after the turns in flight and still judges; twice ends at once.
    """
    notes = report_console(stderr=True)
    settings = parse_settings(set_ or [])
    KernelLogWatcher(kernel_log, RealClock())  # refuses an impossible choice before anything is started
    if url is not None:
        _refuse(
            "with --url, the server is already running",
            engine=engine,
            set=set_,
            arg=arg,
            port=port,
            start_timeout=start_timeout,
        )
        order = None
    else:
        _refuse("without --url", pid=pid, engine_log=engine_log, api_key_env=api_key_env)
        order = engine_order(engine or EMBEDDED, settings, arg or [], model, port, start_timeout, notes)
    if transcript is not None:
        usual = LoadOptions()
        _refuse(
            "with --transcript, which is sent as it is",
            tools=tools if tools != usual.tools else None,
            seed=seed if seed != usual.seed else None,
            temperature=temperature if temperature != usual.temperature else None,
            result_scale=result_scale if result_scale != usual.result_scale else None,
            at_limit=at_limit if at_limit != usual.at_limit else None,
            reproducer=reproducer if reproducer != AGENT_LOOP.name else None,
            context_limit=context_limit,
            max_tokens=max_tokens if max_tokens != usual.max_tokens and transcript.is_dir() else None,
        )
    elif keep_text:
        raise UsageError("--keep-text is for --transcript; synthetic loads always keep their text")
    if turns is not None and for_ is not None:
        raise UsageError("--turns and --for are two ways to say how long; give one")
    for name, count, least in (("--turns", turns, 1), ("--conversations", conversations, 1), ("--max-bad", max_bad, 0),
                               ("--max-tokens", max_tokens, 1), ("--context-limit", context_limit, 1),
                               ("--seed", seed, 0)):  # fmt: skip
        if count is not None and not least <= count < 1 << 31:
            raise UsageError(f"{name} {count}: expected a number from {least} up, below 2^31")
    tool_definitions(tools)  # refuses an impossible number
    for name, value in (("--stall-timeout", stall_timeout), ("--first-byte-timeout", first_byte_timeout),
                        ("--result-scale", result_scale), ("--start-timeout", start_timeout)):  # fmt: skip
        if value is not None and not 0 < value < 1e9:
            raise UsageError(f"{name} {value:g}: expected a number above 0")
    if not 0 <= temperature <= 5:
        raise UsageError(f"--temperature {temperature:g}: expected 0 to 5")
    gates = [parse_gate(text).text for text in gate or []]
    options = LoadOptions(
        conversations, tools, seed, max_tokens, temperature, context_limit,
        cast(AtLimit, _one_of("--at-limit", at_limit, ("restart", "stop-growing"))), result_scale,
    )  # fmt: skip
    seconds = parse_duration(for_) if for_ is not None else None
    load, facts, lanes = _load(reproducer, options, transcript, over_again=turns is not None or seconds is not None)
    plan = Plan(
        conversations=len(lanes) or conversations,
        turns=None if seconds is not None else turns or max(lanes, default=DEFAULT_TURNS),
        seconds=seconds,
        lanes=lanes if lanes and turns is None and seconds is None else None,
    )
    name = "transcript" if transcript is not None else find_reproducer(reproducer).name
    spec = RunSpec(
        reproducer=name,
        plan=plan,
        conversations=load,
        seed=seed,
        gates=gates,
        accept=[_one_of("--accept", item, tuple(LENIENCIES)) for item in accept or []],
        timeouts=Timeouts(stall=stall_timeout, first_byte=max(first_byte_timeout, stall_timeout)),
        kernel_log=kernel_log,
        max_bad=max_bad,
        on_fault=cast(Literal["stop", "continue"], _one_of("--on-fault", on_fault, ("stop", "continue"))),
        keep_text=transcript is None or keep_text,
        transcript=facts,
        load=options.recorded() if transcript is None else {},
        settings=order.recorded() if order is not None else {},
        launched=order.launched if order is not None else None,
        runs_dir=runs_dir,
        run_id=new_run_id(name),
    )
    view = LiveView(notes)
    with ExitStack() as stack:
        if order is not None:
            target = _launched(stack, spec, order, notes)
        else:
            target = _attached(url or "", pid, engine_log, model, api_key_env)
        soaking = SoakRun(spec, target, RealClock(), view, deaf_afterwards=True)
        with view:
            result = _drive(soaking)
    for what, error in (("ended the load", soaking.error), ("blinded the live view", soaking.view_error)):
        if error is not None:
            notes.print(f"soak: a bug of soakrig {what}: {error!r}", style="bold red", markup=False)
    console = report_console(stderr=as_json)
    resend = str(transcript.resolve()) if transcript is not None and not keep_text else None
    found = None
    with contextlib.suppress(SoakrigError, OSError):  # the runs folder went away; the verdict has been given
        found = corrections_beside(soaking.folder, read_campaign_result) if soaking.folder is not None else None
    print_report(console, result, view.series, soaking.folder, resend=resend, corrections=found)
    if as_json:
        emit_json(result.to_json())
    raise typer.Exit(result.exit_code)


def _load(
    reproducer: str, options: LoadOptions, transcript: Path | None, *, over_again: bool
) -> tuple[Callable[[Probe], Sequence[Conversation]], dict[str, Any] | None, list[int]]:
    """What makes the conversations, what the record keeps of a transcript, and how many turns each of its
    conversations has. A transcript of one conversation is sent by every place of the load."""
    if transcript is None:
        chosen = find_reproducer(reproducer)
        return lambda probe: chosen.load(options, probe), None, []

    def read(model: str) -> list[list[Line]]:
        lanes = read_transcript(transcript, model=model, max_tokens=options.max_tokens)
        return lanes * options.conversations if len(lanes) == 1 else lanes

    lanes = read("")
    if options.conversations not in (1, len(lanes)):
        raise UsageError(
            f"--conversations {options.conversations}: {transcript} holds {len(lanes)} conversations, each sent once",
            remedy="Leave --conversations out.",
        )
    facts = transcript_facts(transcript, lanes)

    def load(probe: Probe) -> Sequence[Conversation]:
        return [TranscriptConversation(number, lane, over_again) for number, lane in enumerate(read(probe.model))]

    return load, facts, [len(lane) for lane in lanes]


def _attached(url: str, pid: int | None, engine_log: Path | None, model: str, api_key_env: str) -> Target:
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


def _launched(stack: ExitStack, spec: RunSpec, order: Order, notes: Console) -> Target:
    refuse_if_taken(order.port)
    folder = spec.runs_dir / spec.run_id
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"cannot make {folder}: {error.strerror or error}", remedy="Give another --runs-dir."
        ) from error
    unused = stack.enter_context(ExitStack())
    try:
        with Starting(notes) as starting:
            engine: EngineProcess = stack.enter_context(launch_bundled(order, folder, starting.note, starting.progress))
    except SoakrigError:
        with contextlib.suppress(OSError):
            folder.rmdir()  # refused before anything was started: there is no log to keep
        raise
    unused.callback(_drop_unused, folder)  # runs after the engine has stopped; its log stays where it did not start
    return Target(
        engine.base_url,
        pid=engine.pid,
        engine_log=engine.log_path,
        exit_status=engine.exit_status,
        launched=True,
        keeper_pid=engine.keeper_pid,
    )


def _drive(soaking: SoakRun) -> Result:
    factory = None
    if sys.platform == "linux":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(soaking.run())


def _drop_unused(folder: Path) -> None:
    """Remove the folder of a run that was refused before it began."""
    if not (folder / MANIFEST).exists():
        shutil.rmtree(folder, ignore_errors=True)


def _refuse(why: str, **options: object) -> None:
    for name, value in options.items():
        if value not in (None, "", 0, []):
            raise UsageError(f"--{name.replace('_', '-')} makes no sense {why}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise UsageError(f"{name} {value!r}: expected one of {', '.join(allowed)}")
    return value
