"""One progress line per part on standard error: live on a terminal, a line when something changes elsewhere."""

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn
from rich.text import Text

from headrace.local.part import Part


def _ready_line(part: Part, seconds: float) -> str:
    return f"{part.name:<9} ready in {seconds:4.1f} s  {part.address}"


def _restart_line(part: Part, reason: str, delay_s: float) -> str:
    return f"{part.name:<9} {reason}; starting it again in {delay_s:.2g} s (log: {part.log})"


class PlainProgress:
    """For pipes and logs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def starting(self, part: Part) -> None:
        self._say(f"{part.name:<9} starting")

    def ready(self, part: Part, seconds: float) -> None:
        self._say(_ready_line(part, seconds))

    def restarting(self, part: Part, reason: str, delay_s: float) -> None:
        self._say(_restart_line(part, reason, delay_s))

    def close(self) -> None:
        """Nothing is open."""

    def _say(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


class TerminalProgress:
    """A spinner per part until it is ready; changes after `close` are plain lines."""

    def __init__(self, console: Console) -> None:
        self._plain = PlainProgress(console)
        self._live: Progress | None = Progress(
            SpinnerColumn(finished_text="[green]✓"), TextColumn("{task.description}", markup=False), console=console
        )
        self._live.start()
        self._tasks: dict[str, TaskID] = {}

    def starting(self, part: Part) -> None:
        if self._live is None:
            self._plain.starting(part)
        elif part.name not in self._tasks:
            self._tasks[part.name] = self._live.add_task(f"{part.name:<9} starting", total=1)

    def ready(self, part: Part, seconds: float) -> None:
        if self._live is None:
            self._plain.ready(part, seconds)
        else:
            self._live.update(self._tasks[part.name], description=_ready_line(part, seconds), completed=1)

    def restarting(self, part: Part, reason: str, delay_s: float) -> None:
        if self._live is None:
            self._plain.restarting(part, reason, delay_s)
        else:
            line = _restart_line(part, reason, delay_s)
            self._live.update(self._tasks[part.name], description=line, completed=0)

    def close(self) -> None:
        """Leave the lines as they are and stop drawing."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def make_progress(console: Console) -> PlainProgress | TerminalProgress:
    """The form that fits where `console` writes to."""
    return TerminalProgress(console) if console.is_terminal else PlainProgress(console)
