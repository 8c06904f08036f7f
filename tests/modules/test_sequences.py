"""Blocks with cu_seqlens: the tokens of several sequences, of which each has the results that it has alone."""

from itertools import pairwise

import pytest
import torch
from models import D, H, randomised
from torch import nn

from fastvit import eva_layers, layers
from fastvit.modules.parts import DropPath
from fastvit.study.memory.peak import saved_bytes

ENDS = (0, 5, 6, 15, 31)
BLOCKS = {
    "Block": lambda: layers.Block(D, H, qkv_bias=True, init_values=0.5),
    "PostNormBlock": lambda: layers.PostNormBlock(D, H, qk_norm=True),
    "EvaBlock": lambda: eva_layers.EvaBlock(D, H, num_prefix_tokens=0, qkv_fused=False),
}


def hook_everything(block):
    """Let the block call its modules one by one, and attention materialise its probabilities."""
    for module in (block.attn, block.attn.attn_drop, block.mlp):
        module.register_forward_hook(lambda *_: None)


def step(block, x, dy, *arguments, **options):
    y = block(x, *arguments, **options)
    return y, *torch.autograd.grad(y, [x, *block.parameters()], dy)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", BLOCKS)
def test_sequences_do_not_see_each_other(kind, fused):
    block = randomised(BLOCKS[kind]()).double()
    if not fused:
        hook_everything(block)
    x, dy = torch.randn(2, ENDS[-1], D, dtype=torch.float64)
    x.requires_grad_()
    rope = [torch.randn(ENDS[-1], 2 * D // H)] if kind == "EvaBlock" else []
    ends = torch.tensor(ENDS)
    got = step(block, x, dy, *rope, cu_seqlens=ends, max_seqlen=16)
    parts = [slice(*bounds) for bounds in pairwise(ENDS)]
    alone = torch.cat([block(x[part][None], *[t[part] for t in rope])[0] for part in parts])
    want = alone, *torch.autograd.grad(alone, [x, *block.parameters()], dy)
    torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="attn_mask must be None and is_causal False with cu_seqlens"):
        block(x, *rope, is_causal=True, cu_seqlens=ends)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["Block", "EvaBlock"])
def test_stochastic_depth_is_drawn_once_a_sequence(kind, fused):
    torch.manual_seed(0)
    block = BLOCKS[kind]()
    block.drop_path1, block.drop_path2 = DropPath(0.5), DropPath(0.5)
    for last, value in ((block.attn.proj, 1.0), (block.mlp.fc2, 10.0)):
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, value if kind == "EvaBlock" else 2 * value)  # a LayerScale of 0.5
    if not fused:
        hook_everything(block)
    lengths = torch.randint(1, 5, (40,))
    ends = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
    branches = block(torch.zeros(int(ends[-1]), D), cu_seqlens=ends)
    drawn = [branches[a:b].detach().unique() for a, b in pairwise(ends.tolist())]
    assert all(values.numel() == 1 for values in drawn)
    assert {float(values) for values in drawn} == {0.0, 2.0, 20.0, 22.0}


def test_saves_ten_token_tensors():
    block = randomised(layers.Block(D, H, qkv_bias=True, init_values=0.5, drop_path=0.1)).bfloat16()
    x, ends = torch.randn(ENDS[-1], D, dtype=torch.bfloat16, requires_grad=True), torch.tensor(ENDS)
    token, T = x.nbytes, ENDS[-1]
    saved = saved_bytes(lambda: block(x, cu_seqlens=ends, max_seqlen=16), list(block.parameters()))
    statistics = 4 * (2 * 2 * T + H * T) + ends.nbytes + 2 * 2 * T  # norms, log-sum-exp; ends; stochastic depth
    assert 9 * token < saved <= 10 * token + statistics


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", BLOCKS)
def test_errors(kind, fused):
    block, x, ends = BLOCKS[kind](), torch.randn(ENDS[-1], D), torch.tensor(ENDS)
    block.drop_path1 = DropPath(0.5)
    if not fused:
        hook_everything(block)
    for error, message, wrong in (
        (ValueError, "cu_seqlens must ascend from 0 to the number of tokens 31, got", {"cu_seqlens": ends[:-1]}),
        (ValueError, "max_seqlen must be at least the longest", {"cu_seqlens": ends, "max_seqlen": 3}),
        (ValueError, "max_seqlen must be None without cu_seqlens, got 3", {"x": x[None], "max_seqlen": 3}),
        (ValueError, r"x must have shape \(T, D\) with cu_seqlens", {"x": x[None], "cu_seqlens": ends}),
        (TypeError, "cu_seqlens must be a tensor of int32 or int64, got list", {"cu_seqlens": list(ENDS)}),
        (TypeError, "is_causal must be a bool, got 'yes'", {"x": x[None], "is_causal": "yes"}),
    ):
        with pytest.raises(error, match=message):
            block(**{"x": x, **wrong})


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_scale_of_the_users(kind):
    """Fused, by modules, and by modules with probabilities in memory."""
    block, ends = randomised(BLOCKS[kind](), 0.3).double(), torch.tensor(ENDS)
    x = torch.randn(ENDS[-1], D, dtype=torch.float64)
    plain = block(x, cu_seqlens=ends)
    block.attn.scale = 1.0
    want, want_batch = block(x, cu_seqlens=ends), block(x[None])
    assert not torch.allclose(want, plain)
    for name in ("attn.qkv" if kind != "EvaBlock" else "attn.q_proj", "attn.attn_drop"):
        block.get_submodule(name).register_forward_hook(lambda *_: None)
        torch.testing.assert_close(block(x, cu_seqlens=ends), want)
        torch.testing.assert_close(block(x[None]), want_batch)
