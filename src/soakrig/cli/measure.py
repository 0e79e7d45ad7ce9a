"""``soak measure``: a change measured so that the answer holds; backends swept; a decode step taken apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from soakrig.cli.measure_text import print_measurement
from soakrig.cli.output import emit_json
from soakrig.engine.bundled import BUNDLED, EMBEDDED
from soakrig.engine.environment import parse_settings
from soakrig.errors import UsageError
from soakrig.reports.terminal import report_console
from soakrig.reproducers.measure.backends import Sweep, judge_backends, measure_backends, parse_sweep
from soakrig.reproducers.measure.equivalence import BASES, EquivalencePlan, judge_equivalence, measure_equivalence
from soakrig.reproducers.measure.folder import MeasureFolder, read_observations, read_plan
from soakrig.reproducers.measure.profile import measure_profile
from soakrig.reproducers.measure.scoring import WHY_NO_TEXT
from soakrig.reproducers.measure.sides import Bench, Side, parse_side
from soakrig.reproducers.measure.speed import SpeedPlan, judge_speed, measure_speed
from soakrig.soak.fingerprint import host_facts

app = typer.Typer(
    no_args_is_help=True,
    help="Measure a change: equivalence, speed, backends; and where a decode step goes.\n\n"
    "A and B are settings and flags in one word ('VLLM_MOE_DMA_STAGING=0 --max-num-seqs=4'), 'default', or the URL of "
    "a running engine. A is the control. Before a word that begins with dashes, write --.",
)

SideA = Annotated[str, typer.Argument(help="The control.", metavar="A")]
SideB = Annotated[str, typer.Argument(help="The change.", metavar="B")]
EngineName = Annotated[str, typer.Option("--engine", help=f"Bundled engine of both sides: {', '.join(BUNDLED)}.")]
Model = Annotated[str, typer.Option(help="With --engine vllm: the checkpoint's folder.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Variable of both sides.")]
Flags = Annotated[list[str] | None, typer.Option("--arg", metavar="--flag=value", help="Flag of both sides.")]
StartTimeout = Annotated[float | None, typer.Option(help="Most seconds until an engine answers.")]
Seed = Annotated[int, typer.Option(help="Of the prompts. An engine that runs has to get new ones: another seed.")]
RunsDir = Annotated[Path, typer.Option(help="Where the measurement's folder is made.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
RUNS = Path("runs")


@app.command("equivalence")
def equivalence(
    a: SideA,
    b: SideB,
    engine: EngineName = EMBEDDED,
    model: Model = "",
    set_: Settings = None,
    arg: Flags = None,
    by: Annotated[str, typer.Option(help="Evidence: prompt-logprobs. greedy-text is refused.")] = "prompt-logprobs",
    against: Annotated[
        str, typer.Option(help="The control's own drift that is tolerated: cached (fresh against cached), again "
                          "(launch against launch), or auto: none where A repeats itself to the bit, else cached."),
    ] = "auto",
    launches: Annotated[int, typer.Option(min=1, max=20, help="Launches of each side.")] = 2,
    prompts: Annotated[int, typer.Option(min=1, max=1000, help="Fresh prompts in each launch.")] = 24,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of the longest prompt; the shortest has half.")] = 1200,
    cuts: Annotated[int, typer.Option(min=1, max=1000, help="Cached places of the control in each prompt.")] = 48,
    precision: Annotated[
        float, typer.Option(help="Say 'cannot tell' while the change may drift this many times as much.")
    ] = 3.0,
    seed: Seed = 0,
    start_timeout: StartTimeout = None,
    runs_dir: RunsDir = RUNS,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Does B compute what A computes? Prompt log-probabilities, against A's own drift.

    Exit codes: 0 the same, or no more drift than the control's own, 1 different, 2 cannot tell, 3 an engine gives no
    logprobs.
    """
    if by != "prompt-logprobs":
        known = "greedy-text is no evidence" if by == "greedy-text" else f"--by {by!r}: expected prompt-logprobs"
        raise UsageError(known, remedy=WHY_NO_TEXT[0].upper() + WHY_NO_TEXT[1:] + ".")
    if against not in BASES:
        raise UsageError(f"--against {against!r}: expected one of {', '.join(BASES)}")
    if not precision > 1:
        raise UsageError(f"--precision {precision:g}: expected more than 1")
    plan = EquivalencePlan(launches, prompts, tokens, cuts, str(seed), against, precision=precision)
    bench, sides = _bench(engine, model, set_, arg, start_timeout), _sides(a, b)
    _run(
        "equivalence", bench, sides, asdict(plan), runs_dir, as_json,
        lambda folder, tell: measure_equivalence(bench, *sides, plan, folder, tell),
    )  # fmt: skip


