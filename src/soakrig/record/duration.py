"""Durations as people write them."""

from __future__ import annotations

import re

from soakrig.errors import UsageError

_FORM = re.compile(r"^(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?$")


def parse_duration(text: str) -> float:
    """Seconds of ``8h``, ``90m``, ``45s`` or ``1h30m``. Raises ``UsageError`` for anything else, zero included."""
    match = _FORM.match(text.strip())
    hours, minutes, seconds = (float(part) if part else 0.0 for part in match.groups()) if match else (0.0, 0.0, 0.0)
    total = 3600 * hours + 60 * minutes + seconds
    if total <= 0:
        raise UsageError(f"{text!r} is no duration", remedy="Write 8h, 90m, 45s or 1h30m.")
    return total
