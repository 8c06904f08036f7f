"""How the verbs print tables, show progress, write files and fail."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import io
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastvit._base.output import not_writable, printable, write_file

if TYPE_CHECKING:
    from rich.console import Console

_LONGEST = 600  # characters of an error


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps descriptions and examples as they are written, and names defaults."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False) or "(default: " in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse's parser without abbreviations, whose errors are one line."""

    def __init__(self, prog: str, description: str = "", epilog: str | None = None, **options: Any) -> None:
        options.setdefault("formatter_class", _Help)
        super().__init__(prog, description=description, epilog=epilog, allow_abbrev=False, **options)

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def refuse(self, word: str, argv: Sequence[str]) -> Any:
        """Exit with an error for a word of the command line that is no option, value or argument."""
        options = {name: action for action in self._actions for name in action.option_strings}
        if word.startswith("-"):
            near = difflib.get_close_matches(word.partition("=")[0].replace("_", "-"), options, 1)
            self.error(f"there is no option {word}" + (f"; did you mean {near[0]}?" if near else ""))
        before = itertools.takewhile(lambda w: not w.startswith("-"), reversed(argv[: argv.index(word)]))
        values = [*reversed([*before])]
        option = argv[argv.index(word) - len(values) - 1]
        metavar = str(getattr(options.get(option), "metavar", ""))
        if values and (between := "," if "," in metavar else "x" if metavar == "PX" else ""):
            self.error(f"{option} takes its values without spaces: {option} {between.join([*values, word])}")
        self.error(f"{word!r} is one argument too many")


def guarded(run: Callable[[], int], traceback: bool = False) -> int:
    """Run a verb and return its status. An error of the user's becomes one line and status 2, an interruption 130."""
    try:
        status = run()
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # for example `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        expected = isinstance(error, ValueError | OSError | ImportError) or type(error).__name__ == "OutOfMemoryError"
        if traceback or not expected:
            raise
        print(f"fastvit: {described(error)}", file=sys.stderr)
        return 2


def described(error: BaseException) -> str:
    """Write an error in one line, with escape sequences, which may come from a file, made visible."""
    if isinstance(error, OSError) and error.strerror:
        return printable(f"{error.strerror}: {error.filename}" if error.filename else error.strerror)
    text = printable(" ".join(str(error).split()))
    return (text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ...") or type(error).__name__


def console() -> Console:
    """Return the console of standard output: as wide as the terminal or $COLUMNS, 80 columns for a file or a pipe;
    colours only on a terminal without NO_COLOR."""
    found: Console = wanted("rich.console", "rich").Console(highlight=False)
    return found


def print_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", words: Sequence[int] = (0,)
) -> None:
    """Print a table without cutting or breaking a number or a name. If the columns are too wide, cells of words wrap at
    spaces; if that is not enough, the terminal wraps the lines itself.

    Args:
        heads: one for each column; empty for a table without heads.
        rows: as many cells as columns; an empty row prints an empty line.
        words: columns of words, aligned left. All others are numbers, aligned right, and may have rich's markup.
    """
    out, text = console(), wanted("rich.text", "rich").Text
    table = wanted("rich.table", "rich").Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=bool(heads)
    )
    count = len(next(row for row in [heads, *rows] if row))
    cells = [
        [text(value) if c in words else text.from_markup(value) for c, value in enumerate(row)]
        for row in [heads or [""] * count, *rows]
    ]
    for c in range(count):
        values = [row[c].plain for row in cells if row]
        least = max(len(part) for value in values for part in ((value.split() or [""]) if c in words else [value]))
        table.add_column(cells[0][c], min_width=least, justify="left" if c in words else "right")
    for row in cells[1:]:
        table.add_row(*row)
    if table.__rich_measure__(out, out.options.update(max_width=1 << 16)).maximum > out.width:
        table.padding = (0, 1, 0, 0)
        out.width = max(out.width, sum(column.min_width or 0 for column in table.columns) + count - 1)
    if title:
        out.print(text(title, style="bold"))
    out.print(table, crop=False)


def wanted(module: str, package: str) -> Any:
    """Import a module of the extra `study`, or raise an ImportError that says how to install it."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name and error.name.split(".")[0] != package:
            raise
        raise ImportError(f"this needs {package}, which is not installed: pip install 'fastvit[study]'") from None


@contextlib.contextmanager
def progress(total: int | None, what: str) -> Iterator[Callable[[str], None]]:
    """Show a bar on standard error, if that is a terminal. Yields a function to call with what begins next. total: None
    if it is not known."""
    if not sys.stderr.isatty() or total in (0, 1):
        yield lambda now: None
        return
    bars, rich = wanted("rich.progress", "rich"), wanted("rich.console", "rich")
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=rich.Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        started = False

        def step(now: str) -> None:
            nonlocal started
            bar.update(task, description=f"{what}: {now}", advance=int(started))
            started = True

        yield step


def write(path: str | Path, content: str | bytes) -> None:
    """Write a file by `write_file`, and report it."""
    write_file(path, content)
    print(f"wrote {path}", file=sys.stderr)


def check_folder(option: str, path: Path) -> None:
    """Raise ValueError if a file cannot be written to `path`. Called before anything takes time."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise ValueError(f"{option}: there is no folder {target.parent}")
    if target.is_dir():
        raise ValueError(f"{option}: {path} is a folder")
    if target.exists() and not os.access(target, os.W_OK):
        raise ValueError(f"{option}: {path} cannot be written: {os.strerror(errno.EACCES)}")
    if (target.is_file() or not target.exists()) and (reason := not_writable(target.parent)):
        raise ValueError(f"{option}: {reason}")


def check_picture(option: str, path: Path) -> None:
    """Raise ValueError or ImportError if matplotlib cannot write a picture to `path`."""
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"{option} writes .png or .svg, got {path}")
    check_folder(option, path)
    wanted("matplotlib", "matplotlib")


def write_figure(path: Path, figure: Any, theme: str = "", description: str = "") -> None:
    """Write a matplotlib figure, the same bytes in every run.

    Args:
        theme: whose background it gets; "" for a transparent one.
        description: what an SVG shows, for readers that cannot see it.
    """
    from matplotlib import rc_context

    from fastvit.study.memory.plot import BACKGROUNDS

    out, about = io.BytesIO(), dict[str, Any]()
    if path.suffix == ".svg":
        about = {"Date": None} | ({"Description": description} if description else {})
    with rc_context({"svg.hashsalt": "fastvit"}):
        figure.savefig(out, format=path.suffix[1:], dpi=160, facecolor=BACKGROUNDS.get(theme, "none"), metadata=about)
    write(path, out.getvalue())
