"""``soak bisect``: the verb is reserved; this version does not have it yet."""

from __future__ import annotations

from typing import Annotated

import typer

from soakrig.errors import UsageError


def bisect(words: Annotated[list[str] | None, typer.Argument(help="NAME=control,value ...")] = None) -> None:
    """Find the one variable that causes a fault. Not in this version: it says so and exits 64."""
    asked = f" ({' '.join(words)})" if words else ""
    raise UsageError(
        f"`soak bisect`{asked} is not part of this version",
        remedy="Until it is: one `soak run --set NAME=VALUE` for each value, and compare the bounds of their reports.",
    )
