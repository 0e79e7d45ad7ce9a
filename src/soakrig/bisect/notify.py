"""Messages about a campaign, by apprise (https://github.com/caronc/apprise), to the URLs that ``--notify`` gives.

Nothing is sent anywhere unless a URL was given. A URL is a secret, as most services put their token into it: no message
of this module holds one, and processes get them on standard input.

Each URL has a process of its own, ``python -P -m soakrig.bisect.notify_child``, for the time of one message: a server
that never answers would hold a thread, and a thread holds the tool's exit.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from soakrig.errors import UsageError

SEND_S = 30.0
CHECK_S = 60.0
LONGEST = 8000
"""Characters of a title or body; what is more is cut. Services take less, and a pipe holds it without a reader."""
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]{0,15})://")
_CHILD = "soakrig.bisect.notify_child"


class Notifier:
    """Sends to every one of ``urls``; does nothing where there is none.

    ``deadline``: seconds for one message, over all URLs. ``env``: of the child processes, None for this process's.
    """

    def __init__(self, urls: Sequence[str], *, deadline: float = SEND_S, env: Mapping[str, str] | None = None) -> None:
        self._urls, self._deadline = tuple(urls), deadline
        self._env = None if env is None else dict(env)

    def check(self) -> None:
        """Whether apprise is there and understands each URL; sends nothing. Raises ``UsageError``."""
        for label, answer in self._asked({"op": "check"}, CHECK_S):
            if answer.get("missing"):
                raise UsageError(
                    f"--notify needs apprise, which cannot be loaded: {answer['missing']}",
                    remedy="pip install 'soakrig[notify]'",
                )
            if not answer.get("ok"):
                raise UsageError(
                    f"--notify: {label} is no URL that apprise can send to ({answer['why']})",
                    remedy="Example: mailto://user:password@example.com; `apprise --details` lists the services.",
                )

    def send(self, title: str, body: str) -> str:
        """Send plain text; "" where every URL took it, else which did not and why. Never raises, and returns within
        ``deadline`` and some milliseconds."""
        request = {"op": "send", "title": _clean(title), "body": _clean(body)}
        try:
            answers = self._asked(request, self._deadline)
        except Exception as error:  # a message that is not sent must not end a campaign
            return f"nobody was notified: {type(error).__name__}"
        failed = [
            f"{label}: {answer.get('missing') or answer.get('why')}"
            for label, answer in answers
            if not answer.get("ok")
        ]
        return f"not notified: {'; '.join(failed)}" if failed else ""

    def _asked(self, request: Mapping[str, str], deadline: float) -> list[tuple[str, dict[str, Any]]]:
        """What became of ``request`` for each URL: its label, and {ok}, {why} or {missing}."""
        end = time.monotonic() + deadline
        children: list[subprocess.Popen[bytes]] = []
        try:
            for url in self._urls:
                child = self._start({**request, "url": _clean(url)})
                children.append(child)  # at once: what has begun has to be ended
            answers = [_answer(child, end, deadline) for child in children]
        finally:
            for child in children:
                _end(child)
        return [
            (_label(url, n, len(self._urls)), answer)
            for n, (url, answer) in enumerate(zip(self._urls, answers, strict=True))
        ]

    def _start(self, request: Mapping[str, str]) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", _CHILD], env=self._env,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        assert child.stdin is not None
        with suppress(OSError), child.stdin:  # one that died at once shows at the read
            child.stdin.write(json.dumps(request, ensure_ascii=False).encode())
        child.stdin = None
        return child


def _answer(child: subprocess.Popen[bytes], end: float, deadline: float) -> dict[str, Any]:
    try:
        # A server before this one may have used up the time: what is there already is still read.
        out, _ = child.communicate(timeout=max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return {"why": f"no answer within {deadline:g} s"}
    try:
        return json.loads(out)
    except ValueError:
        return {"why": f"its process ended without an answer, exit status {child.returncode}"}


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    with suppress(subprocess.TimeoutExpired):
        child.wait(1.0)
    if child.stdout is not None:
        child.stdout.close()


def _label(url: str, number: int, of: int) -> str:
    """A URL without anything that may be a secret."""
    scheme = _SCHEME.match(url)
    shown = f"{scheme[1]}://..." if scheme else "a text without ://"
    return f"{shown} (number {number + 1} of {of})" if of > 1 else shown


def _clean(text: str) -> str:
    """Text that can be encoded: logs may bring bytes that are no UTF-8."""
    return text[:LONGEST].encode("utf-8", "replace").decode("utf-8")
