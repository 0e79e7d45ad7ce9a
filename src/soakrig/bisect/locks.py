"""One campaign to a folder and one campaign to a card, held by locks that end with their process."""

from __future__ import annotations

import re
from pathlib import Path

from filelock import FileLock, Timeout

from soakrig.errors import PreflightRefusedError, StoreError

CAMPAIGN_LOCK = ".lock"
GPU_LOCKS = Path("/tmp")  # noqa: S108
"""Where every user of the host looks, whatever TMPDIR says; what is there is an empty file and its lock."""


def lock_campaign(folder: Path) -> FileLock:
    """Take the folder's lock; ``release`` gives it back. Raises ``PreflightRefusedError`` where another process has it,
    ``StoreError`` where it cannot be made."""
    lock = FileLock(folder / CAMPAIGN_LOCK, mode=0o600)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise PreflightRefusedError(
            f"the campaign in {folder} is run by another process, which holds {folder / CAMPAIGN_LOCK}",
            remedy="`soak bisect status` looks at it without disturbing it.",
        ) from error
    except OSError as error:
        raise StoreError(
            f"cannot lock {folder / CAMPAIGN_LOCK}: {error.strerror or error}", remedy="Is the folder yours to write?"
        ) from error
    return lock


def lock_gpu(uuid: str, folder: Path = GPU_LOCKS) -> FileLock:
    """Take a card by its UUID, as NVML has it, for as long as the process lives or until ``release``.

    Raises ``PreflightRefusedError`` where another campaign has it.
    """
    path = folder / f"soakrig-gpu-{re.sub(r'[^A-Za-z0-9-]', '_', uuid)}.lock"
    lock = FileLock(path, mode=0o666)  # another user's campaign has to be able to ask
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise PreflightRefusedError(
            f"GPU {uuid} is in use by another campaign, which holds {path}",
            remedy="Wait for it, or choose another card with CUDA_VISIBLE_DEVICES.",
        ) from error
    except OSError as error:
        raise PreflightRefusedError(
            f"GPU {uuid} cannot be locked by {path}: {error.strerror or error}",
            remedy="Another user may have left that file: remove it once no campaign runs.",
        ) from error
    return lock
