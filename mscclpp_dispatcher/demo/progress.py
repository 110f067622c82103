# Copyright (c) mscclpp_dispatcher contributors. Licensed under the MIT license.
"""Progress bars through rich; without it, one line per bar and tenth of the way."""

from __future__ import annotations

try:
    from rich import progress as rich_progress
except ImportError:
    rich_progress = None


class Bars:
    """Bars that stay on the screen when the block ends.

    Example:
        with Bars() as bars:
            bar = bars.add("training", 300)
            bars.set(bar, 10, "loss 3.20")
    """

    def __init__(self) -> None:
        self._totals: list[tuple[str, int]] = []
        self._tenths: list[int] = []
        self._rich = None
        if rich_progress is not None:
            self._rich = rich_progress.Progress(
                rich_progress.TextColumn("{task.description:<10}"),
                rich_progress.BarColumn(),
                rich_progress.MofNCompleteColumn(),
                rich_progress.TimeElapsedColumn(),
                rich_progress.TextColumn("{task.fields[note]}"),
            )

    def __enter__(self) -> Bars:
        if self._rich is not None:
            self._rich.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._rich is not None:
            self._rich.stop()

    def add(self, name: str, total: int) -> int:
        """A bar from 0 to ``total``; returns its number for ``set``."""
        self._totals.append((name, total))
        self._tenths.append(0)
        if self._rich is not None:
            return self._rich.add_task(name, total=total, note="")
        return len(self._totals) - 1

    def set(self, bar: int, done: int, note: str = "") -> None:
        """Moves a bar to ``done`` and shows ``note`` beside it."""
        if self._rich is not None:
            self._rich.update(bar, completed=done, note=note)
            return
        name, total = self._totals[bar]
        tenth = 10 * done // max(1, total)
        if tenth > self._tenths[bar]:
            self._tenths[bar] = tenth
            print(f"{name} {done}/{total} {note}".rstrip(), flush=True)
