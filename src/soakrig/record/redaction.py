"""What must not reach a run folder: values of settings whose names say that they are secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

HIDDEN = "[redacted]"

_ENDINGS = ("KEY", "KEYS", "TOKEN", "TOKENS", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIALS")
_WORDS = frozenset({*_ENDINGS, "CREDENTIAL", "COOKIE", "BEARER", "AUTH", "AUTHORIZATION"})
_COUNTED = frozenset(
    {"MAX", "MIN", "NUM", "BATCHED", "KV", "SPECULATIVE", "PREFILL", "DECODE", "INPUT", "OUTPUT", "PROMPT", "CONTEXT",
     "NEW", "ROUTED", "CHUNK"}
)  # fmt: skip
"""Words before TOKENS that make it a length."""


def is_secret(name: str) -> bool:
    """Whether a setting's name says that its value is a secret. Numbers of tokens are none; in doubt it is one."""
    words = ["", *(word for word in re.split(r"[^A-Z]+", name.upper()) if word), ""]
    for before, word, after in zip(words, words[1:], words[2:], strict=False):
        if word == "TOKENS" and before in _COUNTED:
            continue
        if word == "TOKEN" and (before == "PER" or after == "BUDGET"):
            continue
        if word in _WORDS or word.endswith(_ENDINGS):
            return True
    return False


def redact_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Environment settings with secret values hidden; names stay."""
    return {name: HIDDEN if is_secret(name) else value for name, value in settings.items()}


def redact_flags(flags: Sequence[str]) -> list[str]:
    """``--api-key=abc`` becomes ``--api-key=[redacted]``, and so does a value that is an argument of its own."""
    out: list[str] = []
    hide_next = False
    for flag in flags:
        name, equals, _ = flag.partition("=")
        if hide_next and not flag.startswith("--"):
            out.append(HIDDEN)
            hide_next = False
            continue
        secret = flag.startswith("-") and is_secret(name)
        out.append(f"{name}={HIDDEN}" if secret and equals else flag)
        hide_next = secret and not equals
    return out
