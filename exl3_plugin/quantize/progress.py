"""What a person sees while a conversion runs: a bar with the time left, or a line now and then."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

_LINE_EVERY_S = 20.0


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class ConversionProgress:
    """Progress in units of work (about one trellis search each); a context manager.

    On a terminal a bar, elsewhere (a log file, systemd) one line every 20 seconds. The time left
    comes from what this run has done itself, so that resumed work does not flatter it.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._live = self.console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            disable=not self._live,
            refresh_per_second=2,
        )
        self._task = self._bar.add_task("", total=1, left="")
        self._total = 1.0
        self._skipped = self._done = self._module_work = self._module_done = 0.0
        self._description = ""
        self._began = self._last_line = time.monotonic()

    def __enter__(self) -> ConversionProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begin(self, total: float, already_done: float) -> None:
        """Say how much work there is, and how much of it an earlier run has done."""
        self._total, self._skipped, self._done = max(total, 1.0), already_done, already_done
        self._began = time.monotonic()
        self._show()

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def stage(self, description: str) -> None:
        """What happens now, without progress of its own."""
        self._description = description
        if not self._live:
            self.say(description)
        self._show()

    def module(self, name: str, work: float) -> None:
        """A module of `work` units begins."""
        self._description = name
        self._module_work, self._module_done = work, 0.0
        if self._done == self._skipped:
            # What came before the first module (loading, sampling) says nothing about the rest.
            self._began = time.monotonic()
        self._show()

    def advance(self, units: float) -> None:
        """Part of the module is done; never more than it was said to be."""
        step = min(units, self._module_work - self._module_done)
        self._module_done += step
        self._done += step
        self._show()

    def module_done(self) -> None:
        """The rest of the module's work is done."""
        self.advance(self._module_work)

    def left_s(self) -> float | None:
        """Seconds left at the pace of this run, None before there is one."""
        own = self._done - self._skipped
        if own <= 0:
            return None
        return (time.monotonic() - self._began) * (self._total - self._done) / own

    def _show(self) -> None:
        left = self.left_s()
        text = "" if left is None else f"{duration(left)} left"
        self._bar.update(
            self._task,
            description=self._description,
            completed=self._done / self._total,
            left=text,
        )
        now = time.monotonic()
        if not self._live and left is not None and now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            self.say(f"{100 * self._done / self._total:5.1f} %  {text}  {self._description}")
