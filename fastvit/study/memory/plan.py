"""The memory of a step, planned: the real model runs on fake tensors, which have sizes and no data."""

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

from fastvit.study.memory.allocations import Allocations, as_on
from fastvit.study.sources import model_source
from fastvit.study.sources.model_source import Subject, channels, images, output_of

MODES = ("train", "infer")
OPTIMIZERS = ("adamw", "sgd", "none")
DTYPES = model_source.DTYPES | {"amp": torch.float32}  # of parameters
DTYPES |= {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Parts:
    """Bytes that are held at the moment when a step holds most, by what they are for.

    Attributes:
        weights: parameters and buffers.
        gradients: of the parameters.
        optimizer: its state.
        inputs: the images.
        saved: what the forward pass keeps for the backward pass, but for attention matrices.
        attention: (B, H, N, N) scores and probabilities, and their gradients.
        temporaries: all else.
    """

    weights: int
    gradients: int
    optimizer: int
    inputs: int
    saved: int
    attention: int
    temporaries: int

    @property
    def peak(self) -> int:
        """Their sum."""
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True)
class Plan:
    """Of one step: the parts of its peak; tokens N; and the bytes of all activations, and of the N x N matrices among
    them, each when these are most, an optimizer's step left out."""

    parts: Parts
    tokens: int
    activations: int
    attention: int


@dataclass(frozen=True)
class Setting:
    """What one step is, beside model, provider and sizes.

    Attributes:
        mode: "train" (forward, backward, and an optimizer's step whose state is there already) or "infer".
        dtype: of parameters and activations, or "amp": float32 parameters under autocast to bfloat16.
        optimizer: "adamw", "sgd" (with momentum) or "none": without a step. Of "train".
        checkpointing: blocks are computed again in the backward pass. Of "train".
    """

    mode: str = "train"
    dtype: str = "bfloat16"
    optimizer: str = "adamw"
    checkpointing: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("mode", self.mode, MODES), ("dtype", self.dtype, tuple(DTYPES)), ("optimizer", self.optimizer, OPTIMIZERS),
        ):  # fmt: skip
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


class Step:
    """One step of a model, on whatever its tensors are: fakes or real ones."""

    def __init__(self, model: nn.Module, images: Tensor, setting: Setting, gpu: bool) -> None:
        self.model, self.images, self.setting = model, images, setting
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if setting.mode == "train" and not self.parameters:
            raise ValueError("mode 'train' wants a parameter that requires a gradient; all of the model are frozen")
        self.model.train(setting.mode == "train")
        self.optimizer: torch.optim.Optimizer | None = None
        # foreach is PyTorch's default on a GPU, where it holds more at a time
        options: dict[str, Any] = {"lr": 0.0, "foreach": gpu}
        if setting.mode == "train" and setting.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(self.parameters, **options)
        elif setting.mode == "train" and setting.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(self.parameters, momentum=0.9, **options)
        if setting.checkpointing and setting.mode == "train":
            _checkpoint(model)

    def make_state(self) -> None:
        """The optimizer's state, as an earlier step leaves it."""
        if self.optimizer is not None:
            for p in self.parameters:
                p.grad = torch.zeros_like(p)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> list[Tensor]:
        values = [] if self.optimizer is None else self.optimizer.state.values()
        return [t for value in values for t in value.values() if isinstance(t, Tensor)]

    def tensors(self) -> list[Tensor]:
        """What is there before the step."""
        return [*self.model.parameters(), *self.model.buffers(), *self.state(), self.images]

    def forward(self) -> Tensor:
        device, amp = self.images.device.type, self.setting.dtype == "amp"
        with torch.autocast(device, torch.bfloat16, enabled=amp, cache_enabled=True):
            out = output_of(self.model(self.images))
        return out.float().square().mean() if self.setting.mode == "train" else out

    def run(self) -> None:
        """The whole step."""
        loss = self.passes()  # which lives until the step is done, as in a loop of training
        self.update()
        del loss

    def passes(self, reached: Callable[[str], None] = lambda what: None) -> Tensor:
        """The loss after the forward and the backward pass, or what the model returns in inference. reached: called
        after the "forward" and after the "backward" pass."""
        with torch.set_grad_enabled(self.setting.mode == "train"):
            out = self.forward()
        reached("forward")
        if self.setting.mode == "train":
            out.backward()
            reached("backward")
        return out

    def update(self) -> None:
        """The optimizer's step."""
        if self.optimizer is not None:
            self.optimizer.step()


