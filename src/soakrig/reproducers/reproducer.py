"""A reproducer: a named load shape with the signature it is known to provoke."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from soakrig.soak.conversation import AtLimit, Conversation
from soakrig.soak.probe import Probe


@dataclass(frozen=True)
class LoadOptions:
    """What an operator may set of any load."""

    conversations: int = 1
    tools: int = 50
    seed: int = 0
    max_tokens: int = 512
    temperature: float = 0.7
    context_limit: int | None = None
    at_limit: AtLimit = "restart"
    result_scale: float = 1.0

    def recorded(self) -> dict[str, Any]:
        """What a manifest keeps as ``load``; seed and conversations stand there by themselves."""
        return {name: value for name, value in asdict(self).items() if name not in ("seed", "conversations")}


@dataclass(frozen=True)
class Reproducer:
    """``load`` makes the conversations once the target is known; the texts are for `soak repro show`.

    ``signature``: the start of the fault signatures that count as its fault.
    """

    name: str
    summary: str
    provokes: str
    seen: str
    costs: str
    clean_means: str
    signature: tuple[str, ...]
    load: Callable[[LoadOptions, Probe], Sequence[Conversation]]
