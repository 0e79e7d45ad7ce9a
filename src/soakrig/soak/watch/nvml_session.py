"""A session with the process that reads NVML: one request at a time, each with a deadline, and an end that holds."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from soakrig.clock import Clock
from soakrig.errors import WatcherError
from soakrig.soak.watch import proc


@dataclass(frozen=True, slots=True)
class Silence:
    """Why there was no answer. ``exit_status`` None: it was alive; ``threads`` then says where its threads were.
    ``ended`` is False where even SIGKILL did not end it within a second."""

    op: str
    seconds: float
    exit_status: int | None
    threads: str
    ended: bool


class NvmlSession:
    """One child process (``nvml_child``) and the request under way. ``env`` None: this process's environment."""

    def __init__(self, clock: Clock, env: Mapping[str, str] | None) -> None:
        argv = [sys.executable, "-P", "-m", "soakrig.soak.watch.nvml_child", str(os.getpid())]
        self._clock = clock
        self._child = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=None if env is None else dict(env), bufsize=0, start_new_session=True,
        )  # fmt: skip
        assert self._child.stdout is not None
        assert self._child.stdin is not None
        self._in, self._out = self._child.stdin, self._child.stdout
        os.set_blocking(self._out.fileno(), False)
        self._number, self._sent, self._deadline = 0, 0.0, 0.0
        self._buffer = b""
        self.pid = self._child.pid
        self.op: str | None = None
        """What was asked and not answered yet."""

    def ask(self, op: str, deadline: float) -> None:
        """Send a request that has to be answered within ``deadline`` seconds."""
        self._number += 1
        self.op, self._sent, self._deadline = op, self._clock.monotonic(), deadline
        with suppress(OSError):  # a dead child shows at the read
            self._in.write(json.dumps({"id": self._number, "op": op}).encode() + b"\n")

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """The answer to the request under way, or None when none came within ``seconds``."""
        end = self._clock.monotonic() + seconds
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                answer = json.loads(line)
                if answer["id"] == self._number:
                    self.op = None
                    return answer
                continue
            left = end - self._clock.monotonic()
            if left <= 0 or not select.select([self._out], [], [], left)[0]:
                return None
            data = self._out.read(1 << 16)
            if not data:
                with suppress(subprocess.TimeoutExpired):
                    self._child.wait(0.5)  # its output has ended, so has it
                return None
            self._buffer += data

    def overdue(self) -> bool:
        """Whether the deadline has passed, or the child is dead and will never answer."""
        late = self.op is not None and self._clock.monotonic() - self._sent >= self._deadline
        return late or self._child.poll() is not None

    def give_up(self) -> Silence:
        """End a child that does not answer, and say how it was found."""
        status = self._child.poll()
        seconds = round(self._clock.monotonic() - self._sent, 3)
        states = [
            f"{one.state}{f' in {one.wchan}' if one.wchan else ''}"
            for one in (proc.threads(self.pid) if status is None else [])
        ]
        return Silence(self.op or "?", seconds, status, ", ".join(states), self.close())

    def close(self) -> bool:
        """Kill the child; False when it is still there a second later (it sits in the driver)."""
        for pipe in (self._in, self._out):
            with suppress(OSError):
                pipe.close()
        with suppress(ProcessLookupError):
            self._child.send_signal(signal.SIGKILL)
        try:
            self._child.wait(1.0)
        except subprocess.TimeoutExpired:
            return False
        return True


def read_once(
    op: str, clock: Clock, *, env: Mapping[str, str] | None = None, deadline: float = 30.0
) -> dict[str, Any] | str:
    """One answer to ``op`` ("state", "poll") from a child of its own, with what "open" told merged in; or the text of
    why there is none: no NVML here, or it shows no GPU.

    ``deadline``: seconds for both requests together; loading the driver of a card that nobody uses takes some. ``env``:
    of the child, None for this process's own. Raises ``WatcherError`` where NVML hangs, fails or ends its process.
    """
    end = clock.monotonic() + deadline
    session = NvmlSession(clock, env)
    try:
        opened = _asked(session, "open", deadline)
        if "ok" not in opened:
            return f"no NVML here: {opened.get('absent', 'no reason given')}"
        if not opened["ok"]["gpus"]:
            return "; ".join(["no NVML here: it shows no GPU", *opened["ok"]["notes"]])
        answer = _asked(session, op, max(0.1, end - clock.monotonic()))
        if "ok" not in answer:
            text = answer.get("failed") or answer.get("absent")
            raise WatcherError(f"NVML gave no {op}: {text}", remedy="`nvidia-smi -q` says more.")
        return {**opened["ok"], **answer["ok"]}
    finally:
        session.close()


def _asked(session: NvmlSession, op: str, seconds: float) -> dict[str, Any]:
    """The answer, or ``WatcherError`` where there is none within ``seconds``."""
    session.ask(op, seconds)
    answer = session.answer(seconds)
    if answer is not None:
        return answer
    silence = session.give_up()
    if silence.exit_status is not None:
        text = f"the process that reads NVML ended by itself ({op}), exit status {silence.exit_status}"
    else:
        text = f"NVML did not answer ({op}) within {seconds:g} s; its threads were: {silence.threads or 'unknown'}"
        text += "" if silence.ended else "; SIGKILL does not end it"
    raise WatcherError(text, remedy="Does `nvidia-smi` answer? A driver that hangs needs a reboot.")