def plan(
    subject: Subject, provider: str, image_size: tuple[int, int], batch: int, setting: Setting, *, gpu: bool,
    patch_size: tuple[int, int] | None = None,
) -> Plan:  # fmt: skip
    """What a step would hold. gpu: on a GPU, where fused ops run their kernels; else on a CPU."""
    seen, begin, last, groups = run(subject, provider, image_size, batch, setting, gpu=gpu, patch_size=patch_size)
    there, parts = seen.held(begin), {}
    for name, group in groups.items():
        parts[name] = seen.bytes_of(there & group)
        there -= group
    parts["temporaries"] = seen.bytes_of(there)
    activations = set(range(len(seen.blocks))).difference(
        *(groups[name] for name in ("weights", "gradients", "optimizer", "inputs"))
    )
    most = [seen.bytes_of(seen.held(begin, last, of)) for of in (activations, groups["attention"])]
    return Plan(Parts(**parts), seen.tokens, *most)


class Run(NamedTuple):
    """A step on fake tensors: what it allocates and releases, the first event of the step itself, the last before its
    optimizer's, and the blocks of each of `Parts` but its temporaries; a block is of the first that has it."""

    seen: Allocations
    begin: int
    last: int
    groups: dict[str, set[int]]


def run(
    subject: Subject, provider: str, image_size: tuple[int, int], batch: int, setting: Setting, *, gpu: bool,
    patch_size: tuple[int, int] | None = None,
) -> Run:  # fmt: skip
    """What `plan` reads the parts from. The passes run on fake tensors, which say that they are on a CPU. They share
    storages with tensors on the meta device, where the optimizer's ops in place need not run."""
    dtype = DTYPES[setting.dtype]
    model = subject.on_meta(provider, image_size, patch_size).to("meta", dtype)
    with torch.device("meta"):
        step = Step(model, images(batch, image_size, dtype, channels(model)), setting, gpu)
    seen = Allocations(gpu)
    weights = set(seen.see([*model.parameters(), *model.buffers()]))
    inputs = set(seen.see(step.images))
    with seen:
        step.make_state()
    optimizer = set(seen.see(step.state()))
    begin, ends = len(seen.events), dict[str, tuple[int, set[int]]]()
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    fake = without_data(model, fakes)
    step.images = FakeTensor(fakes, step.images, _CPU)
    with fakes, as_on(gpu), torch.enable_grad(), contextlib.ExitStack() as stack:
        if gpu:
            stack.enter_context(_FunctionsOfAGpu())
        with seen, subject.running():
            loss = step.passes(lambda what: ends.update({what: (len(seen.events), seen.alive())}))
    for p in step.parameters:
        if (grad := fake[p].grad) is not None:
            p.grad = torch.empty(0, dtype=p.dtype, device="meta").set_(
                grad.untyped_storage(), 0, p.shape, grad.stride()
            )
    with seen:
        step.update()
    del loss
    gradients = set(seen.see([p.grad for p in step.parameters if p.grad is not None]))
    if not seen.tokens:
        raise ValueError(f"no attention is seen in {subject.name}: it is no ViT")
    matrices = {n for n, block in enumerate(seen.blocks) if seen.is_attention_matrix(block)}
    saved = ends["forward"][1] if setting.mode == "train" else set()
    groups = {
        "weights": weights, "gradients": gradients, "optimizer": optimizer, "inputs": inputs,
        "saved": saved - matrices, "attention": matrices,
    }  # fmt: skip
    return Run(seen, begin, list(ends.values())[-1][0], groups)


def without_data(model: nn.Module, fakes: FakeTensorMode) -> dict[Tensor, Tensor]:
    """Parameters, buffers and other tensors of modules on the meta device become fake ones on the CPU, of the same
    storages. Returns {tensor on the meta device: fake tensor}."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers, vars(module)):
            for name, t in tensors.items():
                if isinstance(t, Tensor):
                    if t not in made:
                        fake = FakeTensor(fakes, t.detach().to("meta"), _CPU)
                        made[t] = nn.Parameter(fake, t.requires_grad) if isinstance(t, nn.Parameter) else fake
                    tensors[name] = made[t]  # type: ignore[assignment]
    return made


class _FunctionsOfAGpu(TorchFunctionMode):
    """Functions whose memory on a CPU, whose tensors stand in for a GPU's, is not a GPU's: there SDPA with dropout has
    a kernel, which keeps a seed, and autocast computes softmax and LayerNorm in float32."""

    _WIDE = (F.softmax, torch.softmax, Tensor.softmax, F.layer_norm, torch.layer_norm)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        if func in self._WIDE and torch.is_autocast_enabled("cpu"):
            args = tuple(a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
        return func(*args, **kwargs)


def _checkpoint(model: nn.Module) -> None:
    """As timm, transformers and this library spell it."""
    for name in ("set_grad_checkpointing", "gradient_checkpointing_enable"):
        if callable(enable := getattr(model, name, None)):
            enable()
            return
    raise ValueError(f"{type(model).__name__} has no set_grad_checkpointing and no gradient_checkpointing_enable")
