"""Settings that contradict each other, and combinations that the registry marks as fatal."""

from __future__ import annotations

from pathlib import Path

from soakrig.engine.launch_values import holds
from soakrig.engine.offload.profile import read_profile
from soakrig.engine.preflight.finding import Finding, ok, refused, unknown
from soakrig.engine.preflight.machine import Machine
from soakrig.engine.registry_entry import OFFLOAD_FLAG, OFFLOAD_VARIABLE, Entry, expand
from soakrig.errors import UsageError

SLOTS, PROFILE = "VLLM_MOE_HOT_SLOTS", "VLLM_MOE_HOT_PROFILE"


def check_settings(entry: Entry, machine: Machine) -> Finding:
    """The offload variables as the engine itself would judge them; a build that has its own is not judged."""
    name = "settings"
    if entry.own_offload:
        return ok(name, "the engine judges its own variables")
    settings = {key: expand(value, machine.home) for key, value in entry.settings.items()}
    try:
        if entry.backend == "embedded":
            from soakrig.engine.embedded.settings import Settings

            Settings.from_environment(settings)
        else:
            from soakrig.engine.vllm.settings import VllmSettings

            VllmSettings.from_environment(settings)
    except UsageError as error:
        return refused(name, error.message, error.remedy)
    return ok(name, f"{len(settings)} set, none refused" if settings else "none set")


def check_offload_slots(entry: Entry, machine: Machine) -> Finding:
    """Offload without hot slots: the memory that it frees on the card is not used, and every token pays the bus."""
    name = "offload-slots"
    try:
        offload = entry.offload_gib
    except ValueError as error:
        return unknown(name, str(error), "Correct it in the registry.")
    if not offload:
        return ok(name, "nothing is offloaded")
    slots = entry.settings.get(SLOTS, "0")
    if slots in ("", "0"):
        text = f"{offload:g} GiB are offloaded and {SLOTS} is {slots or 'empty'}: no expert stays on the card"
        remedy = f"Set {SLOTS} (one operator measured 11.3 tok/s without and 16.8 with 68), or offload nothing."
        return refused(name, text, remedy, needs=1, has=0, unit="slots")
    return ok(name, f"{offload:g} GiB offloaded, {SLOTS}={slots}")


def check_offload_twice(entry: Entry, machine: Machine) -> Finding:
    """The flag that offloads and the variable that is compared with the profile have to agree."""
    name = "offload-twice"
    try:
        flag, variable = entry.values.number(OFFLOAD_FLAG), entry.values.number(OFFLOAD_VARIABLE)
    except ValueError as error:
        return unknown(name, str(error), "Correct it in the registry.")
    if flag is None or variable is None or flag == variable:
        return ok(name, "said once" if flag is None or variable is None else f"both say {flag:g} GiB")
    text = f"{OFFLOAD_FLAG}={flag:g} and {OFFLOAD_VARIABLE}={variable:g}"
    return refused(name, text, "Give both the same number of GiB.", needs=flag, has=variable, unit="GiB")


def check_profile(entry: Entry, machine: Machine) -> Finding:
    """The hot profile exists and was taken at the offload of this launch: at another one its layers are others."""
    name = "profile"
    given = entry.settings.get(PROFILE)
    if not given:
        return ok(name, "no hot profile")
    path = Path(expand(given, machine.home))
    if not path.is_file():
        remedy = "VLLM_MOE_SKEW_PERLAYER writes one; without it no expert is pinned."
        return refused(name, f"the hot profile {path} is not there", remedy)
    try:
        launch = entry.offload_gib
    except ValueError as error:
        return unknown(name, str(error), "Correct it in the registry.")
    try:
        taken = read_profile(str(path)).offload_gb
    except UsageError as error:
        if entry.profile_offload_gib is None:
            return unknown(name, f"{path} does not say at which offload it was taken: {error.message}",
                           "Set profile_offload_gib.")  # fmt: skip
        taken = entry.profile_offload_gib
    if taken is None:
        return unknown(name, f"{path} was taken without {OFFLOAD_VARIABLE}, so its offload is not known")
    text = f"taken at {taken:g} GiB of offload, this launch offloads {launch:g}"
    if taken != launch:
        remedy = "Take a profile at this offload (VLLM_MOE_SKEW_PERLAYER), or offload what it was taken at."
        return refused(name, text, remedy, needs=launch, has=taken, unit="GiB")
    return ok(name, text, needs=launch, has=taken, unit="GiB")


def check_fatal(entry: Entry, machine: Machine) -> Finding:
    """None of the combinations that the registry marks as fatal."""
    name = "fatal"
    values, hits = entry.values, list[str]()
    for row in entry.fatal:
        try:
            if not all(holds(values, one, condition) for one, condition in row.when.items()):
                continue
        except ValueError as error:
            return unknown(name, f"{row.name}: {error}", "Correct it in the registry.")
        shown = ", ".join(
            f"{one} is {values.get(one) or 'unset'} ({condition} is fatal)" for one, condition in row.when.items()
        )
        hits.append(f"{row.name}: {shown}: {row.why}" + (f" ({row.source})" if row.source else ""))
    if hits:
        return refused(name, "; ".join(hits), "Take another value; the registry marks these as fatal for this model.")
    return ok(name, f"none of the {len(entry.fatal)} combinations known to be fatal" if entry.fatal else "none known")
