"""Plans the memory of a step: the real model runs on fake tensors, which have sizes and no data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from fastvit.blocks.hooks import without_hooks
from fastvit.study.memory.allocations import Allocations, as_on
from fastvit.study.memory.step import DTYPES, Step, StepSpec
from fastvit.study.sources.model_source import one_line_errors


@dataclass(frozen=True)
class Parts:
    """Bytes in use at the peak of a step, by purpose.

    Attributes:
        weights: parameters and buffers.
        gradients: of the parameters.
        optimizer: its state.
        inputs: the images.
        saved: tensors that the forward pass keeps for the backward pass, except attention matrices.
        attention: (B, H, N, N) scores and probabilities, and their gradients.
        temporaries: everything else.
        graph: with `Setting.graphs`, what the captured graph holds: the peak of its passes, their gradients included,
            and its own copy of the images. `gradients` are then the copies in `.grad`, `saved` and `attention` are 0,
            and `temporaries` are the optimizer's. Otherwise 0.
    """

    weights: int
    gradients: int
    optimizer: int
    inputs: int
    saved: int
    attention: int
    temporaries: int
    graph: int = 0

    @property
    def peak(self) -> int:
        """The sum of all parts."""
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True)
class MemoryPoint:
    """One step of one provider.

    Attributes:
        provider: "eager", "sdpa" or "fastvit".
        image_size: (height, width) in pixels; of a list, the first.
        tokens: N, prefix tokens included; of a list, those of all images.
        batch: images; of a list, images of each size.
        planned: parts of the peak in bytes.
        activations, attention: planned bytes of everything but weights, gradients, optimizer state and images, and of
            the (B, H, N, N) matrices among it, each at its own peak, before the optimizer's step.
        measured: the peak in bytes, or None if nothing was measured, or the device had too little memory.
    """

    provider: str
    image_size: tuple[int, int]
    tokens: int
    batch: int
    planned: Parts
    activations: int
    attention: int
    measured: int | None = None


def plan(spec: StepSpec) -> MemoryPoint:
    """Plan the memory of a step. On a GPU, fused ops run Triton kernels.

    Raises:
        ValueError: `setting.graphs` for a CPU, and other wrong arguments.
    """
    if spec.setting.graphs and not spec.gpu:
        raise ValueError("graphs=True is planned for device='cuda' only, which needs no GPU")
    seen, begin, last, _, groups = trace_step(spec)
    at_peak, parts = seen.held(begin), {}
    given = groups["weights"] | groups["optimizer"] | groups["inputs"]
    passes = set(range(len(seen.storages))) - given
    if spec.setting.graphs:  # the graph's memory is never released, so the peak is in the optimizer's step
        temporaries = seen.held(last, of={n for n, came in seen.events[last:] if came})
        at_peak = given | groups["gradients"] | temporaries
        parts["graph"] = seen.bytes_of(seen.held(begin, last, passes)) + seen.bytes_of(groups["inputs"])
    for name, group in groups.items():
        parts[name] = seen.bytes_of(at_peak & group)
        at_peak -= group
    parts["temporaries"] = seen.bytes_of(at_peak)
    activations = passes - groups["gradients"]
    largest = [seen.bytes_of(seen.held(begin, last, storages)) for storages in (activations, groups["attention"])]
    size, *_ = spec.together or (spec.image_size,)
    return MemoryPoint(spec.provider, size, seen.tokens, spec.batch, Parts(**parts), *largest)


class StepTrace(NamedTuple):
    """A step that ran on fake tensors.

    Attributes:
        seen: its allocations and releases.
        begin: the first event of the step itself.
        last: the first event of the optimizer's step.
        kept: the storages that are alive after the forward pass.
        groups: the storages of each of `Parts` except temporaries. A storage belongs to the first group that has it.
    """

    seen: Allocations
    begin: int
    last: int
    kept: set[int]
    groups: dict[str, set[int]]


def trace_step(
    spec: StepSpec, seen: Allocations | None = None, prepare: Callable[[nn.Module], None] = lambda _: None
) -> StepTrace:
    """Run a step on fake CPU tensors.

    Args:
        seen: records the step; None for new `Allocations`.
        prepare: called with the model before the step.
    """
    name, gpu = spec.source.name, spec.gpu
    model = spec.source.on_meta(spec.provider, spec.image_size, spec.patch_size).to("meta", DTYPES[spec.setting.dtype])
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    _as_fake(model, fakes)
    with fakes, one_line_errors(name):
        images = spec.images(model)
    step = Step(model, images, spec.setting, gpu)
    seen = Allocations(gpu) if seen is None else seen
    weights = set(seen.see([*model.parameters(), *model.buffers()]))
    inputs = set(seen.see(images))
    with seen:
        step.make_state()
    optimizer = set(seen.see(step.state()))
    begin, ends = len(seen.events), dict[str, tuple[int, set[int]]]()
    prepare(model)
    if spec.accumulates:
        with seen:
            for p in step.parameters:
                p.grad = torch.zeros_like(p)
    with fakes, as_on(gpu), torch.enable_grad(), contextlib.ExitStack() as stack:
        if gpu:
            stack.enter_context(_GpuFunctions())
        with seen, without_hooks(model), one_line_errors(name):
            loss = step.passes(lambda what: ends.update({what: (len(seen.events), seen.alive())}))
    with seen:
        step.update()
    del loss
    gradients = set(seen.see([p.grad for p in step.parameters if p.grad is not None]))
    if not seen.tokens:
        raise ValueError(f"no attention is seen in {name}: it is no ViT")
    matrices = {n for n, storage in enumerate(seen.storages) if seen.is_attention_matrix(storage)}
    kept = ends["forward"][1]
    saved = kept if spec.setting.mode == "train" else set()
    groups = {
        "weights": weights, "gradients": gradients, "optimizer": optimizer, "inputs": inputs,
        "saved": saved - matrices, "attention": matrices,
    }  # fmt: skip
    return StepTrace(seen, begin, list(ends.values())[-1][0], kept, groups)


def _as_fake(model: nn.Module, fakes: FakeTensorMode) -> None:
    """Replace the meta tensors of a model, in place, by fake CPU tensors: parameters, buffers and other attributes of
    modules."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers, vars(module)):
            for name, t in tensors.items():
                if isinstance(t, Tensor):
                    if t not in made:
                        fake = FakeTensor(fakes, t.detach().to("meta"), torch.device("cpu"))
                        made[t] = nn.Parameter(fake, t.requires_grad) if isinstance(t, nn.Parameter) else fake
                    tensors[name] = made[t]  # type: ignore[assignment]


class _GpuFunctions(TorchFunctionMode):
    """Makes functions that need other memory on a CPU behave as on a GPU, for which fake CPU tensors stand.

    SDPA with dropout has a kernel on a GPU and keeps only a seed; autocast computes softmax and LayerNorm in float32.
    """

    _WIDE = (F.softmax, torch.softmax, Tensor.softmax, F.layer_norm, torch.layer_norm)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.backward:
            return self._backward(args[0])  # called without options
        if func is F.scaled_dot_product_attention:
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        if func in self._WIDE and torch.is_autocast_enabled("cpu"):
            args = tuple(a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
        return func(*args, **kwargs)

    def _backward(self, loss: Tensor) -> None:
        """Run the backward pass with this mode, which PyTorch leaves to call `__torch_function__`: what checkpointing
        computes again is compared with the forward pass. The engine takes the modes of the moment that it starts."""
        with self:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True)
