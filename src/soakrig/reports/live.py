"""The view of a run that goes on: a panel on a terminal, plain lines anywhere else. Always on standard error."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from soakrig.record.events import EngineChecked, Event, Note, RunEnded, SignalSeen, SourceChanged, TurnDone
from soakrig.record.judge import Judge
from soakrig.record.latency import decode_rate
from soakrig.reports.series import Series


class LiveView:
    """Takes events as they happen; a context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.series = Series()
        self.judge: Judge | None = None
        self.last_turn: TurnDone | None = None
        self.last_signal = ""
        self.began = time.monotonic()
        self._live: Live | None = None
        self._plain_at = 0.0

    def __enter__(self) -> LiveView:
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._panel, console=self.console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event, judge: Judge) -> None:
        """The observer of a run."""
        self.judge = judge
        self.series.feed(event)
        if isinstance(event, TurnDone):
            self.last_turn = event
        text = _notable(event)
        if text:
            self.last_signal = text
        if self._live is not None:
            return
        if isinstance(event, TurnDone):
            self._plain_turn(event)
        elif text:
            self.console.print(text, markup=False, soft_wrap=True)

    def _plain_turn(self, event: TurnDone) -> None:
        """One line a turn while there are few, at most two lines a second when there are many; bad turns always."""
        now = time.monotonic()
        if event.outcome == "ok" and now - self._plain_at < 0.5 and event.turn > 1:
            return
        self._plain_at = now
        self.console.print(turn_line(event), markup=False, soft_wrap=True)

    def _panel(self) -> RenderableType:
        judge = self.judge
        if judge is None:
            return Text("starting ...", style="dim")
        plan = judge.manifest.plan
        done, total = self._progress(judge)
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(judge.manifest.reproducer, "bold"),
            ProgressBar(total=max(total, 1e-9), completed=min(done, total), width=40),
            f"{done:,.0f} of {plan.text()}",
            f"{time.monotonic() - self.began:,.0f} s",
        )
        strip = Text("".join(self.series.marks[-3 * (self.console.width - 2) :]))
        facts = Table.grid(padding=(0, 2))
        for _ in range(6):
            facts.add_column(no_wrap=True)
        last = self.last_turn
        if last is not None:
            rate = decode_rate(last)
            facts.add_row(
                f"turn {last.turn}",
                f"context {last.context_tokens:,}",
                f"TTFT {last.ttft_s:.2f} s" if last.ttft_s is not None else "TTFT -",
                f"decode {rate:.1f} tok/s" if rate else "decode -",
                f"busy {judge.exposure.busy_seconds:,.0f} s",
                f"{judge.exposure.prompt_tokens + judge.exposure.output_tokens:,} tokens",
            )
        return Group(
            bar,
            strip,
            facts,
            Text(f"last: {self.last_signal or 'nothing seen'}", style="dim", overflow="ellipsis", no_wrap=True),
        )

    def _progress(self, judge: Judge) -> tuple[float, float]:
        plan = judge.manifest.plan
        if plan.turns is not None:
            return float(sum(judge.outcomes.values())), float(plan.turns * plan.conversations)
        started = judge.first_sent
        return (judge.last_done or 0.0) - started if started is not None else 0.0, plan.seconds or 0.0


def turn_line(event: TurnDone) -> str:
    """One turn as a plain line."""
    rate = decode_rate(event)
    parts = [
        f"c{event.conversation} t{event.turn}",
        event.outcome,
        f"ctx {event.context_tokens}",
        f"ttft {event.ttft_s:.3f}s" if event.ttft_s is not None else "ttft -",
        f"{rate:.1f} tok/s" if rate else "- tok/s",
        f"{event.output_tokens} out",
    ]
    return "  ".join(parts) + (f"  {event.why}" if event.why else "")


def _notable(event: Event) -> str:
    match event:
        case SignalSeen() if event.signal.severity != "info":
            seen = event.signal
            mark = " (injected)" if seen.injected else ""
            return f"{seen.severity}: {seen.signature or seen.kind}{mark}: {seen.raw[:200]}"
        case SourceChanged() if event.state.state != "live":
            return f"{event.state.name} {event.state.state}: {event.state.detail}"
        case EngineChecked() if event.alive is False and event.how:
            return f"engine dead: {event.how}"
        case Note():
            return event.text
        case RunEnded():
            return f"ended: {event.reason}" + (f", {event.detail}" if event.detail else "")
        case _:
            return ""
