"""Record a call of an op as a plan, which `replay.c` runs without Python in between.

    recorder = Recorder(inputs)
    with recorder:
        outputs = function(inputs)
    plan = recorder.plan(outputs)  # plan(inputs) -> outputs, for inputs that `begin` finds alike

A recorder is a TorchFunctionMode: it sees every function of PyTorch that the call runs, and every launch. It writes
down what a later call has to do. Allocations and views need no function; what only looks at a tensor's shape, dtype or
strides is left out, since it is the same in every call like this one. A function that returns anything else, such as a
tensor's values as numbers, cannot be recorded: there is no plan then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from fastvit.ops.runtime import native
from fastvit.ops.runtime.torch_private import (
    DisableTorchFunction,
    current_function_mode,
    is_torch_function_mode_enabled,
)

_SOURCE = Path(__file__).with_name("replay.c")
T = TypeVar("T")
Function = Callable[[list[Any]], tuple[Any, ...]]
Replay = Callable[[list[Any]], Any]  # inputs -> results, or None

# as in replay.c
_CONSTANT, _TENSOR, _ADDRESS, _STREAM, _LIST, _TUPLE = range(6)
_EMPTY, _VIEW, _CALL = range(3)
_ANYTHING, _A_TENSOR, _AN_ALIGNED_TENSOR = range(3)

_ALLOCATE = {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}
# what looks at nothing but what `begin` compares
_LOOK = {torch.promote_types} | {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "is_cuda", "is_cpu", "is_nested", "ndim", "requires_grad", "itemsize")
} | {
    getattr(Tensor, name)
    for name in ("dim", "size", "stride", "numel", "is_contiguous", "element_size", "is_floating_point", "__len__")
}  # fmt: skip
# what returns its tensor where there is nothing to do
_CONVERT = {
    Tensor.to, Tensor.contiguous, Tensor.float, Tensor.reshape, Tensor.view, Tensor.flatten, Tensor.expand,
    Tensor.unflatten,
}  # fmt: skip
# what returns tensors whose shapes depend on values
_VARYING = {"nonzero", "masked_select", "unique", "unique_consecutive", "bincount", "argwhere"}
_CASTS = {torch.bfloat16: Tensor.bfloat16, torch.float16: Tensor.half, torch.float32: Tensor.float}


@functools.cache
def available() -> Any:
    """Return the module of `replay.c`, or None if it cannot be built here, or this torch lacks what it needs."""
    if current_function_mode is None or DisableTorchFunction is None:
        return None
    module = native.load(_SOURCE)
    is_ready = module is not None and module.set_up(torch.empty(0), torch.nn.Parameter, torch.empty_strided)
    return module if is_ready else None


def why_not() -> str | None:
    """Return why calls are not replayed on this machine, or None if they are."""
    if available() is not None:
        return None
    return native.why_not(_SOURCE) or f"torch {torch.__version__} has changed inside"


def current() -> Recorder | None:
    """Return the recorder of the call that this thread is in, if it is being recorded."""
    if is_torch_function_mode_enabled is None or not is_torch_function_mode_enabled():
        return None
    mode = current_function_mode()
    return mode if type(mode) is Recorder else None


def constant(make: Callable[[], T]) -> T:
    """Return make(): a tensor, or a tuple of them, that every call like this one reads and none writes. A plan keeps
    them, and does not repeat how they are made."""
    if (recorder := current()) is None:
        return make()
    with DisableTorchFunction():
        made = make()
        recorder.hold(_tensors(made))
    return made


class Recorder(TorchFunctionMode):
    """Writes down what happens in its context.

    inputs: of the call: tensors and anything else.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()
        self._numbers: Any = WeakIdKeyDictionary()  # tensor -> its number
        self._count = len(inputs)
        self._inputs = [_A_TENSOR if isinstance(t, Tensor) else _ANYTHING for t in inputs]
        self._bases = [*range(len(inputs))]  # by number: the tensor that it is a view of, which is none, or itself
        self._starts: dict[int, int] = {}  # of tensors that are no views: where they begin in memory, in elements
        self._steps: list[tuple[int, tuple[int, ...], tuple[Any, ...], set[int]]] = []  # kind, made, rest, last: read
        self.refusal: str | None = None  # why the call cannot be recorded
        for number, t in enumerate(inputs):
            if isinstance(t, Tensor):
                self._numbers.setdefault(t, number)
                self._starts[number] = int(t.storage_offset())

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.refusal is None and function not in _LOOK:
            try:
                self._note(function, args, kwargs or {}, result)
            except _CannotRecord as reason:
                self.refusal = str(reason)
        return result

    def _note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        is_sequence = isinstance(result, tuple | list)
        results = [*result] if is_sequence else [args[0] if function is Tensor.__setitem__ else result]
        tensors = [t for t in results if t is not None]
        if not tensors or not all([isinstance(t, Tensor) for t in tensors]):
            raise _CannotRecord(f"{_name(function)} returns {type(result).__name__}")
        if function in _ALLOCATE:
            self._add(_EMPTY, [self._new(result)], (*_extents(result), *_placement(result)), [])
            return
        read = _tensors((args, kwargs))
        if _name(function) in _VARYING or (function is Tensor.__getitem__ and any(map(_is_mask, read[1:]))):
            raise _CannotRecord(f"{_name(function)} returns a shape that depends on values")
        if all(t in self._numbers for t in tensors):
            if function in _CONVERT:
                return
            results, is_sequence = [], False  # it has written into its arguments
        elif all(_owner(t, read) is not None for t in results):
            for t in results:
                self._view(t, _owner(t, read))
            return
        if function is torch.nn.functional.linear and not kwargs and _is_product(*args):
            self._note_linear(result, *args)
            return
        function, args = _shorter(function, args, kwargs)
        arguments = tuple([self._argument(a) for a in (*args, *kwargs.values())])
        made = [-1 if t is None else self._new(t) for t in results]
        self._add(_CALL, made, (function, arguments, tuple(kwargs) or None, is_sequence), read)

    def _note_linear(self, result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """Write down what PyTorch's function does, in half the time: a product of matrices."""
        rows, transposed, product = x.view(-1, x.shape[-1]), weight.t(), result.view(-1, result.shape[-1])
        self._view(rows, x)
        self._view(transposed, weight)
        factors = [t for t in (bias, rows, transposed) if t is not None]
        function = torch.mm if bias is None else torch.addmm
        arguments = tuple([self._argument(t) for t in factors])
        self._add(_CALL, [self._new(product)], (function, arguments, None, False), factors)
        self._view(result, product)

    def launch(self, launch: Any, tensors: tuple[Tensor | None, ...]) -> None:
        """Run a launch, and write down what it calls: Triton's launcher, with addresses."""
        refusal, self.refusal = self.refusal, "a kernel was refused"
        with DisableTorchFunction():
            direct = launch.directly(*tensors)
            self.refusal = refusal or self._note_launch(direct, tensors)

    def _note_launch(self, direct: Any, tensors: tuple[Tensor | None, ...]) -> str | None:
        if direct is None:
            return "a kernel is launched by Triton's public way, or for other addresses"
        function, before, stream, after, rest = direct
        read = [t for t in tensors if t is not None]
        try:
            addresses = [(_CONSTANT, 0) if t is None else (_ADDRESS, self._number(t)) for t in tensors]
        except _CannotRecord as reason:
            return str(reason)
        constants = [[(_CONSTANT, value) for value in values] for values in (before, after, rest)]
        arguments = *constants[0], (_STREAM, stream), *constants[1], *addresses, *constants[2]
        for t in read:
            if (base := self._bases[self._number(t)]) < len(self._inputs):
                if (t.storage_offset() - self._starts[base]) * t.itemsize % 16:
                    return "a launch reads a part of an input that is not aligned as the input is"
                self._inputs[base] = _AN_ALIGNED_TENSOR
        self._add(_CALL, [], (function, arguments, None, False), read)
        return None

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Write down that later calls read these tensors."""
        for t in tensors:
            self._add(_CALL, [self._new(t)], (functools.partial(_itself, t), (), None, False), [])

    def plan(self, outputs: Sequence[Tensor | None]) -> Replay | None:
        """Return a plan that makes these outputs, or None if there is none; `refusal` says why."""
        try:
            numbers = [-1 if t is None else self._number(t) for t in outputs]
        except _CannotRecord as reason:
            self.refusal = self.refusal or str(reason)
            return None
        self._make_real_views({*numbers})
        if self.refusal is not None:
            return None
        last = {number: i for i, (*_, read) in enumerate(self._steps) for number in read}
        dead: list[list[int]] = [[] for _ in self._steps]
        for number, i in last.items():
            if number not in numbers:
                dead[i].append(number)
        steps = [(kind, made, tuple(dead[i]), rest) for i, (kind, made, rest, _) in enumerate(self._steps)]
        plan: Replay = available().Plan(bytes(self._inputs), self._count, tuple(steps), tuple(numbers))
        return plan

    def _make_real_views(self, outputs: set[int]) -> None:
        """Let PyTorch make the outputs that are views of inputs: an edit of one is then seen in the other."""
        for i, (kind, made, rest, read) in enumerate(self._steps):
            if kind == _VIEW and made[0] in outputs and self._bases[made[0]] < len(self._inputs):
                sizes, strides, base, offset = rest
                if offset:
                    self.refusal = "a part of an input is an output"
                arguments = (_TENSOR, base), (_CONSTANT, sizes), (_CONSTANT, strides)
                self._steps[i] = _CALL, made, (_view_of, arguments, None, False), read

    def _number(self, t: Tensor) -> int:
        number: int | None = self._numbers.get(t)
        if number is None:
            raise _CannotRecord(f"a tensor of shape {tuple(t.shape)} comes from elsewhere")
        return number

    def _new(self, t: Tensor, base: int | None = None) -> int:
        number = self._numbers[t] = self._count
        self._bases.append(number if base is None else base)
        if base is None:
            self._starts[number] = int(t.storage_offset())
        self._count += 1
        return number

    def _add(self, kind: int, made: list[int], rest: tuple[Any, ...], read: Sequence[Tensor]) -> None:
        numbers = {*map(self._number, read), *(number for number in made if number >= 0)}
        self._steps.append((kind, tuple(made), rest, numbers))

    def _view(self, t: Tensor, owner: Tensor) -> None:
        base = self._bases[self._number(owner)]
        made, offset = self._new(t, base), t.storage_offset() - self._starts[base]
        self._steps.append((_VIEW, (made,), (*_extents(t), base, offset), {made, base}))

    def _argument(self, value: Any) -> tuple[int, Any]:
        if isinstance(value, Tensor):
            return _TENSOR, self._number(value)
        if isinstance(value, tuple | list) and _tensors(value):
            return _LIST if isinstance(value, list) else _TUPLE, tuple([self._argument(member) for member in value])
        if isinstance(value, dict):
            raise _CannotRecord("a dict is an argument")  # of tensors, maybe
        return _CONSTANT, value


class _CannotRecord(Exception):
    pass


def _itself(t: Tensor) -> Tensor:
    return t


def _view_of(t: Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    with torch.enable_grad():  # else autograd would not say, of an edit, what was edited
        return torch.as_strided(t, size, stride)


def _is_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether F.linear multiplies matrices, the rows of x, which are not copied, and the weight's, and adds the
    bias before it rounds, which it does not if that is expanded."""
    if bias is not None and not bias.is_contiguous():
        return False
    return x.is_contiguous() and x.dim() >= 2 == weight.dim() and x.numel() > 0 < weight.numel()


def _shorter(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Return a function that does the same with less work on the host, and its arguments."""
    if isinstance(function, torch._ops.OpOverload):
        return function._op, args  # without a call in Python
    if function is Tensor.to and len(args) == 2 and not kwargs and args[1] in _CASTS:
        return _CASTS[args[1]], args[:1]
    if (
        function in (torch.matmul, Tensor.matmul, Tensor.__matmul__)
        and not kwargs
        and args[0].dim() == args[1].dim() == 2
    ):
        return torch.mm, args
    return function, args


def _name(function: Any) -> str:
    return getattr(function, "__name__", str(function))


def _is_mask(t: Tensor) -> bool:
    return t.dtype in (torch.bool, torch.uint8)


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [t for value in values for t in _tensors(value)]


def _owner(t: Any, read: list[Tensor]) -> Any:
    """Return the tensor, of those that a function reads, that t is a view of, or None."""
    for other in read if t is not None else ():
        if other.dtype is t.dtype and _memory(other) == _memory(t) and not t.is_neg():
            return other
    return None


def _memory(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _extents(t: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(t.shape), t.stride()


def _placement(t: Tensor) -> tuple[Any, dict[str, Any]]:
    """Return where an empty tensor like t is, for libtorch and for PyTorch."""
    return available().placement(t), {"dtype": t.dtype, "device": t.device}
