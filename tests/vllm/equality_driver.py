"""Runs inside an environment with vLLM: serves one checkpoint in this process and writes what came out.

    python equality_driver.py JOB.json OUT.json

The job: ``model``, ``eager``, ``prompts`` (token ids), ``tokens``, and ``cases``: name -> environment of the offload
core. The first case is what the process starts with; for each further one the plug-in's store is built anew over the
same banks. Without cases the engine is stock. ``stale``: the case in which one copy of 500 is left out.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(job_path: str, out_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    cases: dict[str, dict[str, str]] = job["cases"]
    first = next(iter(cases.values()), {})
    os.environ.update(first, VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING", HF_HUB_OFFLINE="1")
    if not job.get("cuda"):
        # Two threads that spin while they wait for each other are slow where others use the cores too.
        os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
    from vllm import LLM

    engine = LLM(
        job["model"], skip_tokenizer_init=True, enforce_eager=job["eager"], kv_cache_memory_bytes=1 << 27,
        max_model_len=4096, max_num_batched_tokens=job.get("batched", 4096), max_num_seqs=8,
        enable_prefix_caching=False, **job.get("engine", {}),
    )  # fmt: skip
    if not cases:
        found: dict[str, Any] = {"stock": {"answers": answers(engine, job)}}
    else:
        found = {}
        for number, (name, environment) in enumerate(cases.items()):
            if number:
                rebuild(engine, environment)
            with stale(active=name == job.get("stale")):
                found[name] = {"answers": answers(engine, job)}
            report, newest = (engine.collective_rpc(f"soakrig_{what}")[0] for what in ("report", "newest"))
            found[name]["report"] = {**report, **newest}
            engine.collective_rpc("soakrig_flush")
    Path(out_path).write_text(json.dumps(found))


def answers(engine: Any, job: dict[str, Any]) -> list[Any]:
    """One request at a time: ids, logprobs, prompt logprobs."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=job["tokens"], ignore_eos=True, logprobs=2, prompt_logprobs=2, detokenize=False
    )
    found: list[Any] = []
    for ids in job["prompts"]:
        (done,) = engine.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        one = done.outputs[0]
        found.append([list(one.token_ids), _table(one.logprobs), _table(done.prompt_logprobs)])
    return found


def _table(rows: Any) -> list[Any]:
    return [None if row is None else sorted((token, one.logprob) for token, one in row.items()) for row in rows]


def rebuild(engine: Any, environment: dict[str, str]) -> None:
    """Another store over the same banks, as if the engine had been started with ``environment``."""
    from soakrig.engine.vllm.routed_experts import current_host
    from soakrig.engine.vllm.settings import VllmSettings

    host = current_host()
    assert host.store is not None
    host.store.close()
    host.settings = VllmSettings.from_environment(environment)
    config = engine.llm_engine.vllm_config
    host.finish(config.model_config, config.scheduler_config.max_num_batched_tokens, host.store.device)


class stale:
    """Leaves copy 500 out while ``active``."""

    def __init__(self, *, active: bool) -> None:
        self._active = active

    def __enter__(self) -> None:
        from soakrig.engine.offload.staging import Staging

        self._whole: Any = Staging.gather
        if not self._active:
            return
        whole, copies = self._whole, 0

        def gather(staging: Any, src: Any, dst: Any) -> None:
            nonlocal copies
            before = copies
            copies += int((src >= 0).sum())
            if before < 500 <= copies:
                src = src.copy()
                src[500 - before - 1] = -1
            whole(staging, src, dst)

        Staging.gather = gather  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        from soakrig.engine.offload.staging import Staging

        Staging.gather = self._whole  # type: ignore[method-assign]


if __name__ == "__main__":
    main(*sys.argv[1:])
