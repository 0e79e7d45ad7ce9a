"""`soak engine` as a real command over two small models of its own, in a state folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

from e2e.soaking import wait_for
from soakrig.engine import keeper
from soakrig.engine.registry import load_registry
from soakrig.engine.service import Host
from soakrig.engine.serving import cgroup
from soakrig.engine.serving.folder import EngineFolder
from soakrig.engine.serving.processes import Launch, find_launch

SMALL = '"--layers=2", "--hidden=64", "--experts=8", "--kv-tokens=8192", "--threads=1"'


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Box:
    """Two models, ``one`` and ``two``, on one port and in one slot. A context manager that leaves nothing behind."""

    def __init__(self, folder: Path, extra: str = "") -> None:
        token = secrets.token_hex(3)
        self.one, self.two, self.slot = f"one-{token}", f"two-{token}", f"slot-{token}"
        self.port = free_port()
        self.state = folder / "state"
        self.root = self.state / "soakrig" / "engines"
        self.registry = folder / "models.toml"
        table = "\n".join(
            f'[models.{name}]\nbackend = "embedded"\ncontext = 4096\nvalidated_context = 4096\nhost_ram_gib = 0.5\n'
            f'slot = "{self.slot}"\nport = {self.port}\nflags = [{SMALL}, "--weights-seed={seed}"]\n'
            for name, seed in ((self.one, 1), (self.two, 2))
        )
        self.registry.write_text(table + extra.format(one=self.one, two=self.two))
        self.env = {**os.environ, "XDG_STATE_HOME": str(self.state), "SOAKRIG_MODELS": str(self.registry)}
        self.started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        for name in (self.one, self.two):
            while (launch := find_launch(name, self.root)) is not None:
                for pid in launch.pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
                        os.kill(pid, signal.SIGKILL)
            self.remove_cgroups(name)

    def remove_cgroups(self, name: str) -> None:
        for group in self.cgroups(name):
            group.remove()

    def cgroups(self, name: str) -> list[cgroup.Cgroup]:
        mount, own = cgroup.mount(), cgroup.own()
        if mount is None or own is None:
            return []
        return [cgroup.Cgroup(path) for path in (mount / own.lstrip("/")).glob(f"soakrig-{name}-*")]

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "soakrig", "engine", *words]

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(self.argv(*words), env=self.env, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self.run(*words, "--json", code=code).stdout)

    def start(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        """A command that goes on; ended with the box."""
        process = subprocess.Popen(
            self.argv(*words), env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
        )
        self.started.append(process)
        return process

    def status(self, name: str, timeout: float = 30.0) -> dict[str, Any]:
        """As `soak engine status` has it, without another process to start."""
        return Host(load_registry(self.registry), root=self.root).states([name], timeout)[0].to_json()

    def launch(self, name: str) -> Launch:
        found = find_launch(name, self.root)
        assert found is not None, f"nothing of {name} is there"
        return found

    def folder(self, name: str) -> EngineFolder:
        return EngineFolder(name, self.root)

    def gone(self, name: str, seconds: float = 30.0) -> None:
        wait_for(f"the end of {name}", lambda: find_launch(name, self.root) is None, seconds)

    def ready_within(self, name: str, seconds: float = 60.0) -> None:
        def ready() -> bool:
            return any(row["event"] == "ready" for row in self.folder(name).launches())

        wait_for(f"{name} to be ready", ready, seconds)

    def nothing_holds_the_port(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", self.port))


class Load:
    """Streams that go on until the server ends them; how each of them ended."""

    def __init__(self, port: int, streams: int = 4, model: str = "") -> None:
        self.model = {"model": model} if model else {}
        self.url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self.ends: list[str] = []
        self.flowing = threading.Semaphore(0)
        self.threads = [threading.Thread(target=self._stream, args=(n,), daemon=True) for n in range(streams)]
        for thread in self.threads:
            thread.start()

    def _stream(self, number: int) -> None:
        body = {"messages": [{"role": "user", "content": f"stream {number}"}], "stream": True, "max_tokens": 3800,
                "ignore_eos": True, **self.model}  # fmt: skip
        text = b""
        try:
            with httpx.stream("POST", self.url, json=body, timeout=60.0, trust_env=False) as reply:
                for chunk in reply.iter_bytes():
                    if not text:
                        self.flowing.release()
                    text += chunk
        except httpx.HTTPError as error:
            told = b'"error"' in text and b"[DONE]" not in text
            self.ends.append("error frame" if told else f"broken: {type(error).__name__}")
            return
        if b"[DONE]" in text and b'"error"' not in text:
            self.ends.append("done")
        else:
            self.ends.append("error frame" if b'"error"' in text else "cut")

    def flows(self) -> None:
        """Until every stream has brought bytes."""
        for _ in self.threads:
            assert self.flowing.acquire(timeout=60)

    def finish(self) -> list[str]:
        for thread in self.threads:
            thread.join(60)
        return self.ends


def all_ended(launch: Launch) -> None:
    """Each process of a launch has ended. One that ends loses its environment first, and with it its mark."""

    def ended() -> bool:
        found = (keeper.read_stat(pid) for pid in launch.pids)
        return not any(stat is not None and keeper.is_running(stat) for stat in found)

    wait_for(f"the end of {sorted(launch.pids)}", ended, 5.0)
