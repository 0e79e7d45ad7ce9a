"""A campaign on this terminal: shows it while it runs, takes Ctrl-C, keeps its reports, tells who wants to know."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path

import orjson
from rich.console import Console

from soakrig.bisect.campaign import CampaignLoop, End, first_environment, reboot_host
from soakrig.bisect.campaign_file import Campaign
from soakrig.bisect.campaign_result import campaign_result, launch
from soakrig.bisect.executors import Executor, LocalExecutor
from soakrig.bisect.journal import Journal
from soakrig.bisect.notify import Notifier
from soakrig.bisect.resume_unit import UNITS, unit_name
from soakrig.bisect.stop import Stop
from soakrig.clock import RealClock
from soakrig.engine.ports import refuse_if_taken
from soakrig.errors import PreflightRefusedError, StoreError, WatcherError
from soakrig.record.campaign import CAMPAIGN_RESULT, CampaignResult
from soakrig.record.store import write_private
from soakrig.reports.campaign_live import CampaignView
from soakrig.reports.campaign_page import campaign_html, campaign_markdown
from soakrig.soak.watch.kernel_log import KernelLogWatcher

HTML, MARKDOWN = "report.html", "report.md"
_LOOK_S = 0.2


def make_executor(journal: Journal, campaign: Campaign, say: Callable[[str], None]) -> Executor:
    """Where the campaign's launches run; ``say`` is told what cannot be used. Raises ``PreflightRefusedError`` for a
    card in use, no ray, no cluster."""
    if campaign.executor == "ray":
        from soakrig.bisect.ray_executor import RayExecutor

        cluster = RayExecutor()
        for text in cluster.left_out:
            say(f"not used: {text}")
        return cluster
    return LocalExecutor(visible=(first_environment(journal) or {}).get("CUDA_VISIBLE_DEVICES"))


def preflight(campaign: Campaign, *, fresh: bool) -> None:
    """Refuse what would make every launch void: a kernel log that cannot be watched, a notifier that is none, and where
    it is ``fresh`` a port that is taken (in a resume an earlier engine may still be on its way out). Raises
    ``PreflightRefusedError`` or ``UsageError``."""
    Notifier(campaign.notify).check()
    if campaign.executor != "local":
        return
    if fresh:
        refuse_if_taken(campaign.port)
    watcher = KernelLogWatcher(campaign.kernel_log, RealClock())
    try:
        state = watcher.open()
    except WatcherError as error:
        raise PreflightRefusedError(
            f"every launch would be void: {error.message}", remedy=error.remedy or "`soak doctor` says more."
        ) from error
    watcher.close()
    if state.state != "live":
        raise PreflightRefusedError(
            f"every clean launch would be void: the kernel log is watched in part only ({state.detail})",
            remedy="`soak doctor` says what is missing.",
        )


class CampaignSession:
    """Runs a campaign from an open journal to its end. ``console``: for people, standard error."""

    def __init__(self, journal: Journal, campaign: Campaign, console: Console) -> None:
        self.journal, self.campaign, self.console = journal, campaign, console
        self.stop = Stop()
        self._view = CampaignView(console)
        self._notifier = Notifier(campaign.notify)
        self._lock = threading.Lock()
        self._settled = -1
        self._result: CampaignResult | None = None
        self._told_fault = any(run.result == "faulted" for run in journal.runs())
        self._end: End | None = None
        self._error: BaseException | None = None
        self.view_error: Exception | None = None

    def run(self, executor: Executor) -> CampaignResult:
        """To the end, or until Ctrl-C, SIGTERM or SIGHUP: the first ends after the turn in flight, the second at once.

        Raises ``StoreError`` when the journal can no longer be written.
        """
        with ExitStack() as stack:
            stack.callback(executor.close)
            stack.enter_context(self._view)
            asked = stack.enter_context(ending_signals())
            folder = self.journal.folder
            loop = CampaignLoop(
                self.journal, self.campaign, executor, self.stop, changed=self._changed,
                progress=self._changed if self.console.is_terminal else lambda text: None,
                reboot=lambda: _reboot(folder),
            )  # fmt: skip
            worker = threading.Thread(target=self._work, args=(loop,), name="campaign")
            worker.start()
            while worker.is_alive():
                worker.join(_LOOK_S)
                while not asked.empty():
                    self.stop.ask(asked.get())
        if self._error is not None:
            raise self._error
        result = campaign_result(self.journal, self.campaign)
        self._keep(result)
        if self.view_error is not None:
            self.say(f"a bug of soakrig blinded the live view: {self.view_error!r}")
        if self._end is not None and self._end.kind != "stopped":
            self.say(self._notifier.send(f"soakrig: {result.campaign} {result.state}", _message(result)))
        return result

    def _work(self, loop: CampaignLoop) -> None:
        try:
            self._end = loop.run()
        except BaseException as error:
            self._error = error

    def _changed(self, note: str) -> None:
        """After each entry of the journal. What is shown must never end a campaign."""
        with self._lock:
            try:
                self._show(note)
            except StoreError:
                raise
            except Exception as error:
                self.view_error = self.view_error or error

    def _show(self, note: str) -> None:
        """The whole result is made anew only when a launch has settled."""
        runs = self.journal.runs()
        settled = sum(run.state == "settled" for run in runs)
        if self._result is None or settled != self._settled:
            self._result, self._settled = campaign_result(self.journal, self.campaign), settled
        spans = self.journal.spans()
        current = [launch(run, spans) for run in runs if run.state != "settled"]
        self._view.update(self._result, current, note)
        first = next((run for run in runs if run.result == "faulted"), None)
        if first is not None and not self._told_fault:
            self._told_fault = True
            text = f"The first fault came in run {first.id} ({first.arm}): {first.signature}"
            threading.Thread(target=self._tell_fault, args=(text,), name="notify", daemon=True).start()

    def _tell_fault(self, text: str) -> None:
        self.say(self._notifier.send(f"soakrig: first fault in {self.journal.folder.name}", text))

    def say(self, failed: str) -> None:
        """A line for people, where there is something to say."""
        if failed:
            self.console.print(f"soak: {failed}", style="yellow", markup=False, soft_wrap=True)

    def _keep(self, result: CampaignResult) -> None:
        """Leave the result and its pages in the campaign's folder; a full disk is told, the journal has it all."""
        json = orjson.dumps(result.to_json(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        pages = {
            CAMPAIGN_RESULT: json,
            HTML: campaign_html(result).encode(),
            MARKDOWN: campaign_markdown(result).encode(),
        }
        for name, data in pages.items():
            try:
                write_private(self.journal.folder / name, data)
            except OSError as error:
                self.say(f"{self.journal.folder / name} was not written: {error.strerror or error}")


def unit_installed(folder: Path) -> bool:
    """Whether a reboot would be followed by a resume."""
    return (UNITS / unit_name(folder)).exists()


def _reboot(folder: Path) -> None:
    if not unit_installed(folder):
        raise PreflightRefusedError("nothing would take the campaign up", remedy=f"soak bisect install-resume {folder}")
    reboot_host()


def _message(result: CampaignResult) -> str:
    faults = sum(arm.faults for arm in result.arms)
    spent = f"{len(result.launches)} launches, {faults} faults, {result.hours:.2g} h"
    return f"{result.conclusion}\n{spent}. {result.ended}\n{result.folder}"


@contextlib.contextmanager
def ending_signals() -> Generator[queue.SimpleQueue[str]]:
    """The signals that end a process, by name as they come; one that is ignored (nohup) stays so. A handler only puts
    the name into the queue, which is safe in a handler (queue.SimpleQueue is reentrant)."""
    names = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    before = {number: signal.getsignal(number) for number in names}
    for number, name in names.items():
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, lambda _number, _frame, how=name: asked.put(how))
    try:
        yield asked
    finally:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, handler)
