"""A folder that Python would import the engine from instead of the installed one."""

from __future__ import annotations

from pathlib import Path

from soakrig.engine.preflight.finding import Finding, ok, refused
from soakrig.engine.preflight.machine import Machine
from soakrig.engine.registry_entry import Entry, expand

PACKAGES = {"embedded": ("soakrig", "torch"), "vllm": ("vllm", "torch")}
"""What each backend imports first: a second vLLM beside the launch, not compiled, has been taken for the real one."""


def check_shadow(entry: Entry, machine: Machine) -> Finding:
    """Neither the working directory of the launch nor its PYTHONPATH holds a package of the engine's name."""
    name = "shadow"
    folder = Path(expand(entry.directory, machine.home)) if entry.directory else machine.launch_folder
    places = [("the working directory", folder)]
    if entry.directory and not folder.is_dir():
        return refused(name, f"the working directory {folder} is not there", "Set directory to a folder that is.")
    path = entry.settings.get("PYTHONPATH", "")
    places += [("PYTHONPATH", folder / expand(one, machine.home)) for one in path.split(":") if one]
    for what, place in places:
        for package in PACKAGES[entry.backend]:
            for found in (place / package, place / f"{package}.py"):
                if found.is_dir() or found.is_file():
                    text = f"{what} {place} holds {found.name}, which Python would import instead of the installed one"
                    remedy = (
                        "Set directory to another folder." if what != "PYTHONPATH" else "Leave it out of PYTHONPATH."
                    )
                    return refused(name, text, remedy)
    return ok(name, f"nothing in {folder} hides {PACKAGES[entry.backend][0]}")
