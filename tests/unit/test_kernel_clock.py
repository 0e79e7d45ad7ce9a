"""The kernel log's clock against ours."""

from __future__ import annotations

import asyncio

import pytest

from soakrig.clock import FakeClock
from soakrig.soak.watch.kernel_clock import KEPT_S, UNSEEN_S, KernelClock

EPOCH = 1_700_000_000.0


class SplitClock(FakeClock):
    """A fake clock whose epoch is not its monotonic zero."""

    def time(self) -> float:
        return self.monotonic() + EPOCH

    def move(self, seconds: float) -> None:
        asyncio.run(self.advance(seconds))


def us(seconds: float) -> int:
    return round(seconds * 1e6)


def test_the_smallest_latency_seen_gives_the_offset() -> None:
    clock = SplitClock(100.0)
    kernel = KernelClock(clock, prompt=False)
    clock.move(0.3)
    kernel.live(us(100.2))  # kernel clock equals ours, read 0.1 s late
    kernel.live(us(100.299))  # 1 ms late
    late = kernel.live(us(100.1))
    assert late.mono == pytest.approx(100.101)
    assert late.time == pytest.approx(EPOCH + 100.101)
    assert late.error_s == pytest.approx(0.3)


def test_a_prompt_source_cannot_give_a_record_older_than_its_last_drain() -> None:
    clock = SplitClock(100.0)
    kernel = KernelClock(clock, prompt=True)
    kernel.drained()
    clock.move(0.1)
    kernel.live(us(100.1))  # the clocks agree
    kernel.drained()
    clock.move(0.1)
    moment = kernel.live(us(99.0))  # the kernel's clock has slipped: the bounds hold all the same
    assert moment.mono == pytest.approx(100.1)
    assert moment.error_s == pytest.approx(0.1)


def test_a_record_is_never_in_the_future() -> None:
    clock = SplitClock(100.0)
    kernel = KernelClock(clock, prompt=False)
    kernel.live(us(99.0))
    assert kernel.live(us(105.0)).mono <= clock.monotonic()


def test_drift_is_forgotten_after_the_window() -> None:
    clock = SplitClock(100.0)
    kernel = KernelClock(clock, prompt=False)
    kernel.live(us(100.0))
    clock.move(KEPT_S + 1)
    drifted = clock.monotonic() - 3.0  # the kernel's clock has lost 3 s since
    assert kernel.live(us(drifted)).mono == pytest.approx(clock.monotonic())


def test_a_record_without_a_time_is_now_within_the_poll() -> None:
    clock = SplitClock(100.0)
    kernel = KernelClock(clock, prompt=False)
    clock.move(0.25)
    assert kernel.live(None) == (EPOCH + 100.25, 100.25, pytest.approx(0.25))


def test_old_records_are_converted_with_their_error() -> None:
    clock = SplitClock(100.0)
    kernel = KernelClock(clock, prompt=True)
    assert kernel.old(us(40.0)) == (EPOCH + 40.0, 40.0, UNSEEN_S)
    kernel.live(us(98.0))  # offset 2 s
    assert kernel.old(us(40.0)).mono == pytest.approx(42.0)
