"""``soak report --serve``: the runs folder as a site, on this machine or for a team with a token."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import socket
from pathlib import Path

import uvicorn

from soakrig.cli.bisect import read_campaign_result
from soakrig.cli.compare import comparison_page
from soakrig.cli.output import emit_json
from soakrig.engine.gateway.server import Server, bind
from soakrig.errors import UsageError
from soakrig.record.run_index import RunIndex
from soakrig.reports.campaign_page import campaign_html
from soakrig.reports.site import Site
from soakrig.reports.site_guard import LEAST_TOKEN
from soakrig.reports.terminal import report_console

LOOPBACK = "127.0.0.1"
GRACE_S = 1


def serve_reports(runs_dir: Path, *, port: int, address: str, token_env: str, as_json: bool) -> None:
    """Serve until Ctrl-C or SIGTERM. ``port`` 0 takes a free one. Raises ``UsageError`` for an address that would be
    open to anybody, ``PreflightRefusedError`` for one that is taken, ``RecordError`` where there is no runs folder."""
    token = _token(token_env)
    loopback = _is_loopback(address)
    if not loopback and not token:
        raise UsageError(
            f"--bind {address} lets other machines in, and there is no token",
            remedy="Add --token-env NAME, the environment variable that holds it; or leave --bind out.",
        )
    with RunIndex(runs_dir, keep=True, campaigns=read_campaign_result) as index:
        index.refresh()
        listener = bind(address, port, option="--bind")
        port = listener.getsockname()[1]
        url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
        site = Site(index, lambda folder, said: campaign_html(read_campaign_result(folder), said), comparison_page)
        app = site.app(token=token, cookie=f"soakrig-{port}", loopback=loopback)
        notes = report_console(stderr=True)

        def ready() -> None:
            if as_json:
                emit_json({"url": url, "runs_dir": str(runs_dir), "token": bool(token)})
            place = index.place or "memory: no place can be written"
            notes.print(f"reports of {runs_dir} on {url}, until Ctrl-C (index: {place})", markup=False, soft_wrap=True)
            if token:
                notes.print("open it once with ?token=, then the token, behind the address", markup=False)

        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", server_header=False,
            timeout_graceful_shutdown=GRACE_S,
        )  # fmt: skip
        asyncio.run(_serve(Server(config, ready), listener))


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await server.serve(sockets=[listener])
    finally:
        listener.close()


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError as error:
        raise UsageError(f"--bind {address!r} is no IP address", remedy="Give an address of this machine.") from error


def _token(variable: str) -> str:
    if not variable:
        return ""
    token = os.environ.get(variable, "")
    if len(token) < LEAST_TOKEN:
        what = f"has {len(token)} characters" if token else "is not set"
        raise UsageError(
            f"--token-env {variable}: the variable {what}, {LEAST_TOKEN} were expected at least",
            remedy=f"export {variable}=$(openssl rand -hex 16)",
        )
    return token
