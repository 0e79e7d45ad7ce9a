"""Rows that are about an engine's start, its end and its memory: what it leaves, what answers for it when dead."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reproducing import (
    embedded,
    found,
    its_own,
    kernel_log,
    rejudged,
    soak_engine,
    soak_loopback,
    soak_row,
)
from soakrig.bisect.launch_result import signature_of
from soakrig.cli import run_engine
from soakrig.cli.main import invoke
from soakrig.engine.bundled import Order
from soakrig.engine.launcher import EngineProcess, launch
from soakrig.record.result import Result
from soakrig.record.store import RunReader
from soakrig.reproducers.engine_control import EngineControl
from soakrig.soak.target import Target
from wire import loopback

TESTS = Path(__file__).parents[1]


@contextlib.contextmanager
def leaving(folder: Path, what: str) -> Iterator[EngineControl]:
    """A stand-in engine that leaves ``what`` behind."""

    def start(number: int) -> Any:
        port_file = folder / f"port-{number}"
        argv = [sys.executable, str(TESTS / "leaving_engine.py"), str(port_file), what]
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(TESTS)}
        log = folder / f"engine-{number}.log"
        return launch(argv, env=environment, log_path=log, port_file=port_file, timeout=60.0, grace=1.0)

    with EngineControl(start) as control:
        control.start()
        yield control


WEDGED = {"turns": 1, "streams": 2, "patience": 1.0}


def test_a_worker_that_outlives_its_server_is_named(tmp_path: Path) -> None:
    with leaving(tmp_path, "child") as control:
        result = soak_engine(tmp_path, "wedge", control, parameters={**WEDGED, "ways": "kill"})
    assert its_own(result, "wedge")
    assert signature_of(result) == "finding survivors-kill"
    left = found(result, "survivors-kill")
    assert "1 processes are still there" in left.text
    assert (left.kind, left.bound) == ("measured", "<= 1 s")
    assert [one.name for one in result.findings] == ["survivors-kill", "shm-kill", "vram-kill"], "it was ended then"
    assert result.engine.alive is True
    assert result.outcomes == {"ok": 1}, "streams under way at the kill are no turns"


def test_ctrl_c_ends_the_wait_for_what_outlives_its_server(tmp_path: Path) -> None:
    with leaving(tmp_path, "child") as control:
        parameters = {**WEDGED, "ways": "kill", "patience": 60.0}
        began = time.monotonic()
        result = soak_engine(tmp_path, "wedge", control, parameters=parameters, ctrl_c_after=2.0)
        assert time.monotonic() - began < 50
    assert (result.verdict, result.ended) == ("inconclusive", "interrupted")
    left = found(result, "survivors-kill")
    assert (left.says, "1 processes are still there" in left.text) == ("unknown", True)


def test_shared_memory_that_somebody_holds_is_named(tmp_path: Path) -> None:
    holding: list[int] = []
    with leaving(tmp_path, "shm") as control:
        name = (tmp_path / "port-1.shm").read_text()
        holding.append(os.open(f"/dev/shm/{name}", os.O_RDONLY))
        try:
            result = soak_engine(tmp_path, "wedge", control, parameters={**WEDGED, "ways": "term", "patience": 20.0})
        finally:
            os.close(holding.pop())
            Path(f"/dev/shm/{name}").unlink(missing_ok=True)
    assert its_own(result, "wedge")
    left = found(result, "shm-term")
    assert (left.says, left.value) == ("fault", 1.0)
    assert name in left.text
    assert found(result, "survivors-term").says == "clean"


# -- dead-proxy --------------------------------------------------------------------------------------------------------


def proxy(upstream: str, when_dead: loopback.Handler) -> tuple[loopback.Handler, loopback.Route]:
    """Passes everything on, byte for byte, and answers by itself once nothing is there to pass it on to."""
    port = int(upstream.rpartition(":")[2])

    async def passed(x: loopback.Exchange) -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.write(x.head_bytes.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + x.body)
        data = await reader.read(65536)
        dead = data.startswith(b"HTTP/1.1 503")
        while data and not dead:
            x.writer.write(data)
            data = await reader.read(65536)
        writer.close()
        return not dead

    return when_dead, passed


async def stale(x: loopback.Exchange) -> None:
    """An answer out of a cache."""
    await x.whole(loopback.ROLE, *loopback.words(), loopback.delta(finish="stop"), loopback.usage(), loopback.DONE)


async def bad_gateway(x: loopback.Exchange) -> None:
    await x.json({"error": {"message": "upstream is dead"}}, "502 Bad Gateway")


@pytest.mark.parametrize(
    ("answer", "signature"),
    [
        (loopback.zero_bytes, "finding after-death-empty_200"),
        (stale, "finding after-death-post_mortem"),
        (loopback.role_and_stop, "finding after-death-answerless"),
        (bad_gateway, None),
    ],
)
def test_what_stands_before_a_dead_engine(tmp_path: Path, answer: loopback.Handler, signature: str | None) -> None:
    async def whole(upstream: str, pid: int) -> Result:
        handler, route = proxy(upstream, answer)
        async with loopback.serve(handler, route) as url:
            return await soak_row(tmp_path, "dead-proxy", Target(url, pid=pid), parameters={"kill": True, "turns": 2})

    with embedded(tmp_path) as control:
        assert control.engine is not None
        result = asyncio.run(whole(control.engine.base_url, control.engine.pid))
        assert not control.engine.alive()
    assert signature_of(result) == signature
    assert result.outcomes == {"ok": 2}
    if signature is None:
        assert (result.verdict, found(result, "after-death").value) == ("pass", 4.0)
        assert "http_error" in found(result, "after-death").text
    else:
        assert its_own(result, "dead-proxy")
        # The first one may still meet the dying engine's socket.
        assert re.match(r"request [12] after the engine's death got", result.findings[0].text)


# -- host-ram ----------------------------------------------------------------------------------------------------------


def with_books(asked: int, resident: int) -> loopback.Route:
    async def route(x: loopback.Exchange) -> bool:
        if x.path == "/soakrig/settings":
            memory = {"bank_bytes_asked": asked, "bank_bytes_resident": resident}
            await x.json({"engine": "other", "offload": {"memory": memory}})
            return True
        return await loopback.models(x)

    return route


@pytest.mark.parametrize(("resident", "verdict"), [(215, "pass"), (338, "fail")])
def test_rounded_pinned_memory_is_found_by_the_books(tmp_path: Path, resident: int, verdict: str) -> None:
    async def whole() -> Result:
        async with loopback.serve(loopback.good, with_books(190 << 20, resident << 20)) as url:
            return await soak_row(tmp_path, "host-ram", Target(url, pid=os.getpid()))

    result = asyncio.run(whole())
    assert result.verdict == verdict
    assert found(result, "host-ratio").value == pytest.approx(resident / 190, abs=1e-3)
    assert its_own(result, "host-ram") is (verdict == "fail")


# -- kv-offload-shm, idle ----------------------------------------------------------------------------------------------


def test_a_death_at_the_start_leaves_a_run_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launches(order: Order, folder: Path, *_: Any) -> EngineProcess:
        assert "--kv-offloading-size=48" in order.flags
        argv = [sys.executable, str(TESTS / "leaving_engine.py"), str(folder / "port"), "dies"]
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(TESTS)}
        return launch(argv, env=environment, log_path=folder / "engine.log", port_file=folder / "port", timeout=60.0)

    monkeypatch.setattr(run_engine, "launch_bundled", launches)
    argv = [
        "run",
        "kv-offload-shm",
        "--engine",
        "vllm",
        "--model",
        "m",
        "--param",
        "tier_gib=48",
        "--param",
        "force=true",
    ]
    assert invoke([*argv, "--runs-dir", str(tmp_path), "--json"]) == 1
    result = Result.from_json(json.loads(capsys.readouterr().out))
    assert its_own(result, "kv-offload-shm")
    assert (result.verdict, result.engine.exit_status, result.engine.died_after_turn) == ("fail", 1, 0)
    tier = found(result, "kv-tier")
    assert (tier.value, tier.unit) == (49151.0, "MiB")
    assert "32768 MiB free by its own words" in tier.text
    assert rejudged(tmp_path / "latest") == result.to_json() == RunReader(tmp_path / "latest").stored_result().to_json()


def test_a_tier_that_fits_passes(tmp_path: Path) -> None:
    result = soak_loopback(tmp_path, "kv-offload-shm", loopback.good, parameters={"tier_gib": 1.0})
    assert (result.verdict, result.outcomes, found(result, "kv-tier").says) == ("pass", {"ok": 4}, "clean")


def test_a_quiet_time_is_never_a_pass(tmp_path: Path) -> None:
    result = soak_loopback(tmp_path, "idle", loopback.good, parameters={"seconds": 0.3})
    assert (result.verdict, result.exit_code) == ("inconclusive", 2)
    assert result.exposure.turns == 0
    assert result.exposure.busy_seconds == 0.0
    assert result.hazard.upper_95 is None
    assert (found(result, "idle").value or 0) >= 0.3
    assert found(result, "idle").says == "unknown"
    assert any("exposure not reached" in reason for reason in result.reasons)


def test_an_xid_without_load_is_a_fault_all_the_same(tmp_path: Path) -> None:
    line = (
        "2026-11-29T15:04:35.000000+00:00 host kernel: [  101.000000] NVRM: Xid (PCI:0000:01:00): 31, pid=77, "
        "name=python3, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC0 faulted @ 0x7f1e_00000000. "
        "Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE\n"
    )
    log = kernel_log(tmp_path)
    written = threading.Event()

    async def models(x: loopback.Exchange) -> bool:
        if x.path == "/soakrig/ping" and not written.is_set():  # the last question before the watch begins
            asyncio.get_running_loop().call_later(0.5, lambda: (log.write_text(line), written.set()))
        return await loopback.models(x)

    result = soak_loopback(tmp_path, "idle", loopback.good, models, parameters={"seconds": 20.0})
    assert its_own(result, "idle")
    (fault,) = result.faults
    assert (fault.xid, fault.turn, fault.attribution) == (31, None, "none")
    assert (found(result, "idle").value or 99) < 20.0, "a fault ends it"
