"""An Xid line in the driver's own form, for a planted fault: to a kernel-log file, or to /dev/kmsg.

The forms of the line and of each Xid's text: ``NVRM: Xid (PCI:dddd:bb:dd): N, pid=P, name=N, TEXT``, as the open
kernel modules print it (kernel_rc.c) and as public reports quote it.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import datetime
from pathlib import Path

KMSG = "/dev/kmsg"
PCI = "PCI:0000:01:00"
PROCESS = "python3"
_TEXTS = {
    13: "Graphics SM Warp Exception on (GPC 0, TPC 3, SM 0): Out Of Range Address",
    31: (
        "Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC0 GPCCLIENT_T1_8 faulted @ 0x73ac_1c000000. "
        "Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE"
    ),
    79: "GPU has fallen off the bus.",
}
_OTHER = "Ch 00000008"


def xid_line(xid: int | str, pid: int) -> str:
    """``xid`` as a number becomes the line of that Xid with ``pid`` in it; a whole line stays as it is."""
    if isinstance(xid, str):
        return xid
    return f"NVRM: Xid ({PCI}): {xid}, pid={pid}, name={PROCESS}, {_TEXTS.get(xid, _OTHER)}"


def write_kernel_line(path: str, line: str) -> None:
    """Append ``line``, on disk before this returns. A file gets syslog's prefix; /dev/kmsg takes the bare line."""
    if path == KMSG:
        text = f"<4>{line}\n"
    else:
        up = time.clock_gettime(time.CLOCK_BOOTTIME)
        stamp = datetime.now().astimezone().strftime("%b %e %H:%M:%S")
        text = f"{stamp} {socket.gethostname()} kernel: [{up:12.6f}] {line}\n"
    descriptor = os.open(Path(path), os.O_WRONLY | os.O_APPEND | (0 if path == KMSG else os.O_CREAT), 0o644)
    try:
        os.write(descriptor, text.encode())
        if path != KMSG:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
