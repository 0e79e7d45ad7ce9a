"""What a launch needs on disk: the engine, and the checkpoint."""

from __future__ import annotations

from soakrig.engine.checkpoint import own_words
from soakrig.engine.preflight.finding import Finding, gib, ok, refused
from soakrig.engine.preflight.machine import Machine
from soakrig.engine.registry_entry import MADE_HERE, Entry
from soakrig.engine.vllm.command import offloads
from soakrig.engine.vllm.installation import Installation
from soakrig.errors import UsageError


def check_engine(entry: Entry, machine: Machine) -> Finding:
    """There is a Python with the engine, and the plug-in beside it where the settings need it."""
    name = "engine"
    if entry.backend == "embedded":
        return ok(name, "it comes with this tool")
    found = machine.installation
    if not isinstance(found, Installation):
        text, _, remedy = (found or "nobody looked for vLLM").partition("\n")
        return refused(name, text, remedy.strip() or f"Set models.{entry.name}.python to the Python that has vLLM.")
    if offloads(entry.settings) and not entry.own_offload and not found.plugin:
        text = f"the settings need soakrig's plug-in, which is not installed beside {found.text} ({found.python})"
        return refused(name, text, f"{found.python} -m pip install --no-deps soakrig orjson; or own_offload = true.")
    return ok(name, f"{found.text} ({found.python})")


def check_checkpoint(entry: Entry, machine: Machine) -> Finding:
    """The folder is there and says what it is."""
    name = "checkpoint"
    if entry.backend == "embedded" or entry.checkpoint == MADE_HERE:
        return ok(name, "made by this tool")
    try:
        found = own_words(entry, machine.home)
    except UsageError as error:
        return refused(name, error.message, error.remedy)
    size = f", {gib(found.weight_bytes)} of weights" if found.weight_bytes else ""
    return ok(name, f"{found.source}{size}")
