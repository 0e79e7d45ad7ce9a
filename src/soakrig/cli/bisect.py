"""``soak bisect``: find the one variable that causes an intermittent fault, unattended, with a verdict that holds."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from soakrig.bisect.campaign import BUDGET, keep_environment
from soakrig.bisect.campaign_file import Campaign, merge_campaign, read_campaign
from soakrig.bisect.campaign_result import campaign_result
from soakrig.bisect.journal import JOURNAL, Journal
from soakrig.bisect.price import Pace
from soakrig.bisect.resume_unit import install_unit
from soakrig.bisect.variables import ARG, parse_variables
from soakrig.cli.campaign_plan import campaign_plan, print_plan
from soakrig.cli.campaign_session import CampaignSession, make_executor, preflight, unit_installed
from soakrig.cli.engine_choice import check_registry_machine
from soakrig.cli.output import emit, emit_json, write_page
from soakrig.engine.bundled import BUNDLED, EMBEDDED
from soakrig.engine.environment import parse_settings
from soakrig.errors import SoakrigError, StoreError, UsageError
from soakrig.record.campaign import CampaignResult
from soakrig.record.corrections import outlived_launches
from soakrig.record.duration import parse_duration
from soakrig.record.run_index import RunIndex
from soakrig.record.store import new_run_id
from soakrig.reports.campaign_page import campaign_html, campaign_markdown
from soakrig.reports.campaign_terminal import print_campaign
from soakrig.reports.campaign_text import inert
from soakrig.reports.corrections import launch_lines
from soakrig.reports.terminal import report_console
from soakrig.reproducers.parameters import split_parameters

LOAD, ENGINE, RULE, CAMPAIGN, ENDING = "The load", "The engine", "When it is enough", "The campaign", "Output"
START = "start"


class _Group(TyperGroup):
    """``soak bisect NAME=1,0`` is ``soak bisect start NAME=1,0``: what names no verb of the group begins a campaign."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = [START, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return ("" if name == START else name), command, rest


app = typer.Typer(cls=_Group, no_args_is_help=False, rich_markup_mode="rich", add_completion=False)


