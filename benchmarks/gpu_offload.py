"""What the offload kernels cost on a card: the gather beside a plain pinned copy, the books, a replayed step.

    python benchmarks/gpu_offload.py [--repeats 30] [--json]

*Gather*: 8 and 16 rows of 13.5 MiB and of 1 MiB, random experts of a bank in pinned host memory, fetched by one launch
with a list of 64 ids; *copy*: one ``copy_`` of as many bytes from the same memory, which the copy engine does. Both are
replayed from graphs of 20, by turns. *Books*: ``assign`` for one layer-step of 256 experts, top-8; *eager* is launched
from Python each time, *replayed* comes from a graph, which is how an engine runs it. *Step*: replay of 75 layers' books
and gathers of two parameters, once with every expert in a slot and once with every expert missing. Medians over the
repeats. The first gather is compared with the bank, byte by byte: exit 1 where they differ.

Without a card, and with a torch that has no CUDA, nothing is measured: it says so, and exits 0. Takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor

from soakrig.engine.offload.assign_kernel import assign
from soakrig.engine.offload.bookkeeping import FETCHES
from soakrig.engine.offload.counters import COUNTERS
from soakrig.engine.offload.host_memory import HostMemory
from soakrig.engine.offload.kernels import gather
from soakrig.engine.offload.policy import Policy

DEVICE = torch.device("cuda")
MIB = 2**20
ROWS = ((13 * MIB + MIB // 2, 48), (MIB, 256))
"""Bytes of a row, and experts of its bank."""
FETCHED = (8, 16)
BATCH = 20
"""Gathers and copies in a graph: far more bytes than a cache of the card holds before a row comes again."""
EXPERTS, TOP_K, LAYERS = 256, 8, 75
PARAMETERS = (MIB, MIB // 2)
"""Bytes of an expert's parameters in a replayed step."""
BOOKS = [(policy, slots, tokens) for slots in (64, 192) for policy in Policy for tokens in (1, 8)]
BOOKS += [(Policy.LRU, 8400, 1), (Policy.CLOCK, 8400, 1)]
SECONDS = 150.0
"""No new case is begun after so long; what was left out is named."""
Row = dict[str, Any]


def seconds_of(act: Callable[[], object]) -> float:
    """Time on the device from the first of its work to the last."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    act()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def median_of(repeats: int, *acts: Callable[[], object]) -> list[float]:
    """Seconds of each, by turns: a machine that is busy for one is busy for all. The first turn is not counted."""
    taken: list[list[float]] = [[] for _ in acts]
    for number in range(repeats + 1):
        for act, times in zip(acts, taken, strict=True):
            found = seconds_of(act)
            if number:
                times.append(found)
    return [statistics.median(times) for times in taken]


@contextmanager
def pinned_bank(rows: int, row_bytes: int) -> Iterator[Tensor]:
    """[rows, row_bytes] of pinned host memory in which no two rows are equal."""
    memory = HostMemory()
    bank = memory.empty((rows, row_bytes), torch.uint8)
    numbers = torch.arange(row_bytes // 8, dtype=torch.int64)
    for row, to_row in enumerate(bank.view(torch.int64)):
        to_row.copy_(numbers + row * 1_000_003)
    memory.pin()
    try:
        yield bank
    finally:
        torch.cuda.synchronize()
        memory.close()


def fetch_list(count: int, experts: int) -> tuple[Tensor, Tensor]:
    """Lists of 64 of which ``count`` ask for something: random experts, the first rows."""
    src, dst = (torch.full((FETCHES,), -1, dtype=torch.int32) for _ in range(2))
    src[:count] = torch.randperm(experts, dtype=torch.int32)[:count]
    dst[:count] = torch.arange(count, dtype=torch.int32)
    return src, dst


def graph_of(act: Callable[[], object]) -> Callable[[], object]:
    """``act`` captured; what to call to replay it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        act()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        act()
    return graph.replay


