"""Lines a second of the kernel-log parser, beside a bare ``re.search("Xid")`` over the same lines.

    python benchmarks/kernel_log.py [--lines 200000] [--json]

Two logs are made up from a seed: chatter (dmesg lines, one in 2,000 an Xid) and a burst (every line an Xid). Each
figure is the best of three passes on one core; ``ratio`` is the parser's time over the bare loop's.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable

from soakrig.soak.watch.kernel_lines import classify
from soakrig.soak.watch.kernel_record import parse_record

CHATTER = (
    "audit: type=1400 audit({n}.1:77): apparmor=ALLOWED operation=open profile=snapd pid={n} comm=cat",
    "usb 1-4: new high-speed USB device number {n} using xhci_hcd",
    "docker0: port {n}(veth31ab2c1) entered blocking state",
    "EXT4-fs (nvme0n1p2): mounted filesystem with ordered data mode. Quota mode: none.",
    "IPv6: ADDRCONF(NETDEV_CHANGE): veth{n}: link becomes ready",
    "perf: interrupt took too long ({n} > 2500), lowering kernel.perf_event_max_sample_rate to 79750",
)
BUS = "NVRM: Xid (PCI:0000:65:00): "
MMU = "MMU Fault: ENGINE GRAPHICS GPC0 GPCCLIENT_T1_7 faulted @ 0x7ba4_e2000000. Fault is of type FAULT_PDE"
XID = (
    f"{BUS}31, pid={{n}}, name=VLLM::EngineCor, channel 0x00000002, intr 00000000. {MMU} ACCESS_TYPE_VIRT_WRITE",
    f"{BUS}13, Graphics SM Warp Exception on (GPC 1, TPC 2, SM 0): Out Of Range Address",
    f"{BUS}43, pid={{n}}, name=python3, Ch 00000010",
)


def made_up(lines: int, every: int, kmsg: bool) -> list[str]:
    """``lines`` lines, one in ``every`` an Xid, as dmesg or as /dev/kmsg prints them."""
    source = random.Random(7)
    found: list[str] = []
    for n in range(lines):
        text = source.choice(XID if n % every == 0 else CHATTER).format(n=source.randrange(1000, 99999))
        found.append(f"4,{n},{n * 137},-;{text}" if kmsg else f"[{n * 137 / 1e6:12.6f}] {text}")
    return found


def best(passes: int, act: Callable[[], int]) -> tuple[float, int]:
    """Seconds of the quickest pass, and what it counted."""
    times: list[float] = []
    count = 0
    for _ in range(passes):
        start = time.perf_counter()
        count = act()
        times.append(time.perf_counter() - start)
    return min(times), count


def bare(lines: list[str]) -> int:
    pattern = re.compile("Xid")
    return sum(1 for line in lines if pattern.search(line))


def parsed(lines: list[str]) -> int:
    return sum(len(classify(parse_record(line))) for line in lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    options.add_argument("--lines", type=int, default=200_000)
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    rows: list[dict[str, object]] = []
    for name, every, kmsg in (("chatter, dmesg", 2000, False), ("chatter, kmsg", 2000, True), ("burst, kmsg", 1, True)):
        lines = made_up(given.lines, every, kmsg)
        bare_s, bare_found = best(3, lambda lines=lines: bare(lines))
        own_s, own_found = best(3, lambda lines=lines: parsed(lines))
        assert own_found == bare_found, (name, own_found, bare_found)
        rows.append(
            {
                "log": name,
                "lines": given.lines,
                "xids": own_found,
                "parser_lines_per_s": round(given.lines / own_s),
                "bare_lines_per_s": round(given.lines / bare_s),
                "ratio": round(own_s / bare_s, 1),
            }
        )
    if given.json:
        print(json.dumps({"benchmark": "kernel_log", "rows": rows}))
        return
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
