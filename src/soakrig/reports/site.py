"""The pages of ``soak report --serve``: the list, a report of each run and campaign, comparisons, and runs that go on.

Reports are drawn on demand from the folders. What an address names is looked up in the index and nowhere else, so that
no address leads out of the runs folder. Only GET is answered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from soakrig.errors import RecordError, SoakrigError, UsageError
from soakrig.record.corrections import corrections_of, outlived_launches
from soakrig.record.run_index import RunIndex
from soakrig.record.run_summary import RunSummary
from soakrig.reports.corrections import launch_lines
from soakrig.reports.followed_run import FollowedRun
from soakrig.reports.pages import policy, script
from soakrig.reports.run_list import Asked, address, list_html, mark
from soakrig.reports.run_page import run_html
from soakrig.reports.run_view import read_run
from soakrig.reports.site_guard import Guard, Headers

LOOPBACK_NAMES = ["127.0.0.1", "localhost", "[::1]", "::1"]
"""Names by which a page of this machine may be asked for: any other is a foreign name that was pointed here."""
AT_ONCE = 2
"""Reports that are drawn at once."""
MOST_FOLLOWED = 32
REFRESH_S = 15
"""After which a browser loads the page of a running campaign again."""
_HOME = '<nav aria-label="Site"><a href="/">All runs</a></nav>\n'


@dataclass
class Site:
    """``index``: open, closed by whoever opened it. ``campaign_page``: HTML of a campaign's folder, with these
    corrections. ``comparison_page``: HTML of two run folders side by side. Both are handed in, since what they are made
    with lives above ``reports``; they raise ``SoakrigError``."""

    index: RunIndex
    campaign_page: Callable[[Path, list[str]], str]
    comparison_page: Callable[[Path, Path], str]
    _followed: dict[str, FollowedRun] = field(default_factory=dict[str, FollowedRun])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _drawing: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(AT_ONCE))

    def app(self, *, token: str = "", cookie: str = "soakrig", loopback: bool = True) -> Starlette:
        """ASGI. ``token``: see ``Guard``. ``loopback``: answer only to names of this machine."""
        middleware = [Middleware(Headers)]
        if loopback:
            middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK_NAMES, www_redirect=False))
        middleware.append(Middleware(Guard, token=token, name=cookie))
        return Starlette(
            routes=[
                Route("/", self.list, methods=["GET"]),
                Route("/changes", self.changes, methods=["GET"]),
                Route("/compare", self.compare, methods=["GET"]),
                Route("/favicon.ico", self.favicon, methods=["GET"]),
                Route("/run/{name:path}", self.report, methods=["GET"]),
                Route("/live/{name:path}", self.live, methods=["GET"]),
            ],
            middleware=middleware,
            exception_handlers={SoakrigError: _refused},
        )

    def list(self, request: Request) -> Response:
        """Runs and campaigns; see ``run_list.Asked``."""
        self.index.refresh()
        page = list_html(str(self.index.runs_dir), self.index.rows(), Asked.of_query(request.query_params))
        return _page(page, policy(script("runs.js"), served=True))

    def changes(self, request: Request) -> Response:
        """``mark`` of the list as it is now, and turns and faults of what runs, by id."""
        self.index.refresh()
        rows = self.index.rows()
        running = [row for row in rows if row.running and row.kind == "run"][:MOST_FOLLOWED]
        figures: dict[str, dict[str, int]] = {}
        for row in running:
            try:
                now = self._follow(row).look()
            except RecordError:
                continue  # its row tells what is wrong once it has ended
            figures[row.id] = {"turns": now["turns"], "faults": len(now["faults"])}
        self._forget({row.id for row in running})
        return JSONResponse({"mark": mark(rows), "running": figures})

    def report(self, request: Request) -> Response:
        """The report of one run or campaign."""
        self.index.refresh()
        row = self._row(request.path_params["name"])
        folder = self.index.folder(row)
        with self._drawing:
            if row.kind == "campaign":
                found = outlived_launches(self.index, row.id)
                page = _with_way_home(self.campaign_page(folder, launch_lines(found)))
                return _page(page, policy(), {"Refresh": str(REFRESH_S)} if row.running else None)
            view = read_run(folder)
            view.corrections = corrections_of(self.index, row.id)
            scripts = [script("run.js"), *([script("live.js")] if view.running else [])]
            return _page(run_html(view, served=address(row.id).removeprefix("/run/")), policy(*scripts, served=True))

    def live(self, request: Request) -> Response:
        """How a run that goes on is now; see ``FollowedRun.look``."""
        row = self._row(request.path_params["name"])
        if row.kind not in ("run", "launch"):
            raise UsageError(f"{row.id} is no run", remedy="Follow a run.")
        return JSONResponse(self._follow(row).look())

    def compare(self, request: Request) -> Response:
        """Two runs side by side."""
        names = request.query_params.getlist("run")
        if len(names) != 2 or names[0] == names[1]:
            raise UsageError(
                f"two runs are compared, and {len(set(names))} were given", remedy="Check two in the list."
            )
        self.index.refresh()
        rows = sorted((self._row(name) for name in names), key=lambda row: (row.created, row.id))
        for row in rows:
            if row.kind not in ("run", "launch"):
                raise UsageError(f"{row.id} is no run that can be compared", remedy="Check two runs.")
        with self._drawing:
            one, other = (self.index.folder(row) for row in rows)
            return _page(_with_way_home(self.comparison_page(one, other)), policy())

    def favicon(self, request: Request) -> Response:
        """None."""
        return Response(status_code=204)

    def _row(self, name: str) -> RunSummary:
        row = self.index.get(name)
        if row is None:
            raise RecordError(f"there is no run or campaign {name[:200]!r} in the index", remedy="See the list.")
        return row

    def _follow(self, row: RunSummary) -> FollowedRun:
        with self._lock:
            if row.id not in self._followed:
                while len(self._followed) >= MOST_FOLLOWED:
                    self._followed.pop(next(iter(self._followed)))
                self._followed[row.id] = FollowedRun(self.index.folder(row))
            return self._followed[row.id]

    def _forget(self, running: set[str]) -> None:
        with self._lock:
            self._followed = {name: one for name, one in self._followed.items() if name in running}


def _page(html: str, said: str, more: dict[str, str] | None = None) -> Response:
    return HTMLResponse(html, headers={"Content-Security-Policy": said, **(more or {})})


def _with_way_home(html: str) -> str:
    return html.replace("<header>\n", f"<header>\n{_HOME}", 1)


def _refused(request: Request, error: Exception) -> Response:
    """What a folder or an address is refused for, in words."""
    known: Any = error
    return PlainTextResponse(f"{known.message}\n{known.remedy}\n", 404 if isinstance(error, RecordError) else 400)
