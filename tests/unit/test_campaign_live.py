"""The live view of a campaign: lines where there is no terminal, a panel where there is one, never an exception."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console

from campaign_results import HOSTILE, XID, arm, campaign, launch, running, single
from soakrig.record.campaign import ArmLaunch, CampaignResult
from soakrig.reports.campaign_live import CampaignView


class Gone(io.StringIO):
    """A stream whose reader is gone; not a broken pipe, which rich knows, but a terminal that went away."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def plain() -> tuple[CampaignView, io.StringIO]:
    """A view on no terminal."""
    stream = io.StringIO()
    return CampaignView(Console(file=stream, width=100)), stream


def result_of(*launches: ArmLaunch) -> CampaignResult:
    """A campaign with these launches."""
    return campaign([arm("control", "control"), arm("VLLM_X=0", "one")], list(launches))


def test_a_line_when_a_launch_begins_one_when_it_ends_and_none_for_a_turn() -> None:
    view, stream = plain()
    with view:
        for turn in range(1, 7):
            going = launch(12, "VLLM_X=0", None, float(turn), why="the likeliest")
            view.update(result_of(going), [going])
        view.update(result_of(launch(12, "VLLM_X=0", "faulted", 7.0)), [])
        clean = launch(13, "control", "clean", 60.0)
        view.update(result_of(clean), [clean])
        void = launch(14, "control", "void", 0.0, reason="the port was taken")
        view.update(result_of(clean, void), [])
        view.update(result_of(clean, void), [])
    assert stream.getvalue().splitlines() == [
        "run 12  VLLM_X=0  the likeliest",
        f"run 12  VLLM_X=0  faulted after 7 turns: {XID}",
        "run 13  control  clean, 60 turns",
        "run 14  control  VOID: the port was taken",
    ]
    assert view.trouble == ""


def test_a_result_that_turns_void_is_told_again() -> None:
    view, stream = plain()
    going = launch(1, "control", None, 3.0, why="")
    view.update(result_of(going), [going])
    ended = launch(1, "control", "clean", 60.0, state="teardown")
    view.update(result_of(ended), [ended])
    view.update(result_of(launch(1, "control", "void", 60.0, reason="a foreign process")), [])
    assert stream.getvalue().splitlines() == [
        "run 1  control", "run 1  control  clean, 60 turns", "run 1  control  VOID: a foreign process",
    ]  # fmt: skip


def test_launches_of_before_a_resume_are_not_told_again() -> None:
    view, stream = plain()
    old = [launch(n, "control", "faulted", 5.0) for n in range(1, 9)]
    going = launch(9, "VLLM_X=0", None, 0.0, why="next")
    view.update(result_of(*old, going), [going])
    assert stream.getvalue() == "run 9  VLLM_X=0  next\n"


def test_a_note_is_told_once() -> None:
    view, stream = plain()
    for note in ("cooling down", "cooling down", "", "cooling down", "paused"):
        view.update(result_of(), [], note)
    assert stream.getvalue() == "cooling down\npaused\n"


def test_hostile_text_is_inert_in_lines_and_panel() -> None:
    view, stream = plain()
    going = launch(1, f"VLLM_X={HOSTILE}", None, 0.0, why=HOSTILE)
    view.update(result_of(going), [going], HOSTILE)
    assert len(stream.getvalue().splitlines()) == 2
    assert "[red]bold[/red]" in stream.getvalue()
    assert not set(stream.getvalue()) & set("\x1b\x9b\u202e")
    screen = Console(file=io.StringIO(), width=100)
    screen.print(view.panel())
    assert not set(screen.file.getvalue()) & set("\x1b\x9b\u202e")


