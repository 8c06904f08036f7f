"""Masks and causal attention in modules and models, against timm's with the same parameters, and the reference."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from library_imports import import_timm
from models import blocks, close, randomised, tokens, twins
from torch import Tensor, nn

import fastvit
from fastvit import VisionTransformer, layers, reference
from fastvit.blocks import read_timm, run
from fastvit.blocks.recompute import ATTRIBUTE, Recompute, recompute_all
from fastvit.blocks.spec import AdaptedLinear
from fastvit.eva import Eva
from fastvit.eva_layers import AttentionRope, EvaAttention, EvaBlock
from fastvit.study.sources.baselines import use_sdpa

B, N, D, H = 2, 6, 48, 3
ROPE = torch.randn(N - 1, 2 * D // H, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def block_of_timm() -> nn.Module:
    return import_timm().models.vision_transformer.Block(D, H, qkv_bias=True, init_values=0.5)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "Attention": (lambda: layers.Attention(D, H), lambda: import_timm().layers.Attention(D, H)),
    "Block": (lambda: layers.Block(D, H, qkv_bias=True, init_values=0.5), block_of_timm),
    "PostNormBlock": (lambda: layers.PostNormBlock(D, H), lambda: reference.PostNormBlock(D, H)),
    "EvaAttention": (lambda: EvaAttention(D, H), lambda: import_timm().models.eva.EvaAttention(D, H, scale_norm=False)),
    "AttentionRope": (lambda: AttentionRope(D, H), lambda: import_timm().layers.AttentionRope(D, H)),
    "EvaBlock": (
        lambda: EvaBlock(D, H, init_values=0.5),
        lambda: import_timm().models.eva.EvaBlock(D, H, init_values=0.5),
    ),
}
PAIRS = torch.rand(B, 1, N, N, generator=torch.Generator().manual_seed(5)) > 0.4
PAIRS[..., 0] = True
BIAS = torch.randn(B, H, N, N, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
MASKS: dict[str, dict[str, Any]] = {
    "pairs": {"attn_mask": PAIRS},
    "padding": {"attn_mask": torch.tensor([[True] * 4 + [False] * 2, [True] * N])[:, None, None, :]},
    "bias": {"attn_mask": BIAS},
    "bias of a head": {"attn_mask": BIAS[0, :, :, :]},
    "bias of a key": {"attn_mask": BIAS[:, :1, :1, :]},
    "bias and hidden keys": {"attn_mask": BIAS[0, 0].masked_fill(~PAIRS[0, 0], -torch.inf)},
    "causal": {"is_causal": True},
}


def step(module: nn.Module, x: Tensor, seen: dict[str, Any], **more: Any) -> list[Tensor]:
    """The output, and the gradients of x, of every parameter, and of a bias."""
    x = x.clone().requires_grad_()
    mask, wanted = seen.get("attn_mask"), [x, *module.parameters()]
    if mask is not None and mask.is_floating_point():
        mask = mask.clone().requires_grad_()
        wanted.append(mask)
    y = module(x, **more, **{**seen, "attn_mask": mask})
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y, *torch.autograd.grad(y, wanted, dy)]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", MODULES)
def test_modules_are_timms(kind: str, mask: str) -> None:
    """In float64, fused and with the modules one by one."""
    ours, theirs = twins(*(make().double() for make in MODULES[kind]))
    x, more = tokens(B, N, D)[0], {"rope": ROPE} if "Eva" in kind or "Rope" in kind else {}
    want = step(theirs, x, MASKS[mask], **more)
    assert_same(step(ours, x, MASKS[mask], **more), want)
    attn: Any = ours.attn if "Block" in kind else ours
    attn.proj.register_forward_hook(lambda *_: None)
    assert_same(step(ours, x, MASKS[mask], **more), want)
    attn.attn_drop.register_forward_hook(lambda *_: None)
    assert_same(step(ours, x, MASKS[mask], **more), want)
    assert not close(ours(x, **more), want[0])


def test_halves_in_steps() -> None:
    """A half runs in steps if heads share keys or if a layer is called as a module."""
    block, x = randomised(layers.Block(D, H)).double(), tokens(B, N, D)[0]
    half, seen = read_timm.read_attention_half(block), {"attn_mask": BIAS, "is_causal": True}
    want = run.run_attention_half(x, half, **seen)
    changes: list[dict[str, Any]] = [{"in_steps": True}, {"proj": AdaptedLinear(block.attn.proj), "adapted": True}]
    for change, recompute in itertools.product(changes, ("none", "all")):
        changed = half._replace(branch=half.branch._replace(**change))
        assert_same([run.run_attention_half(x, changed, **seen, recompute=recompute)], [want])


def test_queries_that_see_no_key() -> None:
    """Zeros from attention, and no NaN in a gradient; also with what is_causal leaves of a mask."""
    x = tokens(B, N, D)[0]
    for seen in (
        {"attn_mask": torch.arange(N)[:, None] > 1},
        {"attn_mask": torch.where(torch.arange(N)[:, None] > 1, BIAS[0, 0], -torch.inf)},
        {"attn_mask": torch.arange(N) > 1, "is_causal": True},
    ):
        ours, theirs = twins(layers.Attention(D, H).double(), reference.Attention(D, H).double())
        want = step(theirs, x, seen)
        assert torch.equal(want[0][:, :2], theirs.proj.bias.expand(B, 2, D))
        assert_same(step(ours, x, seen), want)
        ours.attn_drop.register_forward_hook(lambda *_: None)
        assert_same(step(ours, x, seen), want)


def test_proportional_attention() -> None:
    """A token with log(s) added to its scores is s equal tokens (Bolya et al. 2023, arXiv:2210.09461), gradients
    included."""
    block = randomised(layers.Block(D, H)).double()
    x, sizes = tokens(B, 4, D)[0].requires_grad_(), torch.tensor([[1, 3, 2, 1], [2, 1, 1, 3]])
    got = block(x, attn_mask=sizes.double().log()[:, None, None, :])
    repeated = torch.stack([tokens.repeat_interleave(s, dim=0) for tokens, s in zip(x, sizes, strict=True)])
    first = (sizes.cumsum(1) - sizes)[..., None].expand(-1, -1, D)
    want = block(repeated).gather(1, first)
    wanted = [x, *block.parameters()]
    gradients = (torch.autograd.grad(y.square().sum(), wanted) for y in (got, want))
    for a, b in zip((got, *next(gradients)), (want, *next(gradients)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_masks_that_do_not_fit_raise() -> None:
    """Fused, and with the modules one by one."""
    attn, x = layers.Attention(D, H), torch.randn(B, N, D)
    for _ in range(2):
        with pytest.raises(TypeError, match="attn_mask must be float"):
            attn(x, torch.ones(N, N, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"attn_mask must be broadcastable to .*, got \(2, 6\)"):
            attn(x, torch.ones(B, N, dtype=torch.bool))
        attn.attn_drop.register_forward_hook(lambda *_: None)


def test_an_attention_without_masks_in_a_block() -> None:
    """Runs where the call has none, and raises where it has one."""
    block, x = layers.Block(D, H), torch.randn(B, N, D)
    block.attn = nn.Linear(D, D)
    assert block(x).shape == x.shape
    with pytest.raises(TypeError, match="attn_mask"):
        block(x, is_causal=True)


# ---- models ----

SMALL: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
MODELS = {
    "vit_tiny_patch16_224": {"img_size": 48, "reg_tokens": 1},
    "deit_tiny_distilled_patch16_224": {"img_size": 48},
    "eva02_tiny_patch14_224": {"img_size": 42},
}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_timms(name: str) -> None:
    ours, theirs = (lib.create_model(name, **SMALL, **MODELS[name]).eval() for lib in (fastvit, import_timm()))
    twins(ours, theirs)
    image = torch.randn(2, 3, *ours.patch_embed.img_size)
    n = ours.num_prefix_tokens + 9
    mask = torch.randn(1, 3, n, n)
    for seen in ((mask,), (mask > -1.0,), (None, True)):
        results = []
        for model in (ours, theirs):
            options = (2, True, True, False, "NLC", False)
            at_end = seen if model is theirs and "eva" in name else (False, *seen)  # timm's Eva has no output_dict
            final, pairs = model.forward_intermediates(image, *options, *at_end)
            parts = [t for pair in pairs for t in pair]
            results.append([model(image, *seen), model.forward_features(image, *seen), final, *parts])
            if seen[0] is not None and hasattr(model, "get_intermediate_layers"):
                results[-1] += model.get_intermediate_layers(image, 1, norm=False, attn_mask=seen[0])
        got, want = results
        for a, b in zip(got, want, strict=False):  # timm's Eva has no get_intermediate_layers
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert not close(ours(image), got[0])


@pytest.mark.parametrize("name", ["VisionTransformer", "Eva"])
def test_less_memory_with_masks(name: str) -> None:
    """Checkpointed and fitted models, and the reference with and without SDPA, give the same outputs and gradients."""
    rope = {"use_rot_pos_emb": True} if name == "Eva" else {}
    kinds = (VisionTransformer, reference.VisionTransformer) if not rope else (Eva, reference.Eva)
    ours, theirs = twins(*(kind(16, 4, **SMALL, **rope).double() for kind in kinds))
    image, bias = torch.randn(2, 3, 16, 16, dtype=torch.float64), torch.randn(3, 17, 17, dtype=torch.float64)
    want = step(ours, image, {"attn_mask": bias})
    checkpointed, fitted = copy.deepcopy(ours), copy.deepcopy(ours)
    checkpointed.set_grad_checkpointing()
    theirs.set_grad_checkpointing()
    recompute_all(fitted.blocks[0])
    setattr(fitted.blocks[1], ATTRIBUTE, Recompute("all", "all"))
    for model in (theirs, use_sdpa(copy.deepcopy(theirs)), checkpointed, fitted):
        assert_same(step(model, image, {"attn_mask": bias}), want)
        assert_same(step(model, image, {"is_causal": True}), step(ours, image, {"is_causal": True}))


def test_compile_fullgraph() -> None:
    block, _ = blocks()
    bias, x = torch.randn(1, H, N, N), torch.randn(B, N, D)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    seen = {"attn_mask": bias, "is_causal": True}
    for got, want in zip(step(compiled, x, seen), step(block, x, seen), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
