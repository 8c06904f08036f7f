"""Files that are written for a user: replaced whole or not at all, with links and permissions kept."""

import errno
import os
from pathlib import Path
from unittest import mock

import pytest

from fastvit._base.output import write_file


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_file_is_replaced_whole_or_not_at_all(error: BaseException, linked: bool, tmp_path: Path) -> None:
    old = path = tmp_path / "old.json"
    old.write_text("old")
    if linked:
        path = tmp_path / "link.json"
        path.symlink_to(old.name)
    there = sorted(tmp_path.iterdir())
    with mock.patch.object(os, "fsync", side_effect=error), pytest.raises(type(error)) as caught:
        write_file(path, "new")
    assert getattr(caught.value, "filename", str(path)) == str(path)
    assert old.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == there
    write_file(path, "new")
    assert old.read_text() == "new"
    assert path.is_symlink() == linked
    assert sorted(tmp_path.iterdir()) == there


def test_permissions(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("old")
    old.chmod(0o606)
    before = os.umask(0o027)
    try:
        write_file(new, b"new")
        write_file(old, b"new")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (new, old)] == [0o640, 0o606]
    with mock.patch.object(os, "access", return_value=False), pytest.raises(PermissionError, match=str(old)):
        write_file(old, b"newer")  # a write-protected file in a folder that is not
    assert old.read_bytes() == b"new"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_file(path, "new")
        assert os.read(reader, 9) == b"new"
    finally:
        os.close(reader)
    assert path.is_fifo()
