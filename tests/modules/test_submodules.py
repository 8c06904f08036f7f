"""Nothing is skipped: hooks on the submodules that a fused op stands for run, and replaced submodules too."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import B, Calls, D, H, LoRA, N, assert_same_step, blocks, tokens
from torch import Tensor, nn

from fastvit import layers
from fastvit.blocks import read_timm, run

SUBMODULES = (
    "norm1", "attn", "attn.qkv", "attn.attn_drop", "attn.proj", "attn.proj_drop", "ls1", "drop_path1",
    "norm2", "mlp", "mlp.fc1", "mlp.act", "mlp.drop1", "mlp.fc2", "mlp.drop2", "ls2", "drop_path2",
)  # fmt: skip


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


def double(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output * 2


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


@pytest.mark.parametrize(
    ("path", "change"),
    [(path, hook) for path in SUBMODULES] + [("attn", pre_hook), ("attn.proj", backward_hook), ("mlp", new_forward)],
)
def test_a_changed_submodule_is_honoured(path: str, change: Callable[[nn.Module], None]) -> None:
    ours, theirs = blocks(init_values=0.1, drop_path=0.3)
    for block in (ours, theirs):
        change(block.get_submodule(path))
    assert_same_step(ours, theirs, *tokens(dtype=torch.float32))


@pytest.mark.parametrize("path", ["norm1", "attn", "attn.qkv", "mlp.act"])
def test_a_forward_replaced_on_the_class_is_honoured(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = blocks(init_values=0.1, drop_path=0.3)
    for kind in {type(block.get_submodule(path)) for block in (ours, theirs)}:
        doubled = functools.wraps(kind.forward)(lambda self, *args, forward=kind.forward: forward(self, *args) * 2)
        monkeypatch.setattr(kind, "forward", doubled)
    assert_same_step(ours, theirs, *tokens(dtype=torch.float32))


@pytest.mark.parametrize("path", ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"])
def test_a_replaced_linear_is_honoured(path: str) -> None:
    parent, _, name = path.rpartition(".")
    ours, theirs = blocks()
    for block in (ours, theirs):
        torch.manual_seed(5)
        setattr(block.get_submodule(parent), name, LoRA(block.get_submodule(path)))
    assert_same_step(ours, theirs, *tokens(dtype=torch.float32))


def test_a_replaced_linear_is_honoured_under_compile() -> None:
    block, _ = blocks()
    block.attn.qkv, block.mlp.fc1 = LoRA(block.attn.qkv), LoRA(block.mlp.fc1)
    x, dy = tokens(dtype=torch.float32)
    torch._dynamo.reset()
    assert_same_step(torch.compile(block, backend="aot_eager", fullgraph=True), block, x, dy)


def test_a_hook_on_one_half_leaves_the_other_fused() -> None:
    block, _ = blocks()
    x = torch.randn(B, N, D)
    attention_half = operators(lambda x: run.run_attention_half(x, read_timm.read_attention_half(block)), x)
    fused = operators(block, x)
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


def test_dropouts_may_be_replaced_by_identities() -> None:
    """Dropouts replaced by nn.Identity, to switch them off: such an MLP runs its submodules, in training too."""
    mlp = layers.Mlp(16, 32).train()
    x = torch.randn(2, 3, 16)
    want = mlp(x)
    mlp.drop1 = mlp.drop2 = nn.Identity()
    torch.testing.assert_close(mlp(x), want)
