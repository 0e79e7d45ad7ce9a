"""The one way in which this package compiles Python for the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])
_log = logging.getLogger("soakrig.engine")


def compiled(function: Function) -> Function:
    """``function`` compiled by numba on its first call; the machine code is kept on disk where a folder allows it.

    A cache that is broken (cut off by a power loss, a full disk) costs the time to compile, never the engine's start.
    """
    try:
        found: Any = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return cast("Function", numba.njit(cache=False, nogil=True)(function))
    cache: Any = getattr(found, "_cache", None)
    for name in ("load_overload", "save_overload"):
        whole = getattr(cache, name, None)
        if whole is not None:
            setattr(cache, name, _forgiving(whole, name))
    return cast("Function", found)


def _forgiving(whole: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        try:
            return whole(*args)
        except Exception as error:  # unpickling what is no pickle raises nearly anything
            _log.warning("numba's cache is not used (%s): %s: %s", name, type(error).__name__, error)
            return None

    return run
