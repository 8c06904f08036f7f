"""What the verbs share: how they read sizes, print tables, show progress, write files and fail."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastvit._output import printable, write_file

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100  # of every table
_LONGEST = 600  # characters of an error


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keep descriptions and examples as they are written, and say what an option is by default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False) or "(default: " in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """argparse's, with examples below, as they are written."""

    def __init__(self, prog: str, description: str = "", epilog: str | None = None, **options: Any) -> None:
        options.setdefault("formatter_class", _Help)
        super().__init__(prog, description=description, epilog=epilog, allow_abbrev=False, **options)

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def guarded(run: Callable[[], int], traceback: bool = False) -> int:
    """run(); a mistake in what was asked for becomes one line and status 2, an interruption status 130."""
    try:
        status = run()
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        expected = isinstance(error, ValueError | OSError | ImportError) or type(error).__name__ == "OutOfMemoryError"
        if traceback or not expected:
            raise
        print(f"fastvit: {described(error)}", file=sys.stderr)
        return 2


def described(error: BaseException) -> str:
    """An error in one line, without escape sequences that files may have brought into it."""
    if isinstance(error, OSError) and error.strerror:
        return printable(f"{error.strerror}: {error.filename}" if error.filename else error.strerror)
    text = printable(" ".join(str(error).split()))
    return (text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ...") or type(error).__name__


def console() -> Console:
    """Of standard output: 100 columns at most; colours only on a terminal, and none under NO_COLOR."""
    rich = wanted("rich.console", "rich")
    width = None if sys.stdout.isatty() else WIDTH
    found = rich.Console(width=width, highlight=False, soft_wrap=False)
    if found.width > WIDTH:
        found.width = WIDTH
    return found


def wanted(module: str, package: str) -> Any:
    """A module of the extra `study`, or an ImportError that says how to get it."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name and error.name.split(".")[0] != package:
            raise
        raise ImportError(f"this wants {package}, which is not installed: pip install 'fastvit[study]'") from None


@contextlib.contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[str], None]]:
    """A bar on standard error, if that is a terminal: the function yielded tells what is next, and that one is done."""
    if not sys.stderr.isatty() or total < 2:
        yield lambda now: None
        return
    bars, rich = wanted("rich.progress", "rich"), wanted("rich.console", "rich")
    columns = (
        bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeRemainingColumn(),
    )  # fmt: skip
    with bars.Progress(*columns, console=rich.Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        started = False

        def step(now: str) -> None:
            nonlocal started
            bar.update(task, description=f"{what}: {now}", advance=int(started))
            started = True

        yield step


@contextlib.contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """As `progress`, where nobody knows how many are to come."""
    if not sys.stderr.isatty():
        yield lambda now: None
        return
    status, rich = wanted("rich.status", "rich"), wanted("rich.console", "rich")
    with status.Status(what, console=rich.Console(stderr=True)) as line:
        yield lambda now: line.update(f"{what}: {now}")


def write(path: str | Path, content: str | bytes) -> None:
    """Write a file as `write_file`, and say so."""
    write_file(path, content)
    print(f"wrote {path}", file=sys.stderr)


def check_folder(option: str, path: Path) -> None:
    """Before anything takes time: whether a file can be there."""
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option}: there is no folder {path.absolute().parent}")
    if path.is_dir():
        raise ValueError(f"{option}: {path} is a folder")


def check_picture(option: str, path: Path) -> None:
    """Whether a picture of matplotlib can be written there."""
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"{option} writes .png or .svg, got {path}")
    check_folder(option, path)
    wanted("matplotlib", "matplotlib")


def write_figure(path: Path, figure: Any, theme: str) -> None:
    """A figure of matplotlib, on the background of its theme; the same bytes in every run."""
    from matplotlib import rc_context

    from fastvit.study._plot import BACKGROUNDS

    out, svg = io.BytesIO(), path.suffix == ".svg"
    with rc_context({"svg.hashsalt": "fastvit"}):
        figure.savefig(
            out, format=path.suffix[1:], dpi=160, facecolor=BACKGROUNDS[theme], metadata={"Date": None} if svg else {}
        )
    write(path, out.getvalue())


# ---- arguments that several verbs take ----


def sizes(text: str) -> list[tuple[int, int]]:
    """ "224,384x512" -> [(224, 224), (384, 512)]: height x width."""
    found = [_size(word) for word in text.split(",") if word]
    if not found:
        raise argparse.ArgumentTypeError(f"sizes are 224 or 224,384x512, got {text!r}")
    return found


def _size(word: str) -> tuple[int, int]:
    parts = word.lower().split("x")
    if len(parts) > 2 or not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"a size is 224 or 224x448 (height x width), got {word!r}")
    return int(parts[0]), int(parts[-1])


def size(text: str) -> tuple[int, int]:
    """ "224" or "224x448" -> (height, width)."""
    return _size(text)


def integers(text: str) -> list[int]:
    """ "1,8,64" -> [1, 8, 64]"""
    if not all(word.isdigit() and int(word) for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"must be positive integers such as 1,8,64, got {text!r}")
    return [int(word) for word in text.split(",")]


def count(text: str) -> int:
    """A positive integer."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)
