"""Launch a bundled engine by name, with settings and flags as given and an environment of known names only."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from soakrig.engine.environment import engine_environment
from soakrig.engine.launcher import EngineProcess, launch
from soakrig.engine.ports import refuse_if_taken
from soakrig.engine.vllm.command import Command, vllm_command
from soakrig.engine.vllm.installation import Installation, find_installation, look_at
from soakrig.engine.vllm.launch import START_S, launch_vllm
from soakrig.engine.vllm.served_model import ServedModel, read_model
from soakrig.engine.vllm.tiny_cache import tiny_model
from soakrig.errors import EngineStartError, UsageError
from soakrig.record.redaction import redact_flags, redact_settings

EMBEDDED, VLLM, TINY = "embedded", "vllm", "tiny-moe"
BUNDLED = (EMBEDDED, VLLM, TINY)
EMBEDDED_START_S = 120.0


@dataclass(frozen=True)
class Order:
    """An engine to start: one of ``BUNDLED``. ``model``: a checkpoint's folder, for vllm alone. ``port``: 0 takes a
    free one. ``start_s``: how long the start may take, None for the engine's own default. ``caller``: the environment
    to take the caller's variables from, None for this process's. ``mark``: of its processes, made up where empty.
    ``python``: the one that has vLLM, looked for where empty. ``own_offload``: as of ``vllm_command``. ``registry``:
    the registry's name for it, where it is from there. ``canary``: whether a vLLM has to answer a generation before it
    is ready."""

    name: str
    settings: Mapping[str, str]
    flags: Sequence[str]
    model: str = ""
    port: int = 0
    start_s: float | None = None
    caller: Mapping[str, str] | None = None
    mark: str = ""
    python: str = ""
    own_offload: bool = False
    registry: str = ""
    canary: bool = True

    def __post_init__(self) -> None:
        check_engine(self.name)
        if self.name == VLLM and not self.model:
            raise UsageError(
                "--engine vllm needs a model", remedy="Add --model FOLDER; --engine tiny-moe brings its own."
            )
        if self.name != VLLM and self.model:
            raise UsageError(
                f"--model {self.model!r}: --engine {self.name} brings its own",
                remedy="Use --engine vllm, or leave it out.",
            )

    @property
    def launched(self) -> Literal["embedded", "vllm"]:
        """What serves: embedded or vllm, as a run's manifest has it."""
        return "embedded" if self.name == EMBEDDED else "vllm"

    def recorded(self) -> dict[str, Any]:
        """What a run's manifest keeps of it: names and values, secrets hidden."""
        kept: dict[str, Any] = {"set": redact_settings(self.settings), "args": redact_flags(self.flags)}
        if self.name != EMBEDDED:
            kept |= {"bundled": self.name, "model": self.model}
        if self.registry:
            kept["registry"] = self.registry
        return kept


def check_engine(name: str) -> str:
    """``name`` when it is a bundled engine. Raises ``UsageError`` with what there is."""
    if name not in BUNDLED:
        near = difflib.get_close_matches(name, BUNDLED, n=1)
        raise UsageError(
            f"there is no bundled engine {name!r}" + (f"; {near[0]!r} was meant?" if near else ""),
            remedy=f"Bundled in this version: {', '.join(BUNDLED)}. Any other engine is attached with --url.",
        )
    return name


def launch_bundled(
    order: Order,
    folder: Path,
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[str], None] = lambda text: None,
    give_up: Callable[[], str] = lambda: "",
) -> EngineProcess:
    """Start what was ordered, with its log in ``folder``; ``note`` and ``progress`` as in ``launch_vllm``, which also
    says what is raised. ``give_up``: asked while it starts; a text ends the wait with an ``EngineStartError``."""
    if order.name == EMBEDDED:
        return launch_embedded(order, folder, give_up)
    model = tiny_model(progress) if order.name == TINY else read_model(order.model)
    return launch_vllm(
        model,
        order.settings,
        order.flags,
        folder,
        port=order.port,
        timeout=order.start_s or START_S,
        note=note,
        progress=progress,
        caller=order.caller,
        mark=order.mark,
        give_up=give_up,
        installation=installation_of(order) if order.python else None,
        own_offload=order.own_offload,
        canary=order.canary,
    )


def installation_of(order: Order) -> Installation:
    """The vLLM that an order is for. Raises ``PreflightRefusedError`` where there is none."""
    return look_at(Path(order.python)) if order.python else find_installation()


def preview(order: Order, port_file: Path) -> tuple[list[str], dict[str, str]]:
    """The command line and environment that ``launch_bundled`` would start, without its mark; port 0 stands for one
    that is chosen then. Makes the tiny checkpoint where it is missing. Raises as ``launch_vllm`` before it starts."""
    if order.name == EMBEDDED:
        command = compose(order, port_file=port_file)
    else:
        model = tiny_model(lambda text: None) if order.name == TINY else read_model(order.model)
        command = compose(order, installation=installation_of(order), model=model)
    return command.argv, command.env


def compose(
    order: Order,
    *,
    port_file: Path | None = None,
    installation: Installation | None = None,
    model: ServedModel | None = None,
    python: str = sys.executable,
) -> Command:
    """The command of an order from what was found on the host; nothing is looked up but, where ``order.caller`` is
    None, this process's environment. ``port_file`` and ``python`` are for the embedded engine, ``installation`` and
    ``model`` for vLLM.

    Raises ``UsageError`` and ``PreflightRefusedError`` as ``vllm_command``.
    """
    if order.name == EMBEDDED:
        argv, env = _embedded_command(order, port_file or Path("engine.port"), python)
        return Command(argv, env)
    assert installation is not None
    assert model is not None
    caller = os.environ if order.caller is None else order.caller
    return vllm_command(
        installation, model, order.port, order.settings, order.flags, caller, own_offload=order.own_offload
    )


def _embedded_command(order: Order, port_file: Path, python: str = sys.executable) -> tuple[list[str], dict[str, str]]:
    taken = next((flag for flag in order.flags if flag.partition("=")[0] in ("--port", "--port-file")), None)
    if taken is not None:
        raise UsageError(f"--arg={taken} is set by this tool", remedy="Use --port for the port.")
    own = ["--port", str(order.port), "--port-file", str(port_file)]
    argv = [python, "-m", "soakrig.engine.embedded", *own, *order.flags]
    return argv, engine_environment(order.settings, order.caller)


def launch_embedded(order: Order, folder: Path, give_up: Callable[[], str] = lambda: "") -> EngineProcess:
    """Start the embedded engine with its log and port file in ``folder`` and wait until it is ready.

    Raises ``PreflightRefusedError`` when ``port`` is taken (naming who holds it), ``UsageError`` when it refuses a
    flag or a setting, and ``EngineStartError`` when it does not come up.
    """
    refuse_if_taken(order.port)
    port_file = folder / "engine.port"
    argv, env = _embedded_command(order, port_file)
    try:
        return launch(
            argv,
            env=env,
            log_path=folder / "engine.log",
            port_file=port_file,
            timeout=order.start_s or EMBEDDED_START_S,
            mark=order.mark,
            give_up=give_up,
        )
    except EngineStartError as error:
        if error.exit_status == UsageError.exit_code:  # it refused a flag or a setting, as its own command would
            raise UsageError(error.message, remedy=error.remedy) from error
        raise
