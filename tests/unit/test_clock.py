from __future__ import annotations

import asyncio
import threading

from soakrig.clock import FakeClock, RealClock


def test_eight_hours_pass_in_no_time_and_in_order() -> None:
    async def main() -> list[tuple[str, float]]:
        clock = FakeClock(start=0.0)
        woken: list[tuple[str, float]] = []

        async def sleeper(name: str, every: float) -> None:
            while True:
                await clock.sleep(every)
                woken.append((name, clock.monotonic()))

        tasks = [asyncio.create_task(sleeper("hour", 3600)), asyncio.create_task(sleeper("half", 1800))]
        await clock.advance(8 * 3600)
        for task in tasks:
            task.cancel()
        assert clock.monotonic() == 8 * 3600
        return woken

    woken = asyncio.run(main())
    assert len([name for name, _ in woken if name == "hour"]) == 8
    assert len([name for name, _ in woken if name == "half"]) == 16
    assert [at for _, at in woken] == sorted(at for _, at in woken)


def test_waiting_in_a_thread_never_blocks_on_the_driven_clock() -> None:
    clock, event = FakeClock(start=5.0), threading.Event()
    assert clock.wait(event, 100.0) is False
    assert clock.monotonic() == 105.0
    event.set()
    assert clock.wait(event, 100.0) is True
    assert clock.monotonic() == 105.0


def test_the_real_clock_is_the_machine_s() -> None:
    clock, event = RealClock(), threading.Event()
    before = clock.monotonic()
    assert clock.wait(event, 0.001) is False
    asyncio.run(clock.sleep(0.0))
    assert clock.monotonic() > before
    assert clock.time() > 1.7e9
