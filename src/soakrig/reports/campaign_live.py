"""The view of a campaign that goes on: a panel on a terminal, plain lines anywhere else. Never raises into it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from soakrig.record.campaign import ArmLaunch, CampaignResult
from soakrig.reports.campaign_terminal import VERDICT_STYLES, Writer
from soakrig.reports.campaign_text import UNITS, Unit, arm_row, launch_line, ordered, quantity, short_names

NAME_WIDTH = 40
LINES_FOR_REST = 8
"""Lines of the panel that are neither arms nor launches."""


class CampaignView:
    """Takes the state of a campaign after each change and each turn, from any thread; a context manager.

    What fails here (a closed terminal, a value that cannot be drawn) never raises in the caller: the view shows less,
    and ``trouble`` says what was the matter first, empty where all went well.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.trouble = ""
        self._write = Writer(console)
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._result: CampaignResult | None = None
        self._current: tuple[ArmLaunch, ...] = ()
        self._note = ""
        self._told: dict[int, str | None] = {}
        """Launches of which a line was printed, with the result that it told."""

    def __enter__(self) -> CampaignView:
        with self._harmless():
            if self.console.is_terminal:
                self._live = _HarmlessLive(_Panel(self.panel, self._harmless), self.console, self._harmless)
                self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        live, self._live = self._live, None
        if live is not None:
            with self._harmless():
                live.stop()

    def update(self, result: CampaignResult, current: Sequence[ArmLaunch], note: str = "") -> None:
        """Show how the campaign stands. ``current``: the launches that go on. ``note``: what happened, told once."""
        with self._harmless(), self._lock:
            first, self._result, self._current = self._result is None, result, tuple(current)
            news, self._note = note not in ("", self._note), note or self._note
            if self._live is not None:
                return
            self._tell(result, first=first)
            if news:
                self._line(note)

    @contextmanager
    def _harmless(self) -> Generator[None]:
        try:
            yield
        except Exception as error:
            self.trouble = self.trouble or f"{type(error).__name__}: {error}"

    def _tell(self, result: CampaignResult, *, first: bool) -> None:
        """A line for each launch that began and for each that ended; those of before a resume were told then."""
        going = {one.id for one in self._current}
        launches: dict[int, ArmLaunch] = {}
        for one in (*result.launches, *self._current):
            if one.id not in launches or one.result is not None:
                launches[one.id] = one
        if first:
            self._told = {one.id: one.result for one in launches.values() if one.result and one.id not in going}
        unit = UNITS[result.unit]
        for number, one in sorted(launches.items()):
            if one.result is None:
                if number in going and number not in self._told:
                    self._told[number] = None
                    self._line(f"run {number}  {one.arm}" + (f"  {one.why}" if one.why else ""))
            elif self._told.get(number) != one.result:  # a check after the load may still make a result void
                self._told[number] = one.result
                self._line(f"run {number}  {one.arm}  {launch_line(one, unit)}")

    def _line(self, text: str) -> None:
        self.console.print(self._write(text), soft_wrap=True)

    def panel(self) -> RenderableType:
        """The panel as it stands."""
        with self._lock:
            result, current, note = self._result, self._current, self._note
        if result is None:
            return Text("starting ...", style="dim")
        unit = UNITS[result.unit]
        return Group(
            self._head(result),
            *(self._launch(one, unit) for one in current),
            self._cut(f"last: {note or 'nothing yet'}", "dim"),
            Text(""),
            self._arms(result, unit, self.console.height - LINES_FOR_REST - 2 * len(current)),
        )

    def _head(self, result: CampaignResult) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        total = max(result.budget_hours, 1e-9)
        state = Text(self._write.shown(result.campaign, 48) + f"  {result.state}", style="bold")
        if result.simulated:
            state.append("  SIMULATED", style="bold magenta")
        grid.add_row(
            state,
            ProgressBar(total=total, completed=max(0.0, min(result.hours, total)), width=20),
            Text(f"{quantity(result.hours)} of {quantity(result.budget_hours)} h"),
        )
        return grid

    def _launch(self, launch: ArmLaunch, unit: Unit) -> RenderableType:
        seconds = launch.seconds if launch.seconds is not None else max(0.0, time.time() - launch.began)
        line = f"run {launch.id}  {launch.arm}  {launch_line(launch, unit)}  {seconds:,.0f} s"
        return Group(self._cut(line, "bold"), Padding(self._cut(launch.why or "-", "dim"), (0, 0, 0, 2)))

    def _arms(self, result: CampaignResult, unit: Unit, room: int) -> RenderableType:
        arms = ordered(result.arms)
        short = short_names([arm.name for arm in arms], NAME_WIDTH, self._write.shown)
        table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
        for name in ("arm", "runs", "faults", unit.many, "void", "verdict"):
            table.add_column(name, no_wrap=True, justify="left" if name in ("arm", "verdict") else "right")
        shown = arms[: max(3, room)]
        for arm in shown:
            row = arm_row(arm, unit)
            words = (short[arm.name], row.runs, row.faults, row.exposure, row.void)
            table.add_row(*map(self._write, words), self._write(arm.verdict, VERDICT_STYLES[arm.verdict]))
        if len(shown) == len(arms):
            return table
        return Group(table, Text(f"and {len(arms) - len(shown)} more arms", style="dim"))

    def _cut(self, text: str, style: str) -> Text:
        line = self._write(text, style)
        line.no_wrap, line.overflow = True, "ellipsis" if self.console.encoding.startswith("utf") else "crop"
        return line


Guard = Callable[[], AbstractContextManager[None]]


class _Panel:
    """Draws what ``make`` gives, or says that it cannot be drawn."""

    def __init__(self, make: Callable[[], RenderableType], harmless: Guard) -> None:
        self._make, self._harmless = make, harmless

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._harmless():
            return [*console.render(self._make(), options)]
        return [Text("the campaign goes on; its view cannot be drawn", style="dim")]


class _HarmlessLive(Live):
    """A ``Live`` whose redraw, also that of its own thread, never raises: the terminal may be gone."""

    def __init__(self, panel: _Panel, console: Console, harmless: Guard) -> None:
        self._harmless = harmless
        super().__init__(panel, console=console, refresh_per_second=4, transient=True)

    def refresh(self) -> None:
        with self._harmless():
            super().refresh()
