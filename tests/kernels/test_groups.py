"""Groups of a kernel's arguments: what Triton makes of them."""

import importlib
import pkgutil
from typing import get_type_hints

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl

import fastvit.kernels

MODULES = [importlib.import_module(f"fastvit.kernels.{m.name}") for m in pkgutil.iter_modules(fastvit.kernels.__path__)]
# Its strides are multiplied by a constexpr: without it they would not compile.
LOUD = {"Tokens"}


def groups():
    classes = {v for module in MODULES for v in vars(module).values() if isinstance(v, type) and issubclass(v, tuple)}
    return {group.__name__: get_type_hints(group) for group in classes if hasattr(group, "_fields")}


def test_no_group_in_a_group_has_a_constexpr():
    """In a loop or a branch triton 3.6 takes it for None: masks with dropout were read as one row for all queries."""
    all_groups = groups()
    inner = {kind.__name__ for fields in all_groups.values() for kind in fields.values() if hasattr(kind, "_fields")}
    assert {"Mask", "Tokens"} <= inner
    for name in inner - LOUD:
        assert tl.constexpr not in all_groups[name].values(), name
