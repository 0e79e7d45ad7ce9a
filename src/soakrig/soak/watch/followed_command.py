"""A child process whose output lines are followed: how journalctl and dmesg are read."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence

from soakrig.errors import WatcherError

LINE_MAX = 1 << 20
"""A line longer than this is handed on in pieces."""


class FollowedCommand:
    """Starts ``argv`` in its own process group under LC_ALL=C and reads its lines without blocking.

    Where setpriv (util-linux) is there, the kernel ends the child together with us, also when we are killed.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = list(argv)
        self._rest = b""
        self._errors = b""
        wrapper = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        try:
            self._child = subprocess.Popen(
                [*wrapper, *self.argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, "LC_ALL": "C"},
            )
        except OSError as error:
            raise WatcherError(f"{self.argv[0]}: {error.strerror}", remedy=f"install {self.argv[0]}") from error
        for stream in (self._child.stdout, self._child.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)

    @property
    def pid(self) -> int:
        return self._child.pid

    def lines(self, most: int) -> tuple[list[bytes], bool]:
        """Up to about ``most`` whole lines, and whether there was nothing more just then."""
        found: list[bytes] = []
        assert self._child.stdout is not None
        while len(found) < most:
            data = _read(self._child.stdout.fileno())
            if not data:
                if data == b"" and self._rest:  # end of file: what is left is the last line
                    found.append(self._rest)
                    self._rest = b""
                return found, True
            *lines, self._rest = (self._rest + data).split(b"\n")
            found += lines
            if len(self._rest) > LINE_MAX:
                found.append(self._rest)
                self._rest = b""
        return found, False

    def ended(self) -> str | None:
        """None while it runs, else what it said and its exit status.

        Ask before ``lines``: of a child that has ended every line can then be read.
        """
        assert self._child.stderr is not None
        status = self._child.poll()  # first, so that its last words are there to be read
        while data := _read(self._child.stderr.fileno()):
            self._errors = (self._errors + data)[-2_000:]
        if status is None:
            return None
        said = self._errors.decode("utf-8", "replace").strip()
        return f"{self.argv[0]} ended with status {status}" + (f": {said}" if said else "")

    @property
    def status(self) -> int | None:
        return self._child.poll()

    def close(self) -> None:
        """End the child's process group; it gets two seconds before it is killed."""
        if self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGTERM)
            try:
                self._child.wait(2)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._child.pid, signal.SIGKILL)
                self._child.wait(2)
        for stream in (self._child.stdout, self._child.stderr):
            if stream is not None:
                stream.close()


def run_once(argv: Sequence[str], timeout: float = 10.0) -> tuple[int, str, str]:
    """Exit status, output and errors of a command that ends; 127 where it is not there, 124 after ``timeout`` s."""
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except OSError as error:
        return 127, "", f"{argv[0]}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return 124, "", f"{argv[0]} gave no answer within {timeout:g} s"
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace").strip()


def _read(fd: int) -> bytes | None:
    """Bytes, b"" at the end of the file, None where there is nothing now."""
    try:
        return os.read(fd, 65_536)
    except BlockingIOError:
        return None
