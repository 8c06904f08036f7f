"""Count what Triton kernels load from and store to global memory, in Triton's interpreter.

    with count() as traffic:          # in a process with TRITON_INTERPRET=1
        ops.layer_norm(x, weight, bias)
    for launch in traffic.launches:
        print(launch.kernel, launch.loaded, launch.stored, launch.least)

Bytes are those of unmasked lanes: what the programs ask of the caches. HBM delivers a byte once as long as L2 holds it.
Every address is attributed to the tensor argument that contains it. An address in no argument (out of bounds) raises,
and so does an element that two programs of a launch store (a race).
"""

from __future__ import annotations

import bisect
import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime import interpreter

from fastvit.ops.runtime.launch import warn_of_bfloat16

Flags = NDArray[np.bool_]


@dataclass
class Argument:
    """Bytes moved for one tensor argument in one launch."""

    name: str
    loaded: int = 0
    loaded_per_program: int = 0  # as if every program loaded an element only once
    loaded_once: int = 0  # as if the launch did
    stored: int = 0
    stored_once: int = 0

    @property
    def readers(self) -> float:
        """Mean number of programs that load an element."""
        return self.loaded_per_program / self.loaded_once if self.loaded else 0.0


@dataclass
class CountedLaunch:
    kernel: str
    arguments: dict[str, Argument]
    storages: list[_Storage] = field(repr=False)

    def _total(self, *what: str) -> int:
        return sum(getattr(argument, name) for argument in self.arguments.values() for name in what)

    @property
    def loaded(self) -> int:
        return self._total("loaded")

    @property
    def stored(self) -> int:
        return self._total("stored")

    @property
    def least(self) -> int:
        """Bytes if every element that is loaded or stored is loaded or stored once."""
        return self._total("loaded_once", "stored_once")

    @property
    def least_tiled(self) -> int:
        """Bytes if every program loads each element that it needs once, and results are stored once."""
        return self._total("loaded_per_program", "stored_once")


