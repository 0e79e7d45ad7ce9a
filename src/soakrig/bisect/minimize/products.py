"""What a minimisation leaves for people: the load, a bisect's campaign file, and a script that needs no soakrig."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import orjson

from soakrig.bisect.minimize.hunt import Hunt
from soakrig.errors import StoreError
from soakrig.record.redaction import HIDDEN, redact_flags, redact_settings
from soakrig.record.request_log import StoredRequest, write_requests
from soakrig.record.store import write_private
from soakrig.reproducers.replay import PATH

LOAD, CAMPAIGN, SCRIPT = "load", "reproducer.toml", "reproduce.py"


def write_products(folder: Path, requests: Sequence[Sequence[StoredRequest]], hunt: Hunt, turns: int) -> dict[str, str]:
    """Write them; paths by what they are. ``turns``: of one conversation, in which the fault is to be expected.

    Raises ``StoreError``.
    """
    load = folder / LOAD
    write_requests(load, requests)
    try:
        write_private(folder / CAMPAIGN, _campaign(load, len(requests), hunt, turns).encode())
        write_private(folder / SCRIPT, script(requests, hunt.signature or "", turns * len(requests)).encode())
    except OSError as error:
        raise StoreError(f"cannot write in {folder}: {error.strerror or error}", remedy="Free space.") from error
    return {"load": str(load), "campaign": str(folder / CAMPAIGN), "script": str(folder / SCRIPT)}


def script(requests: Sequence[Sequence[StoredRequest]], signature: str, turns: int) -> str:
    """``standalone.py`` with a load of its own. Every body is one line."""
    text = files("soakrig.bisect.minimize").joinpath("standalone.py").read_text("utf-8")
    lanes = "".join(
        "    [\n" + "".join(f"        {request.body.decode()!r},\n" for request in lane) + "    ],\n"
        for lane in requests
    )
    for pattern, value in (
        (r'^SIGNATURE: str = ""$', f"SIGNATURE: str = {signature!r}"),
        (r"^TURNS: int = 60$", f"TURNS: int = {turns}"),
        (r"^LOAD: (.*) = \[\](.*)$", f"LOAD: List[List[str]] = [\n{lanes}]"),
        (r"\n# What `soak repro minimize` writes out is .*\n", ""),
        (r" +# noqa: .*$", ""),
    ):
        text, count = re.subn(pattern, lambda _, value=value: value, text, flags=re.MULTILINE)
        assert count, f"the template has no {pattern}"
    return text


def _campaign(load: Path, conversations: int, hunt: Hunt, turns: int) -> str:
    """A campaign file that only lacks its variables."""
    settings, flags = redact_settings(hunt.settings), redact_flags(hunt.flags)
    lines = [
        f"# soak bisect -f {CAMPAIGN} NAME=control,value",
        f"engine = {_text(hunt.engine)}",
        *([f"model = {_text(hunt.model)}"] if hunt.model else []),
        f"reproducer = {_text(hunt.reproducer)}",
        f"turns = {turns}",
        f"signature = {_text(hunt.signature or '')}",
        f"kernel_log = {_text(hunt.kernel_log)}",
        f"flags = [{', '.join(map(_text, flags))}]",
        "",
        "[load]",
        f"conversations = {conversations}",
        "",
        "[load.parameters]",
        f"{PATH.name} = {_text(str(load.resolve()))}",
        "",
        "[settings]",
        *(f"{name} = {_text(value)}" for name, value in settings.items()),
    ]
    if HIDDEN in "".join(lines):
        lines.insert(1, f"# {HIDDEN} stands for a secret: write it in.")
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    """As TOML has it: JSON's escapes are a part of its own."""
    return orjson.dumps(value).decode().replace("\x7f", "\\u007f")
