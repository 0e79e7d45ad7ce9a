"""``soak run``: soak an engine and end in a verdict that holds."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NoReturn, cast

import typer

from soakrig.bisect.launch_result import signature_of
from soakrig.cli.bisect import read_campaign_result
from soakrig.cli.engine_choice import engine_order
from soakrig.cli.output import emit_json
from soakrig.cli.run_engine import attached, engine_words, launched, recorded, suited
from soakrig.cli.transcript_load import lateness, read_load, transcript_conversations, transcript_plan
from soakrig.clock import RealClock
from soakrig.engine.bundled import BUNDLED, EMBEDDED
from soakrig.engine.environment import parse_settings
from soakrig.errors import EngineStartError, SoakrigError, UsageError
from soakrig.record.corrections import corrections_beside
from soakrig.record.duration import parse_duration
from soakrig.record.gates import FIGURES, parse_gate
from soakrig.record.result import Result
from soakrig.record.store import new_run_id
from soakrig.reports.live import LiveView
from soakrig.reports.terminal import print_report, report_console
from soakrig.reproducers.agent_loop import AGENT_LOOP
from soakrig.reproducers.engine_control import EngineControl
from soakrig.reproducers.parameters import split_parameters
from soakrig.reproducers.registry import find_reproducer
from soakrig.reproducers.reproducer import LoadOptions
from soakrig.soak.agent.tools import tools as tool_definitions
from soakrig.soak.classify import LENIENCIES
from soakrig.soak.client import Timeouts
from soakrig.soak.run import RunSpec, SoakRun
from soakrig.soak.start_failure import record_start_failure
from soakrig.soak.transcript import Transcript
from soakrig.soak.watch.kernel_log import KernelLogWatcher

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
        int | None, typer.Option(help="Turns of each conversation (default: the load's own).", rich_help_panel=LOAD)
    ] = None,
    for_: Annotated[
        str | None, typer.Option("--for", help="Load for so long instead: 8h, 90m, 45s.", rich_help_panel=LOAD)
    ] = None,
    conversations: Annotated[
        int | None,
        typer.Option(help="Conversations in parallel (default: the load's own; of a trace 64).", rich_help_panel=LOAD),
    ] = None,
    tools: Annotated[
        int | None, typer.Option(help="Tool definitions in every request (default: 50).", rich_help_panel=LOAD)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Same seed, same bytes, given the same replies (default: 0).", rich_help_panel=LOAD),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of one reply (default: the load's own).", rich_help_panel=LOAD)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature (default: the load's own).", rich_help_panel=LOAD)
    ] = None,
    context_limit: Annotated[
        int | None, typer.Option(help="Context limit in tokens, where the engine does not say.", rich_help_panel=LOAD)
    ] = None,
    at_limit: Annotated[
        str | None,
        typer.Option(help="At the context limit: restart the conversation, or stop-growing.", rich_help_panel=LOAD),
    ] = None,
    result_scale: Annotated[
        float | None, typer.Option(help="Length of tool results, as a multiple.", rich_help_panel=LOAD)
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Parameter of the load; `soak repro show NAME` lists them.",
                     rich_help_panel=LOAD),
    ] = None,
    transcript: Annotated[
        Path | None,
        typer.Option(help="Send this instead: OpenAI JSONL, ShareGPT, Mooncake trace, or run folder (byte for byte).",
                     rich_help_panel=LOAD),
    ] = None,
    anonymise: Annotated[
        bool, typer.Option("--anonymise", help="Put filler of the same token lengths in place of a transcript's texts.",
                           rich_help_panel=LOAD),
    ] = False,
    trace_block: Annotated[
        int | None, typer.Option(help="Tokens of a trace's blocks (default: 512).", rich_help_panel=LOAD)
    ] = None,
    trace_speed: Annotated[
        float | None, typer.Option(help="Trace time over real time; 0 sends without waiting.", rich_help_panel=LOAD)
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
        _refuse(
            "with --transcript, which is sent as it is",
            tools=tools,
            seed=seed if not anonymise else None,
            temperature=temperature,
            result_scale=result_scale,
            at_limit=at_limit,
            param=param,
            reproducer=reproducer if reproducer != AGENT_LOOP.name else None,
            context_limit=context_limit,
        )
    else:
        _refuse("without --transcript", anonymise=anonymise, trace_block=trace_block, trace_speed=trace_speed)
        if keep_text:
            raise UsageError("--keep-text is for --transcript; synthetic loads always keep their text")
    if turns is not None and for_ is not None:
        raise UsageError("--turns and --for are two ways to say how long; give one")
    for name, count, least in (("--turns", turns, 1), ("--conversations", conversations, 1), ("--max-bad", max_bad, 0),
                               ("--max-tokens", max_tokens, 1), ("--context-limit", context_limit, 1),
                               ("--seed", seed, 0), ("--trace-block", trace_block, 1)):  # fmt: skip
        if count is not None and not least <= count < 1 << 31:
            raise UsageError(f"{name} {count}: expected a number from {least} up, below 2^31")
    tool_definitions(tools or 0)  # refuses an impossible number
    for name, value in (("--stall-timeout", stall_timeout), ("--first-byte-timeout", first_byte_timeout),
                        ("--result-scale", result_scale), ("--start-timeout", start_timeout)):  # fmt: skip
        if value is not None and not 0 < value < 1e9:
            raise UsageError(f"{name} {value:g}: expected a number above 0")
    if trace_speed is not None and not 0 <= trace_speed < 1e9:
        raise UsageError(f"--trace-speed {trace_speed:g}: expected a number from 0 up")
    if temperature is not None and not 0 <= temperature <= 5:
        raise UsageError(f"--temperature {temperature:g}: expected 0 to 5")
    gates = [parse_gate(text).text for text in gate or []]
    if at_limit is not None:
        _one_of("--at-limit", at_limit, ("restart", "stop-growing"))
    chosen = find_reproducer(reproducer)
    seconds = parse_duration(for_) if for_ is not None else None
    talk: Transcript | None = None
    options: LoadOptions | None = None
    if transcript is not None:
        talk = read_load(
            transcript,
            max_tokens=max_tokens,
            conversations=conversations,
            anonymise=anonymise,
            seed=seed or 0,
            trace_block=trace_block,
            trace_speed=trace_speed,
        )
        plan = transcript_plan(talk, turns, seconds)
        load = transcript_conversations(talk, over_again=turns is not None or seconds is not None)
        name = "transcript"
    else:
        given = {
            "conversations": conversations, "tools": tools, "seed": seed, "max_tokens": max_tokens,
            "temperature": temperature, "context_limit": context_limit, "at_limit": at_limit,
            "result_scale": result_scale,
        }  # fmt: skip
        options = chosen.options(given, split_parameters(param or []))
        load, name, plan = partial(chosen.load, options), chosen.name, chosen.planned(options, turns, seconds)
        order = suited(chosen, options, order, pid)
    spec = RunSpec(
        reproducer=name,
        plan=plan,
        conversations=load,
        seed=seed or 0,
        gates=gates,
        accept=[_one_of("--accept", item, tuple(LENIENCIES)) for item in accept or []],
        timeouts=Timeouts(stall=stall_timeout, first_byte=max(first_byte_timeout, stall_timeout)),
        kernel_log=kernel_log,
        max_bad=max_bad,
        on_fault=cast(Literal["stop", "continue"], _one_of("--on-fault", on_fault, ("stop", "continue"))),
        keep_text=talk is None or keep_text or talk.keeps_text,
        transcript=talk.facts if talk is not None else None,
        load=options.recorded() if options is not None else {},
        settings=recorded(order, options),
        launched=order.launched if order is not None else None,
        runs_dir=runs_dir,
        run_id=new_run_id(name),
    )
    for line in talk.said() if talk is not None else ():
        notes.print(f"soak: {line}", markup=False)
    view = LiveView(notes)
    with ExitStack() as stack:
        control: EngineControl | None = None
        if order is not None:
            try:
                control = launched(stack, spec, order, notes, vram=chosen.vram)
            except EngineStartError as error:
                said = f"{error.message}\n{engine_words(spec)}"
                found = chosen.start_failed(said) if options is not None and chosen.start_failed else []
                if not found:
                    raise
                result, folder = record_start_failure(spec, error, found, RealClock())
                _told(result, view, folder, as_json=as_json)
            target = control.target
        else:
            target = attached(url or "", pid, engine_log, model, api_key_env)
        if options is not None:
            spec.procedure = chosen.drive(options, control)
        if talk is not None:
            talk.prepare(target)
        soaking = SoakRun(spec, target, RealClock(), view, deaf_afterwards=True)
        with view:
            result = _drive(soaking)
    for what, error in (("ended the load", soaking.error), ("blinded the live view", soaking.view_error)):
        if error is not None:
            notes.print(f"soak: a bug of soakrig {what}: {error!r}", style="bold red", markup=False)
    if options is not None and chosen.signature and (signature := signature_of(result)) is not None:
        its = "the fault" if chosen.is_its(signature) else "a fault, and not one of those"
        notes.print(f"soak: {signature}: {its} that {name} is known to provoke", markup=False)
    resend = str(transcript.resolve()) if transcript is not None and not spec.keep_text else None
    if late := lateness(soaking.load.late):
        report_console(stderr=as_json).print(f"soak: {late}", style="yellow", markup=False)
    _told(result, view, soaking.folder, as_json=as_json, resend=resend)


def _told(result: Result, view: LiveView, folder: Path | None, *, as_json: bool, resend: str | None = None) -> NoReturn:
    found = None
    with contextlib.suppress(SoakrigError, OSError):  # the runs folder went away; the verdict has been given
        found = corrections_beside(folder, read_campaign_result) if folder is not None else None
    print_report(report_console(stderr=as_json), result, view.series, folder, resend=resend, corrections=found)
    if as_json:
        emit_json(result.to_json())
    raise typer.Exit(result.exit_code)


def _drive(soaking: SoakRun) -> Result:
    factory = None
    if sys.platform == "linux":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(soaking.run())


def _refuse(why: str, **options: object) -> None:
    for name, value in options.items():
        if value not in (None, "", 0, []):
            raise UsageError(f"--{name.replace('_', '-')} makes no sense {why}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise UsageError(f"{name} {value!r}: expected one of {', '.join(allowed)}")
    return value
