"""Records the fused ops that a model's step calls, and runs them again on tensors of the same layouts."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime import registry
from fastvit.ops.runtime.backend import KernelUnsupported, Path
from fastvit.ops.runtime.call import UNKEPT
from fastvit.ops.runtime.launch import launching
from fastvit.study.memory.allocations import TensorLayout
from fastvit.study.memory.plan import trace_step
from fastvit.study.memory.step import Setting
from fastvit.study.sources.model_source import ModelSource
from fastvit.tuning.launches import Recorder, in_library, recording

MODES = ("infer", "train")


Arguments = tuple[list[Any], dict[str, Any]]  # by position, as in the op's schema, and by keyword


@dataclass(frozen=True)
class OpCall:
    """A registered op with its arguments, of which tensors are kept as shape, strides and dtype.

    Attributes:
        op: the overload, such as `torch.ops.fastvit.attention_fwd.default`.
        leaves, nested: the arguments as `tree_flatten` returns them, with `TensorLayout` for tensors.
        counts: how often a step of each mode makes this call.
    """

    op: Any
    leaves: tuple[Any, ...]
    nested: TreeSpec
    counts: Counter[str] = field(default_factory=Counter, compare=False)

    @property
    def name(self) -> str:
        """The op's name, such as "attention_fwd"."""
        return str(self.op._schema.name.partition("::")[2])

    def arguments(self, device: torch.device) -> Arguments:
        """Return the arguments, with tensors of the recorded layouts: random, or without data on the meta device."""
        names = [argument.name for argument in self.op._schema.arguments]
        made = (_drawn(leaf, device) if isinstance(leaf, TensorLayout) else leaf for leaf in self.leaves)
        given, keywords = tree_unflatten(list(made), self.nested)
        arguments = list(given)
        if device.type != "meta":
            for i, name in enumerate(names[: len(arguments)]):
                arguments[i] = _suited(name, arguments[i], arguments)
            if "lse" in names:
                _attend(self.name, dict(zip(names, arguments, strict=False)))
        return arguments, keywords

    def run(self, arguments: Arguments) -> tuple[Tensor, ...]:
        """Launch the op's Triton kernels on these arguments, and return its tensors.

        Raises:
            KernelUnsupported: Triton cannot take these arguments.
        """
        given, keywords = arguments
        with torch.no_grad():
            out = registry.IMPLEMENTATIONS[self.op](*given, call=UNKEPT[Path.TRITON], **keywords)
        return tuple(t for t in ((out,) if isinstance(out, Tensor) else out) if isinstance(t, Tensor))


def calls_of(
    source: ModelSource, image_size: tuple[int, int], batch: int, dtype: str, modes: Sequence[str]
) -> list[OpCall]:
    """Record the fused ops that a step of the model calls, equal calls once, in the order of the first calls.

    The model, accelerated if it is another library's, runs forward, and for "train" backward, on fake tensors.

    Args:
        source: as `fastvit.study.sources.find.find` returns it.
        image_size: height and width in pixels.
        batch: images.
        dtype: of parameters and images, a key of `fastvit.study.memory.step.DTYPES`.
        modes: of MODES.

    Raises:
        ValueError: the model refuses the size, or runs no fused op.
    """
    found: dict[OpCall, OpCall] = {}
    for mode in modes:
        setting = Setting(mode, dtype, optimizer="none")
        for op in trace_step(source, "fastvit", image_size, batch, setting, gpu=True).seen.ops:
            call = OpCall(op.op, op.leaves, op.nested)
            found.setdefault(call, call).counts[mode] += 1
    if not found:
        raise ValueError(f"{source.name} runs none of fastvit's ops")
    return list(found.values())


@contextlib.contextmanager
def on_meta(arch: str, multiprocessors: int) -> Iterator[None]:
    """Within the context `OpCall.run` on meta tensors looks up a GPU's launch choices, and launches nothing."""
    library = in_library(
        wants_triton=lambda x: True, arch=lambda x: arch, multiprocessors=lambda index: multiprocessors
    )
    with library, launching(lambda *_: None), backends.use_backend("auto", strict=True):
        yield


def record(calls: Iterable[OpCall], recorder: Recorder, multiprocessors: int | None = None) -> None:
    """Record the kernels that the calls launch, each once, in the order of a step. Calls that Triton cannot take launch
    nothing."""
    with recording(recorder, multiprocessors):
        for call in calls:
            with contextlib.suppress(KernelUnsupported):
                call.run(call.arguments(torch.device("meta")))


def _drawn(laid: TensorLayout, device: torch.device) -> Tensor:
    """Draw a tensor of this layout: random normal, integers from 0 to 255, or booleans."""
    if device.type == "meta":
        return torch.empty_strided(laid.shape, laid.stride, dtype=laid.dtype, device=device)
    span = 1 + sum((n - 1) * s for n, s in zip(laid.shape, laid.stride, strict=True))
    memory = torch.randn(span if 0 not in laid.shape else 0, device=device)
    if not laid.dtype.is_floating_point:
        memory = memory > 0 if laid.dtype is torch.bool else (64 * memory + 128).clamp(0, 255)
    return memory.to(laid.dtype).as_strided(laid.shape, laid.stride)


def _suited(name: str, value: Any, arguments: Sequence[Any]) -> Any:
    """Return the argument with values that the op can compute with: rstd is positive, so that nothing overflows, and
    sequences begin and end within the tokens."""
    if not isinstance(value, Tensor):
        return value
    if name == "rstd":
        return value.abs_().add_(1.0)
    if name == "cu_seqlens":
        ends = torch.linspace(0, arguments[0].shape[0], value.numel(), device=value.device)
        return value.copy_(ends.to(value.dtype))
    return value


def _attend(backward: str, given: dict[str, Any]) -> None:
    """Fill o and lse of an attention backward pass from the forward pass of the same q, k and v.

    If lse were below a score, its probability would exceed 1. Kernels clamp that in some tiles only, so choices would
    disagree.

    Args:
        backward: the op's name.
        given: its arguments by name.
    """
    forward = getattr(torch.ops.fastvit, backward.removesuffix("_with_mask").removesuffix("bwd") + "fwd").default
    with torch.no_grad():
        o, lse = forward(*(given[argument.name] for argument in forward._schema.arguments))
    given["o"].copy_(o)
    given["lse"].copy_(lse)
