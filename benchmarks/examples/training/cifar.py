"""Read CIFAR-10 and CIFAR-100 (Krizhevsky 2009) from their archives, in the binary and in the Python form.

The Python form is a pickle. Only the opcodes that such files need are interpreted, and every name in it stands for one
of the few stand-ins below: nothing is imported, and no code from the file or of numpy runs.
"""

from __future__ import annotations

import io
import lzma
import pickle
import pickletools
import re
import tarfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

SIDE = 32
_PIXELS = 3 * SIDE * SIDE
_LARGEST = 1 << 28  # bytes of a file in the archive; the largest real one has 154 MB


class Arrays(NamedTuple):
    """Images (n, 3, S, S) uint8 and their classes (n,) int64."""

    images: np.ndarray
    labels: np.ndarray


class Cifar(NamedTuple):
    name: str
    train: Arrays
    test: Arrays
    classes: list[str]


class _Form(NamedTuple):
    name: str
    train: tuple[str, ...]
    test: str
    names: str
    labels: str  # key of the labels in a pickle; "" for the binary form
    label_bytes: int  # before the pixels of a record; the last one is the class
    classes: int


_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
_FORMS = (
    _Form("CIFAR-10", tuple(f"{name}.bin" for name in _BATCHES), "test_batch.bin", "batches.meta.txt", "", 1, 10),
    _Form("CIFAR-10", _BATCHES, "test_batch", "batches.meta", "labels", 0, 10),
    _Form("CIFAR-100", ("train.bin",), "test.bin", "fine_label_names.txt", "", 2, 100),
    _Form("CIFAR-100", ("train",), "test", "meta", "fine_labels", 0, 100),
)
_WANTED = {name for form in _FORMS for name in (*form.train, form.test, form.names)}
_OPCODES = """
PROTO FRAME STOP MARK EMPTY_DICT EMPTY_LIST SETITEM SETITEMS APPEND APPENDS GLOBAL REDUCE BUILD NONE NEWTRUE NEWFALSE
BININT BININT1 BININT2 BINSTRING SHORT_BINSTRING BINUNICODE SHORT_BINUNICODE BINBYTES SHORT_BINBYTES EMPTY_TUPLE TUPLE
TUPLE1 TUPLE2 TUPLE3 BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE
"""
_TUPLES = 16  # at most: real files have 7, and many nested ones would take for ever to hash


def holds_cifar(path: Path) -> bool:
    """Return whether the path is a file, or a folder with the files of an unpacked archive."""
    return path.is_file() or any((path / form.train[0]).is_file() for form in _FORMS)


def read(path: Path) -> Cifar:
    """Read an archive, packed or unpacked.

    Raises:
        ValueError: a file that is damaged, or is no CIFAR archive; the message names it.
        OSError: it cannot be read.
    """
    try:
        files = _folder(path) if path.is_dir() else _archive(path)
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the system's; others are a decompressor's
            raise
        raise ValueError(f"{path} is no readable tar archive: {error}") from None
    for form in _FORMS:
        if {*form.train, form.test, form.names} <= files.keys():
            read_file = _read_pickle if form.labels else _read_binary
            parts = [read_file(files[name], form, f"{path}: {name}") for name in (*form.train, form.test)]
            train = Arrays(*(np.concatenate(columns) for columns in zip(*parts[:-1], strict=True)))
            return Cifar(form.name, train, parts[-1], _class_names(files[form.names], form, f"{path}: {form.names}"))
    found = ", ".join(sorted(files)[:6]) or "no file"
    raise ValueError(f"{path} is no complete CIFAR-10 or CIFAR-100 archive: it has {found}")


def _folder(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name in _WANTED and file.is_file()}


def _archive(path: Path) -> dict[str, bytes]:
    files = {}
    with tarfile.open(path) as archive:
        for member in archive:
            name = PurePosixPath(member.name).name
            if name in _WANTED and member.size <= _LARGEST and (file := archive.extractfile(member)) is not None:
                files[name] = file.read()
    return files


