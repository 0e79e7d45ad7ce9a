"""The one way in which this package compiles Python for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """``function`` compiled by numba on its first call; the machine code is kept on disk where a folder allows it."""
    try:
        return cast("Function", numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return cast("Function", numba.njit(cache=False, nogil=True)(function))
