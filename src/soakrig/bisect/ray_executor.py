"""Launches on the hosts of a Ray cluster: every card, or every host of a cluster without cards, is a stratum.

One actor (``ray_host.LaunchHost``) holds each card for the whole campaign: no other job of the cluster comes in between
two launches, the level that the card's memory has to come back to is known, and a stop has somebody to reach. The
driver asks it for one event at a time, and writes that down before the launch goes on, as it would be on this host.

Whatever breaks on the way there, a worker, a raylet, a host, the network, makes the launch void. Nothing is tried again
by Ray. The keeper ends the engine of a worker that died.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import soakrig
from soakrig.bisect.arm_launch import STOP_GRACE_S, ArmLaunch, Teller
from soakrig.bisect.executors import Stratum
from soakrig.bisect.launch_result import LaunchResult, void
from soakrig.bisect.ray_cluster import connect, import_ray, in_words
from soakrig.bisect.ray_host import OVER, Event, LaunchHost, replay
from soakrig.bisect.stop import Stop
from soakrig.engine.keeper import KILL_WAIT
from soakrig.engine.leftovers import KEEPER_S
from soakrig.errors import PreflightRefusedError

_STEP_S = 0.5


class _BrokenError(Exception):
    """The far end did not do what was asked; the text is for people. ``what``: the kind of failure of a launch."""

    def __init__(self, text: str, what: str = "host lost") -> None:
        super().__init__(text)
        self.what = what


@dataclass
class _Seat:
    """A place in the cluster. ``host``: its actor, None where there is none at present."""

    node: str
    stratum: Stratum
    host: Any
    lost: bool = False


class _Host(NamedTuple):
    """An actor that answered. ``card``: what Ray gave it, None for none. ``facts``: as ``LaunchHost.hello``."""

    actor: Any
    card: str | None
    facts: Mapping[str, Any]


class RayExecutor:
    """The cards of a running Ray cluster (``executors.Executor``).

    ``address``: of the cluster, ``HOST:PORT``; None or "auto" takes RAY_ADDRESS, else the one that this host is a node
    of. No cluster is ever started. ``schedule_s``: how long a card may take to be given to us; ``answer_s``: how long a
    host may be silent. A stratum is named by host name and card, so it keeps its name when Ray is restarted; nodes that
    join later are not used. ``left_out``: cards and hosts that could not be had, in words.

    Raises ``PreflightRefusedError`` where ray is not installed, no cluster answers, or none of its cards can be had.
    """

    def __init__(self, address: str | None = None, *, schedule_s: float = 60.0, answer_s: float = 120.0) -> None:
        self._schedule_s, self._answer_s = schedule_s, answer_s
        self._lock = threading.RLock()
        self._seats: list[_Seat] = []
        self.left_out: list[str] = []
        self._ray = import_ray()
        self._connected = connect(self._ray, address)
        try:
            self._take_seats()
        except BaseException:
            self.close()
            raise

    @property
    def strata(self) -> Sequence[Stratum]:
        """The places that are still there."""
        return tuple(seat.stratum for seat in self._seats if not seat.lost)

    def machine(self, stratum: Stratum) -> dict[str, Any]:
        """As ``machine_state`` has it there; ``error`` says why it is not known. An actor that has died since the last
        launch shows here, and the next launch gets a new one."""
        seat = self._seat(stratum)
        try:
            return self._ask(self._host(seat).machine)
        except _BrokenError as error:
            self._drop(seat)
            return {"error": str(error)}

    def run(self, launch: ArmLaunch, stratum: Stratum, tell: Teller, stop: Stop) -> None:
        """One launch, whole. A host that is lost on the way makes it void, also where it had been clean a moment ago.
        Raises what ``tell`` raises, after the engine is gone."""
        seat, told = self._seat(stratum), _Told(tell)
        begun = False
        try:
            host = self._host(seat, stop)
            begun = True
            self._follow(launch, host, seat, told, stop)
        except _BrokenError as error:
            self._drop(seat)
            if not begun and stop.why:
                told.tell(Event("ended", asdict(LaunchResult("interrupted", reason=f"stopped by {stop.why}"))))
            elif told.result in ("", "clean"):
                what = error.what if begun else "host not to be had"
                told.tell(Event("ended", asdict(void(f"{what}: {stratum.name}: {error}"))))
            left = self.clear(launch.mark, stratum) if begun else []
            if not told.gone:
                told.tell(Event("gone", left))
        except BaseException:
            self._drop(seat)  # no launch goes on without somebody who writes it down
            self.clear(launch.mark, stratum)
            raise
        if told.error is not None:
            raise told.error

    def clear(self, mark: str, stratum: Stratum) -> list[str]:
        """By the mark, on that host, whoever has the card now. Empty too where the host is gone and cannot be asked."""
        seat, within = self._seat(stratum), KEEPER_S + KILL_WAIT + self._answer_s
        if seat.host is not None:
            with suppress(_BrokenError):
                return self._ask(seat.host.clear, mark, within=within)
            self._drop(seat)
        deadline = time.monotonic() + self._schedule_s
        while self._node_is_there(seat):
            actor = self._actor(seat.node)
            try:
                return self._ask(actor.clear, mark, within=within)
            except _BrokenError as error:
                if time.monotonic() >= deadline:
                    return [f"something that {stratum.name} does not tell: {error}"]
            finally:
                self._kill(actor)
            time.sleep(_STEP_S)  # Ray learns of a node's death some seconds later than we do
        return []

    def close(self) -> None:
        """Give the cards back, and leave the cluster where this executor had come to it."""
        for seat in self._seats:
            self._drop(seat)
        if self._connected:
            self._connected = False
            self._ray.shutdown()

    def _follow(self, launch: ArmLaunch, host: Any, seat: _Seat, told: _Told, stop: Stop) -> None:
        """From the first event to the last."""
        campaign = launch.campaign
        what = (campaign.to_json(), launch.arm, launch.number, str(launch.folder), launch.mark, seat.stratum.card)
        self._ask(host.begin, *what)
        end = None
        with _stops(host, stop):
            while end is None or time.monotonic() < end:
                found = self._ask(host.next, repr(told.error) if told.error is not None else "")
                if found is None:
                    continue
                event = Event(*found)
                if event.name != OVER:
                    told.tell(event)
                elif event.data:
                    told.tell(Event("say", event.data))
                    raise _BrokenError(event.data.strip().splitlines()[-1], "a bug of soakrig")
                else:
                    return
                if told.error is not None and end is None:
                    end = time.monotonic() + STOP_GRACE_S + campaign.limits.teardown + self._answer_s
        raise _BrokenError("it did not end the launch when it was told to")

    def _take_seats(self) -> None:
        """An actor on every card; on every node with a CPU where no node has a card."""
        nodes = sorted((one for one in self._ray.nodes() if one["Alive"]), key=_order)
        cards = any(one["Resources"].get("GPU", 0) >= 1 for one in nodes)
        asked: list[tuple[dict[str, Any], Any]] = []
        for node in nodes:
            has = int(node["Resources"].get("GPU" if cards else "CPU", 0))
            asked += [
                (node, self._actor(node["NodeID"], **_wants(card=cards))) for _ in range(has if cards else min(has, 1))
            ]
        deadline = time.monotonic() + self._schedule_s
        found: list[tuple[str, _Host]] = []
        for node, actor in asked:
            try:
                found.append((node["NodeID"], self._greet(actor, deadline)))
            except _BrokenError as error:
                what = "a card" if cards else "a CPU"
                self.left_out.append(f"{what} of {node['NodeManagerHostname']}: {error}")
        names: dict[str, int] = {}
        for node_id, host in sorted(found, key=lambda one: (one[1].facts["host"], one[1].card or "")):
            name = f"{host.facts['host']} {'cpu' if host.card is None else f'gpu {host.card}'}"
            names[name] = names.get(name, 0) + 1
            again = f" #{names[name]}" if names[name] > 1 else ""  # two nodes on one host
            stratum = Stratum(name + again, host.card, host.facts["boot_id"])
            self._seats.append(_Seat(node_id, stratum, host.actor))
        if not self._seats:
            why = "; ".join(self.left_out) or "no node has a GPU, and none a CPU"
            raise PreflightRefusedError(
                f"the Ray cluster has {len(nodes)} nodes, and none of them can be used: {why}",
                remedy="`ray status` shows who has the cards. Every node needs the same soakrig.",
            )

    def _seat(self, stratum: Stratum) -> _Seat:
        return next(seat for seat in self._seats if seat.stratum.name == stratum.name)

    def _host(self, seat: _Seat, stop: Stop | None = None) -> Any:
        """The seat's actor, a new one where the last has died. Raises ``_BrokenError``; ``seat.lost`` then says whether
        its node is gone."""
        deadline = time.monotonic() + self._schedule_s
        with self._lock:  # two seats of a node may be given each other's card
            while seat.host is None:
                if not self._node_is_there(seat):
                    raise _BrokenError("its node is no more in the cluster")
                actor = self._actor(seat.node, **_wants(card=seat.stratum.card is not None))
                try:
                    self._sit(seat, self._greet(actor, deadline, stop))
                except _BrokenError:
                    if time.monotonic() >= deadline or (stop is not None and stop.why):
                        raise
                    time.sleep(_STEP_S)  # Ray learns of a node's death some seconds later than we do
            return seat.host

    def _sit(self, seat: _Seat, host: _Host) -> None:
        """Put an actor where its card belongs; Ray does not say beforehand which card it will give."""
        fits = (one for one in self._seats if one.node == seat.node and one.host is None)
        place = next((one for one in fits if one.stratum.card == host.card), None)
        if place is None:
            self._kill(host.actor)
            raise _BrokenError(f"Ray gave card {host.card} in place of {seat.stratum.card}: another job has that now")
        place.host = host.actor

    def _actor(self, node: str, num_gpus: int = 0, num_cpus: int = 0) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node, soft=False)
        remote: Any = self._ray.remote(LaunchHost)
        return remote.options(
            num_gpus=num_gpus, num_cpus=num_cpus, max_restarts=0, max_task_retries=0, max_concurrency=4,
            scheduling_strategy=there,
        ).remote()  # fmt: skip

    def _greet(self, actor: Any, deadline: float, stop: Stop | None = None) -> _Host:
        """Wait until the actor runs and has its card. Raises ``_BrokenError``, after its end."""
        try:
            ref = actor.__ray_call__.remote(_given_card)
            while not self._ray.wait([ref], timeout=_STEP_S)[0]:
                if time.monotonic() >= deadline:
                    raise _BrokenError(
                        f"not given to us within {self._schedule_s:g} s: others have it, or it is too busy"
                    )
                if stop is not None and stop.why:
                    raise _BrokenError(f"stopped by {stop.why} before it was given to us")
            card: str | None = self._get(ref, self._answer_s)
            facts = self._ask(actor.hello, card)
            if facts["soakrig"] != soakrig.__version__:
                raise _BrokenError(f"it has soakrig {facts['soakrig']}, {soakrig.__version__} was expected")
            if facts["refused"]:
                raise _BrokenError(facts["refused"])
        except BaseException:
            self._kill(actor)
            raise
        return _Host(actor, card, facts)

    def _node_is_there(self, seat: _Seat) -> bool:
        """Whether the seat's node is in the cluster; once it is not, the seat is lost for good."""
        try:
            there = any(one["NodeID"] == seat.node and one["Alive"] for one in self._ray.nodes())
        except Exception:
            there = False
        seat.lost = seat.lost or not there
        return not seat.lost

    def _drop(self, seat: _Seat) -> None:
        actor, seat.host = seat.host, None
        if actor is not None:
            self._kill(actor)

    def _kill(self, actor: Any) -> None:
        with suppress(Exception):  # dead already, or no cluster any more
            self._ray.kill(actor, no_restart=True)

    def _ask(self, method: Any, *args: Any, within: float | None = None) -> Any:
        return self._get(method.remote(*args), self._answer_s if within is None else within)

    def _get(self, ref: Any, within: float) -> Any:
        """The answer. Whatever Ray raises is a ``_BrokenError``: what cannot be asked is lost."""
        try:
            return self._ray.get(ref, timeout=within)
        except self._ray.exceptions.GetTimeoutError as error:
            raise _BrokenError(f"it has been silent for {within:g} s") from error
        except Exception as error:
            raise _BrokenError(in_words(error)) from error


