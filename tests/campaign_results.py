"""Made-up results of campaigns for tests of their reports: a single cause, nothing in the list, one that still runs."""

from __future__ import annotations

from typing import Any

from soakrig.record.campaign import ArmLaunch, ArmResult, CampaignResult, Span

XID = "Xid 31 FAULT_PDE VIRT_WRITE GRAPHICS GPC0"
BEGAN = 1_795_993_200.0
OFF = {"VLLM_MOE_DMA_STAGING": "0", "VLLM_MOE_HOT_SLOTS": "8", "--max-num-seqs": "1"}
HOSTILE = (
    "<script>alert('x')</script> | `tick` ``two`` [red]bold[/red] \\| *b* _i_ <img src=http://evil/x> "
    "@octocat #12 www.evil.example $x$ \x1b[31mred\x9b\u202e\n# head"
)
"""What a variable's value or a line of a log may hold."""


def arm(name: str, role: str, **fields: Any) -> ArmResult:
    """An arm without figures, but for ``fields``."""
    word = fields.setdefault("verdict", "CONTROL" if role == "control" else "UNDECIDED")
    plain = {"runs": 0, "exposure": 0.0, "faults": 0, "void": 0, "claim": word}
    return ArmResult.model_validate({"name": name, "role": role, **plain, **fields})


def launch(number: int, of: str, result: str | None, exposure: float, **fields: Any) -> ArmLaunch:
    """A launch of 60 turns at most."""
    plain = {
        "state": "settled" if result else "probing", "cap": 60.0, "began": BEGAN + 600 * number,
        "seconds": 540.0 if result else None, "folder": f"run-{number:04d}", "why": "the next by the posterior",
        "signature": XID if result == "faulted" else None, "boot_id": "6f2c",
    }  # fmt: skip
    return ArmLaunch.model_validate(
        {"id": number, "arm": of, "result": result, "exposure": exposure, **plain, **fields}
    )


def span(low: float, estimate: float, high: float | None) -> Span:
    """Short for ``Span``."""
    return Span(low=low, estimate=estimate, high=high)


def campaign(arms: list[ArmResult], launches: list[ArmLaunch], **fields: Any) -> CampaignResult:
    """A finished campaign over three variables."""
    plain: dict[str, Any] = {
        "campaign": "bisect-20261129-2301-a1b2", "folder": "runs/bisect-20261129-2301-a1b2", "state": "finished",
        "exit_code": 0, "ended": "every arm is settled", "simulated": False, "unit": "turns", "cap": 60.0,
        "confidence": 0.99, "at_least": 2.0, "signature": XID, "signatures": {XID: 13}, "conclusion": "",
        "conclusion_kind": "single", "cause": [], "not_said": [], "outlook": [], "proofs": {}, "drift_p": 0.43,
        "hours": 5.87, "budget_hours": 8.0,
        "spec": {
            "engine": "embedded", "reproducer": "agent-loop", "turns": 60, "load": {"tools": 50},
            "settings": {"OMP_NUM_THREADS": "1", "HF_TOKEN": "[redacted]"}, "flags": ["--threads=1"],
            "variables": {
                "VLLM_MOE_DMA_STAGING": ["1", "0"], "VLLM_MOE_HOT_SLOTS": [{"unset": True}, "8"],
                "--max-num-seqs": ["8", "1"],
            },
        },
        "fingerprint": {"soakrig": "0.1.0", "kernel": "6.8.0", "nvidia_driver": "", "boot_ids": ["6f2c"]},
    }  # fmt: skip
    given = {"arms": [a.model_dump() for a in arms], "launches": [one.model_dump() for one in launches]}
    return CampaignResult.from_json({"schema": 1, **plain, **given, **fields})


