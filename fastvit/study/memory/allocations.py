"""Every allocation and release of a run on fake tensors: what a step would hold, at its most, and of what."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter

from fastvit import ops
from fastvit.ops.runtime import dispatch, registry

_ROUNDED = 512  # CUDA's caching allocator hands out multiples of it
_MULTIPROCESSORS = 132  # of the GPU that is planned for: an H100's. The partial sums of norms are a row for each

# What attention runs -> N of its arguments
_TOKENS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._softmax.default: lambda x, *_: x.shape[-1],
    torch.ops.aten._safe_softmax.default: lambda x, *_: x.shape[-1],
    torch.ops.fastvit.attention_fwd.default: lambda q, *_: q.shape[1],
    torch.ops.fastvit.attention_qkvpacked_fwd.default: lambda qkv, *_: qkv.shape[1],
    torch.ops.fastvit.attention_varlen_fwd.default: lambda q, *_: q.shape[0],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: lambda q, *_: q.shape[2],
}
_SOFTMAX = (torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default)


@dataclass
class Block:
    """A storage: its bytes on the device, shape of the first tensor that was seen of it, and the bytes that were asked
    for."""

    nbytes: int
    shape: tuple[int, ...]
    asked: int


class Laid(NamedTuple):
    """All that an op sees of a tensor without data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Call(NamedTuple):
    """A fused op that was run: which, on what arguments (their leaves, with `Laid` for tensors, and how these
    were nested), which events and blocks came within it, from the first to before the last, and the blocks of its
    outputs that are new."""

    op: Any
    leaves: tuple[Any, ...]
    nested: TreeSpec
    events: tuple[int, int]
    blocks: tuple[int, int]
    outputs: tuple[int, ...]


@dataclass
class Allocations(TorchDispatchMode):
    """Within the context every storage that comes or goes is an event, what a fused op allocates by itself included.

    gpu: as on a GPU, where the ops' Triton launchers allocate; else as on a CPU, where PyTorch's functions do.
    """

    gpu: bool
    blocks: list[Block] = field(default_factory=list)
    events: list[tuple[int, bool]] = field(default_factory=list)  # block, whether it came
    calls: list[Call] = field(default_factory=list)
    tokens: int = 0
    scores: set[int] = field(default_factory=set)  # elements of what softmax returned
    _alive: dict[int, tuple[int, Any]] = field(default_factory=dict)  # storage's address -> block, weak reference

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
        if func is torch.ops.prim.device.default:  # half of all calls, of fake tensors
            return args[0].fake_device
        self._count_tokens(func, args)
        if self._inside and func in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default):
            return 0  # a seed, the only thing that an op reads; fakes have no values
        if _changes_nothing(func, args):  # most of an optimizer's step
            return args[0] if isinstance(args[0], Tensor) else None
        out = func(*args, **(kwargs or {}))
        self.see(out)
        if func in _SOFTMAX:
            self.scores.add(out.numel())
        return out

    def _run_op(self, op: Any, args: tuple[Any, ...]) -> Any:
        self._count_tokens(op, args)
        events, blocks = len(self.events), len(self.blocks)
        outermost, self._inside = not self._inside, True
        try:
            out = registry.IMPLEMENTATIONS[op](*args, backend="triton" if self.gpu else "aten")
        finally:
            self._inside = not outermost
        outputs = tuple(number for number in self.see(out) if number >= blocks)  # others are written in place
        if outermost:
            leaves, nested = tree_flatten(args)
            laid = (Laid(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in leaves)
            came = (events, len(self.events)), (blocks, len(self.blocks))
            self.calls.append(Call(op, tuple(laid), nested, *came, outputs))
        return out

    def _count_tokens(self, func: Any, args: tuple[Any, ...]) -> None:
        if (tokens := _TOKENS.get(func)) is not None:
            self.tokens = self.tokens or tokens(*args)

    def see(self, tensors: Any) -> list[int]:
        """The blocks of these tensors; those that are new have come."""
        return [self._see(t) for t in tree_iter(tensors) if isinstance(t, Tensor)]

    def _see(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            asked = storage.nbytes()
            number = len(self.blocks)
            self.blocks.append(Block(self.rounded(asked), tuple(tensor.shape), asked))
            self.events.append((number, True))
            self._alive[key] = number, weakref.ref(storage, partial(self._gone, key))
        return self._alive[key][0]

    def _gone(self, key: int, _: Any) -> None:
        number, _ = self._alive.pop(key)
        self.events.append((number, False))

    def rounded(self, nbytes: Any) -> Any:
        """What so many bytes take of the device: an integer, or an array of them."""
        return -(-nbytes // _ROUNDED) * _ROUNDED if self.gpu else nbytes

    def alive(self) -> set[int]:
        return {number for number, _ in self._alive.values()}

    def is_attention_matrix(self, block: Block) -> bool:
        """As many elements as softmax returned, N x N."""
        N, elements = self.tokens, 1
        for extent in block.shape:
            elements *= extent
        return block.shape[-2:] == (N, N) and elements in self.scores

    def held(self, first: int, last: int | None = None, of: set[int] | None = None) -> set[int]:
        """The blocks that are there at the moment when they are most, from the event `first` on and before `last`.
        of: no others."""
        events = [(i, n, came) for i, (n, came) in enumerate(self.events[:last]) if of is None or n in of]
        now, most, when = 0, 0, -1
        for i, number, came in events:
            now += self.blocks[number].nbytes if came else -self.blocks[number].nbytes
            if i >= first and now > most:
                most, when = now, i
        there: set[int] = set()
        for i, number, came in events:
            if i <= when:
                (there.add if came else there.discard)(number)
        return there

    def bytes_of(self, numbers: Iterable[int]) -> int:
        return sum(self.blocks[number].nbytes for number in numbers)


def _changes_nothing(func: Any, args: Any) -> bool:
    """Whether func computes in place, element by element, on tensors of the meta device, which have no values."""
    if not _is_in_place(func):
        return False
    return all(t.is_meta for t in ([args[0]] if isinstance(args[0], Tensor) else args[0]))


@functools.cache
def _is_in_place(func: Any) -> bool:
    name = func._schema.name
    return name.endswith("_") and (torch.Tag.pointwise in func.tags or name.startswith("aten::_foreach_"))


@contextlib.contextmanager
def as_on(gpu: bool) -> Iterator[None]:
    """Within the context the launchers of Triton kernels allocate and launch nothing."""
    if not gpu:
        yield
        return
    if not dispatch.HAVE_TRITON:
        raise ImportError("planning for a GPU asks the launchers of the Triton kernels: pip install triton")
    from fastvit.ops.runtime.launch import nothing_launched

    warned, before = registry._warned, set(registry._warned)
    with nothing_launched(_MULTIPROCESSORS), ops.use_backend(dispatch.settings()[0], strict=False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what falls back to ATen, says so when it runs
            yield
        warned.intersection_update(before)
