"""``soak bisect --dry-run``: what every arm would start, to the letter, and what the campaign will cost."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from soakrig.bisect.campaign_file import Campaign
from soakrig.bisect.price import Pace, price
from soakrig.engine.bundled import preview
from soakrig.record.redaction import HIDDEN, is_secret, redact_flags, redact_settings

PORT_FILE = Path("RUN_FOLDER/engine.port")


def campaign_plan(campaign: Campaign, pace: Pace) -> dict[str, Any]:
    """The arms with argv and environment, secrets hidden, and the price, modelled from ``pace``: JSON.

    Raises what the engine's launcher would: no vLLM, a model that cannot be read, a flag that cannot be given.
    """
    arms: list[dict[str, Any]] = []
    control = campaign.arms[0]
    for arm in campaign.arms:
        argv, env = preview(campaign.order(arm), PORT_FILE)
        arms.append(
            {
                "name": arm.name,
                "role": arm.role,
                "changes": {
                    name: HIDDEN if is_secret(name) and arm.values[name] is not None else arm.values[name]
                    for name in arm.changed(control)
                },
                "argv": redact_flags(argv),
                "env": redact_settings(env),
            }
        )
    ones = sum(arm.role == "one" for arm in campaign.arms)
    return {
        "dry_run": True,
        "campaign": campaign.shown(),
        "arms": arms,
        "price": {
            "kind": "modelled",
            "pace": asdict(pace),
            "one_cause": asdict(price(ones, campaign.rule, pace)),
            "none_in_the_list": asdict(price(ones, campaign.rule, pace, culprit=False)),
        },
    }


def print_plan(console: Console, plan: dict[str, Any]) -> None:
    """The same for people."""
    for arm in plan["arms"]:
        console.print(f"{arm['name']}  ({arm['role']})", style="bold", markup=False, soft_wrap=True)
        changes = ", ".join(f"{name} {_value(value)}" for name, value in arm["changes"].items())
        console.print(f"  differs from the control: {changes or 'in nothing'}", markup=False, soft_wrap=True)
        console.print(f"  {shlex.join(arm['argv'])}", markup=False, soft_wrap=True)
    console.print()
    console.print("environment of every arm, from an allow-list; what differs is above", style="bold")
    shared = set.intersection(*(set(arm["env"].items()) for arm in plan["arms"]))
    for name, value in sorted(shared):
        console.print(f"  {name}={shlex.quote(value)}", markup=False, soft_wrap=True)
    varied = sorted({name for arm in plan["arms"] for name in arm["env"]} - {name for name, _ in shared})
    for name in varied:
        values = {arm["name"]: arm["env"].get(name) for arm in plan["arms"]}
        for value in dict.fromkeys(values.values()):
            arms = ", ".join(arm for arm, one in values.items() if one == value)
            text = f"{name}={shlex.quote(value)}" if value is not None else f"{name} not set"
            console.print(f"  {text}  in {arms}", markup=False, soft_wrap=True)
    console.print()
    pace, found = plan["price"]["pace"], plan["price"]
    console.print("price (modelled)", style="bold")
    rate = f"a fault in one of {1 / pace['hazard']:.3g} turns"
    told = [
        f"  for {rate}, {pace['turn_s']:g} s a turn, {pace['launch_s']:g} s a launch",
        f"  and at most {pace['cap']} turns a launch; yours by --hazard, --turn-seconds, --launch-seconds, --turns",
    ]
    for title, name in (("one variable is the cause", "one_cause"), ("none of them is", "none_in_the_list")):
        one = found[name]
        told.append(
            f"  {title}: {one['hours']:.1f} h expected, {one['hours_90']:.1f} h in nine of ten; "
            f"{one['turns']:.0f} turns in {one['launches']:.0f} launches"
        )
    console.print("\n".join(told), markup=False, soft_wrap=True)


def _value(value: str | None) -> str:
    return "not set" if value is None else f"= {value!r}" if value else "given, empty"
