"""The archive itself: the same bytes for the same files, whoever makes it and when."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping

MODE = 0o600


def archive(folder: str, files: Mapping[str, bytes]) -> bytes:
    """A ``.tar.gz`` of ``files`` below ``folder``: sorted names, no owner, no times."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(files):
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mode, entry.mtime = len(files[name]), MODE, 0
            tar.addfile(entry, io.BytesIO(files[name]))
    return gzip.compress(plain.getvalue(), compresslevel=9, mtime=0)
