"""The API key of an instance: made once on its host, kept in a file that its owner alone reads.

The key itself never leaves the file: plans, argument lists and logs hold the file's name, and the
supervisor puts it into the server's environment. Standard library only.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from .errors import HostError

GENERATE = "generate"
"""What an inventory writes for `api_key_file` to have one made."""
KEY_BYTES = 32


def default_file(store: Path | str, instance: str) -> Path:
    """Where the key of an instance lies when no other file is named."""
    return Path(store) / "secrets" / f"{instance}.api_key"


def ensure(path: Path) -> bool:
    """Make a key where there is none; whether one was made.

    Raises HostError for a file that others may read, that is empty, or that cannot be written.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return _make(path)
    except OSError as error:
        raise HostError(f"{path} cannot be read: {error.strerror}.", "Deploy as root.") from None
    if stat.S_IMODE(mode) & 0o077:
        raise HostError(
            f"the API key {path} may be read by others (mode {stat.S_IMODE(mode):04o}).",
            f"chmod 600 {path}; make a new key if somebody may have seen it (delete the file and "
            "deploy).",
        )
    if not path.read_text().strip():
        raise HostError(f"the API key {path} is empty.", "Delete the file and deploy.")
    return False


def _make(path: Path) -> bool:
    draft = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        draft.unlink(missing_ok=True)
        # Created with its mode: between a chmod and a write others could open it.
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_urlsafe(KEY_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        raise HostError(
            f"the API key {path} cannot be written: {error.strerror}.",
            "Free space, or set api_key_file to a file of your own.",
        ) from None
    return True
