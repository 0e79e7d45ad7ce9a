"""The record of a run whose engine never came up, for loads that are about the start itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from soakrig.clock import Clock
from soakrig.errors import EngineStartError
from soakrig.record.events import EngineChecked, Event, FindingMade, RunEnded, SourceChanged
from soakrig.record.finding import Finding
from soakrig.record.judge import Judge
from soakrig.record.manifest import Manifest
from soakrig.record.result import Result
from soakrig.record.signal import SOURCE_NAMES, SourceState
from soakrig.record.store import RESULT, RunStore, new_run_id
from soakrig.soak.fingerprint import fingerprint, host_facts
from soakrig.soak.run import RunSpec


def record_start_failure(
    spec: RunSpec, error: EngineStartError, findings: Sequence[Finding], clock: Clock
) -> tuple[Result, Path]:
    """Write the run folder of a start that failed: nothing was sent and nothing was watched but the engine's end.

    The verdict is fail, by the engine's death and by ``findings``. Returns it and the folder. Raises ``StoreError``.
    """
    settings = dict(spec.settings)
    manifest = Manifest(
        run_id=spec.run_id or new_run_id(spec.reproducer, clock.time()),
        created=clock.time(),
        reproducer=spec.reproducer,
        plan=spec.plan,
        seed=spec.seed,
        load=spec.load,
        gates=spec.gates,
        accept=spec.accept,
        base_url="",
        model="",
        launched=spec.launched,
        kernel_log=spec.kernel_log,
        text_kept=spec.keep_text,
        simulated="SOAKRIG_PLANT" in settings.get("set", {}),
        settings=settings,
        fingerprint=fingerprint(settings),
        host=host_facts(),
    )
    now, mono = clock.time(), clock.monotonic()
    how = error.message.splitlines()[0]
    events: list[Event] = [
        *(
            SourceChanged(now, mono, SourceState(name, "absent", "the engine did not come up, so the run never began"))
            for name in SOURCE_NAMES
        ),
        *(FindingMade(now, mono, finding) for finding in findings),
        EngineChecked(now, mono, False, how, error.exit_status),
        RunEnded(now, mono, "engine_dead", how),
    ]
    store, judge = RunStore.create(spec.runs_dir, manifest), Judge(manifest)
    try:
        for event in events:
            store.append(event)
            judge.feed(event)
        store.check()
        result = judge.result()
        store.write_json(RESULT, result.to_json())
    finally:
        store.close()
    return result, store.folder
