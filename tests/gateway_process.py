"""`soak engine gateway` as a real process, for tests that kill what stands behind it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import httpx


class GatewayProcess:
    """A context manager; ``url`` once it listens."""

    def __init__(self, folder: Path, upstream: str, *options: str, env: dict[str, str] | None = None) -> None:
        """``upstream`` "": the registry's models, which ``env`` says where to find."""
        self.errors = folder / "gateway-stderr.txt"
        where = ["--upstream", upstream] if upstream else []
        argv = [sys.executable, "-m", "soakrig", "engine", "gateway", *where, "--port", "0", "--json"]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen([*argv, *options], stdout=subprocess.PIPE, stderr=errors, env=env)

    def __enter__(self) -> GatewayProcess:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors.read_text()
        self.said = json.loads(line)
        self.url: str = self.said["url"]
        self.client = httpx.Client(base_url=self.url, timeout=60.0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.client.close()
        self.process.terminate()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()

    def metric(self, line_start: str) -> float:
        """The value of the first sample whose line begins so."""
        lines = self.client.get("/metrics").text.splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(line_start)), 0.0)