class _Storage:
    """One storage among a launch's arguments, in units of the smallest element of its tensors (granules)."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors  # kept alive, so that no other tensor gets the address
        first = next(iter(tensors.values())).untyped_storage()
        self.base, self.nbytes = first.data_ptr(), first.nbytes()
        self.granule = min(t.element_size() for t in tensors.values())
        count = -(-self.nbytes // self.granule)
        self.names = list(tensors)
        self.owner = np.full(count, -1, np.int8)
        for i, t in enumerate(tensors.values()):
            width = t.element_size() // self.granule
            view = torch.from_numpy(self.owner).as_strided(
                (*t.shape, width), (*(s * width for s in t.stride()), 1), t.storage_offset() * width
            )
            view[view < 0] = i
        self.loaded: Flags = np.zeros(count, bool)
        self.stored: Flags = np.zeros(count, bool)
        self.loader = np.full(count, -1, np.int32)  # the last program that loaded the granule
        self.storer = np.full(count, -1, np.int32)


@dataclass
class Traffic:
    launches: list[CountedLaunch] = field(default_factory=list)

    @property
    def moved(self) -> int:
        return sum(launch.loaded + launch.stored for launch in self.launches)

    @property
    def least(self) -> int:
        """Bytes if all launches are one operation: inputs are loaded once and results stored once. What one launch
        stores for a later one is neither."""
        total = 0
        seen: dict[int, list[Flags]] = {}
        for s in (s for launch in self.launches for s in launch.storages):
            inputs, stored, used = seen.setdefault(s.base, [np.zeros(len(s.loaded), bool) for _ in range(3)])
            before = int(inputs.sum() + (stored & ~used).sum())
            inputs |= s.loaded & ~stored
            used |= s.loaded & stored
            stored |= s.stored
            total += (int(inputs.sum() + (stored & ~used).sum()) - before) * s.granule
        return total


class _Counter:
    """Counts one launch at a time; the interpreter runs its programs one after another."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._bases: list[int] = []

    def begin(self, kernel: str, arguments: dict[str, Any]) -> None:
        tensors = {name: t for name, t in arguments.items() if isinstance(t, Tensor) and t.numel()}
        by_storage: dict[int, dict[str, Tensor]] = {}
        for name, t in tensors.items():
            by_storage.setdefault(t.untyped_storage().data_ptr(), {})[name] = t
        storages = [_Storage(by_storage[base]) for base in sorted(by_storage)]
        self._bases = [s.base for s in storages]
        self.launch = CountedLaunch(kernel, {name: Argument(name) for name in tensors}, storages)
        self.traffic.launches.append(self.launch)

    def access(self, builder: Any, pointers: Any, mask: Any, *, store: bool) -> None:
        addresses = np.asarray(pointers.data)
        if mask is not None:
            addresses = addresses[np.broadcast_to(np.asarray(mask.data, bool), addresses.shape)]
        (x, y, z), (nx, ny, _) = builder.grid_idx, builder.grid_dim
        program = x + nx * (y + ny * z)
        if addresses.size == 0:
            return
        itemsize = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        verb = "stores to" if store else "loads from"
        low, high = int(addresses.min()), int(addresses.max())
        index = bisect.bisect_right(self._bases, low) - 1
        storage = self.launch.storages[max(index, 0)]
        if index < 0 or high + itemsize > storage.base + storage.nbytes:
            raise MemoryError(f"{self.launch.kernel} {verb} memory outside its arguments")
        at = (addresses.ravel().astype(np.int64) - storage.base) // storage.granule
        if storage.owner[at].min() < 0:
            raise MemoryError(f"{self.launch.kernel} {verb} a part of {storage.names} that no argument covers")
        self._move(storage, at, program, itemsize, store)

    def _move(self, s: _Storage, at: Any, program: int, itemsize: int, store: bool) -> None:
        last, touched = (s.storer, s.stored) if store else (s.loader, s.loaded)
        before = last[at]
        if store and ((before >= 0) & (before != program)).any():
            names = sorted({s.names[i] for i in set(s.owner[at].tolist())})
            raise MemoryError(f"{self.launch.kernel}: two programs store one element of {', '.join(names)}")
        fresh = np.unique(at[before != program])
        last[fresh] = program
        once = fresh[~touched[fresh]]
        for offset in range(itemsize // s.granule):
            touched[once + offset] = True
        moved = (np.bincount(s.owner[some], minlength=len(s.names)) * itemsize for some in (at, fresh, once))
        for name, every, by_program, by_launch in zip(s.names, *moved, strict=True):
            argument = self.launch.arguments[name]
            if store:
                argument.stored += int(every)
                argument.stored_once += int(by_launch)
            else:
                argument.loaded += int(every)
                argument.loaded_per_program += int(by_program)
                argument.loaded_once += int(by_launch)


@contextlib.contextmanager
def count(*, compute: bool = True) -> Iterator[Traffic]:
    """Count every launch within the context. compute=False leaves out matmuls, which take most of the interpreter's
    time, for kernels whose addresses depend on no value; that is all kernels of this package."""
    if not compute:  # products do not matter then, and the interpreter's probe of bfloat16 must not be counted
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warn_of_bfloat16()
    counter = _Counter()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, to_host = builder.create_masked_load, builder.create_masked_store, executor._init_args_hst

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        counter.access(self, pointers, mask, store=False)
        return load(self, pointers, mask, *rest, **options)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        counter.access(self, pointers, mask, store=True)
        return store(self, pointers, value, mask, *rest, **options)

    def arguments(self: Any, positional: Any, keywords: Any) -> Any:
        values, by_name = to_host(self, positional, keywords)
        counter.begin(self.fn.__name__, dict(zip(self.arg_names, values, strict=False)) | by_name)
        return values, by_name

    patches: dict[str, Any] = {"create_masked_load": masked_load, "create_masked_store": masked_store}
    atomic = NotImplementedError("atomics are not counted: no kernel of this package has one")
    patches |= {name: mock.Mock(side_effect=atomic) for name in ("create_atomic_rmw", "create_atomic_cas")}
    if not compute:
        patches["create_dot"] = lambda self, a, b, accumulator, *rest: accumulator
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(builder, **patches))
        stack.enter_context(mock.patch.object(executor, "_init_args_hst", arguments))
        yield counter.traffic