def _read_binary(content: bytes, form: _Form, where: str) -> Arrays:
    record = form.label_bytes + _PIXELS
    if not content or len(content) % record:
        raise ValueError(f"{where} must have records of {record} bytes, got {len(content)} bytes")
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    return _checked(records[:, form.label_bytes :], records[:, form.label_bytes - 1], form, where)


def _read_pickle(content: bytes, form: _Form, where: str) -> Arrays:
    found = _unpickled(content, where)
    images, labels = found.get("data"), found.get(form.labels)
    if not isinstance(images, _Array) or not isinstance(labels, list) or not all(type(n) is int for n in labels):
        raise ValueError(f"{where} must have the array 'data' and the list {form.labels!r}")
    return _checked(images.values(where), np.array(labels), form, where)


def _checked(images: np.ndarray, labels: np.ndarray, form: _Form, where: str) -> Arrays:
    if images.ndim != 2 or images.shape[1] != _PIXELS or len(images) != len(labels) or not len(labels):
        raise ValueError(f"{where} must have {_PIXELS} values and a class for each image, got {images.shape}")
    if labels.min() < 0 or labels.max() >= form.classes:
        raise ValueError(f"{where} must have classes from 0 to {form.classes - 1}, got {labels.max()}")
    return Arrays(images.reshape(-1, 3, SIDE, SIDE), labels.astype(np.int64))


def _class_names(content: bytes, form: _Form, where: str) -> list[str]:
    if form.labels:
        found = _unpickled(content, where).get(form.labels.removesuffix("s") + "_names")
        names = [_text(name) for name in found] if isinstance(found, list) else []
    else:
        names = content.decode(errors="replace").split()
    if len(names) != form.classes:
        raise ValueError(f"{where} must have the names of {form.classes} classes, got {len(names)}")
    return names


class _Array:
    """Takes the state of a pickled array of bytes."""

    shape: Any = None
    dtype: Any = None
    fortran: Any = False
    content: Any = None

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.dtype, self.fortran, self.content = state

    def values(self, where: str) -> np.ndarray:
        """Return the array (n, k) uint8."""
        kind = getattr(self.dtype, "kind", None)
        shape, content = self.shape, self.content
        integers = isinstance(shape, tuple) and len(shape) == 2 and all(type(n) is int and n >= 0 for n in shape)
        if kind != "u1" or not integers or not isinstance(content, bytes) or len(content) != shape[0] * shape[1]:
            raise ValueError(f"{where} must have an array (n, {_PIXELS}) of bytes")
        return np.frombuffer(content, np.uint8).reshape(shape, order="F" if self.fortran is True else "C")


class _Dtype:
    def __init__(self, kind: Any, *_: Any) -> None:
        self.kind = _text(kind).lstrip("|")

    def __setstate__(self, state: Any) -> None:
        """Byte order and fields, which bytes do not have."""


_STAND_INS: dict[str, Callable[..., Any]] = {
    "ndarray": _Array,
    "dtype": _Dtype,
    "_reconstruct": lambda *_: _Array(),
    "encode": lambda text, *_: text.encode("latin1"),  # what Python 3 writes for bytes in an old protocol
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if not re.fullmatch(r"numpy|numpy\._?core\.multiarray|_codecs", module) or name not in _STAND_INS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no CIFAR file has")
        return _STAND_INS[name]


def _unpickled(content: bytes, where: str) -> Mapping[str, Any]:
    try:
        _check_opcodes(content)
        found = _Reader(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"{where} is no readable pickle: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where} must have a dict, got {type(found).__name__}")
    return {_text(key): value for key, value in found.items()}


def _check_opcodes(content: bytes) -> None:
    """Raise UnpicklingError for opcodes that no CIFAR file has, which might take very long or much memory."""
    allowed, tuples = _OPCODES.split(), 0
    for opcode, argument, _ in pickletools.genops(content):
        tuples += "TUPLE" in opcode.name
        far = opcode.name == "LONG_BINPUT" and int(argument or 0) > len(content)  # the memo grows up to this index
        if opcode.name not in allowed or tuples > _TUPLES or far:
            raise pickle.UnpicklingError(f"it has {opcode.name} where no CIFAR file does")


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
