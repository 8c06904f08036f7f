"""Output for a user: files that are written whole or not at all, and text that is safe to print on a terminal."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a whole file, or leave what was there.

    The content goes into a temporary file in the same folder, which then replaces the old file. A symbolic link stays
    a link, and an existing file keeps its mode. Devices and pipes are written directly.

    Raises:
        OSError: names `path`; nothing is left of the temporary file, as after any other interruption.
    """
    content = content.encode() if isinstance(content, str) else content
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        target = Path(os.path.realpath(path))
        exists = target.exists()
        if exists and not os.access(target, os.W_OK):  # os.replace asks for the folder's permission only
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        temporary = target.with_name(f".fastvit-{os.urandom(8).hex()}")
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # some filesystems say only now that the disk is full
            if exists:
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def not_writable(folder: Path) -> str:
    """Return why no file can be written in a folder, which may have to be made, or ""."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return ""
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"


def wrapped(lines: Iterable[str], indent: int = 8) -> str:
    """Wrap lines at spaces to the width of the terminal or of $COLUMNS, 80 for a file; further lines are indented. A
    word is never broken."""
    wrapper = textwrap.TextWrapper(
        shutil.get_terminal_size().columns,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(part for line in lines for part in wrapper.wrap(line))


def printable(text: str) -> str:
    """Replace control characters, escape sequences among them, and others that do not print by their escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
