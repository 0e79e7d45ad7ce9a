"""The parts of serving that need no engine: what an answer is worth, when memory is back, where things are kept."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from faked_machine import GIB, MIB, card
from soakrig.cli.engine_facts import gpu_facts
from soakrig.clock import FakeClock
from soakrig.engine import keeper
from soakrig.engine.launcher import MARK
from soakrig.engine.preflight.machine import GpuFacts, Holder
from soakrig.engine.registry_entry import Canary
from soakrig.engine.serving import cgroup
from soakrig.engine.serving.canary import ask, judge
from soakrig.engine.serving.folder import HINT, SHM, EngineFolder, Hint, boot_id, engines_folder, lock
from soakrig.engine.serving.memory_back import Held, Level, held_on_cards, missing, used_on_cards, wait_back
from soakrig.engine.serving.places import Places
from soakrig.engine.serving.processes import find_launches, name_of, new_mark
from soakrig.engine.serving.state import last_words, leaked
from soakrig.errors import PreflightRefusedError

STUB = Path(__file__).parents[1] / "fixtures" / "nvml_stub"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ready", ""),
        ("Ready. ", ""),
        ("aa bb aa bb", ""),  # said twice is no cycle yet
        ("", "empty"),
        (" \n ", "empty"),
        ("!!!!!!!!!!!!!!!!", "'!' over and over"),
        (" the the the the the", "' the' over and over"),
        ("ababababab", "'ab' over and over"),
        ("ok\ufffd\ufffd\ufffd", "3 of 5 characters"),
        ("\0\0", "2 of 2"),
    ],
)
def test_what_makes_sense(text: str, why: str) -> None:
    found = judge(text, 5, Canary())
    assert bool(found) == bool(why)
    assert why in found


def test_what_is_asked_of_a_model_that_was_never_trained() -> None:
    assert judge("!!!!!!!!!!!!!!!!", 16, Canary(accept="anything")) == ""
    assert judge("", 3, Canary(accept="anything")) == ""
    assert judge("", 0, Canary(accept="anything")) == "not one token was generated"


def test_an_expected_answer() -> None:
    canary = Canary(prompt="Capital of France?", expect="(?i)paris")
    assert judge("It is Paris.", 4, canary) == ""
    assert "(?i)paris" in judge("It is Lyon.", 4, canary)


class Stub(BaseHTTPRequestHandler):
    """A stub of an engine: answers with ``reply``; never where ``reply`` is None, while its counter may move."""

    reply: tuple[int, bytes] | None = (200, b"{}")
    counter, step = 7.0, 0.0
    release = threading.Event()

    def do_GET(self) -> None:
        Stub.counter += Stub.step
        self.answer(200, f'# HELP x\nvllm:generation_tokens_total{{model="m"}} {Stub.counter}\n'.encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if Stub.reply is None:
            Stub.release.wait(30)
            self.close_connection = True
            return
        self.answer(*Stub.reply)

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    Stub.release.clear()
    yield f"http://127.0.0.1:{server.server_port}"
    Stub.release.set()
    Stub.reply, Stub.step = (200, b"{}"), 0.0
    server.shutdown()
    server.server_close()
    thread.join()


def completion(**message: Any) -> tuple[int, bytes]:
    return 200, json.dumps({"choices": [{"message": message}], "usage": {"completion_tokens": 3}}).encode()


@pytest.mark.parametrize(
    ("reply", "verdict", "text"),
    [
        (completion(content="ready", reasoning="hm"), "sensible", "hm ready"),
        (completion(content=None, tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]), "sensible", "f {}"),
        (completion(content="", reasoning=None), "nonsense", "the answer is empty"),
        ((200, b""), "error", "no chat completion"),
        ((200, b'{"choices": []}'), "error", "no chat completion"),
        ((200, b'{"error": {"message": "dead"}}'), "error", "dead"),
        ((500, b"EngineCore died"), "error", "status 500: EngineCore died"),
    ],
)
def test_a_canary(stub: str, reply: tuple[int, bytes], verdict: str, text: str) -> None:
    Stub.reply = reply
    answer = ask(stub, "m", Canary())
    assert answer.verdict == verdict
    assert text in answer.text


@pytest.mark.parametrize(("step", "moving"), [(0.0, False), (1.0, True)])
def test_a_silent_engine_works_for_others_where_its_counters_move(stub: str, step: float, moving: bool) -> None:
    Stub.reply, Stub.step = None, step
    answer = ask(stub, "m", Canary(), timeout=0.3)
    assert (answer.verdict, answer.moving) == ("silent", moving)


def test_nobody_listens() -> None:
    assert ask("http://127.0.0.1:1", "m", Canary()).verdict == "refused"


def test_when_memory_is_back() -> None:
    held, before = Held(10 * GIB, {"a": 90 * GIB}), Level(5 * GIB, {"a": 92 * GIB})
    assert missing(held, before, Level(13 * GIB, {"a": 20 * GIB})) == []
    (host,) = missing(held, before, Level(13 * GIB - 1, {"a": 20 * GIB}))
    assert "8.0 GiB were expected" in host
    (of_card,) = missing(held, before, Level(13 * GIB, {"a": 20 * GIB + 1}))
    assert "of a are back, 72.0 GiB were expected" in of_card
    assert missing(held, before, Level(13 * GIB)) == [], "a card that no longer tells is not waited for"


def test_a_wait_ends_when_it_is_back_and_says_what_is_missing_when_it_is_not() -> None:
    clock, held, before = FakeClock(), Held(0, {"a": 10 * GIB}), Level(0, {"a": 12 * GIB})
    used = iter([12 * GIB, 12 * GIB, 5 * GIB, 4 * GIB])
    began = clock.monotonic()
    assert wait_back(held, before, lambda: Level(0, {"a": next(used)}), clock) == []
    assert clock.monotonic() - began == 1.5
    left = wait_back(held, before, lambda: Level(0, {"a": 6 * GIB}), clock, deadline_s=60)
    assert left == ["6.0 GiB of a are back, 8.0 GiB were expected"]
    assert clock.monotonic() - began == pytest.approx(61.5, abs=1)


def test_host_memory_that_others_took_is_not_waited_for_where_the_next_model_fits() -> None:
    clock = FakeClock()
    level = Level(1 * GIB, {"a": 12 * GIB})
    held = Held(4 * GIB)
    assert wait_back(held, level, lambda: level, clock, host_fits=lambda: True) == []
    assert clock.monotonic() == FakeClock().monotonic()
    assert wait_back(held, level, lambda: level, clock, deadline_s=3) != []
    # A card's memory is always waited for.
    with_card = Held(4 * GIB, {"a": 10 * GIB})
    assert len(wait_back(with_card, level, lambda: level, clock, deadline_s=3, host_fits=lambda: True)) == 2


def test_what_a_model_holds_on_the_cards() -> None:
    gpu = GpuFacts((card(used=40 * GIB, holders=(Holder(7, "a", 30 * GIB), Holder(8, "b", 1 * GIB))), card(index=1)))
    assert held_on_cards(gpu, frozenset({7, 9})) == {"GPU-00aa": 30 * GIB}
    assert used_on_cards(gpu) == {"GPU-00aa": 40 * GIB, "GPU-11aa": 600 * MIB}
    assert gpu.cards is not None
    assert gpu.cards[0].unattributed == 9 * GIB


def test_nvml_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "nvml.json"
    state.write_text(json.dumps({"gpus": 1, "gpu": {"used": 3 * GIB, "total": 24 * GIB, "graphics": [[99, 5 * MIB]],
                                                    "processes": [[os.getpid(), 2 * GIB]]}}))  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", str(STUB))
    monkeypatch.setenv("NVML_STUB_STATE", str(state))
    facts = gpu_facts()
    assert facts.driver == "580.00.stub"
    assert facts.cards is not None
    (one,) = facts.cards
    assert (one.uuid, one.name, one.used, one.total) == ("GPU-stub-0", "Stub GPU", 3 * GIB, 24 * GIB)
    assert one.holders is not None
    held = {holder.pid: holder for holder in one.holders}
    assert (held[os.getpid()].compute, held[os.getpid()].bytes) == (True, 2 * GIB)
    assert held[os.getpid()].name
    assert (held[99].compute, held[99].bytes) == (False, 5 * MIB)
    state.write_text(json.dumps({"init": "NVMLError_LibraryNotFound"}))
    assert gpu_facts().cards is None
    assert "no NVML here" in gpu_facts().why
    state.write_text(json.dumps({"failed": {"0": "NVMLError_GpuIsLost"}}))
    assert "GPU 0" in gpu_facts().why


def test_the_mark_has_the_models_name() -> None:
    assert name_of(new_mark("glm53", "abc")) == "glm53"
    assert name_of("0123456789abcdef") == ""


def test_a_host_where_nothing_was_served(tmp_path: Path) -> None:
    assert [one for one in find_launches(tmp_path / "none") if one.hint is not None] == []


def test_where_state_is_kept() -> None:
    assert engines_folder({"HOME": "/h"}) == Path("/h/.local/state/soakrig/engines")
    assert engines_folder({"HOME": "/h", "XDG_STATE_HOME": "/s"}) == Path("/s/soakrig/engines")


def test_logs_are_kept_and_private(tmp_path: Path) -> None:
    folder = EngineFolder("m", tmp_path)
    folder.make()
    for number in range(8):
        folder.rotate()
        folder.engine_log.write_text(f"launch {number}")
    kept = sorted(path.name for path in folder.path.glob("engine.log*"))
    assert kept == ["engine.log", *(f"engine.log.{number}" for number in range(1, 6))]
    assert (folder.path / "engine.log.5").read_text() == "launch 2"
    folder.log("a line")
    folder.record({"event": "start"})
    folder.write_hint(Hint("serve/m/x", boot_id(), 5, 6, 7, "/soakrig-m-1"))
    assert folder.hint() == Hint("serve/m/x", boot_id(), 5, 6, 7, "/soakrig-m-1")
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.write_hint(Hint("serve/m/x", "another boot"))
    assert folder.hint() is None


BOOT = {"boot_id": boot_id(), "pid": 7, "ticks": 1, "port": 80}


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"mark": "serve/m/1", **BOOT, "boot_id": "of before"},
        {"mark": "serve/m/1", **BOOT, "pid": "7"},
        {"mark": "serve/m/1", **BOOT, "cgroup": 5},
        {"mark": "serve/other/1", **BOOT},
        {"mark": "", **BOOT},
    ],
)
def test_a_hint_that_is_none(data: Any, tmp_path: Path) -> None:
    folder = EngineFolder("m", tmp_path)
    folder.make()
    folder.write(HINT, data)
    assert folder.hint() is None


@pytest.mark.parametrize("group", ["/", "/user.slice/session-3.scope", "/soakrig-other-1", "/soakrig-m-1/child", ""])
def test_a_cgroup_that_was_not_made_for_the_model_is_never_its_own(group: str, tmp_path: Path) -> None:
    """Everything in it would be killed."""
    folder = EngineFolder("m", tmp_path)
    folder.make()
    folder.write(HINT, {"mark": "serve/m/1", **BOOT, "cgroup": group})
    assert folder.hint() == Hint("serve/m/1", boot_id(), 7, 1, 80, "")
    folder.write(HINT, {"mark": "serve/m/1", **BOOT, "cgroup": f"{group.rstrip('/')}/soakrig-m-0123"})
    found = folder.hint()
    assert found is not None
    assert found.cgroup.endswith("/soakrig-m-0123")


def test_a_folder_with_nonsense_in_it_is_looked_at_all_the_same(tmp_path: Path) -> None:
    folder = EngineFolder("m", tmp_path)
    folder.make()
    folder.write(SHM, {"psm_x": "y", "../up": 1})
    folder.record({"event": "ended", "time": "noon", "why": "x"})
    assert last_words(folder) == "since at some time: x"
    assert leaked(folder).ours == {"../up": 1}
    folder.path.joinpath("a").write_text("")
    EngineFolder("a", folder.path).remove(HINT)


def test_two_commands_do_not_change_models_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soakrig.engine.serving.folder.LOCK_S", 0.05)
    held = lock(tmp_path)
    try:
        with pytest.raises(PreflightRefusedError, match="starts or stops a model now"):
            lock(tmp_path)
    finally:
        held.release()
    lock(tmp_path).release()


def test_where_cgroups_are(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    assert cgroup.mount(tmp_path) is None
    (tmp_path / "self/mountinfo").write_text(
        "24 1 0:5 / /proc rw - proc proc rw\n31 24 0:28 / /sys/fs/cgroup/uni\\040fied rw,x shared:9 - cgroup2 none rw\n"
    )
    assert cgroup.mount(tmp_path) == Path("/sys/fs/cgroup/uni fied")
    (tmp_path / "self/cgroup").write_text("4:memory:/a\n0::/user.slice/x\n")
    assert cgroup.own(tmp_path) == "/user.slice/x"


def launched(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """A process that listens and carries the mark of a served model, with the hint that its supervisor would write."""
    code = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    mark = new_mark(name, "x")
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, MARK: mark}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    port = int(process.stdout.readline())
    found = keeper.read_stat(process.pid)
    assert found is not None
    kept = EngineFolder(name, folder)
    kept.make()
    kept.write(HINT, asdict(Hint(mark, boot_id(), pid=process.pid, ticks=found.ticks, port=port)))
    return process


def test_where_a_model_is_holds_for_one_process_only(tmp_path: Path) -> None:
    name = f"m{os.getpid()}"
    clock = FakeClock()
    place = Places(tmp_path, clock).place(name)
    assert not place.still()
    assert "stopped, never started here" in place.look().why
    with launched(tmp_path, name) as process:
        assert "stopped" in place.look().why, "what was seen a moment ago holds for all"
        asyncio.run(clock.advance(1.0))
        found = place.look()
        assert found.url.startswith("http://127.0.0.1:")
        assert place.still()
        other = keeper.read_stat(process.pid)
        assert other is not None
        place._engine = other._replace(ticks=other.ticks - 1)
        assert not place.still(), "another process of that number"
        assert place.look() == found
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not place.still(), "a zombie serves nobody"
        asyncio.run(clock.advance(1.0))
        assert place.look().url == ""
        assert not place.still()