@app.command("speed")
def speed(
    a: SideA,
    b: SideB,
    engine: EngineName = EMBEDDED,
    model: Model = "",
    set_: Settings = None,
    arg: Flags = None,
    blocks: Annotated[int, typer.Option(min=2, max=100, help="Launches of each side, taken in turns.")] = 4,
    prompts: Annotated[int, typer.Option(min=1, max=1000, help="Prompts in each launch.")] = 12,
    prompt_words: Annotated[int, typer.Option(min=1, help="Words of a prompt.")] = 400,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 64,
    resolution: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share that still counts as the same.")] = 0.05,
    seed: Seed = 0,
    start_timeout: StartTimeout = None,
    runs_dir: RunsDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Is B faster or slower than A? Time to first token and decode apart, in pairs.

    Exit codes: 0 the same or faster, 1 slower, 2 cannot tell.
    """
    plan = SpeedPlan(blocks, prompts, prompt_words, output_tokens, str(seed), resolution=resolution)
    bench, sides = _bench(engine, model, set_, arg, start_timeout), _sides(a, b)
    _run(
        "speed", bench, sides, asdict(plan), runs_dir, as_json,
        lambda folder, tell: measure_speed(bench, *sides, plan, folder, tell),
    )  # fmt: skip


@app.command("backends")
def backends(
    sweep: Annotated[str, typer.Argument(help="--flag=value,value or NAME=value,value.", metavar="SWEEP")],
    engine: EngineName = EMBEDDED,
    model: Model = "",
    set_: Settings = None,
    arg: Flags = None,
    seed: Seed = 0,
    start_timeout: StartTimeout = None,
    runs_dir: RunsDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Which values of a flag work? Each is refused, dies, is accepted, or is accepted and wrong.

    Exit codes: 0 none is wrong, 1 one is accepted and wrong or dies, 2 none is accepted.
    """
    name, values = parse_sweep(sweep)
    plan = Sweep(name, values, seed=str(seed))
    bench = _bench(engine, model, set_, arg, start_timeout)
    for value in values:
        bench.order(plan.side(value))  # refuses what is set twice
    _run(
        "backends", bench, [], asdict(plan), runs_dir, as_json,
        lambda folder, tell: measure_backends(bench, plan, folder, tell),
    )  # fmt: skip


@app.command("profile")
def profile(
    side: Annotated[str, typer.Argument(help="Settings and flags, 'default', or a URL.", metavar="[SIDE]")] = "default",
    engine: EngineName = "tiny-moe",
    model: Model = "",
    set_: Settings = None,
    arg: Flags = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to profile.")] = 32,
    trace_dir: Annotated[Path | None, typer.Option(help="Where an attached engine writes its traces.")] = None,
    start_timeout: StartTimeout = None,
    runs_dir: RunsDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Where does a decode step go? By the engine's own profiler, where it has one (vLLM has).

    Exit codes: 0 with a table, 3 where there is no profiler.
    """
    bench, one = _bench(engine, model, set_, arg, start_timeout), parse_side("the side", side)
    _run(
        "profile", bench, [one], {"tokens": tokens}, runs_dir, as_json,
        lambda folder, tell: measure_profile(bench, one, folder, tokens, trace_dir, tell),
    )  # fmt: skip


@app.command("show")
def show(
    folder: Annotated[Path, typer.Argument(help="A folder that a measurement has made.")],
    as_json: AsJson = False,
) -> None:
    """Judge a measurement again from its observations, and show it."""
    plan = read_plan(folder)
    kind: str = plan["measures"]
    options: dict[str, Any] = dict(plan["options"])
    seen = read_observations(folder)
    if kind == "equivalence":
        result = judge_equivalence(seen, EquivalencePlan(**options))
    elif kind == "speed":
        result = judge_speed(seen, SpeedPlan(**options))
    elif kind == "backends":
        options["values"] = tuple(options["values"])
        result = judge_backends(seen, Sweep(**options))
    else:
        raise UsageError(f"{folder} measures {kind}, which is not judged again", remedy="Its measurement.json has it.")
    _shown({**_frame(plan), **result, "folder": str(folder)}, as_json)


def _run(
    kind: str,
    bench: Bench,
    sides: Sequence[Side],
    options: dict[str, Any],
    runs_dir: Path,
    as_json: bool,
    measure: Callable[[MeasureFolder, Callable[[str], None]], dict[str, Any]],
) -> None:
    plan = {"sides": {side.name: side.text() for side in sides}, **bench.record(), "options": options}
    for side in sides:
        if not side.url:
            bench.order(side)  # refuses before anything is written or started
    notes = report_console(stderr=True)
    with MeasureFolder(runs_dir, kind, {**plan, "host": host_facts()}) as folder:
        result = measure(folder, lambda text: notes.print(f"soak: {text}", markup=False, soft_wrap=True))
        result = {**_frame({"measures": kind, **plan}), **result, "folder": str(folder.path)}
        folder.finish(result)
    _shown(result, as_json)


def _frame(plan: dict[str, Any]) -> dict[str, Any]:
    return {name: plan[name] for name in ("measures", "sides", "engine", "model", "set", "args", "options")}


def _shown(result: dict[str, Any], as_json: bool) -> None:
    print_measurement(report_console(stderr=as_json), result)
    if as_json:
        emit_json(result)
    raise typer.Exit(result["exit_code"])


def _bench(
    engine: str, model: str, set_: list[str] | None, arg: list[str] | None, start_timeout: float | None
) -> Bench:
    if start_timeout is not None and not 0 < start_timeout < 1e9:
        raise UsageError(f"--start-timeout {start_timeout:g}: expected a number above 0")
    return Bench(engine, model, parse_settings(set_ or []), tuple(arg or ()), start_timeout)


def _sides(a: str, b: str) -> tuple[Side, Side]:
    sides = parse_side("A", a), parse_side("B", b)
    if sides[0].url and sides[0].url == sides[1].url:
        raise UsageError("A and B are the same running engine", remedy="Give two URLs, or settings to launch with.")
    return sides
