"""Nothing is skipped: hooks on the submodules that a fused op stands for run, and replaced submodules too."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_models import FunctionModule
from models import Calls, D, H, blocks, close, randomised, step, tokens
from torch import nn

import fastvit
from fastvit import layers


def operators(block: nn.Module) -> list[str]:
    with torch.no_grad(), Calls() as calls:
        block(tokens(dtype=torch.float32)[0])
    return calls.names


@pytest.mark.parametrize("training", [False, True])
def test_a_block_runs_fused(training: bool) -> None:
    """And the first half still does if a layer of the second one has a hook."""
    block, _ = blocks(init_values=0.1, drop_path=0.1)
    block.train(training)
    fused = operators(block)
    unfused = {"aten::add", "aten::mul", "aten::gelu", "aten::native_layer_norm", "aten::_softmax", "aten::bmm"}
    assert not unfused.intersection(fused), fused
    handle = block.mlp.fc1.register_forward_hook(lambda *_: None)
    hooked = operators(block)
    assert [name for name in hooked if name.startswith("fastvit::attention")]
    assert "aten::gelu" in hooked
    handle.remove()
    assert operators(block) == fused


def eva(**options: Any) -> nn.Module:
    return layers.EvaBlock(D, H, swiglu_mlp=True, init_values=0.3, **options)


WATCHED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "EvaBlock": (
        lambda: eva(scale_mlp=True, qkv_fused=False),
        ("norm1", "attn.q_proj", "attn.attn_drop", "attn.proj", "mlp.fc1_g", "mlp.norm", "norm2"),
    ),
    "EvaBlock, packed": (eva, ("attn.qkv", "mlp.act")),
    "norms of q and k": (lambda: layers.Block(D, H, qk_norm=True), ("attn.q_norm", "attn.attn_drop")),
    "gated by norm": (
        lambda: layers.PostNormBlock(D, H, mlp_layer=functools.partial(layers.SwiGLU, norm_layer=layers.LayerNorm)),
        ("norm2", "mlp.act"),
    ),
    "gate last": (
        lambda: layers.PostNormBlock(D, H, mlp_layer=functools.partial(layers.GluMlp, act_layer="silu")),
        ("norm2", "mlp.act"),
    ),
}


@pytest.mark.parametrize("kind", WATCHED)
def test_a_watched_submodule_is_called(kind: str, device: torch.device) -> None:
    """And the step is that of the fused ops."""
    make, names = WATCHED[kind]
    block = randomised(make().to(device))
    x, dy = tokens(dtype=torch.float32, device=device)
    want = step(block, x, dy)
    seen: list[str] = []
    for name in names:
        handle = block.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
        for key, got in step(block, x, dy).items():
            assert close(got, want[key]), (name, key)
        handle.remove()
    assert seen == list(names)


# ---- patch embedding and dropout ----


def test_a_changed_patch_embedding_is_honoured() -> None:
    """A hook, uint8 images next to one, and another kind of convolution: overlapping patches."""
    for statistics in ({}, {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}):
        embed = layers.PatchEmbed(8, 4, 3, 32, **statistics)
        image, pos, prefix = torch.randint(0, 256, (2, 3, 8, 8)).byte(), torch.randn(4, 32), torch.randn(2, 32)
        plain = embed(image, pos, prefix)
        embed.proj.register_forward_hook(lambda _, __, output: output * 2)
        doubled = embed(image, pos, prefix)
        torch.testing.assert_close(doubled[:, :2], plain[:, :2])
        torch.testing.assert_close(doubled[:, 2:], 2 * (plain[:, 2:] - pos) + pos, rtol=1e-4, atol=1e-5)
    embed.proj = nn.Conv2d(3, 32, 4, stride=2)
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(embed(x), embed.proj(x).flatten(2).transpose(1, 2))


def test_a_replaced_patch_embedding_of_a_model_is_honoured() -> None:
    model = randomised(fastvit.VisionTransformer(16, 4, embed_dim=32, depth=1, num_heads=2))
    x = torch.randn(2, 3, 16, 16)
    embed = model.patch_embed
    model.patch_embed = FunctionModule(lambda m, x: m.proj(x).flatten(2).transpose(1, 2).relu(), proj=embed.proj)
    model.patch_embed.grid_size = embed.grid_size
    patches = model.patch_embed(x) + model.pos_embed[:, 1:]
    cls = (model.cls_token + model.pos_embed[:, :1]).expand(2, -1, -1)
    torch.testing.assert_close(model._tokens(x), torch.cat([cls, patches], 1))
