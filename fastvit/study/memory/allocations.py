"""Follows every allocation and release of a run on fake tensors."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter, tree_map, tree_map_only, tree_unflatten

from fastvit import ops
from fastvit._base import which_triton
from fastvit.ops.attention.groups import tokens_of
from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime import registry
from fastvit.ops.runtime.backend import Route
from fastvit.study.memory.convolutions import Scratch, scratch_of

_ROUNDED = 512  # CUDA's caching allocator rounds up to multiples of it
_MULTIPROCESSORS = 132  # an H100's. The partial sums of norms have a row for each

# Ops of attention -> N, from their arguments
_TOKENS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._softmax.default: lambda x, *_: x.shape[-1],
    torch.ops.aten._safe_softmax.default: lambda x, *_: x.shape[-1],
    torch.ops.fastvit.attention_fwd.default: tokens_of,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: lambda q, *_: q.shape[2],
}
_SOFTMAX = (torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default)


@dataclass
class Storage:
    """One storage.

    Attributes:
        nbytes: bytes that it takes on the device.
        shape: of the first tensor seen with this storage.
        asked: bytes that were asked for.
    """

    nbytes: int
    shape: tuple[int, ...]
    asked: int


class TensorLayout(NamedTuple):
    """Describes a tensor without data, as far as an op depends on it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def without_data(leaves: Sequence[Any], nested: TreeSpec, device: str) -> Any:
    """Return an op's arguments and keywords as `OpTrace` has them, with tensors without data for their layouts."""

    def made(x: Any) -> Any:
        return torch.empty_strided(*x[:2], dtype=x.dtype, device=device) if isinstance(x, TensorLayout) else x

    return tree_map(made, tree_unflatten(leaves, nested), is_leaf=lambda x: isinstance(x, TensorLayout))


class OpTrace(NamedTuple):
    """One run of a fused op.

    Attributes:
        op: the overload.
        leaves, nested: its arguments and keywords, with `TensorLayout` for tensors, as `tree_flatten` returns them.
        events, storages: ranges (first, end) of those that came while it ran.
        outputs: the storages of those outputs that it has allocated.
    """

    op: Any
    leaves: tuple[Any, ...]
    nested: TreeSpec
    events: tuple[int, int]
    storages: tuple[int, int]
    outputs: tuple[int, ...]


