"""The post-norm block against the reference, and what it saves; in whole models: test_vit.py, test_fuzzed_model.py."""

import functools
from typing import Any

import pytest
import torch
from models import (
    D,
    H,
    N,
    assert_module_as_accurate,
    assert_same_step,
    assert_steps_as_accurate,
    blocks,
    randomised,
    step,
    tokens,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastvit import VisionTransformer, layers, reference
from fastvit.study.memory.peak import saved_bytes

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "layer_scale_drop_path": {"init_values": 0.5, "drop_path": 0.5},
    "no_biases": {"proj_bias": False, "norm_layer": functools.partial(nn.LayerNorm, bias=False)},
    "no_affine": {"norm_layer": functools.partial(nn.LayerNorm, elementwise_affine=False)},
    "qk_norm": {"qk_norm": True, "norm_layer": nn.RMSNorm, "act_layer": "relu"},
}
make = functools.partial(blocks, "PostNormBlock")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_as_accurate_as_the_reference(case: str, dtype: torch.dtype, device: torch.device) -> None:
    ours, theirs = make(**CASES[case])
    assert_module_as_accurate(ours.to(device), theirs.to(device), *tokens(4, N, D, device=device), dtype)


def test_under_autocast(device: torch.device) -> None:
    ours, theirs = make(init_values=0.5)
    x, dy = tokens(4, N, D, device=device)
    exact = step(theirs.to(device).double(), x, dy)
    results = []
    for module in (theirs.float(), ours.to(device)):
        module.forward = torch.autocast(device.type, torch.bfloat16)(module.forward)
        results.append(step(module, x.float(), dy.float()))
    assert results[0]["output"].dtype is results[1]["output"].dtype
    assert_steps_as_accurate(results[1], results[0], exact)


@pytest.mark.parametrize("name", ["attn", "norm1", "ls1", "drop_path1", "mlp", "norm2", "ls2", "drop_path2"])
def test_hooks(name: str) -> None:
    """A half with a hook runs its modules one by one, and the hook takes part."""
    ours, theirs = make(init_values=0.5, drop_path=0.3)
    for block in (ours, theirs):
        block.get_submodule(name).register_forward_hook(lambda _, __, output: 1.5 * output)
    assert_same_step(ours, theirs, tokens(dtype=torch.float32)[0])


@pytest.mark.parametrize(
    "mlp_layer",
    [
        functools.partial(layers.SwiGLU, norm_layer=functools.partial(layers.LayerNorm, eps=0.1)),
        functools.partial(layers.GluMlp, act_layer="silu"),
    ],
    ids=["inner_norm", "gate_last"],
)
def test_gated_mlp(mlp_layer: Any) -> None:
    """The modules run one by one if one has a hook, and compute the same."""
    block = randomised(layers.PostNormBlock(D, H, mlp_layer=mlp_layer, init_values=0.5))
    x, dy = tokens(dtype=torch.float32)
    got = step(block, x, dy)
    block.norm2.register_forward_hook(lambda *_: None)
    block.mlp.act.register_forward_hook(lambda *_: None)
    for name, want in step(block, x, dy).items():
        torch.testing.assert_close(got[name], want, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("names", [("attn.proj_drop",), ("mlp.drop2",), ("mlp.drop1", "mlp.drop2")], ids=str)
def test_dropout(names: tuple[str, ...]) -> None:
    """Before LayerScale and the sum: with a probability of nearly 1, of each half the norm of x is left."""
    block, _ = make(init_values=0.5)
    x = tokens(dtype=torch.float32)[0]
    without = block.eval()(x)
    assert torch.equal(block.train()(x), without)
    for name in names:
        block.get_submodule(name).p = 1 - 1e-7
    first = block.norm1(x) if "attn.proj_drop" in names else block.norm1(x + block.ls1(block.attn(x)))
    branch = block.ls2(block.mlp(first)) if "attn.proj_drop" in names else 0
    torch.testing.assert_close(block(x), block.norm2(first + branch), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(block.eval()(x), without)


def test_checkpointing_repeats_the_dropout() -> None:
    block, _ = make(proj_drop=0.3, attn_drop=0.3, drop_path=0.3)
    x, dy = tokens(dtype=torch.float32)
    plain = step(block, x, dy)
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    for name, got in step(block, x, dy).items():
        assert torch.equal(got, plain[name]), name


@pytest.mark.parametrize("layer", ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_quantised_layer_is_called_as_a_module(layer: str) -> None:
    block, _ = make(init_values=0.5)
    quantised = torch.ao.quantization.quantize_dynamic(block.eval(), {layer})
    x = tokens(dtype=torch.float32)[0]
    got = quantised(x)
    assert not torch.equal(got, block(x))
    for norm in (quantised.norm1, quantised.norm2):
        norm.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(got, quantised(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["plain", "layer_scale_drop_path"])
def test_at_most_twelve_token_tensors_are_saved(case: str, backend: str, device: torch.device) -> None:
    """x, q, k, v, the output of attention, both sums, the MLP's input, and its pre-activation, which counts as four."""
    dim, heads = 128, 2
    where: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(2, 16, dim, **where, requires_grad=True)
    ours, eager = (
        kind.PostNormBlock(dim, heads, qkv_bias=True, **where, **CASES[case]) for kind in (layers, reference)
    )
    saved, by_eager = (saved_bytes(lambda m=m: m(x), list(m.parameters())) for m in (ours, eager))
    statistics = 2 * 16 * 4 * (2 * 2 + heads)  # mean and rstd of two norms, LSE of each head, in float32
    assert 11 * x.nbytes < saved <= 12 * x.nbytes + 2 * statistics
    assert by_eager > 14 * x.nbytes


def test_compile_fullgraph_of_a_model() -> None:
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": D, "depth": 1, "num_heads": H, "num_classes": 5}
    model = randomised(VisionTransformer(**sizes, block_fn="postnorm", pos_embed="sincos2d", drop_path_rate=0.1))
    assert type(model.blocks[0]) is layers.PostNormBlock
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_step(compiled, model, torch.randn(2, 3, 16, 16))
