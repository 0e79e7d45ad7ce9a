"""One client in a process of its own: warm it up, run it, and print what it cost as one JSON line.

    python -m streams.measure CLIENT URL STREAMS EACH

CPU is user + system time of this process alone, taken after a warm-up batch (imports, first connections, code that
specialises itself) and after the measured one; the difference counts. Exit 3: the client is not installed here.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import sys
import time

from streams.clients import CLIENTS, MAX_TOKENS, MODEL, PROMPT, Client, Once, Stream

NOT_INSTALLED = 3
BODY = json.dumps(
    {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
        "max_completion_tokens": MAX_TOKENS,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
).encode()


def cpu() -> float:
    """User and system seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def measured(client: Client, url: str, streams: int, each: int) -> dict[str, float]:
    """Figures of ``each`` requests on each of ``streams`` lanes, after a warm-up request on every lane."""
    async with client(url, BODY) as once:
        await lanes(once, streams, 1)
        await take_pace(url)
        before, start = cpu(), time.monotonic()
        seen = await lanes(once, streams, each)
        used, wall = cpu() - before, time.monotonic() - start
    pace = await take_pace(url)
    ttfts, itls = [s.ttft for s in seen], [s.itl for s in seen]
    return {
        "requests": len(seen),
        "whole": sum(s.whole for s in seen),
        "deltas": sum(s.deltas for s in seen),
        "cpu_s": used,
        "wall_s": wall,
        "ttft_s": statistics.fmean(ttfts),
        "ttft_p99_s": percentile(ttfts, 0.99),
        "itl_s": statistics.fmean(itls),
        "server_ttft_s": pace["ttft_s"],
        "server_itl_s": pace["itl_s"],
    }


async def lanes(once: Once, streams: int, each: int) -> list[Stream]:
    """Keep ``streams`` requests in flight, ``each`` of them one after the other on every lane."""
    seen: list[Stream] = []

    async def lane() -> None:
        for _ in range(each):
            seen.append(await once())  # noqa: PERF401

    await asyncio.gather(*[lane() for _ in range(streams)])
    return seen


async def take_pace(url: str) -> dict[str, float]:
    """What the server really did since the last question."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /pace HTTP/1.1\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return json.loads(answer.split(b"\r\n\r\n", 1)[1])


def main() -> int:
    name, url, streams, each = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    client, on_uvloop = CLIENTS[name]
    factory = None
    if on_uvloop:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        try:
            figures = runner.run(measured(client, url, streams, each))
        except ModuleNotFoundError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return NOT_INSTALLED
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
