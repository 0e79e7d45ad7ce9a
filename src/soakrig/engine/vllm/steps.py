"""Where vLLM's worker and scheduler tell the offload core of steps, and it tells them of broken requests."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .host import Host, Scheduled
from .parts import hook

BAD = "soakrig_bad_requests"
"""Attribute of a model output: requests that were routed to an expert which does not exist."""


def install(host: Host) -> None:
    """Wrap the worker's model loading and stepping, and the scheduler's reading of what came out."""
    worker, scheduler = hook("Worker"), hook("Scheduler")
    worker.load_model = _loading(worker.load_model, host)
    worker.execute_model = _stepping(worker.execute_model, host)
    worker.sample_tokens = _telling(worker.sample_tokens, host)
    # Called by name over collective_rpc.
    worker.soakrig_report = _report(host)
    worker.soakrig_flush = _flush(host)
    worker.soakrig_window = _window(host)
    scheduler.update_from_output = _failing(scheduler.update_from_output)


def _report(host: Host) -> Any:
    def soakrig_report(worker: Any) -> Any:
        return host.report()

    return soakrig_report


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
        done = whole(self, *args, **kwargs)
        config = self.vllm_config
        host.refuse(config)
        device = getattr(self, "device", None) or torch.device("cpu")
        host.finish(config.model_config, config.scheduler_config.max_num_batched_tokens, device)
        return done

    return load_model


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
        host.bad += bad
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


def _marked(output: Any, host: Host) -> Any:
    """The output with what is known of broken requests, as soon as there is one to carry it."""
    if output is None or not host.bad:
        return output
    bad, host.bad = host.bad, []
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
        bad: list[str] = [one for one in getattr(model_output, BAD, ()) if one in self.requests]
        for request in bad:
            # What was computed of it is wrong: nobody may find these blocks again.
            blocks = self.kv_cache_manager.get_block_ids(request)
            self.kv_cache_manager.evict_blocks({block for group in blocks for block in group})
        outputs = whole(self, scheduler_output, model_output, *args, **kwargs)
        still = [one for one in bad if one in self.requests]
        if still:
            _fail(self, still, outputs)
        return outputs

    return update_from_output


def _fail(scheduler: Any, requests: list[str], outputs: Any) -> None:
    ended = [scheduler.requests[one] for one in requests]
    scheduler.finish_requests(set(requests), hook("FINISHED_ERROR"))
    for request in ended:
        mine = outputs.get(request.client_index)
        if mine is None:
            mine = outputs[request.client_index] = hook("EngineCoreOutputs")(outputs=[])
        # Words of the same step are void with it.
        mine.outputs = [one for one in mine.outputs if one.request_id != request.request_id]
        mine.outputs.append(
            hook("EngineCoreOutput")(
                request_id=request.request_id, new_token_ids=[], finish_reason=request.get_finished_reason()
            )
        )
