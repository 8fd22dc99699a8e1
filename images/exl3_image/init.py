"""The first process of the container: starts the server, passes signals on, reaps orphans, and ends
with the server's exit status.

  python3 -I -S init.py PROGRAM [ARGUMENT...]

As process 1 a program gets no signal that it does not handle, so a server that is still loading
would not stop; here it is an ordinary child. Nothing but the standard library is loaded, since this
stays for as long as the server does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

PASSED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH")


def hold() -> list[signal.Signals]:
    """Let signals wait, also across exec: process 1 loses those that it has no handler for.

    Returns the signals that are passed on once there is a server.
    """
    wanted = [getattr(signal, name) for name in PASSED]
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    return wanted


def main(argv: list[str]) -> int:
    """Run a program; returns its exit status, 128 + n where signal n ended it."""
    wanted = hold()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            print(f"error: {argv[0]} does not start: {error.strerror}", file=sys.stderr)
            os._exit(127 if isinstance(error, FileNotFoundError) else 126)

    def pass_on(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in wanted:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return (
                os.waitstatus_to_exitcode(status)
                if os.WIFEXITED(status)
                else 128 + os.WTERMSIG(status)
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
