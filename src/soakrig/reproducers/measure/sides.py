"""The two sides of a comparison as people write them: settings and flags, or the URL of a running engine."""

from __future__ import annotations

import shlex
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from soakrig.engine.bundled import EMBEDDED, Order, launch_bundled
from soakrig.engine.environment import parse_settings
from soakrig.engine.launcher import EngineProcess
from soakrig.errors import UsageError
from soakrig.record.redaction import redact_flags, redact_settings
from soakrig.soak.target import Target, parse_url

SideName = Literal["A", "B"]
PLAIN = ("", "default", "control")
"""Words for a side without settings of its own."""


@dataclass(frozen=True)
class Side:
    """``settings`` and ``flags`` of an engine to launch, or the ``url`` of one that runs."""

    name: str
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    flags: tuple[str, ...] = ()
    url: str = ""

    def text(self) -> str:
        """As it may be shown: secrets hidden."""
        words = [f"{name}={value}" for name, value in redact_settings(dict(self.settings)).items()]
        return self.url or " ".join([*words, *redact_flags(list(self.flags))]) or "default"

    def same_as(self, other: Side) -> bool:
        """Whether both are the same to the letter."""
        return (dict(self.settings), self.flags, self.url) == (dict(other.settings), other.flags, other.url)


def parse_side(name: str, text: str) -> Side:
    """``'NAME=VALUE --flag=value'``, ``default``, or a URL. Raises ``UsageError`` naming the word that is none."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{name} is {text!r}: {error}", remedy="Quote it as a shell would.") from error
    if text.strip() in PLAIN:
        return Side(name)
    if any(word.startswith(("http://", "https://")) for word in words):
        if len(words) > 1:
            raise UsageError(f"{name} is {text!r}: a running engine takes no settings", remedy="Give its URL alone.")
        return Side(name, url=parse_url(words[0]))
    flags = tuple(word for word in words if word.startswith("-"))
    for word in words:
        if "=" not in word and not word.startswith("-"):
            raise UsageError(
                f"{name}: {word!r} is neither NAME=VALUE, --flag=value nor a URL",
                remedy="Example: 'VLLM_MOE_DMA_STAGING=0 --max-num-seqs=4'; 'default' changes nothing.",
            )
    return Side(name, parse_settings([word for word in words if not word.startswith("-")]), flags)


@dataclass(frozen=True)
class Bench:
    """What both sides have in common: the bundled engine, its model, and settings and flags under those of a side."""

    engine: str = EMBEDDED
    model: str = ""
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    flags: tuple[str, ...] = ()
    start_s: float | None = None

    def order(self, side: Side) -> Order:
        """What to launch for a side. Raises ``UsageError`` as ``Order``, and for a variable that is set twice."""
        twice = next((name for name in side.settings if name in self.settings), None)
        if twice is not None:
            raise UsageError(f"{twice} is set in {side.name} and for both", remedy="Set it in one place.")
        return Order(
            self.engine, {**self.settings, **side.settings}, [*self.flags, *side.flags], self.model, 0, self.start_s
        )

    def record(self) -> dict[str, Any]:
        """For the record, secrets hidden."""
        return {
            "engine": self.engine,
            "model": self.model,
            "set": redact_settings(dict(self.settings)),
            "args": redact_flags(list(self.flags)),
        }


@contextmanager
def running(bench: Bench, side: Side, folder: Path) -> Generator[Target]:
    """An engine for a side: launched with its log in ``folder`` and ended afterwards, or attached.

    Raises what ``launch_bundled`` raises.
    """
    if side.url:
        yield Target(side.url)
        return
    folder.mkdir(parents=True, exist_ok=True)
    engine: EngineProcess
    with launch_bundled(bench.order(side), folder) as engine:
        yield Target(
            engine.base_url, pid=engine.pid, engine_log=engine.log_path, exit_status=engine.exit_status, launched=True
        )
