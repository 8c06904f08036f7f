"""Masks and causal attention in modules and models, against timm's with the same parameters, and the reference."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from library_imports import import_timm
from models import close, randomised, tokens, twins
from torch import Tensor, nn

import fastvit
from fastvit import layers, reference
from fastvit.blocks import read_timm, run
from fastvit.blocks.spec import AdaptedLinear
from fastvit.layers import AttentionRope, EvaAttention, EvaBlock

B, N, D, H = 2, 6, 48, 3
ROPE = torch.randn(N - 1, 2 * D // H, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
SCALE = {"init_values": 0.5}
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], nn.Module]]] = {  # ours, and timm's
    "Attention": (lambda: layers.Attention(D, H), lambda timm: timm.layers.Attention(D, H)),
    "Block": (lambda: layers.Block(D, H, **SCALE), lambda timm: timm.models.vision_transformer.Block(D, H, **SCALE)),
    "PostNormBlock": (lambda: layers.PostNormBlock(D, H), lambda timm: reference.PostNormBlock(D, H)),
    "EvaAttention": (lambda: EvaAttention(D, H), lambda timm: timm.models.eva.EvaAttention(D, H, scale_norm=False)),
    "AttentionRope, halves": (
        lambda: AttentionRope(D, H, qkv_fused=False, rotate_half=True),
        lambda timm: timm.layers.AttentionRope(D, H, qkv_fused=False, rotate_half=True),
    ),
    "AttentionRope, norms": (
        lambda: AttentionRope(D, H, qk_norm=True, norm_layer=nn.LayerNorm),
        lambda timm: timm.layers.AttentionRope(D, H, qk_norm=True, norm_layer=nn.LayerNorm),
    ),
    "EvaBlock": (lambda: EvaBlock(D, H, **SCALE), lambda timm: timm.models.eva.EvaBlock(D, H, **SCALE)),
}
PAIRS = torch.rand(B, 1, N, N, generator=torch.Generator().manual_seed(5)) > 0.4
PAIRS[..., 0] = True
BIAS = torch.randn(B, H, N, N, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "pairs": {"attn_mask": PAIRS},
    "bias": {"attn_mask": BIAS},
    "bias and hidden keys": {"attn_mask": BIAS[0, 0].masked_fill(~PAIRS[0, 0], -torch.inf)},
    "causal": {"is_causal": True},
}


def step(module: nn.Module, x: Tensor, masks: dict[str, Any], **more: Any) -> list[Tensor]:
    """The output, and the gradients of x, of every parameter, and of a bias."""
    x = x.clone().requires_grad_()
    mask, wanted = masks.get("attn_mask"), [x, *module.parameters()]
    if mask is not None and mask.is_floating_point():
        mask = mask.clone().requires_grad_()
        wanted.append(mask)
    y = module(x, **more, **{**masks, "attn_mask": mask})
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y, *torch.autograd.grad(y, wanted, dy)]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", MODULES)
def test_modules_are_timms(kind: str) -> None:
    """In float64, fused and with the modules one by one."""
    ours_of, theirs_of = MODULES[kind]
    for mask, masks in MASKS.items():
        ours, theirs = twins(ours_of().double(), theirs_of(import_timm()).double())
        x, more = tokens(B, N, D)[0], {"rope": ROPE} if "Eva" in kind or "Rope" in kind else {}
        want = step(theirs, x, masks, **more)
        assert_same(step(ours, x, masks, **more), want)
        attn: Any = ours.attn if "Block" in kind else ours
        attn.proj.register_forward_hook(lambda *_: None)
        assert_same(step(ours, x, masks, **more), want)
        attn.attn_drop.register_forward_hook(lambda *_: None)
        assert_same(step(ours, x, masks, **more), want)
        assert close(ours(x, **more), want[0]) == (mask == "none")


def test_halves_in_steps() -> None:
    """A half runs in steps if heads share keys or if a layer is called as a module."""
    block, x = randomised(layers.Block(D, H)).double(), tokens(B, N, D)[0]
    half, masks = read_timm.read_attention_half(block), {"attn_mask": BIAS, "is_causal": True}
    want = run.run_attention_half(x, half, **masks)
    changes: list[dict[str, Any]] = [{"in_steps": True}, {"proj": AdaptedLinear(block.attn.proj), "adapted": True}]
    for change, recompute in itertools.product(changes, ("none", "all")):
        changed = half._replace(branch=half.branch._replace(**change))
        assert_same([run.run_attention_half(x, changed, **masks, recompute=recompute)], [want])


def test_queries_that_see_no_key() -> None:
    """Zeros from attention, and no NaN in a gradient; also with what is_causal leaves of a mask."""
    x = tokens(B, N, D)[0]
    for masks in (
        {"attn_mask": torch.arange(N)[:, None] > 1},
        {"attn_mask": torch.where(torch.arange(N)[:, None] > 1, BIAS[0, 0], -torch.inf)},
        {"attn_mask": torch.arange(N) > 1, "is_causal": True},
    ):
        ours, theirs = twins(layers.Attention(D, H).double(), reference.Attention(D, H).double())
        want = step(theirs, x, masks)
        assert torch.equal(want[0][:, :2], theirs.proj.bias.expand(B, 2, D))
        assert_same(step(ours, x, masks), want)
        ours.attn_drop.register_forward_hook(lambda *_: None)
        assert_same(step(ours, x, masks), want)


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "eva02_tiny_patch14_224"])
def test_models_are_timms(name: str) -> None:
    sizes = {"img_size": 42 if "eva" in name else 48, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
    ours, theirs = twins(*(lib.create_model(name, **sizes).double().eval() for lib in (fastvit, import_timm())))
    image = torch.randn(2, 3, *ours.patch_embed.img_size, dtype=torch.float64)
    n = ours.num_prefix_tokens + 9
    mask = torch.randn(1, 3, n, n, dtype=torch.float64)
    for masks in ({"attn_mask": mask}, {"attn_mask": mask > -1.0}, {"is_causal": True}):
        results = []
        for model in (ours, theirs):
            final, pairs = model.forward_intermediates(image, 2, True, True, output_fmt="NLC", **masks)
            results.append([model(image, **masks), final, *(t for pair in pairs for t in pair)])
            results[-1].append(model.forward_features(image, **masks))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        (layer,) = ours.get_intermediate_layers(image, 1, **masks)
        assert torch.equal(layer, results[0][4])
        assert not close(ours(image), results[0][0])
