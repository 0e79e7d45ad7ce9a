"""What all launches of a minimisation have in common: a campaign of one arm, whose load differs by launch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from soakrig.bisect.arms import CONTROL, PlannedArm
from soakrig.bisect.campaign_file import Campaign, Load
from soakrig.bisect.evidence import Arm
from soakrig.bisect.limits import Limits
from soakrig.bisect.variables import check_settings
from soakrig.clock import RealClock
from soakrig.engine.bundled import EMBEDDED
from soakrig.errors import UsageError
from soakrig.record.manifest import Manifest
from soakrig.record.redaction import HIDDEN
from soakrig.reproducers.replay import PATH, REPLAY
from soakrig.soak.watch.kernel_log import KernelLogWatcher

MOST_TURNS = 1 << 24


class Hunt(Campaign):
    """The engine as the run had it, and the fault that is looked for. No variables: loads are what is tried."""

    @cached_property
    def arms(self) -> tuple[PlannedArm, ...]:
        """The control alone."""
        return (self.arm(CONTROL),)

    def arm(self, name: str) -> PlannedArm:
        """The control's settings, under the name of a load."""
        settings = MappingProxyType(dict(self.settings))
        return PlannedArm(Arm(name, "control"), MappingProxyType({}), settings, (), tuple(self.flags))

    def sending(self, path: Path, conversations: int, turns: int) -> Hunt:
        """The campaign of one launch: what ``path`` holds, ``turns`` of each conversation."""
        load = Load(conversations=conversations, parameters={PATH.name: str(path)})
        return self.model_copy(update={"load": load, "turns": turns})

    def check(self) -> Hunt:
        """Itself. Raises ``UsageError`` for an engine or settings that cannot be, and a kernel log that is none."""
        KernelLogWatcher(self.kernel_log, RealClock())
        control = self.arms[0]
        self.order(control)
        check_settings(self.engine, control.settings, control.flags)
        return self


def hunt_for(
    manifest: Manifest,
    signature: str,
    *,
    engine: str | None = None,
    model: str | None = None,
    settings: Mapping[str, str] | None = None,
    flags: tuple[str, ...] = (),
    kernel_log: str | None = None,
    start: float | None = None,
    budget: float = 8 * 3600.0,
) -> Hunt:
    """The engine that a run was about, launched as its manifest says; what is given wins. Raises ``UsageError`` where
    the run was attached to a server and no engine is named, and where a secret that is needed was not kept."""
    if manifest.launched is None and engine is None:
        raise UsageError(
            f"{manifest.run_id} was a run against {manifest.base_url}, which this tool cannot start again and again",
            remedy="Say how to launch it: --engine vllm --model DIR, --set and --arg as it was started.",
        )
    was: dict[str, Any] = manifest.settings
    same = engine is None or engine == str(was.get("bundled", EMBEDDED))
    kept: dict[str, str] = {str(k): str(v) for k, v in (was.get("set") or {}).items()} if same else {}
    args = [str(one) for one in was.get("args") or []] if same else []
    kept |= settings or {}
    hidden = [name for name, value in kept.items() if value == HIDDEN] + [one for one in args if HIDDEN in one]
    if hidden:
        raise UsageError(
            f"{', '.join(hidden)} is secret and was not kept with the run", remedy="Give it again: --set NAME=VALUE."
        )
    changed = {one.partition("=")[0] for one in flags}
    return Hunt(
        engine=engine or str(was.get("bundled", EMBEDDED)),
        model=_absolute(model if model is not None else str(was.get("model", "")) if same else ""),
        reproducer=REPLAY.name,
        limits=Limits(start=start, stall=manifest.stall_timeout_s),
        turns=MOST_TURNS,
        budget=budget,
        signature=signature,
        kernel_log=_absolute(kernel_log if kernel_log is not None else manifest.kernel_log),
        settings=kept,
        flags=[*(one for one in args if one.partition("=")[0] not in changed), *flags],
    ).check()


def _absolute(name: str) -> str:
    """A path that is there, as it is known from any folder: somebody may go on from elsewhere. Anything else stays."""
    return str(Path(name).resolve()) if name and Path(name).exists() else name
