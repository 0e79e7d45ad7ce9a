"""A campaign over a model of the registry: its launch is written out, so that what runs later is what was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soakrig.bisect.variables import Variable, flag_key
from soakrig.engine.registry import order_for
from soakrig.engine.registry_changes import registered


def write_out(data: Mapping[str, Any], variables: Sequence[Variable]) -> dict[str, Any]:
    """A campaign's fields with the registry's launch in place of its name: engine, checkpoint, settings and flags, less
    what the variables vary. ``data`` as it is where its engine is a bundled one.

    Raises ``UsageError`` for an engine that is neither, and for settings that the registry would refuse.
    """
    found = registered(data["engine"], data["settings"], data["flags"], model=data["model"])
    if found is None:
        return {**data, "registry": ""}
    order = order_for(found[1])
    varied = {one.key for one in variables}
    return {
        **data,
        "registry": order.registry,
        "engine": order.name,
        "model": order.model,
        "python": order.python,
        "own_offload": order.own_offload,
        "port": data["port"] or order.port,
        "limits": {**data["limits"], "start": data["limits"]["start"] or order.start_s},
        "settings": {name: value for name, value in order.settings.items() if name not in varied},
        "flags": [flag for flag in order.flags if flag_key(flag) not in varied],
    }