def single() -> CampaignResult:
    """One variable CLEARED, and enough for the fault when it is put back."""
    arms = [
        arm("VLLM_MOE_DMA_STAGING=0", "one", variable="VLLM_MOE_DMA_STAGING", value="0", verdict="CLEARED",
            claim="CLEARED to at least 2.3 times", changes={"VLLM_MOE_DMA_STAGING": "0"}, runs=10, exposure=600.0,
            faults=0, void=1, void_reasons={"the port 8123 was taken": 1}, expected=17.6, rate=span(0, 0, 0.00613),
            ratio=span(0, 0, 0.1794), p=0.00031, posterior=0.99971, settled=True),
        arm("VLLM_MOE_HOT_SLOTS=8", "one", variable="VLLM_MOE_HOT_SLOTS", value="8", verdict="REDUCED",
            claim="REDUCED to 0.3 of the control (0.11 to 0.72)", changes={"VLLM_MOE_HOT_SLOTS": "8"}, runs=9,
            exposure=455.0, faults=4, void=0, expected=13.4, rate=span(0.0024, 0.00879, 0.0225),
            ratio=span(0.11, 0.3, 0.72), p=0.0019, posterior=0.91),
        arm("--max-num-seqs=1", "one", variable="--max-num-seqs", value="1", verdict="FAULTS", claim="FAULTS",
            changes={"--max-num-seqs": "1"}, runs=3, exposure=81.0, faults=3, void=0, expected=2.4,
            rate=span(0.00764, 0.037, 0.108), ratio=span(0.2, 1.26, 5.9), p=0.74, posterior=0.061, settled=True),
        arm("back:VLLM_MOE_DMA_STAGING", "add_back", verdict="FAULTS", claim="FAULTS", runs=2, exposure=49.0, faults=2,
            void=0, expected=1.4, rate=span(0.00494, 0.0408, 0.147), ratio=span(0.13, 1.39, None), p=0.81,
            posterior=0.08, settled=True, changes={"VLLM_MOE_HOT_SLOTS": "8", "--max-num-seqs": "1"}),
        arm("all-off", "all_off", runs=2, exposure=120.0, faults=0, void=0, expected=3.5, rate=span(0, 0, 0.0307),
            ratio=span(0, 0, 1.37), p=0.12, posterior=0.83, changes=OFF,
            why="so long without a fault has chance 0.12; 0.0012 is asked for"),
        arm("control", "control", runs=8, exposure=272.0, faults=8, void=0, rate=span(0.0127, 0.0294, 0.058)),
    ]  # fmt: skip
    launches = [
        launch(1, "control", "faulted", 23.0, why="a baseline comes first"),
        launch(2, "VLLM_MOE_DMA_STAGING=0", "void", 0.0, reason="the port 8123 was taken", signature=None),
        launch(3, "VLLM_MOE_DMA_STAGING=0", "clean", 60.0),
        launch(4, "--max-num-seqs=1", "faulted", 7.0),
        launch(5, "all-off", "host_lost", 12.0, reason="another boot_id, no reboot was ordered"),
    ]
    return campaign(
        arms, launches, cause=["VLLM_MOE_DMA_STAGING"],
        conclusion="Changed alone, VLLM_MOE_DMA_STAGING is CLEARED to at least 2.3 times (600 clean, posterior 0.999). "
        "Put back alone, the fault returns: needed, and enough for it.",
        not_said=[
            "Nothing about another load, cap, host, driver or engine build than the one that ran.",
            "Not that the fault is gone: a hazard lower than by the stated factor would have looked the same.",
        ],
        outlook=["Eight more hours would show VLLM_MOE_DMA_STAGING=0 to at least 4 times, if it stays clean."],
        proofs={"VLLM_MOE_DMA_STAGING": "settings", "VLLM_MOE_HOT_SLOTS": "settings, log", "--max-num-seqs": "argv"},
    )  # fmt: skip


def not_in_list() -> CampaignResult:
    """All off faults as well; the values are not ASCII, and one name is too long for a column."""
    long = "VLLM_MOE_HOT_PROFILE=/srv/profile/größe-0123456789-0123456789-0123456789/layer-by-layer.json"
    arms = [
        arm("control", "control", runs=4, exposure=95.0, faults=3, void=1, rate=span(0.00651, 0.0316, 0.0923),
            void_reasons={"another fault: Xid 79": 1}),
        arm("all-off", "all_off", verdict="FAULTS", claim="FAULTS", runs=3, exposure=70.0, faults=3, void=0,
            expected=2.2, rate=span(0.00884, 0.0429, 0.125), ratio=span(0.22, 1.36, 8.3), p=0.79, posterior=0.02,
            settled=True),
        arm(long, "one", runs=0, verdict="UNDECIDED", changes={"VLLM_MOE_HOT_PROFILE": "/srv/profile/größe"}),
    ]  # fmt: skip
    return campaign(
        arms, [launch(n, "control", "faulted", 24.0) for n in range(1, 5)], conclusion_kind="not_in_list",
        conclusion="The fault comes with every variable off: the cause is not in the list, or not in the list alone. "
        "Look outside these variables: driver, hardware, another setting.",
        not_said=["Not that these variables do nothing: two causes, or one outside, would look the same."],
        signatures={XID: 6, "Xid 79 GPU has fallen off the bus": 1}, hours=1.04, drift_p=None, exit_code=2,
        unit="output_tokens", cap=12000.0,
    )  # fmt: skip