def test_the_panel_shows_what_goes_on() -> None:
    stream = io.StringIO()
    with CampaignView(Console(file=stream, width=100, height=40, force_terminal=True, color_system=None)) as view:
        assert "starting" in stream.getvalue()
        result = running()
        view.update(result, [one for one in result.launches if one.result is None], "cooling down for 30 s")
        view.update(result, [], "")
        screen = Console(file=io.StringIO(), width=100, color_system=None)
        view.update(result, [one for one in result.launches if one.result is None])
        screen.print(view.panel())
        text = screen.file.getvalue()
        for part in ("SIMULATED", "0.6 of 8 h", "run 8  control  probing, 7 of 60 turns", "the control again",
                     "last: cooling down for 30 s", "UNDECIDED", "VOID"):  # fmt: skip
            assert part in text
    assert view.trouble == ""


@pytest.mark.parametrize("height", [12, 24])
def test_the_panel_leaves_out_arms_that_do_not_fit_and_says_so(height: int) -> None:
    view = CampaignView(Console(file=io.StringIO(), width=100, height=height))
    arms = [arm("control", "control"), *(arm(f"VLLM_X={n}", "one") for n in range(60))]
    going = launch(1, "control", None, 3.0)
    view.update(campaign(arms, [going]), [going])
    screen = Console(file=io.StringIO(), width=100)
    screen.print(view.panel())
    text = screen.file.getvalue()
    assert len(text.splitlines()) <= height
    shown = sum(f"VLLM_X={n} " in text for n in range(60))
    assert f"and {60 - shown} more arms" in text


def test_an_ascii_terminal_gets_an_ascii_panel() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict", write_through=True)
    with CampaignView(Console(file=stream, width=100, height=40, force_terminal=True)) as view:
        going = launch(1, "VLLM_X=größe", None, 3.0, why="größe" * 60)
        view.update(result_of(going), [going], "größe")
    assert view.trouble == ""
    assert b"gr\\xf6\\xdfe" in stream.buffer.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_stream_that_is_gone_does_not_reach_the_loop(terminal: bool) -> None:
    with CampaignView(Console(file=Gone(), width=100, force_terminal=terminal)) as view:
        going = launch(1, "control", None, 3.0)
        view.update(result_of(going), [going], "a note")
        if view._live is not None:
            view._live.refresh()
    assert view.trouble == "OSError: [Errno 5] Input/output error"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_result_that_cannot_be_drawn_does_not_reach_the_loop(terminal: bool) -> None:
    stream = io.StringIO()
    with CampaignView(Console(file=stream, width=100, height=30, force_terminal=terminal)) as view:
        broken = single().model_copy(update={"arms": [None], "launches": [None]})
        view.update(broken, [])
        if view._live is not None:
            view._live.refresh()
            assert "its view cannot be drawn" in stream.getvalue()
        assert view.trouble.startswith("AttributeError")
        going = launch(77, "control", None, 3.0)
        view.update(result_of(going), [going])
        if view._live is not None:
            view._live.refresh()
        assert "run 77" in stream.getvalue()


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads that take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("terminal", [False, True])
def test_it_may_be_called_from_any_thread(terminal: bool, eager_threads: None) -> None:
    stream = io.StringIO()
    with CampaignView(Console(file=stream, width=100, height=30, force_terminal=terminal)) as view:

        def work(first: int) -> None:
            for number in range(first, 400, 4):
                going = launch(number, "control", None, 1.0, why="")
                view.update(result_of(going), [going])

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert view.trouble == ""
    if not terminal:
        assert sorted(stream.getvalue().splitlines()) == sorted(f"run {n}  control" for n in range(400))


def test_two_threads_never_write_at_once() -> None:
    free: list[bool] = []

    class Watched(io.StringIO):
        def write(self, text: str) -> int:
            other = threading.Thread(target=lambda: free.append(view._lock.acquire(blocking=False)))
            other.start()
            other.join(30)
            return super().write(text)

    view = CampaignView(Console(file=Watched(), width=100))
    going = launch(1, "control", None, 1.0)
    view.update(result_of(going), [going])
    assert set(free) == {False}
