"""The server's end of the worker: starts it, sends requests, hands out events, and knows how it ended."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import orjson

from soakrig.engine.offload.plan import OffloadPlan
from soakrig.errors import EngineStartError, UsageError

from .config import EngineConfig
from .wire import READ_BYTES, Framing, frame

STOP_SECONDS = 1.0
WRITE_SECONDS = 10.0
"""How long a worker has that writes a profile or a trace to its disk before it ends."""
KILL_SECONDS = 1.0
BURY_SECONDS = 10.0
"""How long a worker that closed its socket may take to be gone."""

Event = dict[str, Any]
DEAD: Event = {"dead": True}
"""What every waiting request gets when the worker is gone."""


class WorkerDeadError(Exception):
    """The worker is gone; the message says how it ended."""


class WorkerLink:
    """One worker. Not restarted: an engine whose worker died stays dead, as real engines do."""

    def __init__(self, config: EngineConfig, plan: OffloadPlan, on_report: Callable[[dict[str, Any]], None]) -> None:
        self._config = config
        self._on_report = on_report
        self._loop = asyncio.get_running_loop()
        self._framing = Framing()
        self._queues: dict[str, asyncio.Queue[Event]] = {}
        self._unsent = bytearray()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._dead = asyncio.Event()
        self._last_beat = self._loop.time()
        self._stop_seconds = STOP_SECONDS if plan.skew is None and plan.trace is None else WRITE_SECONDS
        self.how_ended = ""
        self.memory: dict[str, Any] = {}
        """Bytes that the offload core holds, by name; known once the worker is ready."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._socket = ours
        # In a file: with hot sets a plan passes the 128 KiB that Linux takes for one argument (MAX_ARG_STRLEN).
        with theirs, tempfile.TemporaryFile() as plan_file:
            plan_file.write(orjson.dumps(plan.to_json()))
            plan_file.seek(0)
            argv = [sys.executable, "-m", "soakrig.engine.embedded.worker", str(theirs.fileno()), str(os.getpid())]
            # Waiting OpenMP threads sleep: spinning ones take the CPU from the server and from the client under test.
            # Started from the main thread: PR_SET_PDEATHSIG follows the thread that made the child.
            self._process = subprocess.Popen(
                [*argv, orjson.dumps(config.report()).decode()],
                pass_fds=[theirs.fileno()],
                stdin=plan_file,
                env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
            )
        self._loop.add_reader(ours.fileno(), self._on_readable)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._dead.is_set()

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the worker last said anything."""
        return self._loop.time() - self._last_beat

    async def ready(self) -> None:
        """Wait for the loaded model. Raises EngineStartError when the worker ends before, UsageError when it refused
        its settings."""
        try:
            await self._ready
        except WorkerDeadError as error:
            said = "the worker's own words are above, on standard error"
            if self._process.returncode == UsageError.exit_code:
                raise UsageError(f"the settings do not fit the model: {error}", remedy=said) from error
            raise EngineStartError(f"the model could not be loaded: {error}", remedy=said) from error

    def add(self, request: dict[str, Any]) -> asyncio.Queue[Event]:
        """Send a request; its events come through the queue. Raises WorkerDeadError."""
        if not self.alive:
            raise WorkerDeadError(self.how_ended)
        queue: asyncio.Queue[Event] = asyncio.Queue()
        self._queues[request["id"]] = queue
        self._send({"op": "add", **request})
        return queue

    def abort(self, request: str) -> None:
        """Forget a request, and have the worker drop it if it still has it."""
        if self._queues.pop(request, None) is not None and self.alive:
            self._send({"op": "abort", "id": request})

    def forget(self, request: str) -> None:
        """The request has ended."""
        self._queues.pop(request, None)

    def plant_exit(self) -> None:
        """A planted fault: the worker ends itself."""
        self._send({"op": "exit"})

    def plant_kill(self) -> None:
        """A planted fault: SIGKILL for the worker."""
        self._process.send_signal(signal.SIGKILL)

    async def died(self) -> None:
        """Wait until the worker is gone."""
        await self._dead.wait()

    async def stop(self) -> None:
        """End the worker: asked first, then killed. Returns when it is gone."""
        if self.alive:
            self._send({"op": "stop"})
            try:
                await asyncio.wait_for(self._dead.wait(), self._stop_seconds)
            except TimeoutError:
                self._process.kill()
                await asyncio.wait_for(self._dead.wait(), KILL_SECONDS)
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        if not self.alive:
            return
        if not self._unsent:
            self._loop.add_writer(self._socket.fileno(), self._on_writable)
        self._unsent += frame(message)
        self._on_writable()

    def _on_writable(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
        self._loop.remove_writer(self._socket.fileno())

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._bury()
            return
        self._last_beat = self._loop.time()
        for message in self._framing.feed(data):
            if message["op"] == "ready":
                self.memory = message["memory"]
                if not self._ready.done():
                    self._ready.set_result(None)
                continue
            self._on_report(message)
            for event in message["events"]:
                queue = self._queues.get(event["id"])
                if queue is not None:
                    queue.put_nowait(event)

    def _bury(self) -> None:
        """The worker closed its end: it is dead or about to be."""
        descriptor = self._socket.fileno()
        self._loop.remove_reader(descriptor)
        self._loop.remove_writer(descriptor)
        self._unsent.clear()
        self._socket.close()
        try:
            # A Python that ends by itself takes a while on a busy machine, after its sockets are closed.
            status = self._process.wait(timeout=BURY_SECONDS)
            self.how_ended = _how(status, self._process.pid)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self.how_ended = (
                f"the worker (pid {self._process.pid}) closed its socket, did not end within {BURY_SECONDS:g} s, and "
                "was killed by this server"
            )
        self._dead.set()
        if not self._ready.done():
            self._ready.set_exception(WorkerDeadError(self.how_ended))
        for queue in self._queues.values():
            queue.put_nowait(DEAD)


def _how(status: int, pid: int) -> str:
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"the worker (pid {pid}) was ended by {name}"
    return f"the worker (pid {pid}) ended with exit status {status}"