@dataclass
class Allocations(TorchDispatchMode):
    """Records, within its context, every storage that is allocated or released, those inside fused ops included.

    Args:
        gpu: let the fused ops' Triton launchers allocate, as on a GPU; else PyTorch's functions, as on a CPU.
    """

    gpu: bool
    storages: list[Storage] = field(default_factory=list)
    events: list[tuple[int, bool]] = field(default_factory=list)  # storage, True if it was allocated
    ops: list[OpTrace] = field(default_factory=list)
    tokens: int = 0
    scores: set[int] = field(default_factory=set)  # numbers of elements that softmax returned
    _alive: dict[int, tuple[int, Any]] = field(default_factory=dict)  # address -> storage, weak reference

    _inside: bool = False
    _context: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        super().__init__()

    def __enter__(self) -> Allocations:
        self._context.enter_context(registry.run_by(self._run_op))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._context.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # half of all calls on fake tensors
            return args[0].fake_device
        first = len(self.storages)
        self._count_tokens(func, args)
        if self._inside and func in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default):
            return 0  # an op reads only seeds; fake tensors have no values
        if _changes_nothing(func, args):
            return args[0] if isinstance(args[0], Tensor) else None
        out = func(*args, **(kwargs or {}))
        scratch = Scratch() if self.gpu else scratch_of(func, args, out)
        for group in scratch.before:
            self._release(self._allocate(group))
        held = self._allocate(scratch.with_outputs)
        self.see(out)
        self._release(held)
        if func in _SOFTMAX:
            self.scores.add(out.numel())
        if not self._inside:
            self.ran(func, args, kwargs or {}, out, first)
        return out

    def _run_op(self, op: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        self._count_tokens(op, args)
        events, storages = len(self.events), len(self.storages)
        outermost, self._inside = not self._inside, True
        try:
            route = Route.TRITON if self.gpu else Route.ATEN
            out = registry.IMPLEMENTATIONS[op](*args, route=route, **keywords)
        finally:
            self._inside = not outermost
        outputs = tuple(number for number in self.see(out) if number >= storages)  # others were written in place
        if outermost:
            leaves, nested = tree_flatten(tree_map_only(Tensor, TensorLayout.of, (args, keywords)))
            came = (events, len(self.events)), (storages, len(self.storages))
            self.ops.append(OpTrace(op, tuple(leaves), nested, *came, outputs))
            self.ran(op, args, {}, out, storages)
        return out

    def ran(self, op: Any, args: tuple[Any, ...], keywords: dict[str, Any], out: Any, first: int) -> None:
        """Called after each op that runs within no other, with its arguments, its result, and the first storage that it
        may have allocated. For classes that record more."""

    def _count_tokens(self, func: Any, args: tuple[Any, ...]) -> None:
        if (tokens := _TOKENS.get(func)) is not None:
            self.tokens = self.tokens or tokens(*args)

    def _allocate(self, sizes: tuple[int, ...]) -> range:
        """Record scratch memory of an op, which no tensor shows. Return its storages."""
        first = len(self.storages)
        self.storages += (Storage(nbytes, (), nbytes) for nbytes in sizes)
        held = range(first, len(self.storages))
        self.events += ((number, True) for number in held)
        return held

    def _release(self, held: range) -> None:
        self.events += ((number, False) for number in held)

    def see(self, tensors: Any) -> list[int]:
        """Return the storages of these tensors, and record those that are new."""
        return [self._see(t) for t in tree_iter(tensors) if isinstance(t, Tensor)]

    def _see(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            asked = storage.nbytes()
            number = len(self.storages)
            self.storages.append(Storage(self.rounded(asked), tuple(tensor.shape), asked))
            self.events.append((number, True))
            self._alive[key] = number, weakref.ref(storage, partial(self._gone, key))
        return self._alive[key][0]

    def _gone(self, key: int, _: Any) -> None:
        number, _ = self._alive.pop(key)
        self.events.append((number, False))

    def rounded(self, nbytes: Any) -> Any:
        """Return how many bytes the device's allocator takes for so many. An integer or an array."""
        return -(-nbytes // _ROUNDED) * _ROUNDED if self.gpu else nbytes

    def alive(self) -> set[int]:
        """Return the storages that are not released."""
        return {number for number, _ in self._alive.values()}

    def is_attention_matrix(self, storage: Storage) -> bool:
        """Tell whether a storage has the shape (..., N, N) and as many elements as a result of softmax."""
        return storage.shape[-2:] == (self.tokens, self.tokens) and math.prod(storage.shape) in self.scores

    def held(self, first: int, last: int | None = None, of: set[int] | None = None) -> set[int]:
        """Return the storages in use at the peak between two events.

        Args:
            first, last: the peak is searched from `first` up to, not including, `last`.
            of: count these storages only; None for all.
        """
        events = [(i, n, came) for i, (n, came) in enumerate(self.events[:last]) if of is None or n in of]
        now, largest, when = 0, 0, -1
        for i, number, came in events:
            now += self.storages[number].nbytes if came else -self.storages[number].nbytes
            if i >= first and now > largest:
                largest, when = now, i
        alive: set[int] = set()
        for i, number, came in events:
            if i <= when:
                (alive.add if came else alive.discard)(number)
        return alive

    def bytes_of(self, numbers: Iterable[int]) -> int:
        """Return the sum of the bytes of these storages."""
        return sum(self.storages[number].nbytes for number in numbers)


def _changes_nothing(func: Any, args: Any) -> bool:
    """Tell whether func is pointwise, in place, and on tensors without values only: most of an optimizer's step."""
    if torch.is_grad_enabled() or not _is_in_place(func):
        return False
    return all(isinstance(t, FakeTensor) for t in ([args[0]] if isinstance(args[0], Tensor) else args[0]))


@functools.cache
def _is_in_place(func: Any) -> bool:
    name = func._schema.name
    return name.endswith("_") and (torch.Tag.pointwise in func.tags or name.startswith("aten::_foreach_"))


@contextlib.contextmanager
def as_on(gpu: bool) -> Iterator[None]:
    """Within the context, if `gpu`, launchers of Triton kernels allocate their outputs but launch nothing."""
    if not gpu:
        yield
        return
    which_triton.check("planning for a GPU")
    from fastvit.ops.runtime.launch import nothing_launched

    warned, before = backends._warned, set(backends._warned)
    with nothing_launched(_MULTIPROCESSORS), ops.use_backend(backends.settings()[0], strict=False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fallbacks to ATen warn when they really run
            yield
        warned.intersection_update(before)
