"""Sends a small load to an OpenAI-compatible server until a fault comes. Needs Python 3.9 or newer and httpx.

    python reproduce.py http://127.0.0.1:8000

Exit status: 1 the fault came, 0 it did not in so many turns, 2 it cannot be told (nothing answers at the start, a wrong
call). Made by soakrig; the load was recorded, made smaller, and is sent over and over.
"""

# What `soak repro minimize` writes out is this file with its own values in place of these.
from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import threading
from typing import Any, Iterator, List, Optional  # noqa: UP035 - for Python 3.9

import httpx

SIGNATURE: str = ""
"""The fault that was looked for."""
TURNS: int = 60
"""Turns in which it came in 19 of 20 tries, by the lower end of its hazard."""
LOAD: List[List[str]] = []  # noqa: UP006
"""Of each conversation at once: the bodies that it sends in turn."""

XID = re.compile(r"NVRM: Xid")


class KernelLog:
    """New lines of a kernel log: /dev/kmsg, or a file that grows. Silent where it cannot be read."""

    def __init__(self, path: str) -> None:
        self.fd: Optional[int] = None  # noqa: UP045
        with contextlib.suppress(OSError):
            self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self.fd, 0, os.SEEK_END)

    def xid(self) -> str:
        """A line about a GPU error since the last call, empty without one."""
        found = ""
        while self.fd is not None:
            try:
                data = os.read(self.fd, 1 << 16)
            except BrokenPipeError:  # records were overwritten before they were read: the next ones follow
                continue
            except OSError:  # nothing new
                break
            if not data:
                break
            lines = data.decode("utf-8", "replace").splitlines()
            found = found or next((line for line in lines if XID.search(line)), "")
        return found


def events(response: httpx.Response) -> Iterator[Any]:
    """The JSON objects of a stream, and None for its terminator."""
    for line in response.iter_lines():
        if line.startswith("data:"):
            payload = line[5:].strip()
            yield None if payload == "[DONE]" else json.loads(payload)


def send(client: httpx.Client, url: str, body: bytes) -> str:
    """One turn; what was wrong with it, empty where nothing was."""
    whole = not json.loads(body).get("stream", False)
    text, calls, reason, ended, seen = "", [], None, whole, 0
    try:
        headers = {"Content-Type": "application/json"}
        with client.stream("POST", url, content=body, headers=headers) as response:
            if response.status_code != 200:
                said = response.read()[:300].decode("utf-8", "replace")
                return f"http_error: status {response.status_code}: {said}"
            if whole:
                raw = response.read()
                objects: Any = [json.loads(raw)] if raw.strip() else []
            else:
                objects = events(response)
            for data in objects:
                if data is None:
                    ended = True
                    continue
                seen += 1
                if data.get("error"):
                    return f"error_frame: {json.dumps(data['error'])[:300]}"
                for choice in data.get("choices") or []:
                    part = choice.get("delta") or choice.get("message") or {}
                    text += part.get("content") or ""
                    calls += part.get("tool_calls") or []
                    reason = choice.get("finish_reason") or reason
    except httpx.ConnectError as error:
        return f"refused: {error}"
    except httpx.TimeoutException as error:
        return f"hung: {type(error).__name__}"
    except httpx.HTTPError as error:
        return f"truncated: {type(error).__name__}: {error}"
    except (ValueError, AttributeError, TypeError) as error:
        return f"malformed: {error}"
    if not seen:
        return "empty_200: status 200 and no data"
    if reason is None or not ended:
        return f"truncated: finish reason {reason!r}, terminator {'came' if ended else 'missing'}"
    return content_fault(text, calls)


def content_fault(text: str, calls: List[Any]) -> str:  # noqa: UP006
    """Faults of what a model wrote, which count only where one of them is what was looked for."""
    if SIGNATURE == "turn answerless" and not text.strip() and not calls:
        return "answerless: neither content nor a call"
    words = text.split()
    if SIGNATURE == "turn degenerate" and len(words) >= 32 and len(set(words[-32:])) <= 2:
        return f"degenerate: {words[-1][:40]!r} over and over"
    if SIGNATURE == "turn tool_malformed":
        arguments = "".join((call.get("function") or {}).get("arguments") or "" for call in calls)
        if re.search(r"</?(?:tool_call|arg_key|arg_value)", arguments):
            return f"tool_malformed: {arguments[:200]}"
    return ""


class Soak:
    """The conversations at once, until one meets a fault or all are through."""

    def __init__(self, options: argparse.Namespace, model: str) -> None:
        self.options, self.model = options, model
        self.lock, self.over = threading.Lock(), threading.Event()
        self.log = KernelLog(options.kernel_log)
        self.turns, self.fault = 0, ""

    def run(self) -> None:
        """Returns at the end; the fault is in ``fault``."""
        lanes = [threading.Thread(target=self.converse, args=(bodies,)) for bodies in LOAD]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        self.fault = self.fault or self.log.xid()

    def converse(self, bodies: List[str]) -> None:  # noqa: UP006
        url = f"{self.options.url}/chat/completions"
        wanted = -(-self.options.turns // len(LOAD))
        with http(self.options) as client:
            for number in range(wanted):
                if self.over.is_set():
                    return
                body = json.loads(bodies[number % len(bodies)])
                why = send(client, url, json.dumps({**body, "model": self.model}).encode())
                with self.lock:
                    self.turns += 1
                    self.fault = self.fault or self.log.xid() or why
                    if self.fault:
                        self.over.set()


def http(options: argparse.Namespace) -> httpx.Client:
    """A client that waits as long as a slow engine needs, and takes no proxy."""
    key = os.environ.get(options.api_key_env, "") if options.api_key_env else ""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(options.stall, connect=10.0)
    return httpx.Client(timeout=timeout, headers=headers, trust_env=False)


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=f"Reproduces: {SIGNATURE}")
    parser.add_argument("url", help="http://HOST:PORT, with or without /v1")
    parser.add_argument("--turns", type=int, default=TURNS, help="most turns, all conversations together (%(default)s)")
    parser.add_argument("--model", default="", help="name to ask for (the first one served)")
    parser.add_argument("--stall", type=float, default=600.0, help="seconds of silence that are a fault (%(default)s)")
    parser.add_argument("--kernel-log", default="/dev/kmsg", help="watched for Xid lines where it can be read")
    parser.add_argument("--api-key-env", default="", help="environment variable with the key")
    options = parser.parse_args()
    if options.turns < 1:
        parser.error(f"--turns {options.turns}: expected at least 1")
    base = options.url.rstrip("/")
    options.url = base if base.endswith("/v1") else f"{base}/v1"
    try:
        with http(options) as client:
            model = options.model or client.get(f"{options.url}/models").json()["data"][0]["id"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        sys.stderr.write(f"nothing to test at {options.url}: {type(error).__name__}: {error}\n")
        return 2
    soak = Soak(options, model)
    if soak.log.fd is None:
        sys.stderr.write(f"{options.kernel_log} cannot be read: a fault of the GPU shows only where it ends a turn\n")
    soak.run()
    if soak.fault:
        sys.stdout.write(f"FAULT at turn {soak.turns}: {soak.fault}\n(looked for: {SIGNATURE})\n")
        return 1
    sys.stdout.write(f"no fault in {soak.turns} turns (looked for: {SIGNATURE})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
