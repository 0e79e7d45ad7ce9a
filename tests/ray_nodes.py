"""A Ray cluster on this host, in a process of its own: a head and further raylets, all on the loopback network.

``python ray_nodes.py`` prints a line of JSON for the head, then one for each line of its input: the options of a node
to add (``{"num_cpus": 1, "env_vars": {...}}``), or ``{"remove": RAYLET_PID}``. The end of its input ends the cluster.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Any

DEATH = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""A node that is silent for two seconds is dead; 15 s are Ray's own."""


def serve() -> None:
    """The far end of ``RayNodes``."""
    from ray.cluster_utils import Cluster

    common = {"object_store_memory": 80_000_000, "include_dashboard": False}
    head = {**common, "num_cpus": 1, "resources": {"first": 1}, "node_ip_address": "127.0.0.2", "_system_config": DEATH}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = {_raylet(cluster.head_node): cluster.head_node}
    print(json.dumps({"address": cluster.address, "raylet": next(iter(nodes))}), flush=True)
    for number, line in enumerate(sys.stdin, start=3):
        asked = json.loads(line)
        if "remove" in asked:
            cluster.remove_node(nodes.pop(asked["remove"]))
            print("{}", flush=True)
            continue
        node = cluster.add_node(**common, node_ip_address=f"127.0.0.{number}", **asked)
        nodes[_raylet(node)] = node
        print(json.dumps({"raylet": _raylet(node)}), flush=True)
    cluster.shutdown()


def _raylet(node: Any) -> int:
    return node.all_processes["raylet"][0].process.pid


class RayNodes:
    """The cluster. A context manager that leaves nothing behind. ``env``: what a driver needs to get in."""

    def __init__(self) -> None:
        # pytest's folders are too deep for Ray's sockets
        self._folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
        self.env = {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TMPDIR": self._folder,
            "RAY_USAGE_STATS_ENABLED": "0",
        }  # fmt: skip

    def __enter__(self) -> RayNodes:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env={**os.environ, **self.env},
        )  # fmt: skip
        self.address: str = self._answer()["address"]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.communicate(timeout=60)
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, **options: Any) -> int:
        """Add a node; the pid of its raylet."""
        return self._ask(options)["raylet"]

    def remove(self, raylet: int) -> None:
        """End a node, dead or alive."""
        self._ask({"remove": raylet})

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        while line and not line.startswith("{"):  # Ray has something to say
            line = self._process.stdout.readline()
        assert line, f"the cluster ended with status {self._process.wait(10)}"
        return json.loads(line)


if __name__ == "__main__":
    serve()
