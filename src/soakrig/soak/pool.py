"""Conversations in parallel: asyncio-pool behind one door, with its two faults guarded.

asyncio-pool 0.6.0 (1) swallows the owner's cancellation when it comes while ``spawn`` waits for a place, and goes on as
if nothing had happened; (2) keeps a failure in a future that nobody reads until the end, if then. Here the owner never
waits inside the pool: places are taken with ``spawn_n``, which cannot block, and the owner waits for the futures
itself; the first failure, or its own cancellation, cancels all the rest before it is passed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from asyncio_pool import AioPool


async def run_all(jobs: Iterable[Callable[[], Coroutine[Any, Any, None]]], *, size: int) -> None:
    """Run every job, at most ``size`` at a time, until all are done.

    Raises the first failure after every other job has been cancelled and has ended. Cancelling the caller cancels
    every job, waits for their end and raises ``CancelledError``. Jobs that never got a place are never started.
    """
    if size < 1:
        raise ValueError(f"a pool has at least one place, got {size}")
    pool = AioPool(size=size)
    futures: list[asyncio.Future[None]] = [pool.spawn_n(job()) for job in jobs]
    pending: set[asyncio.Future[None]] = set(futures)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
            for future in done:
                future.result()
    finally:
        if pending:
            await _cancel_all(pool)
        for future in futures:
            if future.done() and not future.cancelled():
                future.exception()  # read, so that no failure is reported twice


async def _cancel_all(pool: AioPool) -> None:
    """Cancel what waits and what runs, and see it end, however often the caller is cancelled meanwhile."""
    ending = asyncio.ensure_future(pool.cancel())
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            continue
