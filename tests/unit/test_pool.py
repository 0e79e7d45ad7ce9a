"""The pool's guard: what asyncio-pool 0.6.0 gets wrong must not reach a run."""

from __future__ import annotations

import asyncio
import gc

import pytest

from soakrig.soak.pool import run_all


class Bench:
    """Jobs that tell what became of them."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.cancelled: list[int] = []
        self.finished: list[int] = []
        self.most = 0

    def job(self, number: int, *, fails: bool = False, waits: bool = True):
        async def run() -> None:
            self.started.append(number)
            self.most = max(self.most, len(self.started) - len(self.cancelled) - len(self.finished))
            try:
                if fails:
                    raise RuntimeError(f"conversation {number} failed")
                if waits:
                    await asyncio.Event().wait()
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                self.cancelled.append(number)
                raise
            self.finished.append(number)

        return run


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_all_run_and_never_more_than_size_at_once() -> None:
    bench = Bench()
    asyncio.run(run_all([bench.job(n, waits=False) for n in range(20)], size=3))
    assert sorted(bench.finished) == list(range(20))
    assert bench.most == 3


def test_cancelling_the_owner_cancels_running_and_waiting_jobs() -> None:
    bench = Bench()

    async def main() -> None:
        owner = asyncio.create_task(run_all([bench.job(n) for n in range(5)], size=2))
        await until(lambda: len(bench.started) == 2)
        owner.cancel()
        with pytest.raises(asyncio.CancelledError):
            await owner

    asyncio.run(main())
    assert bench.started == [0, 1]
    assert bench.cancelled == [0, 1]


def test_one_failure_cancels_the_rest_and_is_raised() -> None:
    bench = Bench()

    async def main() -> None:
        with pytest.raises(RuntimeError, match="conversation 1 failed"):
            await run_all([bench.job(0), bench.job(1, fails=True), bench.job(2), bench.job(3)], size=3)

    asyncio.run(main())
    assert set(bench.cancelled) == set(bench.started) - {1}
    assert {0, 2} <= set(bench.cancelled)
    assert bench.finished == []


def test_no_future_is_left_unretrieved() -> None:
    complaints: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))
        bench = Bench()
        jobs = [bench.job(0, fails=True), bench.job(1, fails=True), bench.job(2)]
        with pytest.raises(RuntimeError):
            await run_all(jobs, size=3)
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert complaints == []


def test_a_second_cancellation_still_waits_for_the_jobs_to_end() -> None:
    ended: list[bool] = []

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            for _ in range(50):
                await asyncio.sleep(0)
            ended.append(True)
            raise

    async def main() -> None:
        owner = asyncio.create_task(run_all([stubborn], size=1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        owner.cancel()
        await asyncio.sleep(0)
        owner.cancel()
        with pytest.raises(asyncio.CancelledError):
            await owner

    asyncio.run(main())
    assert ended == [True]
