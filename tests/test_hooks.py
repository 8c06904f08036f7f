"""Modules inside a fused span are modules still: their hooks run, and others may take their places."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import inputs
from test_layers import B, D, H, N, blocks, double, step
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

SUBMODULES = (
    "norm1", "attn", "attn.qkv", "attn.attn_drop", "attn.proj", "attn.proj_drop", "ls1", "drop_path1",
    "norm2", "mlp", "mlp.fc1", "mlp.act", "mlp.drop1", "mlp.fc2", "mlp.drop2", "ls2", "drop_path2",
)  # fmt: skip


class Calls(TorchDispatchMode):
    """The names of the operators that a piece of code calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **kwargs or {})


def operators(module: Callable[[Tensor], Tensor], x: Tensor) -> list[str]:
    with torch.no_grad(), Calls() as calls:
        module(x)
    return calls.names


@pytest.mark.parametrize("kind", ["eval", "train"])
def test_a_block_runs_fused(kind: str) -> None:
    block, _ = blocks(init_values=0.1, drop_path=0.1)
    names = operators(block.train(kind == "train"), torch.randn(B, N, D))
    unfused = {"aten::add", "aten::mul", "aten::gelu", "aten::native_layer_norm", "aten::_softmax", "aten::bmm"}
    assert not unfused.intersection(names), names
    assert sum(name.startswith("fastvit::") for name in names) >= 4


def double_first(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] * 2,)


def hook(module: nn.Module) -> None:
    module.register_forward_hook(double)


def pre_hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(double_first)


def backward_hook(module: nn.Module) -> None:
    module.register_full_backward_hook(lambda _, grads, __: tuple(g * 2 for g in grads))


def new_forward(module: nn.Module) -> None:
    original = module.forward
    module.forward = lambda x: original(x) * 2  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [hook, pre_hook, backward_hook, new_forward])
@pytest.mark.parametrize("path", SUBMODULES)
def test_a_changed_submodule_is_honoured(path: str, change: Callable[[nn.Module], None]) -> None:
    ours, theirs = blocks(init_values=0.1, drop_path=0.3)
    for block in (ours, theirs):
        change(block.get_submodule(path))
    x, dy = (inputs("normal", B, N, D, dtype=torch.float32, device="cpu", seed=s) for s in (0, 1))
    expected = step(theirs, x, dy)
    for name, got in step(ours, x, dy).items():
        torch.testing.assert_close(got, expected[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("path", ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"])
def test_a_replaced_linear_is_honoured(path: str) -> None:
    parent, _, name = path.rpartition(".")
    ours, theirs = blocks()
    for block in (ours, theirs):
        torch.manual_seed(5)
        setattr(block.get_submodule(parent), name, LoRA(block.get_submodule(path)))
    x, dy = (inputs("normal", B, N, D, dtype=torch.float32, device="cpu", seed=s) for s in (0, 1))
    expected = step(theirs, x, dy)
    for key, got in step(ours, x, dy).items():
        torch.testing.assert_close(got, expected[key], rtol=1e-4, atol=1e-5)


def test_a_hook_on_one_half_leaves_the_other_fused() -> None:
    block, _ = blocks()
    x = torch.randn(B, N, D)
    fused, attention_half = operators(block, x), operators(block._attention_half, x)
    handle = block.mlp.fc1.register_forward_hook(double)
    hooked = operators(block, x)
    assert hooked != fused
    assert hooked[: len(attention_half)] == attention_half
    handle.remove()
    assert operators(block, x) == fused


def test_attention_maps_by_a_hook_on_attn_drop() -> None:
    block, theirs = blocks()
    maps = {}
    for name, module in (("ours", block), ("theirs", theirs)):
        module.attn.attn_drop.register_forward_hook(lambda _, __, out, name=name: maps.update({name: out}))
    x = torch.randn(B, N, D)
    torch.testing.assert_close(block(x), theirs(x), rtol=1e-4, atol=1e-5)
    assert maps["ours"].shape == (B, H, N, N)
    torch.testing.assert_close(maps["ours"], maps["theirs"], rtol=1e-4, atol=1e-6)
