"""Asking for the end: every call reaches everybody who listens, once, whenever it came."""

from __future__ import annotations

import threading

import pytest

from soakrig.bisect.stop import Stop


def test_who_asked_first_is_why_and_every_call_is_told() -> None:
    stop, told = Stop(), list[str]()
    assert (stop.why, stop.event.is_set()) == ("", False)
    with stop.telling(told.append):
        stop.ask("Ctrl-C")
        assert stop.event.is_set()
        stop.ask("SIGTERM")
    stop.ask("SIGHUP")
    assert told == ["Ctrl-C", "SIGTERM"], "nobody listens after the block"
    assert stop.why == "Ctrl-C"


def test_what_was_asked_before_is_told_at_once_in_order_to_each_that_comes() -> None:
    stop, first, second = Stop(), list[str](), list[str]()
    stop.ask("Ctrl-C")
    stop.ask("Ctrl-C again")
    with stop.telling(first.append):
        assert first == ["Ctrl-C", "Ctrl-C again"]
        with stop.telling(second.append):
            stop.ask("SIGTERM")
    assert first == second == ["Ctrl-C", "Ctrl-C again", "SIGTERM"]


def test_a_listener_that_fails_listens_no_more() -> None:
    stop, told = Stop(), list[str]()

    def fails(how: str) -> None:
        told.append(how)
        raise ValueError(how)

    stop.ask("one")
    with pytest.raises(ValueError, match="one"), stop.telling(fails):
        pytest.fail("it was told before the block")
    stop.ask("two")
    assert told == ["one"]


def test_a_listener_may_ask_itself() -> None:
    stop, told = Stop(), list[str]()

    def twice(how: str) -> None:
        told.append(how)
        if how == "Ctrl-C":
            stop.ask("its own")

    with stop.telling(twice):
        stop.ask("Ctrl-C")
    assert told == ["Ctrl-C", "its own"]


class AsksOnRelease:
    """A lock; as soon as it is free again for the first time, somebody asks."""

    def __init__(self, stop: Stop) -> None:
        self.stop, self.lock, self.asked = stop, threading.Lock(), False

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()
        if not self.asked:
            self.asked = True
            self.stop.ask("SIGTERM")


def test_nobody_is_missed_between_what_was_asked_and_what_will_be() -> None:
    stop, told = Stop(), list[str]()
    stop._lock = AsksOnRelease(stop)  # type: ignore[assignment]
    with stop.telling(told.append):
        assert told == ["SIGTERM"]


def test_a_call_from_another_thread_while_somebody_begins_to_listen_is_told_once() -> None:
    for _ in range(200):
        stop, told, ready = Stop(), list[str](), threading.Barrier(2)

        def ask(stop: Stop = stop, ready: threading.Barrier = ready) -> None:
            ready.wait()
            stop.ask("SIGTERM")

        thread = threading.Thread(target=ask)
        thread.start()
        ready.wait()
        with stop.telling(told.append):
            thread.join()
        assert told == ["SIGTERM"]
