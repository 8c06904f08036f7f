"""Classes of transformers with the code of a known one.

transformers copies code from model to model: `AltCLIPMLP` is `CLIPMLP`, and `ViTMAELayer` is `ViTLayer`. `learn`
compares what calls of two classes run: the bytecode of `forward`, of the methods and properties that it uses, and of
the functions that it calls in files of models, with constants and defaults, but without docstrings, annotations and the
names of local variables. All other functions, classes and objects must be the same ones. What `__init__` makes is not
compared: readers look at the module itself.
"""

from __future__ import annotations

import builtins
import dis
import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from fastvit.blocks.submodules import CannotFuse
from fastvit.integrations.forward import ClassHandler
from fastvit.integrations.transformers import classes, families, grids, layers, varlen

_HOME = "transformers.models."
# sets of names, and dictionaries by name
_TABLES: list[Any] = [file.HANDLERS for file in (layers, families, grids, varlen)]
_TABLES += [table for name, table in vars(classes).items() if name.isupper() and isinstance(table, set | dict)]
_learnt: set[type] = set()


def learn(kind: type[nn.Module]) -> None:
    """Add a class to the tables that have one with the same code."""
    if kind in _learnt or not kind.__module__.startswith(_HOME):
        return
    _learnt.add(kind)
    if not _reads_images(kind.__module__):
        return
    name = f"{kind.__module__}.{kind.__qualname__}"
    if any(name in table for table in _TABLES):
        return
    code = _code_of(kind)
    for table, originals in zip(_TABLES, _originals(), strict=True):
        original = originals.get(code)
        if isinstance(table, set) and original is not None:
            table.add(name)
        elif original is not None:
            entry = table[original]
            table[name] = replace(entry, read=partial(_read, entry.read)) if isinstance(entry, ClassHandler) else entry


learn._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as blocks/submodules.py's class_name: not traced


@functools.cache
def _reads_images(module: str) -> bool:
    """Return whether a file has a model of images. Language models have MLPs and RMSNorms with the same code, but are
    left alone: for one token at a time an op costs more than it saves."""
    try:
        return "pixel_values" in inspect.getsource(sys.modules[module])
    except (OSError, KeyError):  # no source, or no file of that name
        return False


def _read(read: Callable[[Any], Any], module: nn.Module) -> Any:
    """Read a copy, perhaps out of a pickle in a process that has not seen its classes."""
    learn(type(module))
    try:
        return read(module)
    except CannotFuse:  # not before: walking through the modules takes longer than reading them
        for part in module.modules():
            learn(type(part))
        return read(module)


@functools.cache
def _originals() -> list[dict[Hashable, str]]:
    """Return the classes of each table by their code."""
    return [
        {_code_of(kind): name for name in table if isinstance(name, str) and (kind := _class(name)) is not None}
        for table in _TABLES
    ]


def _class(name: str) -> Any:
    """Return the class of that name, or None if this version of transformers has none."""
    module, _, kind = name.rpartition(".")
    if not module.startswith(_HOME):
        return None
    try:
        return getattr(importlib.import_module(module), kind, None)
    except Exception:  # of a file of another model: RuntimeError, if torchvision does not fit torch
        return None


def _code_of(kind: type[nn.Module]) -> Hashable:
    return _comparable(kind.forward, kind, ()), _comparable(kind.__call__, kind, ())


def _comparable(value: Any, kind: type, within: tuple[FunctionType, ...]) -> Hashable:
    """Return what two copies of a value have in common. within: the functions that lead to it."""
    if isinstance(value, FunctionType):
        if value in within:
            return within.index(value)
        within = (*within, value)
        cells = [_comparable(cell.cell_contents, kind, within) for cell in value.__closure__ or ()]
        home, code = value.__globals__.get("__name__", ""), value.__code__
        if not home.startswith(_HOME):
            return home, code.co_qualname, *cells
        given = value.__defaults__, *(value.__kwdefaults__ or {}).items()
        return _steps(code, value.__globals__, kind, within), _comparable(given, kind, within), *cells
    if isinstance(value, property):
        return "property", _comparable(value.fget, kind, within)
    if isinstance(value, staticmethod | classmethod):
        return type(value).__name__, _comparable(value.__func__, kind, within)
    if isinstance(value, tuple):
        return tuple([_comparable(item, kind, within) for item in value])
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return type(value), repr(value)
    return "a logger" if isinstance(value, logging.Logger) else id(value)


def _steps(code: CodeType, namespace: dict[str, Any], kind: type, within: tuple[FunctionType, ...]) -> Hashable:
    """Return the instructions of a function with what they refer to."""
    steps: list[Hashable] = [code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], code.co_flags]
    steps.append(code.co_exceptiontable)
    for step in dis.get_instructions(code):
        refers_to: Hashable = step.argval
        if step.opcode in dis.haslocal:
            refers_to = step.arg
        elif isinstance(step.argval, CodeType):
            refers_to = _steps(step.argval, namespace, kind, within)
        elif step.opcode in dis.hasconst:
            refers_to = _comparable(step.argval, kind, within)
        elif step.opname == "LOAD_GLOBAL":
            value = namespace.get(step.argval, getattr(builtins, step.argval, None))
            refers_to = step.argval, _comparable(value, kind, within)
        elif step.opcode in dis.hasname and (own := _own_attribute(kind, step.argval)) is not None:
            refers_to = step.argval, _comparable(own, kind, within)
        steps.append((step.opname, refers_to))
    return tuple(steps)


def _own_attribute(kind: type, name: str) -> Any:
    """Return a class's attribute that nn.Module does not have."""
    own = inspect.getattr_static(kind, name, None)
    return None if own is inspect.getattr_static(nn.Module, name, None) else own
