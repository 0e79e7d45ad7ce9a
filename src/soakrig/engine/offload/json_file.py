"""JSON files of a fixed shape: read strictly, every refusal with what was read; written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from soakrig.errors import UsageError

LayerKey = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,5})$")]
"""A layer's number as the key of a JSON object, in its one spelling."""


class JsonFile(BaseModel):
    """A file's content. Unknown keys are refused, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Content = TypeVar("Content", bound=JsonFile)
MOST_ERRORS = 3


def read_json_file(path: str, content: type[Content], what: str) -> Content:
    """The file's content. Raises UsageError saying ``what`` was expected and which key is wrong."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", remedy=f"give a readable {what}") from error
    try:
        return content.model_validate_json(data)
    except ValidationError as error:
        raise UsageError(
            f"{path} is no {what}: {broken(error)}", remedy=f"give a {what}; its keys: {', '.join(keys(content))}"
        ) from error


def broken(error: ValidationError) -> str:
    """The first few things that are wrong, each with its place and what was read there."""
    found: list[str] = []
    for one in error.errors()[:MOST_ERRORS]:
        place = ".".join(map(str, one["loc"]))
        read = "" if isinstance(one["input"], dict | list | bytes) else f" (read: {str(one['input'])[:80]!r})"
        found.append(f"{place}: {one['msg']}{read}" if place else f"{one['msg']}{read}")
    more = error.error_count() - len(found)
    return "; ".join(found) + (f"; and {more} more" if more else "")


def keys(content: type[BaseModel]) -> list[str]:
    """The keys as the file spells them."""
    return [field.alias or name for name, field in content.model_fields.items()]


def write_whole(path: str, data: bytes) -> None:
    """Write beside, sync, rename: a reader sees the old file or the new one. A link stays one. Raises OSError."""
    place = Path(path).resolve()
    # Of a short name: one that a folder just takes has no room for more.
    part = place.with_name(f".{place.name[:20]}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(place)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def as_data(content: JsonFile) -> dict[str, Any]:
    """What the file holds, ready for JSON."""
    return content.model_dump(mode="json", by_alias=True)
