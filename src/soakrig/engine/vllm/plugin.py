"""The entry point of group ``vllm.general_plugins``: loaded in every process of vLLM, does nothing unless asked."""

from __future__ import annotations

import logging

from .settings import VllmSettings

_log = logging.getLogger("vllm.soakrig")
_installed = False


def register() -> None:
    """Put the offload core under vLLM's routed experts, where the environment asks for it; again is no harm.

    Raises UsageError for variables that make no sense and EngineStartError for a vLLM that is not known: the engine
    does not start, rather than start without what was asked for.
    """
    global _installed
    settings = VllmSettings.from_environment()
    if _installed or not settings.asked:
        return
    from . import parts, routed_experts, steps
    from .host import Host

    parts.check()
    host = Host(settings)
    routed_experts.install(host)
    steps.install(host)
    _installed = True
    _log.info("soakrig: the offload core is under the routed experts")
