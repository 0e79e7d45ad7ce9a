"""Engines that come and go under the gateway: who is looked for, when, and what is said of one that is not there."""

from __future__ import annotations

import asyncio
import socket

import pytest

from gateway_bench import Stub, bench, refused, run
from soakrig.engine.gateway.place import Found
from soakrig.engine.gateway.upstream import Upstream
from wire import loopback


class Walking:
    """A place that goes from one finding to the next with every look; what it found last is there until told."""

    def __init__(self, *found: Found) -> None:
        self.found, self.looks, self.there = list(found), 0, True

    def still(self) -> bool:
        return self.there

    def look(self) -> Found:
        self.looks += 1
        return self.found.pop(0) if len(self.found) > 1 else self.found[0]


def test_an_engine_that_comes_and_goes() -> None:
    async def main() -> None:
        stub = Stub(loopback.good)
        async with loopback.serve(stub.handle, stub.route) as behind:
            place = Walking(Found(why="stopped"), Found(loading=True, why="it loads weights"), Found(url=behind))
            async with bench(url="", upstream={"url": "", "place": place, "model": "m"}) as b:
                refused(await b.ask(), 502, "engine_unreachable", "the engine stub is not there: stopped")
                loading = await b.ask()
                refused(loading, 503, "engine_loading", "the engine stub is not ready: it loads weights")
                assert loading.headers["retry-after"] == "5"
                await b.counted("requests_total", 1, outcome="engine_loading", model="stub")
                for _ in range(3):
                    assert (await b.ask()).status == 200
                assert place.looks == 3, "an engine that is still there is not looked for"
                b.upstream.served = [{"id": "of the last launch"}]
                place.there = False
                await asyncio.gather(*(b.upstream.settle() for _ in range(3)))
                assert b.upstream.served == [], "another launch may serve another list"
                place.there, place.found = False, [Found(why="killed")]
                refused(await b.ask(), 502, "engine_unreachable", "the engine stub is not there: killed")

    run(main)


def test_many_clients_wait_for_one_look() -> None:
    async def main() -> None:
        stub = Stub(loopback.good)
        async with loopback.serve(stub.handle, stub.route) as behind:
            place = Walking(Found(url=behind))
            named = Upstream("own", place=place, model="m")
            async with bench(url="http://127.0.0.1:9", named={"own": named, "m": named}) as b:
                answers = await asyncio.gather(*(b.ask({"model": "own"}) for _ in range(8)))
                assert [one.status for one in answers] == [200] * 8
                assert place.looks == 1
                assert stub.sent()["model"] == "m"
                assert "/v1/models" not in stub.asked, "its name is known"

    run(main)


@pytest.mark.parametrize(
    ("now", "status", "says"),
    [
        (Found(loading=True, why="it restarts"), 503, "it restarts"),
        (Found(why="it is being stopped"), 502, "being stopped"),
        (None, 502, "cannot be reached"),
    ],
)
def test_an_engine_that_takes_no_connection_is_looked_for(now: Found | None, status: int, says: str) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as held:
            url = f"http://127.0.0.1:{held.getsockname()[1]}"
        place = Walking(Found(url=url), now or Found(url=url))
        async with bench(upstream={"url": "", "place": place}) as b:
            answer = await b.ask()
            assert (answer.status, says in answer.error["message"]) == (status, True)
            assert place.looks == 2

    run(main)
