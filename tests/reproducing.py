"""One row of the reproducers run in this process, against an engine of its own or a loopback server with a defect."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from soakrig.bisect.launch_result import signature_of
from soakrig.clock import RealClock
from soakrig.engine.bundled import EMBEDDED, Order, launch_bundled
from soakrig.record.events import Event
from soakrig.record.finding import Finding
from soakrig.record.judge import Judge
from soakrig.record.request_log import read_requests
from soakrig.record.result import Result
from soakrig.record.store import RunReader
from soakrig.reproducers.engine_control import EngineControl
from soakrig.reproducers.registry import find_reproducer
from soakrig.soak.client import Timeouts
from soakrig.soak.run import RunSpec, SoakRun
from soakrig.soak.target import Target
from wire import loopback

SMALL = (
    "--layers=2", "--experts=8", "--hidden=64", "--threads=1", "--max-model-len=4096", "--kv-tokens=16384",
)  # fmt: skip


def planted(**fields: object) -> dict[str, str]:
    """Settings of an engine with a fault that strikes for certain once ``after`` is behind."""
    return {"SOAKRIG_PLANT": json.dumps({"hazard": 1, "seed": 1, **fields})}


@contextlib.contextmanager
def embedded(
    folder: Path, settings: dict[str, str] | None = None, flags: Sequence[str] = SMALL, again: Sequence[str] = ()
) -> Iterator[EngineControl]:
    """An embedded engine under control; ``again``: flags that a second start has as well."""

    def launch(number: int) -> Any:
        place = folder / f"engine-{number}"
        place.mkdir(exist_ok=True)
        more = again if number > 1 else ()
        return launch_bundled(Order(EMBEDDED, settings or {}, [*flags, *more], start_s=400.0, caller={}), place)

    with EngineControl(launch) as control:
        control.start()
        yield control


def kernel_log(folder: Path) -> Path:
    """The file that stands for the kernel log of a row."""
    path = folder / "kernel-source.log"
    path.touch()
    return path


def row_spec(
    folder: Path,
    name: str,
    control: EngineControl | None,
    *,
    turns: int | None,
    parameters: dict[str, Any],
    first_byte: float = 60.0,
    **given: Any,
) -> RunSpec:
    """What `soak run NAME` would make of these options."""
    reproducer = find_reproducer(name)
    options = reproducer.options(given, parameters)
    return RunSpec(
        reproducer=name,
        plan=reproducer.planned(options, turns, None),
        conversations=lambda probe: reproducer.load(options, probe),
        procedure=reproducer.drive(options, control),
        seed=options.seed,
        timeouts=Timeouts(connect=10.0, stall=30.0, first_byte=first_byte),
        kernel_log=str(kernel_log(folder)),
        max_bad=1,
        runs_dir=folder / "runs",
        settle_clean_s=0.1,
        settle_bad_s=0.3,
        retry_s=0.05,
    )


async def soak_row(
    folder: Path,
    name: str,
    target: Target,
    control: EngineControl | None = None,
    *,
    turns: int | None = None,
    parameters: dict[str, Any] | None = None,
    observer: Callable[[Event, Judge], None] = lambda event, judge: None,
    ctrl_c_after: float | None = None,
    **given: Any,
) -> Result:
    """The row's result, which the events alone have to give again. ``ctrl_c_after``: seconds from the moment at which
    the load ends its engine."""
    spec = row_spec(folder, name, control, turns=turns, parameters=parameters or {}, **given)

    def observed(event: Event, judge: Judge) -> None:
        observer(event, judge)
        if ctrl_c_after is not None and event.kind == "switch" and event.action == "ended":
            asyncio.get_running_loop().call_later(ctrl_c_after, run.interrupt)

    run = SoakRun(spec, target, RealClock(), observed)
    result = await run.run()
    if run.error is not None:
        raise run.error
    assert run.folder is not None
    assert rejudged(run.folder) == result.to_json()
    if sum(result.outcomes.values()):
        assert len(list(read_requests(run.folder))) == sum(result.outcomes.values()), "each body can be sent again"
    return result


def soak_engine(folder: Path, name: str, control: EngineControl, **more: Any) -> Result:
    """A row on an engine that this test started."""
    return asyncio.run(soak_row(folder, name, control.target, control, **more))


def soak_loopback(
    folder: Path, name: str, handler: loopback.Handler, route: loopback.Route = loopback.models, **more: Any
) -> Result:
    """A row on a loopback server."""

    async def whole() -> Result:
        async with loopback.serve(handler, route) as url:
            return await soak_row(folder, name, Target(url), **more)

    return asyncio.run(whole())


def rejudged(run: Path) -> dict[str, Any]:
    """The result that the events of a run folder give, and nothing else."""
    reader = RunReader(run)
    judge = Judge(reader.manifest)
    for event in reader.events():
        judge.feed(event)
    return judge.result().to_json()


def found(result: Result, name: str) -> Finding:
    """The one finding of that name."""
    (one,) = [finding for finding in result.findings if finding.name == name]
    return one


def its_own(result: Result, name: str) -> bool:
    """Whether the run failed by the fault that the row is known to provoke."""
    return result.verdict == "fail" and find_reproducer(name).is_its(signature_of(result))