def gather_rows(bank: Tensor, out: Tensor, count: int, repeats: int) -> Row:
    """Bandwidth of the gather and of a copy of the same bytes."""
    experts, row_bytes = bank.shape
    lists = [tuple(one.to(DEVICE) for one in fetch_list(count, experts)) for _ in range(BATCH)]
    starts = [int(one) for one in torch.randint(experts - count + 1, (BATCH,))]
    bad = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    gather(bank, out, *lists[0], bad)
    src = lists[0][0][:count].cpu().long()
    equal = torch.equal(out[:count].cpu(), bank[src]) and int(bad) == 0

    def gathers() -> None:
        for src, dst in lists:
            gather(bank, out, src, dst, bad)

    def copies() -> None:
        for start in starts:
            out[:count].copy_(bank[start : start + count], non_blocking=True)

    gathered, copied = median_of(repeats, graph_of(gathers), graph_of(copies))
    total = BATCH * count * row_bytes
    return {
        "row_mib": row_bytes / MIB, "rows": count, "gather_gb_s": total / gathered / 1e9,
        "copy_gb_s": total / copied / 1e9, "ratio": copied / gathered, "equal": equal,
    }  # fmt: skip


class Books:
    """The arrays of ``assign`` for a pool of ``keys`` experts on the device."""

    def __init__(self, policy: Policy, slots: int, keys: int, tokens: int) -> None:
        def array(length: int, dtype: torch.dtype, value: int = 0) -> Tensor:
            return torch.full((length,), value, dtype=dtype, device=DEVICE)

        int32, int64 = torch.int32, torch.int64
        self.state = [
            array(slots, int32, -1), array(keys, int32, -1), array(slots, int64), array(slots, int64),
            array(slots, int32), array(2, int64),
        ]  # fmt: skip
        self.numbers = (int(policy), 0, slots)
        self.fetches = (array(FETCHES, int32, -1), array(FETCHES, int32, -1))
        self.counts = array(len(COUNTERS), int64)
        self.found = [array(tokens * TOP_K, int64), array(tokens * TOP_K, int64), *self.fetches]
        self.found += [self.counts, array(EXPERTS, int64), array(tokens, torch.uint8)]

    def place(self, ids: Tensor, key_base: int = 0) -> None:
        assign(ids, TOP_K, EXPERTS, key_base, *self.state, *self.numbers, *self.found)


def routed(tokens: int) -> Tensor:
    """Ids of a layer-step: different experts within a token."""
    return torch.cat([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)]).to(DEVICE)


def book_cost(policy: Policy, slots: int, tokens: int, repeats: int) -> Row:
    """Microseconds of one layer-step's bookkeeping; ids change from layer-step to layer-step within a graph.

    A pool larger than a layer is shared: so many layer-steps, each of a layer of its own, that it overflows.
    """
    shared = slots > EXPERTS
    steps = slots * 4 // (TOP_K * 3) if shared else LAYERS
    books = Books(policy, slots, EXPERTS * (steps if shared else 1), tokens)
    drawn = [(routed(tokens), EXPERTS * number if shared else 0) for number in range(steps)]

    def place() -> None:
        for ids, key_base in drawn:
            books.place(ids, key_base)

    eager, replayed = median_of(repeats, place, graph_of(place))
    counted = dict(zip(COUNTERS, books.counts.tolist(), strict=True))
    misses = (counted["fills"] + counted["staged"]) / counted["steps"]
    return {
        "policy": policy.name.lower(), "slots": slots, "pairs": tokens * TOP_K, "misses_per_step": misses,
        "eager_us": eager / steps * 1e6, "replayed_us": replayed / steps * 1e6,
    }  # fmt: skip


def step_cost(missing: bool, repeats: int) -> Row:
    """A replayed step of 75 layers: books and two gathers each, when nothing is missing or every expert is."""
    slots = 64
    # Static slots that are empty keep nothing, so that every step misses all; LRU slots keep what the first fetched.
    policy = Policy.STATIC if missing else Policy.LRU
    layers = [(Books(policy, slots, EXPERTS, 1), routed(1)) for _ in range(LAYERS)]
    bad = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pinned_bank(EXPERTS, PARAMETERS[0]) as first, pinned_bank(EXPERTS, PARAMETERS[1]) as second:
        outs = [torch.zeros((slots + FETCHES, size), dtype=torch.uint8, device=DEVICE) for size in PARAMETERS]

        def step() -> None:
            for books, ids in layers:
                books.place(ids)
                for bank, out in zip((first, second), outs, strict=True):
                    gather(bank, out, *books.fetches, bad)

        (taken,) = median_of(repeats, graph_of(step))
    fetched = LAYERS * TOP_K * sum(PARAMETERS) if missing else 0
    return {
        "experts_missing": TOP_K if missing else 0, "step_ms": taken * 1e3, "layer_us": taken / LAYERS * 1e6,
        "gb_s": fetched / taken / 1e9, "refused": int(bad),
    }  # fmt: skip


