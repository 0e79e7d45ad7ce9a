"""What an engine was set to: what was asked for, what it says itself, and in what two runs differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from soakrig.record.manifest import Manifest
from soakrig.record.redaction import HIDDEN, is_secret
from soakrig.reports.run_view import flat

_PER_RUN = frozenset({"pid", "worker_pid", "port", "base_url"})
"""Facts of one launch: in them two runs always differ."""


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """A setting as the engine reports it. ``source``: default, environment, flag; ``obeyed``: None where it does not
    say."""

    name: str
    value: str
    source: str
    obeyed: bool | None


def effective(manifest: Manifest) -> list[EffectiveSetting]:
    """What the engine reports of its settings; those that are not its defaults first."""
    told: Any = manifest.settings.get("engine")
    table: Any = told.get("settings") if isinstance(told, dict) else None
    rows: list[EffectiveSetting] = []
    for name, one in table.items() if isinstance(table, dict) else ():
        known = one if isinstance(one, dict) else {"value": one}
        obeyed = known.get("obeyed")
        rows.append(
            EffectiveSetting(
                name, shown(name, known.get("value")), str(known.get("source", "-")),
                obeyed if isinstance(obeyed, bool) else None,
            )
        )  # fmt: skip
    return sorted(rows, key=lambda row: row.source == "default")


def launch_facts(manifest: Manifest) -> list[tuple[str, str]]:
    """What was asked of the engine and of the run, as names and values."""
    settings = manifest.settings
    rows = [(str(name), shown(str(name), value)) for name, value in _table(settings.get("set")).items()]
    rows += [("flag", str(flag)) for flag in settings.get("args") or []]
    rows += [(f"load.{name}", shown(name, value)) for name, value in manifest.load.items()]
    known = ("set", "args", "engine")
    rows += [(name, shown(name, value)) for name, value in flat({k: v for k, v in settings.items() if k not in known})]
    engine = {k: v for k, v in _table(settings.get("engine")).items() if k != "settings"}
    return rows + [(f"engine.{name}", shown(name, value)) for name, value in flat(engine)]


def plain(manifest: Manifest) -> dict[str, str]:
    """Everything that may differ between two runs, by name: settings, flags, load, versions, host."""
    found = {f"setting {row.name}": row.value for row in effective(manifest)}
    settings = manifest.settings
    found |= {f"set {name}": shown(name, value) for name, value in _table(settings.get("set")).items()}
    for flag in settings.get("args") or []:
        name, equals, value = str(flag).partition("=")
        found[f"flag {name}"] = value if equals else "given"
    rest = {k: v for k, v in settings.items() if k not in ("set", "args", "engine")}
    rest["engine"] = {k: v for k, v in _table(settings.get("engine")).items() if k != "settings" and k not in _PER_RUN}
    found |= {name: shown(name, value) for name, value in flat(rest)}
    load: dict[str, Any] = {
        "reproducer": manifest.reproducer, "plan": manifest.plan.text(), "seed": manifest.seed,
        "model": manifest.model, "launched": manifest.launched or "attached", "accept": " ".join(manifest.accept),
    }  # fmt: skip
    found |= {name: str(value) for name, value in load.items()}
    found |= {f"load {name}": shown(name, value) for name, value in manifest.load.items()}
    found |= {f"fingerprint {name}": shown(name, value) for name, value in flat(manifest.fingerprint)}
    return found | {f"host {name}": shown(name, value) for name, value in flat(manifest.host)}


def differences(one: Manifest, other: Manifest) -> list[tuple[str, str, str]]:
    """Name, value in ``one``, value in ``other``, of everything in which they differ; ``-`` where it is not there."""
    left, right = plain(one), plain(other)
    names = dict.fromkeys([*left, *right])
    return [(n, left.get(n, "-"), right.get(n, "-")) for n in names if left.get(n, "-") != right.get(n, "-")]


def shown(name: str, value: Any) -> str:
    """A value as text, hidden where its name says that it is a secret."""
    if value is None:
        return "unset"
    return HIDDEN if is_secret(name) else str(value)


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
