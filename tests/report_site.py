"""`soak report --serve` as a real process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path


class ReportSite:
    """One served runs folder; a context manager. ``url`` is there once it listens, ``errors`` has standard error."""

    def __init__(self, runs: Path, *options: str, **environment: str) -> None:
        self.errors = runs.parent / "site-stderr.txt"
        self.argv = [sys.executable, "-m", "soakrig", "report", "--serve", "--port", "0", "--json"]
        self.argv += ["--runs-dir", str(runs), *options]
        self.environment = {**os.environ, **environment}

    def __enter__(self) -> ReportSite:
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                self.argv, stdout=subprocess.PIPE, stderr=errors, env=self.environment, start_new_session=True
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors.read_text()
        self.told = json.loads(line)
        self.url: str = self.told["url"]
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def end(self, number: int = signal.SIGINT) -> int:
        """Ctrl-C; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(15)
