"""What must not reach a run folder: values of settings whose names say that they are secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSW|CREDENTIAL|COOKIE|BEARER)", re.IGNORECASE)
_HARMLESS = re.compile(r"(MAX|MIN|NUM|BATCHED|BUDGET|PER)[A-Z_-]*TOKENS?|TOKENIZER|TOKENS\b", re.IGNORECASE)
HIDDEN = "[redacted]"


def is_secret(name: str) -> bool:
    """Whether a setting's name says that its value is a secret; numbers of tokens are none."""
    return bool(_SECRET.search(_HARMLESS.sub("", name)))


def redact_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Environment settings with secret values hidden; names stay."""
    return {name: HIDDEN if is_secret(name) else value for name, value in settings.items()}


def redact_flags(flags: Sequence[str]) -> list[str]:
    """``--api-key=abc`` becomes ``--api-key=[redacted]``, and so does a value that is an argument of its own."""
    out: list[str] = []
    hide_next = False
    for flag in flags:
        name, equals, _ = flag.partition("=")
        if hide_next and not flag.startswith("-"):
            out.append(HIDDEN)
            hide_next = False
            continue
        secret = flag.startswith("-") and is_secret(name)
        out.append(f"{name}={HIDDEN}" if secret and equals else flag)
        hide_next = secret and not equals
    return out
