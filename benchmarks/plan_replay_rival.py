"""libcachesim's LRU on one layer after another: the other side of plan_replay.py, in an environment of its own.

    python benchmarks/plan_replay_rival.py TRACE.i16 LAYERS TOP_K SIZES LAYERS_TO_RUN

Each layer's ids are written once as libcachesim's own binary format (oracleGeneral), which its C++ reader maps; only
``process_trace`` is timed. The hash table is as small as the objects need: its default would be cleared for each size.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

REQUEST = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])


def main() -> None:
    """Print ``{"version", "layers": {layer: {size: [misses, seconds]}}}``."""
    import libcachesim

    path, layers, top_k = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    sizes, wanted = json.loads(sys.argv[4]), json.loads(sys.argv[5])
    ids = np.memmap(path, dtype="<i2", mode="r").reshape(-1, layers, top_k)
    found: dict[int, dict[int, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for layer in wanted:
            flat = np.ascontiguousarray(ids[:, layer]).reshape(-1)
            requests = np.zeros(len(flat), dtype=REQUEST)
            requests["id"], requests["size"], requests["next"] = flat + 1, 1, -2
            file = Path(folder) / "layer.bin"
            requests.tofile(file)
            found[layer] = {}
            for size in sizes:
                reader = libcachesim.TraceReader(str(file), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
                cache = libcachesim.LRU(size, hashpower=12, reader=reader)
                start = time.perf_counter()
                missed, _ = cache.process_trace(reader)
                found[layer][size] = [round(missed * len(flat)), time.perf_counter() - start]
    print(json.dumps({"version": libcachesim.__version__, "layers": found}))


if __name__ == "__main__":
    main()