@app.command(START, context_settings={"ignore_unknown_options": True}, no_args_is_help=True)
def start(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=CONTROL,VALUE...",
                       help="Variables: NAME=control,value[,value], or --arg:--flag=control,value. The control value, "
                       "that of the failing set-up, comes first; nothing stands for not set."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Campaign file (TOML); the command line wins over it.",
                                  rich_help_panel=CAMPAIGN),
    ] = None,
    pair: Annotated[
        list[str] | None, typer.Option(metavar="A+B", help="Also try all off but these two, once needed.",
                                       rich_help_panel=CAMPAIGN),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="No launch begins after it (default: 8h).", rich_help_panel=CAMPAIGN)
    ] = None,
    executor: Annotated[
        str | None, typer.Option(help="local (default), or ray: every card of a cluster, each with its own controls.",
                                 rich_help_panel=CAMPAIGN),
    ] = None,
    cooldown: Annotated[
        str | None, typer.Option(help="Pause between two launches (default: 0s).", rich_help_panel=CAMPAIGN)
    ] = None,
    notify: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Tell this apprise URL of the first fault and of the end.",
                                       rich_help_panel=CAMPAIGN),
    ] = None,
    allow_reboot: Annotated[
        int | None, typer.Option(help="Reboot a wedged host so many times; needs install-resume (default: 0).",
                                 rich_help_panel=CAMPAIGN),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help=f"Engine to launch: {', '.join(BUNDLED)} (default: {EMBEDDED}), or a model of "
                                 "the registry.", rich_help_panel=ENGINE),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With --engine vllm: the checkpoint's folder.", rich_help_panel=ENGINE)
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Environment variable, fixed in every arm.",
                                       rich_help_panel=ENGINE),
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(metavar="--flag=value", help="Launch flag, fixed in every arm: --arg=--flag=value.",
                     rich_help_panel=ENGINE),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of every launch (default: a free one).", rich_help_panel=ENGINE)
    ] = None,
    start_timeout: Annotated[
        str | None, typer.Option(help="Until the engine answers (default: 2m; vllm 30m).", rich_help_panel=ENGINE)
    ] = None,
    repro: Annotated[
        str | None, typer.Option(help="Load shape; `soak repro list` names them.", rich_help_panel=LOAD)
    ] = None,
    turns: Annotated[
        int | None,
        typer.Option(help="Of each launch, per conversation (default: the load's own).", rich_help_panel=LOAD),
    ] = None,
    param: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Parameter of the load; `soak repro show NAME` lists "
                                       "them.", rich_help_panel=LOAD),
    ] = None,
    conversations: Annotated[
        int | None, typer.Option(help="In parallel (default: the load's own).", rich_help_panel=LOAD)
    ] = None,
    tools: Annotated[
        int | None, typer.Option(help="Tool definitions in every request (default: 50).", rich_help_panel=LOAD)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Default: 0.", rich_help_panel=LOAD)] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of one reply (default: the load's own).", rich_help_panel=LOAD)
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Default: the load's own.", rich_help_panel=LOAD)] = None,
    context_limit: Annotated[
        int | None, typer.Option(help="Where the engine does not say it.", rich_help_panel=LOAD)
    ] = None,
    result_scale: Annotated[
        float | None, typer.Option(help="Length of tool results, as a multiple.", rich_help_panel=LOAD)
    ] = None,
    run_timeout: Annotated[
        str | None, typer.Option(help="Most time of a launch's turns; longer is void.", rich_help_panel=LOAD)
    ] = None,
    stall_timeout: Annotated[
        str | None, typer.Option(help="Silence that makes a turn hung (default: 2m).", rich_help_panel=LOAD)
    ] = None,
    kernel_log: Annotated[
        str | None, typer.Option(help="auto (default), kmsg, journal, dmesg, or a log's path.", rich_help_panel=LOAD)
    ] = None,
    confidence: Annotated[
        float | None, typer.Option(help="That no arm is wrongly cleared (default: 0.99).", rich_help_panel=RULE)
    ] = None,
    at_least: Annotated[
        float | None, typer.Option(help="The factor that CLEARED has to show (default: 2).", rich_help_panel=RULE)
    ] = None,
    signature: Annotated[
        str | None, typer.Option(help="The fault to look for (default: the control's commonest).", rich_help_panel=RULE)
    ] = None,
    unit: Annotated[
        str | None, typer.Option(help="Of exposure: turns (default) or output_tokens.", rich_help_panel=RULE)
    ] = None,
    max_bad: Annotated[
        int | None, typer.Option(help="A launch ends after so many turns that are not ok (default: 1).",
                                 rich_help_panel=RULE),
    ] = None,
    hazard: Annotated[
        float, typer.Option(help="For the price: the fault's chance per turn, your guess.", rich_help_panel=ENDING)
    ] = 1 / 30,
    turn_seconds: Annotated[float, typer.Option(help="For the price.", rich_help_panel=ENDING)] = 10.0,
    launch_seconds: Annotated[
        float, typer.Option(help="For the price: launch and teardown.", rich_help_panel=ENDING)
    ] = 240.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print each arm's command and environment, and the price; launch nothing.",
                           rich_help_panel=ENDING),
    ] = False,
    runs_dir: Annotated[
        Path, typer.Option(help="Where the campaign's folder is made.", rich_help_panel=ENDING)
    ] = Path("runs"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one object.", rich_help_panel=ENDING)
    ] = False,
) -> None:  # fmt: skip
    """Find the one variable, environment or launch flag, that causes a fault which comes once in many turns.

    Launches the engine again and again: as it fails (the control), with every variable off, with one changed at a time,
    and with one put back. It stops when the evidence is enough. An arm FAULTS, is REDUCED, CLEARED to at least R times,
    UNDECIDED, or VOID; never "fixed".

    \b
    Examples:
      soak bisect VLLM_MOE_DMA_STAGING=1,0 VLLM_MOE_PREFILL_GROUPS=1,0
      soak bisect --engine vllm --model ~/models/M '--arg:--max-num-seqs=8,1' '--arg:--enforce-eager=,""'
      soak bisect '--arg:--max-num-batched-tokens=4096,8192' --engine vllm --model ~/models/M --repro short-decode
      soak bisect -f campaign.toml --dry-run

    \b
    Also:
      soak bisect resume DIR             go on after a kill, a crash, a reboot, or with --budget after the end
      soak bisect status [DIR]           the state of a campaign, running or not
      soak bisect install-resume DIR     go on by itself after a reboot (systemd)

    Exit codes: 0 answered, 2 not (yet), 3 refused, 64 usage error. Ctrl-C ends after the turn in flight.
    """
    campaign = merge_campaign(
        read_campaign(file) if file is not None else Campaign(),
        {
            "engine": engine, "model": _absolute(model), "reproducer": repro, "turns": turns, "confidence": confidence,
            "at_least": at_least, "signature": signature, "unit": unit, "port": port,
            "kernel_log": _absolute(kernel_log),
            "executor": executor, "notify": notify, "allow_reboot": allow_reboot,
            "budget": _seconds("--budget", budget),
        },
        load={
            "conversations": conversations, "tools": tools, "seed": seed, "max_tokens": max_tokens,
            "temperature": temperature, "context_limit": context_limit, "result_scale": result_scale,
        },
        parameters=split_parameters(param or []),
        limits={
            "start": _seconds("--start-timeout", start_timeout), "run": _seconds("--run-timeout", run_timeout),
            "stall": _seconds("--stall-timeout", stall_timeout), "cooldown": _seconds("--cooldown", cooldown),
            "max_bad": max_bad,
        },
        settings=parse_settings(set_ or []),
        flags=arg or [],
        variables=parse_variables(_words(words or [])),
        pairs=[_pair(text) for text in pair or []],
    )  # fmt: skip
    if dry_run:
        plan = campaign_plan(campaign, Pace(hazard, campaign.planned.turns or 1, turn_seconds, launch_seconds))
        if as_json:
            emit_json(plan)
        else:
            print_plan(report_console(), plan)
        return
    check_registry_machine(campaign.registry, campaign.settings, report_console(stderr=True))
    preflight(campaign, fresh=True)
    folder = runs_dir / new_run_id("bisect")
    with Journal.create(folder, campaign.to_json()) as journal:
        keep_environment(journal, os.environ)
        _run(journal, campaign, as_json=as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="The campaign's folder.", metavar="DIR")],
    budget: Annotated[
        str | None, typer.Option(help="A new budget for the whole campaign, all nights together.")
    ] = None,
    allow_reboot: Annotated[int | None, typer.Option(help="Reboot a wedged host so many times in all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one object.")] = False,
) -> None:
    """Go on with a campaign: after Ctrl-C, a kill, a crash of the tool or of the host, a reboot, or a spent budget.

    A launch that the host went down under is `host_lost`, a fault class of its own; one that only this tool left is
    interrupted and does not count. What an earlier process launched is ended first.
    """
    seconds = _seconds("--budget", budget)
    with Journal.resume(folder) as journal:
        campaign = Campaign.from_json(journal.campaign)
        if allow_reboot is not None:
            campaign = campaign.model_copy(update={"allow_reboot": allow_reboot})
        preflight(campaign, fresh=False)
        if seconds is not None:
            journal.note(BUDGET, seconds=seconds)
        _run(journal, campaign, as_json=as_json)


