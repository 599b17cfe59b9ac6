"""Progress of slow steps: bars in a terminal, one line a stage elsewhere."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn


class Bars:
    """One bar per stage; a stage ends when the next one is reported or the context is left."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        self._progress = Progress(
            TextColumn("  {task.description:<44}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not self._live,
        )
        self._stage = ""
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._end_stage()
        self._progress.stop()

    def report(self, stage: str, done: int | None, total: int | None) -> None:
        """`done` of `total` are through; None where nobody knows."""
        if stage != self._stage:
            self._end_stage()
            self._stage = stage
            self._task = self._progress.add_task(stage, total=total)
            if not self._live:
                self._console.print(f"  {stage} ...")
        if self._task is not None and done is not None:
            self._progress.update(self._task, completed=done, total=total)

    def _end_stage(self) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=1, total=1)
