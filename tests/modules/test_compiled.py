"""Modules and models under torch.compile: one graph, whatever they have and do, and the same step."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_models import FunctionModule
from models import D, H, LoRA, N, assert_same_step, blocks, randomised, tokens
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fastvit
from fastvit import layers
from fastvit.blocks.recompute import ATTRIBUTE, Recompute
from fastvit.eva import Eva

TINY: dict[str, Any] = {
    "img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 7, "mlp_ratio": 2.0,
}  # fmt: skip


def features(m: Any, x: Tensor) -> Tensor:
    """Intermediate tokens of an Eva, side by side."""
    final, ((patches, prefix),) = m.model.forward_intermediates(x, [-1], return_prefix_tokens=True)
    (layer,) = m.model.get_intermediate_layers(x)
    return torch.cat([final.flatten(1), patches.flatten(1), prefix.flatten(1), layer.flatten(1)], dim=1)


def adapted() -> nn.Module:
    block, _ = blocks()
    block.attn.qkv, block.mlp.fc1 = LoRA(block.attn.qkv), LoRA(block.mlp.fc1)
    return block


def masked() -> nn.Module:
    block, _ = blocks()
    masks = {"attn_mask": torch.randn(1, H, N, N), "is_causal": True}
    block.forward = functools.partial(block.forward, **masks)
    return block


MODELS: dict[str, Callable[[], nn.Module]] = {
    "features of Eva": lambda: FunctionModule(
        features, model=Eva(**TINY, use_rot_pos_emb=True, rope_type="dinov3", num_reg_tokens=1)
    ),
    "cross-attention": lambda: FunctionModule(
        lambda m, x: m.attn(x, x.flip(1), torch.arange(N) < N - 4),
        attn=layers.CrossAttention(D, H, qk_norm=True, norm_layer=nn.LayerNorm, attn_drop=0.5).eval(),
    ),
    "adapters": adapted,
    "masks": masked,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_step_in_one_graph(name: str) -> None:
    torch._dynamo.reset()
    model = randomised(MODELS[name]())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    if name == "features of Eva":  # the head does not run
        x = torch.randn(2, 3, 16, 16)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        return
    x = tokens(dtype=torch.float32)[0]
    assert_same_step(compiled, model, x)
    if name == "masks":  # another graph when the block is to compute parts again
        setattr(model, ATTRIBUTE, Recompute("of no op"))
        with pytest.raises(Exception, match="recompute must be one of none, attention, qkv, all, got 'of no op'"):
            compiled(x)


def test_another_batch_size_without_another_graph() -> None:
    """Nothing in a block's forward or backward chooses by how many images there are."""
    block, _ = blocks(init_values=0.1)
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=graphs)
    compiled_at = set()
    for batch in (9, 2, 64):
        assert_same_step(compiled, block, tokens(batch, N, D, dtype=torch.float32)[0])
        compiled_at.add(graphs.frame_count)
    assert len(compiled_at) == 1


def test_blocks_under_autocast(device: torch.device) -> None:
    """Dynamo, which traces a backward pass right after its forward pass, once left autocast off for the next block."""
    torch._dynamo.reset()
    model = nn.Sequential(*(fastvit.Block(32, 2, qkv_bias=True) for _ in range(2))).to(device)
    x = torch.randn(2, 5, 32, device=device, requires_grad=True)

    def step(module: nn.Module) -> list[Tensor]:
        with torch.autocast(device.type, torch.bfloat16):
            out = module(x)
        return [out, *torch.autograd.grad(out.sum(), [x, *model.parameters()])]

    torch.testing.assert_close(step(torch.compile(model, backend="aot_eager", fullgraph=True)), step(model))
