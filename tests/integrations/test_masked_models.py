"""Arguments of a call next to the tokens: masks, causality, rotary positions, ends of sequences. Dropout of gated
MLPs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from known_models import built
from library_models import attention_of_timm, block_of_timm, fused_only, gated_mlp, outcome, parallel_block
from models import accelerate_as_it_was, close
from torch import nn

import fastvit
from fastvit.blocks import read_timm, run
from fastvit.blocks.submodules import CannotFuse
from fastvit.integrations.forward import checked_mask
from fastvit.integrations.transformers import layers

shared_keys = partial(attention_of_timm, "AttentionRope", qkv_fused=False, num_kv_heads=2, rotate_half=True)
ROPE = torch.randn(6, 32)
MODULES: dict[str, tuple[Callable[..., nn.Module], dict[str, Any], str]] = {
    "block": (block_of_timm, {}, "layer_norm_attention, layer_norm_mlp"),
    "EVA": (partial(block_of_timm, "eva02_tiny_patch14_224", num_heads=4), {}, "layer_norm_attention, layer_norm_mlp"),
    "rotary": (partial(attention_of_timm, "EvaAttention"), {"rope": ROPE}, "attention_qkvpacked, rms_norm, linear"),
    "norms": (partial(attention_of_timm, "AttentionRope", qk_norm=True), {"rope": ROPE}, "qk_norm, attention, linear"),
    "three layers, norms": (
        partial(attention_of_timm, "AttentionRope", qk_norm=True, qkv_fused=False), {}, "qk_norm, attention, linear"
    ),
    "shared keys": (shared_keys, {"rope": ROPE}, "attention, linear"),
    "shared keys, norms": (partial(shared_keys, qk_norm=True), {"rope": ROPE}, "rms_norm, attention, linear"),
    "parallel": (parallel_block, {}, "layer_norm_attention, layer_norm_mlp"),
    "parallel, one layer out": (
        partial(parallel_block, qkv_bias=True, fuse_out_proj=True), {}, "layer_norm_attention, layer_norm_mlp"
    ),
    "parallel, norms": (
        partial(parallel_block, qk_norm=True, init_values=0.5), {}, "layer_norm_attention, layer_norm_mlp"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_masks_and_causality(name: str, device: torch.device) -> None:
    make, more, ops = MODULES[name]
    module = make().to(device)
    x, more = torch.randn(2, 7, 64, device=device), {key: t.to(device) for key, t in more.items()}
    seen = torch.rand(2, 1, 7, 7, device=device) > 0.3
    seen[..., 0] = True
    calls: list[dict[str, Any]] = [
        {}, {"attn_mask": seen}, {"is_causal": True},
        {"attn_mask": torch.randn(7, 7, device=device).masked_fill(~seen[0, 0], -torch.inf)},
    ]  # fmt: skip
    report = accelerate_as_it_was(module, lambda: [module(x, **more, **call) for call in calls])
    assert outcome(report, "") == ("accelerated", ops)
    with fused_only():
        unmasked, *masked = (module(x, **more, **call) for call in calls)
    assert not any(close(out, unmasked) for out in masked)


def test_masks_that_no_op_takes_are_the_librarys() -> None:
    """`fused_forward` then runs the module's own forward."""
    for taken in (torch.ones(2, 1, 1, 17), torch.ones(17, 1)):
        assert checked_mask(taken, 17) is taken
    tokens, other_keys = torch.ones(2, 17, dtype=torch.bool), torch.ones(2, 1, 17, 5)
    for mask in (tokens, other_keys, torch.zeros(17, 17, dtype=torch.int64), torch.ones(2, 17, 17), "blocks"):
        with pytest.raises(CannotFuse, match="an attention mask of"):
            checked_mask(mask, 17)


@pytest.mark.parametrize("kind", ["SwiGLU", "GluMlp"])
def test_dropouts_are_those_of_the_layers(kind: str, device: torch.device) -> None:
    """One after the product, before the norm, and one after fc2."""
    mlp = gated_mlp(kind, act_layer=nn.GELU, norm_layer=nn.LayerNorm, drop=0.25).to(device).train()
    spec = read_timm.read_mlp(mlp)
    assert (spec.drop1, spec.drop2, spec.activation) == (0.25, 0.25, "geglu")
    assert spec.inner_norm is not None
    x = torch.randn(64, 64, device=device)
    with torch.no_grad():
        assert 0.2 < float((run.run_mlp(x, spec) == 0).double().mean()) < 0.3
        mlp.drop1.p = 0.0  # fc2's alone
        dropped, whole = run.run_mlp(x, read_timm.read_mlp(mlp)), mlp.eval()(x)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75, rtol=1e-4, atol=1e-5)


def test_other_calls_of_towers(device: torch.device) -> None:
    """With the longest length, by name, compiled, and with arguments that no op has."""
    model = built("Qwen2.5-VL", device).model
    attention = next(m for m in model.modules() if type(m).__name__.endswith("VisionAttention"))
    x, ends = torch.randn(24, attention.dim, device=device), torch.tensor([0, 16, 24], device=device).int()
    angles = torch.randn(24, attention.dim // attention.num_heads // 2, device=device).repeat(1, 2)
    positions = angles.cos(), angles.sin()
    want = attention(x, ends, positions)
    fastvit.accelerate(attention)
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    with fused_only():
        assert close(attention(x, ends, positions, max_seqlen=16), want)
        assert close(attention(x, cu_seqlens=ends.long(), position_embeddings=positions), want)
        assert close(compiled(x, ends, positions), want)
    with pytest.warns(UserWarning, match="no cu_seqlens or no rotary positions"), pytest.raises(TypeError):
        attention(x, ends)
    with pytest.warns(UserWarning, match="the argument other"):
        attention(x, ends, positions, other=2.0)
    fastvit.restore(model)


def test_positions_of_images_with_a_mask(device: torch.device) -> None:
    """In earlier versions of Pixtral they separate images without a mask."""
    x, positions = torch.randn(2, 17, 64, device=device), torch.arange(17, device=device)
    mask, tables = torch.zeros(1, 1, 17, 17, device=device), 2 * (torch.randn(16, 16, device=device),)
    assert layers.read_rotary_call(None, x, mask, tables, position_ids=positions)[0] is x
    with pytest.raises(CannotFuse, match="position_ids"):
        layers.read_rotary_call(None, x, None, tables, position_ids=positions)