def measured(repeats: int) -> dict[str, Any]:
    """Every figure, and the cases that there was no time for."""
    until = time.monotonic() + SECONDS
    torch.manual_seed(0)
    found: dict[str, Any] = {"gather": [], "books": [], "step": [], "left_out": []}

    def case(name: str, words: str, act: Callable[[], Row]) -> None:
        if time.monotonic() > until:
            found["left_out"].append(words)
            return
        print(words, file=sys.stderr)
        found[name].append(act())

    for row_bytes, experts in ROWS:
        with pinned_bank(experts, row_bytes) as bank:
            out = torch.zeros((max(FETCHED), row_bytes), dtype=torch.uint8, device=DEVICE)
            for count in FETCHED:
                words = f"gather {count} rows of {row_bytes / MIB:g} MiB"
                case("gather", words, lambda b=bank, o=out, c=count: gather_rows(b, o, c, repeats))
    for missing in (False, True):
        words = f"step, {'all' if missing else 'no'} experts missing"
        case("step", words, lambda m=missing: step_cost(m, repeats))
    for policy, slots, tokens in BOOKS:
        words = f"books, {policy.name.lower()}, {slots} slots, {tokens} tokens"
        case("books", words, lambda p=policy, s=slots, t=tokens: book_cost(p, s, t, repeats))
    return found


def show(found: dict[str, Any]) -> None:
    """The figures as tables."""
    if found["state"] == "skipped":
        print(f"skipped: {found['why']}")
        return
    print(f"{found['device']}, torch {found['torch']}, triton {found['triton']}; medians of {found['repeats']}")
    print(f"\n{'rows':>5} {'MiB each':>9} {'gather GB/s':>12} {'copy GB/s':>10} {'gather/copy':>12}")
    for row in found["gather"]:
        figures = f"{row['gather_gb_s']:>12.1f} {row['copy_gb_s']:>10.1f} {row['ratio']:>12.2f}"
        print(f"{row['rows']:>5} {row['row_mib']:>9g} {figures}")
    print(f"\n{'books':8} {'slots':>6} {'pairs':>6} {'misses':>7} {'eager us':>9} {'replayed us':>12}")
    for row in found["books"]:
        figures = f"{row['misses_per_step']:>7.1f} {row['eager_us']:>9.1f} {row['replayed_us']:>12.2f}"
        print(f"{row['policy']:8} {row['slots']:>6} {row['pairs']:>6} {figures}")
    print(f"\n{'step of 75 layers, missing':>27} {'ms':>8} {'us a layer':>11} {'GB/s':>7}")
    for row in found["step"]:
        print(f"{row['experts_missing']:>27} {row['step_ms']:>8.3f} {row['layer_us']:>11.2f} {row['gb_s']:>7.1f}")
    for words in found["left_out"]:
        print(f"left out, {SECONDS:g} s were over: {words}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    found: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__}
    if not torch.cuda.is_available():
        why = f"torch {torch.__version__} finds no CUDA device, and what is measured here is the device"
        found |= {"state": "skipped", "why": why}
    else:
        found |= {
            "state": "measured",
            "kind": "measured",
            "device": torch.cuda.get_device_name(),
            "repeats": options.repeats,
        }
        found |= measured(options.repeats)
    if options.json:
        print(json.dumps(found))
    else:
        show(found)
    wrong = [row for row in found.get("gather", ()) if not row["equal"]]
    wrong += [row for row in found.get("step", ()) if row["refused"]]
    for row in wrong:
        print(f"NOT COMPARABLE: the rows that arrived are not the bank's: {row}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
