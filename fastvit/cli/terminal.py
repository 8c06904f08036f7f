"""How the verbs print tables, show progress, write files and fail."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import importlib.util
import io
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastvit._base.output import not_writable, printable, write_file

if TYPE_CHECKING:
    from rich.console import Console

INTERVAL = 5.0  # seconds between lines of progress
_LONGEST = 600  # characters of an error
_reported = 0.0  # when progress was last reported, or a verb began
_saved = ""  # the last file that was written


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

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        argv = list(sys.argv[1:] if args is None else args)
        parsed, unknown = self.parse_known_args(argv, namespace)
        if unknown:
            verbs = [a for a in self._actions if isinstance(a, argparse._SubParsersAction)]
            parser = verbs[0].choices[getattr(parsed, verbs[0].dest)] if verbs else self
            parser.refuse(unknown[0], argv)
        return parsed

    def refuse(self, word: str, argv: Sequence[str]) -> Any:
        """Exit with an error for a word of the command line that is no option, value or argument."""
        options = {name: action for action in self._actions for name in action.option_strings}
        if word.startswith("-"):
            name = word.partition("=")[0].replace("_", "-")
            near = [option for option in options if name.startswith(f"{option}-")]  # --batch of --batch-size
            near += difflib.get_close_matches(name, options, 1)
            self.error(f"there is no option {word}" + (f"; did you mean {near[0]}?" if near else ""))
        before = itertools.takewhile(lambda w: not w.startswith("-"), reversed(argv[: argv.index(word)]))
        values = [*reversed([*before])]
        option = argv[argv.index(word) - len(values) - 1]
        metavar = str(getattr(options.get(option), "metavar", ""))
        if values and (between := "," if "," in metavar else "x" if metavar == "PX" else ""):
            self.error(f"{option} takes its values without spaces: {option} {between.join([*values, word])}")
        self.error(f"{word!r} is one argument too many")


def guarded(run: Callable[[], int | None], traceback: bool = False, name: str = "fastvit") -> int:
    """Run a verb or program and return its status. An error of the user's becomes one line and status 2, an
    interruption one line and 130. A KeyboardInterrupt that `run` raises may say what is saved."""
    global _reported
    _reported = time.monotonic()
    try:
        try:
            return run() or 0
        finally:  # also after --help, which raises SystemExit
            sys.stdout.flush()
    except KeyboardInterrupt as interrupt:
        print(f"{name}: interrupted; {str(interrupt) or _saved or 'nothing was written'}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # for example `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        expected = isinstance(error, ValueError | OSError | ImportError) or type(error).__name__ == "OutOfMemoryError"
        if traceback or not expected:
            raise
        print(f"{name}: {described(error)}", file=sys.stderr)
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
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name and error.name.split(".")[0] != package:
            raise
        raise ImportError(f"this needs {package}, which is not installed: pip install 'fastvit[study]'") from None


@contextlib.contextmanager
def progress(total: int | None, what: str) -> Iterator[Callable[[str], None]]:
    """Show on standard error what runs: on a terminal a bar; else a line every five seconds if there is news, so that
    what is quick says nothing. Yields a function to call with what begins next. total: None if it is not known."""
    now, begun, ended, bar = what, 0, threading.Event(), None

    def step(text: str) -> None:
        nonlocal now, begun
        now, begun = f"{what}: {text}", begun + 1
        if bar is not None:
            bar.update(task, description=now, completed=begun - 1)

    def report() -> None:
        global _reported
        last = ""
        while not ended.wait(max(_reported + INTERVAL - time.monotonic(), 0.1)):
            line = now + f" ({begun} of {total})" * bool(total and begun)
            if line != last:
                with contextlib.suppress(OSError):  # a closed pipe
                    print(line, file=sys.stderr, flush=True)
            last, _reported = line, time.monotonic()

    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        bars, rich = wanted("rich.progress", "rich"), wanted("rich.console", "rich")
        columns = bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn()
        shown = {"console": rich.Console(stderr=True), "transient": True, "redirect_stdout": sys.stdout.isatty()}
        with bars.Progress(*columns, bars.TimeRemainingColumn(), **shown) as bar:
            task = bar.add_task(what, total=total)
            yield step
        return
    threading.Thread(target=report, daemon=True).start()
    try:
        yield step
    finally:
        ended.set()


def write(path: str | Path, content: str | bytes) -> None:
    """Write a file by `write_file`, and report it."""
    global _saved
    write_file(path, content)
    _saved = f"wrote {path}"
    print(_saved, file=sys.stderr)


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
