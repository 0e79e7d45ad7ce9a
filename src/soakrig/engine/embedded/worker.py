"""The worker process: owns the model, takes requests from the server's socket, reports every step to it.

Started by the server with the socket's file descriptor; ends when the server ends, however that happens: the kernel
kills it with its parent (PR_SET_PDEATHSIG), and an end of file on the socket ends it as well.
"""

from __future__ import annotations

import ctypes
import logging
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any

import orjson
import torch

from soakrig.engine.offload.plan import OffloadPlan
from soakrig.errors import SoakrigError

from .config import LOG_FORMAT, EngineConfig
from .runner import Runner, StepStats
from .sequence import from_request
from .tokenizer import Tokenizer
from .wire import READ_BYTES, Framing, send

BEAT_SECONDS = 0.5
FLUSH_SECONDS = 5.0
"""Under steady load profile and trace reach the disk at least this often; an idle worker writes at its next beat."""
PLANTED_STATUS = 1
NO_DEVICE_STATUS = 3
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class _TerminatedError(BaseException):
    """SIGTERM came."""


class Worker:
    """The loop over one socket and one runner."""

    def __init__(self, connection: socket.socket, config: EngineConfig, plan: OffloadPlan) -> None:
        self._connection = connection
        self._tokenizer = Tokenizer()
        self._runner = Runner(config, plan)
        self._framing = Framing()
        self._serial = 0
        self._beaten = 0.0
        self._flushed = time.monotonic()
        self._flushed_steps = 0

    def run(self) -> None:
        """Serve until told to stop or the server is gone."""
        try:
            self._serve()
        finally:
            self._runner.store.close()

    def _serve(self) -> None:
        self._connection.setblocking(False)
        selector = selectors.DefaultSelector()
        selector.register(self._connection, selectors.EVENT_READ)
        self._send({"op": "ready", "memory": self._runner.store.memory()})
        while True:
            scheduler = self._runner.scheduler
            wait = 0.0 if scheduler.has_work else BEAT_SECONDS
            if selector.select(wait) and not self._read():
                return
            if scheduler.has_work:
                result = self._runner.step()
                self._report("step", result.events, result.stats)
                self._flush(FLUSH_SECONDS)
            elif time.monotonic() - self._beaten >= BEAT_SECONDS:
                self._report("beat", [], StepStats())
                self._flush(0.0)

    def _flush(self, after: float) -> None:
        """Bring profile and trace to the disk, where there are new steps and the last time is ``after`` s ago."""
        store, now = self._runner.store, time.monotonic()
        if store.steps == self._flushed_steps or now - self._flushed < after:
            return
        store.flush()
        self._flushed, self._flushed_steps = now, store.steps

    def _read(self) -> bool:
        """Take what the server sent; False when it is time to end."""
        try:
            data = self._connection.recv(READ_BYTES)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        if not data:
            return False
        return all(self._handle(message) for message in self._framing.feed(data))

    def _handle(self, message: dict[str, Any]) -> bool:
        match message["op"]:
            case "add":
                self._serial += 1
                self._runner.scheduler.add(from_request(message, self._serial, self._tokenizer))
            case "abort":
                if self._runner.scheduler.abort(message["id"]):
                    self._report("step", [{"id": message["id"], "finish": "abort"}], StepStats())
            case "exit":
                # The planted fault: gone at once, nothing flushed, nothing said.
                os._exit(PLANTED_STATUS)
            case _:
                return False
        return True

    def _report(self, op: str, events: list[dict[str, Any]], stats: StepStats) -> None:
        scheduler = self._runner.scheduler
        self._send(
            {
                "op": op,
                "events": events,
                "prompt": stats.prompt,
                "generated": stats.generated,
                "computed": stats.computed,
                "running": len(scheduler.running),
                "waiting": len(scheduler.waiting),
                "kv_usage": scheduler.pool.usage,
                "preemptions": scheduler.preemptions,
                "prefix_queries": scheduler.prefix_queries,
                "prefix_hits": scheduler.prefix_hits,
                "offload": self._runner.offload_report() if op == "step" else None,
            }
        )
        self._beaten = time.monotonic()

    def _send(self, message: dict[str, Any]) -> None:
        self._connection.setblocking(True)
        send(self._connection, message)
        self._connection.setblocking(False)


def main(argv: list[str]) -> int:
    """``argv``: the socket's descriptor, the server's pid, the configuration as JSON; the offload plan, as JSON, is on
    standard input."""
    descriptor, parent, raw = int(argv[0]), int(argv[1]), argv[2]
    plan = sys.stdin.buffer.read()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return 0
    # A Ctrl-C in a terminal goes to the whole group; the server decides what it means for the worker.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A service manager ends all processes of a group: profile and trace are written before this one goes.
    signal.signal(signal.SIGTERM, _terminated)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=LOG_FORMAT)
    config = EngineConfig(**orjson.loads(raw))
    if config.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("error: --device cuda, but torch sees no CUDA device here; use --device cpu\n")
        return NO_DEVICE_STATUS
    connection = socket.socket(fileno=descriptor)
    try:
        worker = Worker(connection, config, OffloadPlan.from_json(orjson.loads(plan)))
    except SoakrigError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    try:
        worker.run()
    except BrokenPipeError:
        return 0
    except _TerminatedError:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    return 0


def _terminated(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _TerminatedError


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
