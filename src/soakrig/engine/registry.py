"""The registry: which models can be served, and the command that each of them comes to.

What ships (models.toml beside this file) is merged with the user's file, model by model and key by key.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from soakrig.engine.bundled import EMBEDDED, TINY, VLLM, Order, compose
from soakrig.engine.registry_entry import MADE_HERE, Entry, expand
from soakrig.engine.vllm.installation import Installation
from soakrig.engine.vllm.served_model import ServedModel
from soakrig.errors import UsageError

SHIPPED = Path(__file__).with_name("models.toml")
VARIABLE = "SOAKRIG_MODELS"
MAX_BYTES = 4 << 20
_MERGED = ("settings", "policies", "canary")
"""Tables of a model that the user's file adds to; everything else it replaces."""
_OF_THE_HOST = re.compile(
    r"^(PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_.*|TZ|TMPDIR|LD_LIBRARY_PATH|VIRTUAL_ENV|PYTHONPATH|XDG_.*|CC|CXX|"
    r"SSL_CERT_FILE|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_HOME|CUDA_PATH|NVIDIA_.*|OPENBLAS_.*|MKL_.*|HF_HOME|"
    r"HF_TOKEN)$"
)
"""Variables of the caller that say where things are on this host. All else that an engine reads comes from its table:
what happened to be exported is no part of a model."""


@dataclass(frozen=True)
class Registry:
    """The models by name, and the files that they come from."""

    models: Mapping[str, Entry]
    files: tuple[Path, ...]

    def find(self, name: str) -> Entry:
        """The model of that name. Raises ``UsageError`` with the nearest one and all there are."""
        if name in self.models:
            return self.models[name]
        near = difflib.get_close_matches(name, self.models, n=1)
        raise UsageError(
            f"there is no model {name!r} in the registry" + (f"; {near[0]!r} was meant?" if near else ""),
            remedy=f"It has {', '.join(sorted(self.models)) or 'none'} ({', '.join(map(str, self.files)) or 'none'}).",
        )


def user_file(environ: Mapping[str, str] | None = None) -> tuple[Path, bool]:
    """The user's file, and whether it has to be there: ``$SOAKRIG_MODELS``, else ``soakrig/models.toml`` in the
    configuration folder (``$XDG_CONFIG_HOME`` or ``~/.config``)."""
    environ = os.environ if environ is None else environ
    if named := environ.get(VARIABLE, ""):
        return Path(named).expanduser(), True
    base = environ.get("XDG_CONFIG_HOME", "")
    folder = Path(base) if base.startswith("/") else Path(environ.get("HOME") or Path.home()) / ".config"
    return folder / "soakrig" / "models.toml", False


def load_registry(
    registry: Path | None = None, environ: Mapping[str, str] | None = None, shipped: Path = SHIPPED
) -> Registry:
    """The shipped models and those of ``registry``, or of the user's file where None.

    Raises ``UsageError`` naming file, model and key for anything that is not as it should be.
    """
    path, needed = (registry, True) if registry is not None else user_file(environ)
    tables = _read(shipped)
    files, own = [shipped], {}
    if needed or _is_there(path):
        own = _read(path)
        files.append(path)
    models: dict[str, Entry] = {}
    for name in [*tables, *(name for name in own if name not in tables)]:
        where = path if name in own else shipped
        models[name] = _entry(name, _merge(tables.get(name, {}), own.get(name, {})), where)
    _check_names(models.values(), files[-1])
    return Registry(models, tuple(files))


