"""What the scheduler does when a step tells of broken requests, on a scheduler that stands in for vLLM's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from soakrig.engine.vllm import steps

BLOCK = 4


class StubScheduler:
    """Blocks of each request, a prefix cache to take them out of, and the names that the plug-in asks for."""

    def __init__(self, blocks: dict[str, list[int]]) -> None:
        self.requests = {
            name: SimpleNamespace(request_id=name, client_index=0, get_finished_reason=lambda: "error")
            for name in blocks
        }
        self.blocks = blocks
        self.evicted: set[int] = set()
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK))]
        )
        self.kv_cache_manager = SimpleNamespace(
            get_block_ids=lambda request: ([*self.blocks[request]],), evict_blocks=self.evicted.update
        )

    def finish_requests(self, requests: set[str], status: str) -> list[Any]:
        assert status == "FINISHED_ERROR"
        return [self.requests.pop(one) for one in sorted(requests)]


def update(scheduler: StubScheduler, **wrong: tuple[int, list[int]]) -> dict[str, Any]:
    """Request -> what became of it, by a step that completes every request which is still there."""

    def whole(self: StubScheduler, scheduled: Any, output: Any) -> dict[int, Any]:
        return {0: SimpleNamespace(outputs=[SimpleNamespace(request_id=one, reason="stop") for one in self.requests])}

    output = SimpleNamespace(**{steps.BAD: {one: (first, (blocks,)) for one, (first, blocks) in wrong.items()}})
    found = steps._failing(whole)(scheduler, None, output)
    return {one.request_id: one.reason for one in found[0].outputs}


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine_output(request_id: str, new_token_ids: list[int], finish_reason: str) -> Any:
        return SimpleNamespace(request_id=request_id, reason=finish_reason)

    known = {"FINISHED_ERROR": "FINISHED_ERROR", "EngineCoreOutput": engine_output, "EngineCoreOutputs": None}
    monkeypatch.setattr(steps, "hook", known.__getitem__)


def test_a_request_that_the_bad_step_completes_ends_with_the_error() -> None:
    assert update(StubScheduler({"a": [1], "b": [2]}), a=(0, [1])) == {"a": "error", "b": "stop"}


def test_who_found_the_bad_blocks_in_the_prefix_cache_fails_too() -> None:
    scheduler = StubScheduler({"a": [1, 2, 3], "reader": [1, 2, 7], "of_reader": [1, 9, 7], "before": [1, 8]})
    # Block 1 lay before the step; of_reader has the reader's own block at the same place.
    assert update(scheduler, a=(BLOCK, [1, 2, 3])) == {
        "a": "error", "reader": "error", "of_reader": "error", "before": "stop",
    }  # fmt: skip
    assert scheduler.evicted == {2, 3, 7}


def test_the_blocks_of_a_request_that_was_aborted_meanwhile_leave_the_prefix_cache() -> None:
    scheduler = StubScheduler({"other": [5], "null": [0, 6]})
    assert update(scheduler, gone=(0, [0, 4])) == {"other": "stop", "null": "stop"}
    assert scheduler.evicted == {4}
