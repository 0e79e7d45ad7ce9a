"""Starts vLLM and waits until it has answered; what it dies of is told in its own words."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from soakrig.engine.launcher import EngineProcess, launch
from soakrig.engine.ports import refuse_if_taken, stranger
from soakrig.engine.vllm.command import offloads, vllm_command
from soakrig.engine.vllm.installation import PLUGIN, Installation, find_installation
from soakrig.engine.vllm.ready import Readiness
from soakrig.engine.vllm.served_model import ServedModel
from soakrig.errors import EngineStartError, PreflightRefusedError, SoakrigError, UsageError

START_S = 1800.0
"""How long a start may take: a large checkpoint is read from a disk, compiled and captured."""
BAD_FLAG = 2
"""Exit status of Python's argparse for a flag that it does not know."""
_PREFIX = r"^(?:\(\w+ pid=\d+\) )?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\] )?"
_OWN = re.compile(
    rf"{_PREFIX}soakrig\.errors\.(?P<kind>UsageError|PreflightRefusedError|EngineStartError): (?P<text>.+)$"
    rf"(?:\n{_PREFIX[1:]} +(?!File \")(?P<remedy>\S.*)$)?",
    re.MULTILINE,
)
"""What the plug-in raises ends the start before anything was served: refused, whatever it is called there."""
_ERROR = re.compile(_PREFIX + r"(?P<text>(?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE)
_NOT_LOADED = re.compile(
    rf"Failed to load plugin {PLUGIN}$(?:\n(?!.*(?:Error|Exception): ).*)*\n{_PREFIX[1:]}(?P<text>.+)$", re.MULTILINE
)
_ARGUMENTS = re.compile(r"^\S+: error: (?P<text>.+)$", re.MULTILINE)


def launch_vllm(
    model: ServedModel,
    settings: Mapping[str, str],
    flags: Sequence[str],
    folder: Path,
    *,
    port: int = 0,
    timeout: float = START_S,
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[str], None] = lambda text: None,
    caller: Mapping[str, str] | None = None,
    mark: str = "",
    give_up: Callable[[], str] = lambda: "",
    installation: Installation | None = None,
    own_offload: bool = False,
    canary: bool = True,
) -> EngineProcess:
    """Serve ``model`` with vLLM, its log in ``folder``, and wait until it has answered a generation (``canary``).

    ``note`` is told what the user's flags took the place of, ``progress`` how far the start has come. ``caller``: the
    environment to take the caller's variables from, None for this process's; ``mark`` and ``give_up`` as in ``launch``,
    ``own_offload`` as in ``vllm_command``; ``installation``: None looks for one.
    Raises ``PreflightRefusedError`` when there is no vLLM, ``port`` is taken or the plug-in refuses, ``UsageError``
    when vLLM or the plug-in refuses a flag or a setting, and ``EngineStartError`` when it does not come up.
    """
    refuse_if_taken(port)
    installation = installation or find_installation()
    port = port or free_port()
    environ = os.environ if caller is None else caller
    command = vllm_command(installation, model, port, settings, flags, environ, own_offload=own_offload)
    for text in command.notes:
        note(text)
    progress(f"{installation.text} starts")
    log = folder / "engine.log"
    ready = Readiness(progress, canary=canary)
    try:
        engine = launch(
            command.argv,
            env=command.env,
            log_path=log,
            ready=ready,
            port=port,
            timeout=timeout,
            scratch="TMPDIR" not in settings,
            mark=mark,
            give_up=give_up,
        )
    except EngineStartError as error:
        raise explain(error, log) from error
    finally:
        ready.close()
    try:
        check_started(engine, offloads(command.env) and not own_offload, note)
    except EngineStartError:
        engine.stop()
        raise
    return engine


def check_started(engine: EngineProcess, offloaded: bool, note: Callable[[str], None]) -> None:
    """Is it ours that answers, and has it loaded the plug-in? vLLM goes on without one that cannot be loaded."""
    doubt = stranger(engine.pid, engine.base_url)
    if doubt:
        raise EngineStartError(f"another server took its port: {doubt}", remedy="Try again.")
    found = _NOT_LOADED.search(engine.log_path.read_text("utf-8", "replace"))
    if found:
        text = f"vLLM could not load soakrig's plug-in: {found['text']}"
        if offloaded:
            raise EngineStartError(text, remedy=f"Its log is {engine.log_path}")
        note(text)


def explain(error: EngineStartError, log: Path) -> SoakrigError:
    """The same failure with the first error in the log in front: what ends a worker is told long before the last lines,
    which are those of the process that noticed. A refusal by vLLM's command line or the plug-in is one of ours."""
    try:
        text = log.read_text("utf-8", "replace")
    except OSError:
        return error
    if error.exit_status == BAD_FLAG and (found := _ARGUMENTS.search(text)):
        return UsageError(f"vLLM refuses its arguments: {found['text']}", remedy=f"Check --arg; its log is {log}")
    if found := _OWN.search(text):
        kind = UsageError if found["kind"] == "UsageError" else PreflightRefusedError
        remedy = f"{found['remedy']}\n  " if found["remedy"] else ""
        return kind(found["text"], remedy=f"{remedy}The engine's log is {log}")
    if found := _ERROR.search(text):
        return EngineStartError(f"{found['text']}\n{error.message}", remedy=error.remedy, exit_status=error.exit_status)
    return error


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now; vLLM cannot say which one it took by itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
