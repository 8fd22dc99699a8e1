"""Namespaces of Linux for tests: mounts and networks that only one process sees."""

import subprocess
import warnings

import pytest


def prefix(kind: str) -> list[str]:
    """The command that runs another one in a namespace of its own: `mount` or `net`.

    With a user namespace, so that nobody has to be root; without one where they are switched off.
    Skips, loudly, where neither is possible.
    """
    for command in (
        ["unshare", "--user", "--map-root-user", f"--{kind}"],
        ["unshare", f"--{kind}"],
    ):
        done = subprocess.run([*command, "true"], capture_output=True, text=True)
        if done.returncode == 0:
            return command
    reason = f"NO {kind.upper()} NAMESPACES, this is NOT tested: {done.stderr.strip()}"
    warnings.warn(reason, stacklevel=2)
    pytest.skip(reason)
