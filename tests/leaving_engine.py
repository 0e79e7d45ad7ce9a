"""A stand-in engine that leaves something behind: run as ``python leaving_engine.py PORT_FILE WHAT``.

WHAT: ``child`` (a process that outlives its server and ignores SIGTERM), ``shm`` (an object under /dev/shm, named in
PORT_FILE.shm), ``dies`` (it ends at its start as vLLM does whose KV tier does not fit into /dev/shm).
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

from wire import loopback


async def slow(x: loopback.Exchange) -> None:
    """A reply that takes its time, so that streams are under way when the end comes."""
    await x.head()
    await x.chunk(loopback.ROLE)
    for part in loopback.words(12 if b'"max_tokens":16' in x.body or b"chapters" in x.body else 4000):
        await x.chunk(part)
        await asyncio.sleep(0.01)
    for part in (loopback.delta(finish="stop"), loopback.usage(), loopback.DONE):
        await x.chunk(part)
    await x.end()


async def main(port_file: Path, what: str) -> None:
    kept: list[object] = []
    if what == "child":
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        kept.append(child)
    if what == "shm":
        block = shared_memory.SharedMemory(create=True, size=4096)
        resource_tracker.unregister(block._name, "shared_memory")  # nobody tidies up behind it
        Path(f"{port_file}.shm").write_text(block.name)
        kept.append(block)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with loopback.serve(slow) as url:
        port_file.write_text(url.rpartition(":")[2])
        await stop.wait()


if __name__ == "__main__":
    if sys.argv[2] == "dies":
        sys.exit(
            "RuntimeError: Insufficient space in /dev/shm for CPU KV offload shared region in /dev/shm: 49151 MiB "
            "required, 32768 MiB free. Increase /dev/shm (e.g. --shm-size or --ipc=host)."
        )
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