class _Told:
    """Replays events, and remembers how far they came. ``error``: the first that the teller raised; nothing is told to
    it after that."""

    def __init__(self, tell: Teller) -> None:
        self._tell = tell
        self.result, self.gone = "", False
        self.error: Exception | None = None

    def tell(self, event: Event) -> None:
        if self.error is not None:
            return
        try:
            replay(event, self._tell)
        except Exception as error:
            self.error = error
            return
        if event.name == "ended":
            self.result = event.data["result"]
        self.gone = self.gone or event.name == "gone"


@contextmanager
def _stops(host: Any, stop: Stop) -> Generator[None]:
    """Pass every call of ``stop.ask`` on. In a thread of its own: it may come from a signal handler, in the midst of
    Ray's own code."""
    calls: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def pass_on() -> None:
        while (how := calls.get()) is not None:
            with suppress(Exception):  # the host is lost, and `next` says so
                host.stop.remote(how)

    thread = threading.Thread(target=pass_on, name="stops", daemon=True)
    thread.start()
    try:
        with stop.telling(calls.put):
            yield
    finally:
        calls.put(None)
        thread.join()


def _wants(*, card: bool) -> dict[str, int]:
    """What an actor holds of its node for the campaign."""
    return {"num_gpus": 1} if card else {"num_cpus": 1}


def _given_card(host: LaunchHost) -> str | None:
    """In the actor: the card that Ray gave it, as CUDA_VISIBLE_DEVICES names it."""
    import ray

    found = ray.get_runtime_context().get_accelerator_ids().get("GPU") or []
    return ",".join(str(one) for one in found) or None


def _order(node: Mapping[str, Any]) -> tuple[str, list[str], str]:
    """The same order after a restart of Ray, so that two nodes on one host keep their names where they can be told
    apart: by host, then by the resources that they were given, then as it comes."""
    own = sorted(name for name in node["Resources"] if not name.startswith("node:"))
    return node["NodeManagerHostname"], own, node["NodeID"]
