"""Random parameters, a training step and its memory, and the comparison of two modules, for tests of layers and
models."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from oracle import GRADIENT, assert_as_accurate, inputs
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastvit
from fastvit import layers, reference
from fastvit.integrations import Report

B, N, D, H = 2, 17, 48, 3


def randomised(module: nn.Module, std: float = 0.1) -> nn.Module:
    """Parameters that differ from their initial values everywhere, so that a dropped one shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std
            parameter.copy_((parameter.cpu().double() + noise).to(parameter))
    return module


def twins(ours: nn.Module, theirs: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Both with the same random parameters."""
    theirs.load_state_dict(randomised(ours).state_dict())
    return ours, theirs


def blocks(kind: str = "Block", **arguments: Any) -> tuple[nn.Module, nn.Module]:
    """Ours and the reference's."""
    arguments = {"mlp_ratio": 2.0, "qkv_bias": True, **arguments}
    theirs = dict(arguments)
    if isinstance(theirs.get("act_layer"), str):
        theirs["act_layer"] = reference.ACTIVATIONS[theirs["act_layer"]]
    return twins(getattr(layers, kind)(D, H, **arguments), getattr(reference, kind)(D, H, **theirs))


def tokens(
    *shape: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """x and dy"""
    x, dy = (inputs("normal", *(shape or (B, N, D)), dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    return x, dy


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def step(module: nn.Module, x: Tensor, dy: Tensor | None = None, seed: int = 3) -> dict[str, Tensor]:
    """The output, and the gradients of x and of every parameter. dy: by default the same for outputs of one shape."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(seed)
    y = module(x)
    if dy is None:
        dy = inputs("normal", *y.shape, dtype=torch.float64, device=x.device, seed=2)
    parameters = {name.removeprefix("_orig_mod."): p for name, p in module.named_parameters()}
    grads = torch.autograd.grad(y, [x, *parameters.values()], dy.to(y.dtype))
    return {"output": y.detach(), **{f"d{name}": g for name, g in zip(["x", *parameters], grads, strict=True)}}


def assert_same_step(ours: nn.Module, theirs: nn.Module, x: Tensor, dy: Tensor | None = None) -> None:
    """Equal outputs and gradients, but for rounding in float32."""
    expected = step(theirs, x, dy)
    for name, got in step(ours, x, dy).items():
        torch.testing.assert_close(got, expected[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def assert_steps_as_accurate(got: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """The oracle's rule for the output and every gradient."""
    assert got.keys() == exact.keys()
    for name in exact:
        factor = 2.0 if name == "output" else GRADIENT
        assert_as_accurate(got[name], eager[name], exact[name], factor=factor, what=name)


def assert_module_as_accurate(
    ours: nn.Module, theirs: nn.Module, x: Tensor, dy: Tensor, dtype: torch.dtype = torch.float32
) -> None:
    """One step of ours, theirs and theirs in float64 with the parameters of ours; x, dy: in float64."""
    ours.to(dtype)
    theirs.load_state_dict(ours.state_dict())
    exact = step(copy.deepcopy(theirs).double(), x.to(dtype).double(), dy.to(dtype).double())
    x, dy = x.to(dtype), dy.to(dtype)
    assert_steps_as_accurate(step(ours, x, dy), step(theirs.to(dtype), x, dy), exact)


def accelerate_as_it_was(module: nn.Module, call: Callable[[], Any], warning: str = "") -> Report:
    """Accelerates a module that call() uses: the tensors that it returns are the same. warning: what is warned of, if
    anything is; then the module's own forward runs, and they are equal."""
    want = tree_leaves(call())
    report = fastvit.accelerate(module)
    with pytest.warns(UserWarning, match=warning) if warning else nullcontext():
        got = tree_leaves(call())
    assert all((torch.equal if warning else close)(a, b) for a, b in zip(got, want, strict=True))
    return report


class Calls(TorchDispatchMode):
    """The names of the operators that a piece of code calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **kwargs or {})


def allocated_on_gpu() -> int:
    """Return the bytes of all tensors on the GPU. For some microseconds after a backward pass has returned, autograd's
    thread holds the last tensors of it; it releases them before it begins another pass."""
    nothing = torch.zeros(0, device="cuda", requires_grad=True)
    with torch.enable_grad():
        (nothing * 1).backward(nothing.detach())
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


class LoRA(nn.Module):
    """An adapter in the place of a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))
