"""Captures: two consents, secrets hidden, private files, a ring that stays small."""

from __future__ import annotations

import json
import resource
import stat
from pathlib import Path
from typing import Any

import pytest

from gateway_bench import bench, fixture, run, sse
from soakrig.engine.gateway.capture import BODY_BYTES, Captures, Exchange, hide_body, hide_query
from soakrig.errors import StoreError, UsageError
from unit.test_gateway_deaths import cut_clean_close


def exchange(size: int = 10) -> Exchange:
    return Exchange("m", "/v1/chat/completions", "", 1.0, [], b"x" * size)


async def captured(folder: Path, count: int = 1) -> list[Any]:
    """Files as they come to be: they are written behind the answer."""
    import asyncio

    async with asyncio.timeout(5):
        while len(found := sorted(folder.glob("*.json"))) < count:
            await asyncio.sleep(0.01)
    return [json.loads(path.read_text()) for path in found]


def test_one_consent_is_none(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench(gateway={"captures": Captures(tmp_path / "a")}) as b:
            await b.ask()
            await b.counted("requests_total", 1)
        async with bench(capture=True) as b:
            await b.ask()
            await b.counted("requests_total", 1)
        assert list((tmp_path / "a").iterdir()) == []

    run(main)


def test_an_exchange_as_it_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        folder = tmp_path / "c"
        handler = sse(fixture("leak-key.sse"))
        async with bench(handler, gateway={"captures": Captures(folder)}, capture=True, sanitize_tool_tags=True) as b:
            body = fixture("req-leaked-echo.json").replace(b'{"model"', b'{"api_key":"k","model"')
            headers = {"Authorization": "Bearer abc", "Cookie": "s=1", "X-Trace": "t"}
            answer = await b.ask(body, headers=headers)
            (kept,) = await captured(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (path,) = folder.iterdir()
        assert (path.name, stat.S_IMODE(path.stat().st_mode)) == ("00000001.json", 0o600)
        text = path.read_text()
        assert "Bearer abc" not in text
        assert "s=1" not in text
        assert kept["request"]["body"] == {**json.loads(body), "api_key": "[redacted]"}
        assert kept["sent"]["messages"][1]["tool_calls"][0]["function"]["name"] == "list_dir"
        assert ["x-trace", "t"] in kept["request"]["headers"]
        assert (kept["outcome"], kept["answer"]["status"], kept["model"]) == ("ok", 200, "stub")
        assert kept["answer"]["body"] == answer.body.decode()
        assert kept["answer"]["bytes"] == len(answer.body)

    run(main)


def test_a_broken_answer_is_kept_as_far_as_it_came(tmp_path: Path) -> None:
    async def main() -> None:
        async with bench(cut_clean_close, gateway={"captures": Captures(tmp_path / "c")}, capture=True) as b:
            answer = await b.ask()
            (kept,) = await captured(tmp_path / "c")
        assert kept["outcome"] == "engine_died"
        assert kept["answer"]["body"] == answer.body.decode()
        assert kept["sent"] is None

    run(main)


def test_the_ring_is_bounded_by_files_and_by_bytes(tmp_path: Path) -> None:
    async def main() -> None:
        few = Captures(tmp_path / "few", max_files=3)
        for _ in range(7):
            await few.keep(exchange())
        assert sorted(path.name for path in (tmp_path / "few").iterdir()) == [f"{n:08d}.json" for n in (5, 6, 7)]
        small = Captures(tmp_path / "small", max_bytes=5000)
        for _ in range(9):
            await small.keep(exchange(1500))
        sizes = [path.stat().st_size for path in (tmp_path / "small").iterdir()]
        assert len(sizes) == 2
        assert sum(sizes) <= 5000
        again = Captures(tmp_path / "few", max_files=3)
        (tmp_path / "few" / "notes.txt").write_text("mine")
        await again.keep(exchange())
        names = sorted(path.name for path in (tmp_path / "few").iterdir())
        assert names == ["00000006.json", "00000007.json", "00000008.json", "notes.txt"]

    run(main)


def test_a_disk_that_cannot_be_written_costs_only_the_capture(tmp_path: Path) -> None:
    async def main() -> None:
        captures = Captures(tmp_path / "c")
        (tmp_path / "c").rmdir()
        async with bench(gateway={"captures": captures}, capture=True) as b:
            assert (await b.ask()).clean
            await b.counted("requests_total", 1, outcome="ok")
            await b.counted("policy_total", 1, policy="capture", effect="lost")

    run(main)


def test_half_a_capture_is_none(tmp_path: Path) -> None:
    async def main() -> None:
        captures = Captures(tmp_path / "c")
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # a real disk that is full behind 4 KiB
        try:
            assert not await captures.keep(exchange(20_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert list((tmp_path / "c").iterdir()) == []
        assert await captures.keep(exchange())

    run(main)


def test_a_long_body_has_its_secrets_hidden_too() -> None:
    body = {"api_key": "sk-1", "auth": {"user": "me", "n": 1}, "messages": [{"content": "x" * BODY_BYTES}]}
    kept = hide_body(b" " + json.dumps(body).encode())
    assert len(kept) == BODY_BYTES
    assert kept.startswith('{"api_key": "[redacted]", "auth": {"user": "[redacted]", "n": 1}, ')
    assert "sk-1" not in kept


def test_folders_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(UsageError, match="chmod 700"):
        Captures(tmp_path / "open")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        Captures(tmp_path / "file")


def test_what_is_hidden_and_what_is_cut() -> None:
    body = {"api_key": "k", "max_tokens": 5, "tools": [{"password": "p", "n": 3}], "messages": [{"content": "my key"}]}
    assert hide_body(json.dumps(body).encode()) == {
        **body, "api_key": "[redacted]", "tools": [{"password": "[redacted]", "n": 3}],
    }  # fmt: skip
    assert hide_body(b"{broken") == "{broken"
    assert len(hide_body(b"[" + b"1," * BODY_BYTES)) == BODY_BYTES
    assert hide_query("api_key=a&x=1&x=") == "api_key=%5Bredacted%5D&x=1&x="
    long = exchange()
    for _ in range(3):
        long.add(b"y" * BODY_BYTES)
    assert (long.answer_bytes, len(long.answer)) == (3 * BODY_BYTES, BODY_BYTES)
