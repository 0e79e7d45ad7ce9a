"""Where vLLM's worker and scheduler tell the offload core of steps, and it tells them of broken requests."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from .host import Host, Scheduled, Written
from .parts import hook

_log = logging.getLogger("vllm.soakrig")
BAD = "soakrig_bad_requests"
"""Attribute of a model output: requests that were routed to an expert which does not exist, and what they wrote."""


def install(host: Host) -> None:
    """Wrap the worker's model loading and stepping, and the scheduler's reading of what came out."""
    worker, scheduler = hook("Worker"), hook("Scheduler")
    worker.load_model = _loading(worker.load_model, host)
    worker.execute_model = _stepping(worker.execute_model, host)
    worker.sample_tokens = _telling(worker.sample_tokens, host)
    worker.shutdown = _ending(worker.shutdown, host)
    # Called by name over collective_rpc.
    worker.soakrig_report = _report(host)
    worker.soakrig_newest = _newest(host)
    worker.soakrig_flush = _flush(host)
    worker.soakrig_window = _window(host)
    scheduler.update_from_output = _failing(scheduler.update_from_output)


def _report(host: Host) -> Any:
    def soakrig_report(worker: Any) -> Any:
        return host.report()

    return soakrig_report


def _newest(host: Host) -> Any:
    def soakrig_newest(worker: Any) -> Any:
        return host.newest()

    return soakrig_newest


def _window(host: Host) -> Any:
    def soakrig_window(worker: Any, query: dict[str, str]) -> Any:
        return host.window(query)

    return soakrig_window


def _flush(host: Host) -> Any:
    def soakrig_flush(worker: Any) -> None:
        if host.store is not None:
            host.store.flush()

    return soakrig_flush


def _loading(whole: Any, host: Host) -> Any:
    @functools.wraps(whole)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.vllm_config
        host.refuse(config)  # before a large checkpoint is read for nothing
        done = whole(self, *args, **kwargs)
        device = getattr(self, "device", None) or torch.device("cpu")
        host.finish(config.model_config, config.scheduler_config.max_num_batched_tokens, device)
        return done

    return load_model


def _ending(whole: Any, host: Host) -> Any:
    @functools.wraps(whole)
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
        if host.store is not None:
            host.store.flush()
        return whole(self, *args, **kwargs)

    return shutdown


def _stepping(whole: Any, host: Host) -> Any:
    @functools.wraps(whole)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = scheduler_output.total_num_scheduled_tokens
        if host.store is None or not tokens:
            return whole(self, scheduler_output, *args, **kwargs)
        host.begin_step(tokens, lambda: _scheduled(self.model_runner, scheduler_output))
        if host.plant is not None:
            host.plant.arrive(scheduler_output)
        output = whole(self, scheduler_output, *args, **kwargs)
        bad = host.end_step()
        host.bad |= {request: _written(self.model_runner, request) for request in bad}
        if host.plant is not None:
            host.plant.gone(bad)
            host.plant.strike()
        return _marked(output, host)

    return execute_model


def _telling(whole: Any, host: Host) -> Any:
    @functools.wraps(whole)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _marked(whole(self, *args, **kwargs), host)

    return sample_tokens


def _scheduled(runner: Any, scheduler_output: Any) -> list[Scheduled]:
    """Request, tokens, decode or not; in the order of the batch's rows."""
    counts: dict[str, int] = scheduler_output.num_scheduled_tokens
    drafts = scheduler_output.scheduled_spec_decode_tokens
    found: list[Scheduled] = []
    for request in runner.input_batch.req_ids:
        if request in counts:
            state = runner.requests[request]
            # num_computed_tokens is what lay before this step.
            decode = state.num_computed_tokens >= state.num_prompt_tokens
            found.append((request, counts[request], decode and counts[request] == 1 + len(drafts.get(request, ()))))
    return found


def _written(runner: Any, request: str) -> Written:
    """Where the request's keys and values of this step begin, and its cache blocks: the scheduler may have freed them
    by the time it hears of the step."""
    state = runner.requests[request]
    return state.num_computed_tokens, tuple(list(group) for group in state.block_ids)


def _marked(output: Any, host: Host) -> Any:
    """The output with what is known of broken requests, as soon as there is one to carry it."""
    if output is None or not host.bad:
        return output
    bad, host.bad = host.bad, {}
    late = getattr(output, "get_output", None)
    if late is None:
        setattr(output, BAD, bad)
        return output

    def get_output() -> Any:
        found = late()
        setattr(found, BAD, bad)
        return found

    output.get_output = get_output
    return output


def _failing(whole: Any) -> Any:
    @functools.wraps(whole)
    def update_from_output(self: Any, scheduler_output: Any, model_output: Any, *args: Any, **kwargs: Any) -> Any:
        wrong: dict[str, Written] = getattr(model_output, BAD, {})
        if not wrong:
            return whole(self, scheduler_output, model_output, *args, **kwargs)
        # Ended before the step is read: a request that this very step completes must not pass for a good one.
        ended = _end(self, wrong)
        outputs = whole(self, scheduler_output, model_output, *args, **kwargs)
        for request in ended:
            mine = outputs.get(request.client_index)
            if mine is None:
                mine = outputs[request.client_index] = hook("EngineCoreOutputs")(outputs=[])
            mine.outputs.append(
                hook("EngineCoreOutput")(
                    request_id=request.request_id, new_token_ids=[], finish_reason=request.get_finished_reason()
                )
            )
        return outputs

    return update_from_output


def _end(scheduler: Any, wrong: dict[str, Written]) -> list[Any]:
    """Fail these requests and all that read what they wrote, take it out of the prefix cache; returns the failed."""
    sizes = [group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups]
    places: set[tuple[int, int, int]] = set()  # group, place in a request's table, block
    for computed, groups in wrong.values():
        for group, blocks in enumerate(groups):
            places |= _places(group, blocks, computed // sizes[group])
    failing = {request for request in wrong if request in scheduler.requests}
    more = True
    while more:  # what a reader has written itself has readers of its own
        more = False
        for request in scheduler.requests.keys() - failing:
            found = set[tuple[int, int, int]]()
            for group, blocks in enumerate(scheduler.kv_cache_manager.get_block_ids(request)):
                shared = sorted(place for _, place, _ in _places(group, blocks, 0) & places)
                found |= _places(group, blocks, shared[0]) if shared else set()
            if found:
                failing.add(request)
                places |= found
                more = True
    _log.error(
        "soakrig: routed to an expert that does not exist: %s; ended with an error: %s",
        ", ".join(sorted(wrong)),
        ", ".join(sorted(failing)) or "none, they are gone",
    )
    # Freed or not: nobody may find these blocks again.
    scheduler.kv_cache_manager.evict_blocks({block for _, _, block in places})
    return scheduler.finish_requests(failing, hook("FINISHED_ERROR"))


def _places(group: int, blocks: Any, start: int) -> set[tuple[int, int, int]]:
    # Block 0 is nobody's: vLLM's null block.
    return {(group, place, block) for place, block in enumerate(blocks) if place >= start and block}
