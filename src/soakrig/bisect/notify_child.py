"""The process that sends one message by apprise: ``python -P -m soakrig.bisect.notify_child``.

It reads one JSON object, {op "check" or "send", url, title, body}, and prints one: {ok: true}, {why: text}, or
{missing: text} where apprise cannot be loaded. Its texts do not hold the URL or parts of it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from typing import Any
from urllib.parse import unquote

_LONGEST = 200
_SECOND = re.compile(r"[\s,][A-Za-z][A-Za-z0-9+.-]*://")


class _Kept(logging.Handler):
    """Keeps what apprise logs: the only place where it says why something failed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def without_url(text: str, url: str) -> str:
    """``text`` on one line, with every part of ``url`` but its scheme left out: a token may stand anywhere in it."""
    rest = url.partition("://")[2] or url
    parts = {url, rest, *re.split(r"[/:@?&=#,;+\s]+", rest)}
    parts |= {unquote(part) for part in parts}
    for part in sorted(parts, key=len, reverse=True):
        if len(part) >= 3:
            text = text.replace(part, "***")
    text = re.sub(r"[\x00-\x1f\x7f]+", " ", text).strip()
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def answer(request: dict[str, str]) -> dict[str, Any]:
    """Do what is asked. Never raises."""
    url = request["url"]
    log = logging.getLogger("apprise")
    kept = _Kept()
    log.addHandler(kept)
    log.propagate = False
    if _SECOND.search(url):
        return {"why": "it holds two URLs; give each one with a --notify of its own"}
    try:
        import apprise  # optional, so nothing else may load it

        # Not ``add``: it takes several URLs in one text, and of those with one bad it says no more than "failed".
        server: Any = apprise.Apprise.instantiate(url.strip())
        if server is None:
            return {"why": without_url("; ".join(kept.lines), url) or "it names no service"}
        if request["op"] == "check":
            return {"ok": True}
        sender: Any = apprise.Apprise()
        sender.add(server)
        if sender.notify(title=request["title"], body=request["body"], body_format=apprise.NotifyFormat.TEXT):
            return {"ok": True}
    except ImportError as error:
        return {"missing": without_url(str(error), url)}
    except Exception as error:
        return {"why": without_url(f"{type(error).__name__}: {error}", url)}
    return {"why": without_url("; ".join(kept.lines), url) or "it was not taken, and apprise does not say why"}


def main() -> None:
    """Answer the one request."""
    request = json.loads(sys.stdin.buffer.read())
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    with out:
        out.write(json.dumps(answer(request)).encode())
    os._exit(0)  # a thread of apprise's pool may wait for a server yet


if __name__ == "__main__":
    main()
