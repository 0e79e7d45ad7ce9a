"""What a bisect came to: the object of ``soak bisect --json``. Other people's scripts read it: fields are added, never
changed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

CAMPAIGN_SCHEMA: Literal[1] = 1
CAMPAIGN_RESULT = "campaign.json"
"""Its name in the campaign's folder."""

CampaignState = Literal["running", "paused", "finished"]
ArmRole = Literal["control", "all_off", "one", "add_back", "pair"]
ArmVerdict = Literal["CONTROL", "FAULTS", "REDUCED", "CLEARED", "UNDECIDED", "VOID"]
"""The words of a bisect; the control is not judged, it is what the others are judged by."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Span(_Part):
    """A figure with its 95 % interval; ``high`` None: not bounded."""

    low: float
    estimate: float
    high: float | None


class ArmResult(_Part):
    """One arm. ``variable`` and ``value`` of a one-variable arm, else None; a value of None there is "unset" too.

    ``changes``: what differs from the control, name -> value (None: unset). ``runs``: launches that count, ``void``:
    those that do not, with ``void_reasons``. ``exposure``: turns (or output tokens, see ``CampaignResult.unit``).
    ``expected``: faults of the control in as much work. ``rate``: faults per unit of exposure, with its exact interval,
    measured. ``ratio``: hazard over the control's. ``p``: chance of so few faults if the arm changed nothing, None
    where it is not judged. ``posterior``: P(hazard lower by at least ``at_least``). ``claim``: the verdict as people
    read it. ``seconds``: spent on it.
    """

    name: str
    variable: str | None = None
    value: str | None = None
    role: ArmRole
    changes: dict[str, str | None] = {}
    runs: int
    exposure: float
    faults: int
    void: int
    void_reasons: dict[str, int] = {}
    expected: float | None = None
    rate: Span | None = None
    verdict: ArmVerdict
    claim: str
    why: str = ""
    ratio: Span | None = None
    p: float | None = None
    posterior: float | None = None
    settled: bool = False
    seconds: float = 0.0


class ArmLaunch(_Part):
    """One launch. ``result``: faulted, clean, void, host_lost, interrupted, or None while it goes on, and then
    ``state`` says how far it is. ``folder``: its run folder, below the campaign's. ``began``: seconds since the
    epoch."""

    id: int
    arm: str
    stratum: str = ""
    state: str
    result: str | None
    exposure: float
    cap: float
    signature: str | None = None
    reason: str = ""
    folder: str = ""
    why: str = ""
    began: float
    seconds: float | None = None
    boot_id: str = ""


class CampaignResult(_Part):
    """The whole of it. ``campaign``: its id, the folder's name. ``spec``: the effective campaign, secrets hidden.

    ``unit``: of exposure. ``cap``: of one launch. ``conclusion``: two sentences; ``conclusion_kind`` for scripts.
    ``not_said``: what it does not say, a sentence each. ``outlook``: what more hours would buy, a sentence each
    (modelled). ``proofs``: by variable, how it was shown to be in effect ("settings", "log", "environment", "argv").
    ``hours``: of launches, from planned to settled. ``ended``: why there is no next launch, empty while it runs.
    ``signature``: the fault that is pooled. ``simulated``: a planted fault took part.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: Literal[1] = CAMPAIGN_SCHEMA
    campaign: str
    folder: str
    state: CampaignState
    exit_code: int
    ended: str
    simulated: bool
    unit: Literal["turns", "output_tokens"]
    cap: float
    confidence: float
    at_least: float
    signature: str | None
    signatures: dict[str, int]
    arms: list[ArmResult]
    conclusion: str
    conclusion_kind: str
    cause: list[str]
    not_said: list[str]
    outlook: list[str]
    proofs: dict[str, str]
    drift_p: float | None
    hours: float
    budget_hours: float
    launches: list[ArmLaunch]
    spec: dict[str, Any]
    fingerprint: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain data with the contract's names."""
        data = self.model_dump(mode="json")
        return {"schema": data.pop("schema_"), **data}

    @classmethod
    def from_json(cls, data: object) -> CampaignResult:
        """Read it back. Raises ``ValueError`` for anything else."""
        if not isinstance(data, dict):
            raise ValueError("it is no JSON object")  # noqa: TRY004  (a reader of files catches ValueError)
        fields = {name: value for name, value in data.items() if name != "schema"}
        return cls.model_validate({"schema_": data.get("schema"), **fields})