@app.command()
def status(
    folder: Annotated[str, typer.Argument(help="The campaign's folder, or 'latest'.", metavar="[DIR]")] = "latest",
    runs_dir: Annotated[Path, typer.Option(help="Where campaigns are kept.")] = Path("runs"),
    html: Annotated[Path | None, typer.Option(help="Write the report as one HTML file.")] = None,
    md: Annotated[Path | None, typer.Option(help="Write the report as Markdown.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one object.")] = False,
) -> None:
    """The state of a campaign, from its journal, without disturbing it; exits with the campaign's code."""
    show(find_campaign(folder, runs_dir), html=html, md=md, as_json=as_json)


@app.command("install-resume")
def install_resume(
    folder: Annotated[Path, typer.Argument(help="The campaign's folder.", metavar="DIR")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the systemd unit, install nothing.")] = False,
) -> None:
    """Install a systemd unit that resumes the campaign after a reboot (needs root)."""
    told = install_unit(folder, dry_run=dry_run)
    emit(told.rstrip("\n"))


def find_campaign(name: str, runs_dir: Path) -> Path:
    """The folder of a campaign by path, by name below ``runs_dir``, or the newest. Raises ``UsageError``."""
    if name == "latest":
        found = sorted(path.parent for path in runs_dir.glob(f"*/{JOURNAL}"))
        if not found:
            raise UsageError(f"there is no campaign in {runs_dir}", remedy="Give its folder, or --runs-dir.")
        return found[-1]
    return next((path for path in (Path(name), runs_dir / name) if (path / JOURNAL).exists()), Path(name))


def read_campaign_result(folder: Path) -> CampaignResult:
    """A campaign's result from its journal. Raises ``RecordError``."""
    with Journal.read(folder) as journal:
        return campaign_result(journal, Campaign.from_json(journal.campaign))


def _outlived(folder: Path) -> list[str]:
    """What later runs beside the campaign say against its clean launches."""
    place = folder.resolve()
    with RunIndex(place.parent, keep=False, campaigns=read_campaign_result) as index:
        try:
            index.refresh()
        except SoakrigError as error:
            return [f"Whether later runs contradict its clean launches is not known: {error.message}"]
        return launch_lines(outlived_launches(index, place.name))


def show(folder: Path, *, html: Path | None = None, md: Path | None = None, as_json: bool = False) -> None:
    """Print a campaign's report and exit with its code."""
    result, said = read_campaign_result(folder), _outlived(folder)
    if html is not None:
        write_page(html, campaign_html(result, said))
    if md is not None:
        write_page(md, campaign_markdown(result, said))
    _print(result, as_json=as_json)
    for text in said if not as_json else []:
        report_console().print(f"\n{inert(text, 1000)}", style="yellow", markup=False)
    raise typer.Exit(result.exit_code)


def _run(journal: Journal, campaign: Campaign, *, as_json: bool) -> None:
    notes = report_console(stderr=True)
    notes.print(f"campaign {journal.folder}", markup=False, soft_wrap=True)
    if campaign.allow_reboot and not unit_installed(journal.folder):
        text = f"soak: no reboot will be ordered before `soak bisect install-resume {journal.folder}` was done"
        notes.print(text, style="yellow", markup=False, soft_wrap=True)
    for run in journal.recovered:
        text = f"found run {run.id} of {run.arm}: {run.result or run.state}" + (f", {run.reason}" if run.reason else "")
        notes.print(text, markup=False, soft_wrap=True)
    session = CampaignSession(journal, campaign, notes)
    try:
        result = session.run(make_executor(journal, campaign, session.say))
    except StoreError as error:
        raise StoreError(
            f"the campaign had to stop: {error.message}",
            remedy=f"Make room, then `soak bisect resume {journal.folder}`; nothing of it runs any more.",
        ) from error
    _print(result, as_json=as_json)
    raise typer.Exit(result.exit_code)


def _print(result: CampaignResult, *, as_json: bool) -> None:
    if as_json:
        emit_json(result.to_json())
    else:
        print_campaign(report_console(), result)


def _words(words: Sequence[str]) -> list[str]:
    """The words that are variables. An option that does not exist came along with them: it is refused."""
    for word in words:
        if word.startswith("-") and not word.startswith(ARG):
            name, values, _ = word.partition("=")
            group: Any = typer.main.get_command(app)
            options = [one for parameter in group.commands[START].params for one in parameter.opts]
            near = difflib.get_close_matches(name, options, n=1)
            flag = word if values else f"{word}=control,value"
            raise UsageError(
                f"there is no option {name}" + (f"; {near[0]} was meant?" if near else ""),
                remedy=f"`soak bisect --help` lists them; a launch flag as a variable is {ARG}{flag}.",
            )
    return list(words)


def _absolute(name: str | None) -> str | None:
    """A path that is there, as it is known from any folder: a resume may begin elsewhere. Anything else stays."""
    return str(Path(name).resolve()) if name and Path(name).exists() else name


def _pair(text: str) -> tuple[str, str]:
    one, plus, other = text.partition("+")
    if not (one and plus and other):
        raise UsageError(f"--pair {text!r} is no A+B", remedy="Two variables: VLLM_MOE_DMA_STAGING+VLLM_MOE_HOT_SLOTS")
    return one, other


def _seconds(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parse_duration(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error.message}", remedy=error.remedy) from error
