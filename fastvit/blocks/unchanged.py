"""Read a module once, and again when it has changed.

unchanged.c records what a module and the modules in it contain: parameters, buffers, submodules, hooks, modes, other
attributes, and the versions of their classes. A description is kept if it follows from that:

- Its tensors are parameters. One that a reader computes, such as joined biases, depends on values and on grad mode.
- Its numbers depend on no tensor. The default eps of RMSNorm does: the weight's dtype can change in place.
- Its parts and the module are of the classes below. Readers of other descriptions may compute numbers, those of
  transformers look at configurations and at a context variable, and a subclass may compute attributes, as those do that
  `parametrize` makes. Modules in the module are of known classes too, as `submodules` checks.

What is kept has weak references to modules and addresses of tensors, so that it keeps none alive and lets PyTorch swap
tensors. Copy and pickle of the module do not see it. A module with an attribute that could change inside, such as a
configuration, is read in every call from then on. So is every module without a C compiler, and while torch.compile
traces.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from fastvit.blocks.spec import AdaptedLinear, AttentionSpec, HalfSpec, MlpSpec, PlainLinear
from fastvit.ops import Norm
from fastvit.ops.runtime import native

T = TypeVar("T")
_CLASSES = {tuple, Norm, PlainLinear, AdaptedLinear, AttentionSpec, MlpSpec, HalfSpec}
_DEFAULT_EPS = {torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps}
_LIBRARIES = "fastvit.", "timm.", "torchvision.", "open_clip.", "dinov2.", "dinov3.", "torch.nn.modules."

# module -> (reader, record, template of the description, or False if reading raised an error). The record is None if
# the module has to be read in every call.
_kept: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any, Any]] = weakref.WeakKeyDictionary()


@functools.cache
def compiled() -> Any:
    return native.load(Path(__file__).with_suffix(".c"))


def tensors_in(record: list[Any]) -> dict[int, complex]:
    """Return what stands in a template for each tensor of a record, by the tensor's id."""
    kind = compiled().TENSOR
    return {int(item.imag): item for item in record if type(item) is complex and item.real == kind}


def read_once(read: Callable[[Any], T], module: nn.Module) -> T:
    """Return read(module), which depends on nothing but the module: the last result if the module has not changed."""
    if is_dynamo_compiling() or compiled() is None:
        return read(module)
    reader, record, template = _kept.get(module, (None, None, None))
    if reader is not read:
        return _read_and_keep(read, module)
    if record is None:
        return read(module)
    description: Any = compiled().recall(module, record, template, None)
    if description is None:
        return _read_and_keep(read, module)
    return description or read(module)


def _read_and_keep(read: Callable[[Any], T], module: nn.Module) -> T:
    library = compiled()
    is_known = type(module).__module__.startswith(_LIBRARIES)
    record, template = library.record(module, None, None) if is_known else None, False
    try:
        description = read(module)
        if record is not None:
            try:
                template = _template(description, tensors_in(record))
            except _NotKept:
                record = None
    finally:
        # compared, because another thread may have changed the module since
        if record is None or library.recall(module, record, True, None):
            _kept[module] = read, record, template
    return description


class _NotKept(Exception):
    """This description does not follow from what the module contains."""


def _template(part: Any, tensors: dict[int, complex]) -> Any:
    """Return a description with what stands for parameters and modules."""
    kind = type(part)
    if kind in _CLASSES:
        return tuple.__new__(kind, [_template(item, tensors) for item in part])
    if part is None or kind in (bool, int, str) or (kind is float and part not in _DEFAULT_EPS):
        return part
    if isinstance(part, nn.Module):
        return weakref.ref(part)
    if kind is Parameter and id(part) in tensors:
        return tensors[id(part)]
    raise _NotKept
