"""What the gateway adds to a stream: latency to the first token, and CPU, beside a direct connection, in one run.

    python benchmarks/gateway.py [--rounds 3] [--streams 1,64] [--json FILE]

A server process (``streams/server.py``) answers with a role chunk, 32 deltas, finish, usage and the terminator: 35
events, a delta every 20 ms, the first 20 ms after the request. A client process sends the same requests to it directly,
through a gateway without a policy, and through one that reads every event (restore_reasoning, sanitize_tool_tags,
mirror_content), one after the other and round after round, so that a busy machine is busy for all alike. Added latency
is the difference of percentiles over a round's requests, CPU is user + system time of the gateway's process; medians
over rounds are shown. All on loopback. Exit 1 when an answer did not come whole.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import uvloop

from streams.clients import CLIENTS
from streams.measure import BODY, cpu, lanes, percentile

HERE = Path(__file__).resolve().parent
DELTAS, EVENTS, ITL_MS, TTFT_MS = 32, 35, 20.0, 20.0
DIRECT, PLAIN, POLICIES = "direct", "gateway", "gateway, policies on"
EVERY = ("restore_reasoning", "sanitize_tool_tags", "mirror_content")
REQUESTS = 40
"""Of one lane; of more lanes each sends at least MIN_EACH."""
MIN_EACH = 5
Figures = dict[str, float]


@contextmanager
def server() -> Generator[str]:
    """The server in a process of its own; yields its URL. It ends when its standard input closes."""
    argv = [sys.executable, "-m", "streams.server", "--deltas", str(DELTAS)]
    argv += ["--itl-ms", str(ITL_MS), "--ttft-ms", str(TTFT_MS)]
    with subprocess.Popen(argv, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"


@contextmanager
def gateway(upstream: str, *policies: str) -> Generator[tuple[str, psutil.Process]]:
    """`soak engine gateway` in front of ``upstream``; yields its URL and its process."""
    argv = [sys.executable, "-m", "soakrig", "engine", "gateway", "--upstream", upstream, "--port", "0", "--json"]
    for policy in policies:
        argv += ["--policy", policy]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.communicate()


async def ask(url: str, streams: int, each: int) -> Figures:
    """Figures of ``each`` requests on each of ``streams`` lanes, after a warm-up request on every lane."""
    client, _ = CLIENTS["soakrig"]
    async with client(url, BODY) as once:
        await lanes(once, streams, 1)
        print(flush=True)  # the parent takes the gateway's CPU time now
        await asyncio.to_thread(sys.stdin.readline)
        before = cpu()
        seen = await lanes(once, streams, each)
        used = cpu() - before
    ttfts = [one.ttft for one in seen]
    return {
        "requests": len(seen),
        "whole": sum(one.whole and one.deltas == DELTAS for one in seen),
        "client_ms_per_1000_events": used / (len(seen) * EVENTS) * 1e6,
        "ttft_p50_ms": percentile(ttfts, 0.50) * 1e3,
        "ttft_p99_ms": percentile(ttfts, 0.99) * 1e3,
    }


def measured(url: str, process: psutil.Process | None, streams: int) -> Figures:
    """One client process against one URL; the CPU time of ``process`` over the measured requests."""
    each = max(MIN_EACH, REQUESTS // streams)
    argv = [sys.executable, str(Path(__file__).resolve()), "--client", url, str(streams), str(each)]
    with subprocess.Popen(argv, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdout.readline()
        before = sum(process.cpu_times()[:2]) if process else 0.0
        client.stdin.write("\n")
        client.stdin.flush()
        figures: Figures = json.loads(client.stdout.readline())
        after = sum(process.cpu_times()[:2]) if process else 0.0
    figures["gateway_ms_per_1000_events"] = (after - before) / (figures["requests"] * EVENTS) * 1e6
    return figures


def rows(streams: int, rounds: list[dict[str, Figures]]) -> list[dict[str, object]]:
    """One row a way: medians over rounds, differences and ratios within a round."""
    found: list[dict[str, object]] = []
    for way in (DIRECT, PLAIN, POLICIES):
        row: dict[str, object] = {"streams": streams, "way": way}
        for key in rounds[0][way]:
            row[key] = statistics.median(seen[way][key] for seen in rounds)
        for key in ("ttft_p50_ms", "ttft_p99_ms"):
            row[f"added_{key}"] = statistics.median(seen[way][key] - seen[DIRECT][key] for seen in rounds)
        row["cpu_over_client"] = statistics.median(
            seen[way]["gateway_ms_per_1000_events"] / seen[DIRECT]["client_ms_per_1000_events"] for seen in rounds
        )
        found.append(row)
    return found


def show(table: list[dict[str, object]]) -> None:
    print(f"{'streams':>7} {'way':22} {'TTFT p50 ms':>12} {'p99':>7} {'added p50':>10} {'added p99':>10}", end="")
    print(f" {'gateway CPU ms/1000 ev':>23} {'client':>7} {'ratio':>6}")
    for row in table:
        print(f"{row['streams']:>7} {row['way']:22} {row['ttft_p50_ms']:>12.2f} {row['ttft_p99_ms']:>7.2f}", end="")
        print(f" {row['added_ttft_p50_ms']:>10.2f} {row['added_ttft_p99_ms']:>10.2f}", end="")
        print(f" {row['gateway_ms_per_1000_events']:>23.1f} {row['client_ms_per_1000_events']:>7.1f}", end="")
        print(f" {row['cpu_over_client']:>6.2f}")


def main() -> int:
    if sys.argv[1:2] == ["--client"]:
        url, streams, each = sys.argv[2:5]
        print(json.dumps(uvloop.run(ask(url, int(streams), int(each)))), flush=True)
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", default="1,64", help="lanes, separated by commas")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    cases = [int(text) for text in options.streams.split(",")]
    rounds: dict[int, list[dict[str, Figures]]] = {streams: [] for streams in cases}
    with ExitStack() as stack:
        direct = stack.enter_context(server())
        ways = {
            DIRECT: (direct, None),
            PLAIN: stack.enter_context(gateway(direct)),
            POLICIES: stack.enter_context(gateway(direct, *EVERY)),
        }
        for number in range(options.rounds):
            for streams in cases:
                rounds[streams].append({way: measured(*where, streams) for way, where in ways.items()})
                print(f"round {number + 1}: {streams} streams", file=sys.stderr)
    table = [row for streams in cases for row in rows(streams, rounds[streams])]
    show(table)
    if options.json:
        host = {"cores": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()}
        data = {"kind": "measured", "host": host, "events_per_stream": EVENTS, "rows": table, "each_round": rounds}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    broken = [f"{way}, {streams} streams" for streams in cases for seen in rounds[streams]
              for way, figures in seen.items() if figures["whole"] != figures["requests"]]  # fmt: skip
    for one in broken:
        print(f"NOT COMPARABLE: answers were missing or cut: {one}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
