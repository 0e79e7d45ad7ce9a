"""The registry's models as engines behind a gateway: their names, policies and context, and where each is now."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from soakrig.engine.gateway.upstream import Upstream
from soakrig.engine.registry import Registry
from soakrig.engine.serving.places import Places


def served_upstreams(registry: Registry, models: Iterable[str], root: Path) -> dict[str, Upstream]:
    """Every name that a client may ask for -> its engine: the table's own name and the name that it serves under.

    ``root``: where the models' folders are. Raises ``UsageError`` for a model that the registry does not have.
    """
    places = Places(root)
    found: dict[str, Upstream] = {}
    for name in dict.fromkeys(models):
        entry = registry.find(name)
        upstream = Upstream(
            entry.name,
            policies=entry.policies,
            model=entry.model_name,
            context=entry.context,
            place=places.place(entry.name),
        )
        found[entry.name] = found[entry.model_name] = upstream
    return found