def _is_there(path: Path) -> bool:
    """Whether there is anything of that name, be it a link to nowhere or what may not be looked at."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise UsageError(f"the registry {path} has more than {MAX_BYTES} bytes", remedy="Give a registry.")
        data = tomllib.loads(raw.decode("utf-8-sig"))
    except OSError as error:
        raise UsageError(
            f"the registry {path} cannot be read: {error.strerror or error}",
            remedy=f"Give a file with --registry or {VARIABLE}, or leave both out.",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the registry {path} is no TOML: {error}", remedy="Correct the line that it names."
        ) from error
    except RecursionError as error:
        raise UsageError(f"the registry {path} is no TOML: it is nested too deeply", remedy="Correct it.") from error
    for key in data:
        if key != "models":
            raise UsageError(
                f"{path}: {key!r} is no key of a registry, models was expected",
                remedy="A model is a table [models.NAME].",
            )
    models: Any = data.get("models", {})
    if not isinstance(models, dict) or not all(isinstance(one, dict) for one in models.values()):
        raise UsageError(f"{path}: models is no table of tables", remedy="A model is a table [models.NAME].")
    return models


def _merge(shipped: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**shipped, **own}
    for key in _MERGED:
        below, above = shipped.get(key), own.get(key)
        if isinstance(below, dict) and isinstance(above, dict):
            merged[key] = {**below, **above}
    return merged


def _entry(name: str, table: Mapping[str, Any], where: Path) -> Entry:
    if "name" in table:
        raise UsageError(f"{where}: models.{name}.name is no key", remedy="The table's own name is the model's.")
    try:
        return Entry.model_validate({**table, "name": name})
    except ValidationError as error:
        raise _refused(f"{where}: models.{name}", error) from error


def _refused(where: str, error: ValidationError) -> UsageError:
    """The first thing that is wrong; an unknown key comes first, as it may be the reason for another one's absence."""
    found = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")[0]
    place = [str(part) for part in found["loc"]]
    key = ".".join([where, *place])
    if found["type"] == "extra_forbidden":
        known = _keys(Entry, place[:-1])
        near = difflib.get_close_matches(place[-1], known, n=1)
        meant = f"; {near[0]!r} was probably meant" if near else ""
        return UsageError(f"{key} is no key of a model{meant}", remedy=f"Keys there: {', '.join(sorted(known))}.")
    if found["type"] == "missing":
        return UsageError(f"{key} is missing", remedy="docs/serving.md has a line for each key.")
    what = found["msg"].removeprefix("Value error, ")
    given = found["input"]
    shown = f" (it is {given!r})" if place and isinstance(given, str | int | float | bool) else ""
    return UsageError(f"{key}{shown}: {what}", remedy="docs/serving.md has a line for each key.")


def _keys(model: type[BaseModel], place: Sequence[str]) -> list[str]:
    """The keys of the table at ``place``: field names of the models on the way."""
    for part in place:
        if part.isdigit():
            continue
        found = list(_models_in(model.model_fields[part].annotation)) if part in model.model_fields else []
        if found:
            model = found[0]
    return [field.alias or name for name, field in model.model_fields.items() if name != "name" or model is not Entry]


def _models_in(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for one in getattr(annotation, "__args__", ()):
        yield from _models_in(one)


def _check_names(models: Iterable[Entry], where: Path) -> None:
    """A name that a client may ask for stands for one model only."""
    owner: dict[str, str] = {}
    for entry in models:
        if own := {entry.name, entry.model_name} & set(aliases(entry)):
            raise UsageError(
                f"{where}: models.{entry.name}.policies.presets: {min(own)!r} is the model's own name",
                remedy="Give the preset another name.",
            )
        for name in {entry.name, entry.model_name, *aliases(entry)}:
            if owner.setdefault(name, entry.name) != entry.name:
                raise UsageError(
                    f"{where}: models {owner[name]} and {entry.name} both answer to {name!r}",
                    remedy="Give one of them another served_name, or its preset another name.",
                )


def aliases(entry: Entry) -> tuple[str, ...]:
    """The names of its presets, under which a gateway serves the model too."""
    return tuple(entry.policies.presets)


def order_for(
    entry: Entry, *, port: int | None = None, mark: str = "", caller: Mapping[str, str] | None = None
) -> Order:
    """The order to start this model. ``port`` None: the entry's own; ``caller``: the environment to take the host's
    variables from, None for this process's."""
    environ = os.environ if caller is None else caller
    home = environ.get("HOME") or str(Path.home())
    name = EMBEDDED if entry.backend == "embedded" else TINY if entry.checkpoint == MADE_HERE else VLLM
    return Order(
        name,
        {key: expand(value, home) for key, value in entry.settings.items()},
        list(entry.rendered_flags),
        model=expand(entry.checkpoint, home) if name == VLLM else "",
        port=entry.port if port is None else port,
        start_s=entry.start_timeout,
        caller={key: value for key, value in environ.items() if _OF_THE_HOST.match(key)},
        mark=mark,
        python=expand(entry.python, home),
        own_offload=entry.own_offload,
        registry=entry.name,
    )


def left_out(entry: Entry, environ: Mapping[str, str] | None = None) -> list[str]:
    """Variables of the caller that an engine would read and this launch does not pass on, sorted."""
    from soakrig.engine.environment import PASSED_ON

    environ = os.environ if environ is None else environ
    return sorted(
        name
        for name in environ
        if PASSED_ON.match(name) and not _OF_THE_HOST.match(name) and name not in entry.settings
    )


def render(
    entry: Entry,
    port: int,
    *,
    caller: Mapping[str, str],
    installation: Installation | None = None,
    model: ServedModel | None = None,
    port_file: Path = Path("engine.port"),
    python: str = sys.executable,
) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment that start this model on ``port``: the same ones for the same input, nothing is looked
    up. ``installation`` and ``model``: of vLLM, as found; ``port_file`` and ``python``: of the embedded engine.

    Raises what ``engine.bundled.compose`` raises.
    """
    order = order_for(entry, port=port, caller=caller)
    command = compose(order, port_file=port_file, installation=installation, model=model, python=python)
    return command.argv, command.env