def running() -> CampaignResult:
    """One hour in, with voids; nothing can be judged yet, a planted fault."""
    arms = [
        arm("control", "control", runs=2, exposure=34.0, faults=2, void=2, rate=span(0.00713, 0.0588, 0.197),
            void_reasons={"a foreign process (pid 4711) on the card": 1}),
        arm("all-off", "all_off", verdict="VOID", claim="VOID", runs=0, void=2, why="no run counts", changes=OFF,
            void_reasons={"VLLM_MOE_HOT_SLOTS was not in effect": 1, "a foreign process (pid 4711) on the card": 1}),
        arm("VLLM_MOE_DMA_STAGING=0", "one", variable="VLLM_MOE_DMA_STAGING", value="0", runs=1, exposure=60.0,
            changes={"VLLM_MOE_DMA_STAGING": "0"}, rate=span(0, 0, 0.0596)),
    ]  # fmt: skip
    launches = [
        launch(1, "control", "faulted", 11.0),
        launch(2, "all-off", "void", 0.0, reason="VLLM_MOE_HOT_SLOTS was not in effect"),
        launch(3, "all-off", "void", 0.0, reason="a foreign process (pid 4711) on the card"),
        launch(4, "control", "void", 2.0, reason="a foreign process (pid 4711) on the card"),
        launch(5, "control", "void", 0.0),
        launch(6, "control", "faulted", 23.0),
        launch(7, "VLLM_MOE_DMA_STAGING=0", "clean", 60.0),
        launch(8, "control", None, 7.0, why="the control again, after six launches"),
    ]
    return campaign(
        arms, launches, state="running", exit_code=2, ended="", simulated=True, conclusion_kind="no_baseline",
        conclusion="The control faulted 2 times; below 3 faults no arm is judged clean. "
        "More runs of the control come first.",
        not_said=["Nothing against the fault in VLLM_MOE_DMA_STAGING=0: clean so far is not cleared."],
        outlook=["The baseline needs about 0.5 h more."], signature=None, signatures={}, drift_p=None, hours=0.6,
        proofs={"VLLM_MOE_DMA_STAGING": "settings"},
    )  # fmt: skip


def hostile() -> CampaignResult:
    """Hostile text in every place that a caller, an environment or a log can reach."""
    arms = [
        arm("control", "control", runs=2, exposure=34.0, faults=2, void=1, void_reasons={HOSTILE: 1}, why=HOSTILE),
        arm(f"VLLM_X={HOSTILE}", "one", variable="VLLM_X", value=HOSTILE, runs=1, exposure=60.0, claim=HOSTILE,
            changes={"VLLM_X": HOSTILE}, why=HOSTILE),
    ]  # fmt: skip
    launches = [
        launch(1, "control", "faulted", 11.0, signature=HOSTILE, why=HOSTILE, folder=HOSTILE),
        launch(2, f"VLLM_X={HOSTILE}", "void", 3.0, reason=HOSTILE, stratum=HOSTILE),
    ]
    return campaign(
        arms, launches, campaign=HOSTILE, folder=HOSTILE, ended=HOSTILE, conclusion=HOSTILE, not_said=[HOSTILE],
        outlook=[HOSTILE], proofs={HOSTILE: HOSTILE}, signature=HOSTILE, signatures={HOSTILE: 1}, cause=[HOSTILE],
        conclusion_kind=HOSTILE,
        spec={"settings": {HOSTILE: HOSTILE}, "flags": [HOSTILE], "variables": {HOSTILE: [HOSTILE]}, HOSTILE: HOSTILE},
        fingerprint={HOSTILE: {HOSTILE: HOSTILE}},
    )  # fmt: skip
