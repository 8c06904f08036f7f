"""Our blocks compute parts again in the backward pass: no gradient changes, and less is saved."""

import itertools

import pytest
import torch
from graph_models import FunctionModule
from models import D, H, randomised, step, tokens
from torch import nn

from fastvit import layers, ops
from fastvit.blocks import read_timm, run
from fastvit.blocks.recompute import ATTRIBUTE, DEFAULT, Recompute
from fastvit.study.memory.peak import saved_bytes

ATTENTION_CHOICES, MLP_CHOICES = ("none", "attention", "qkv", "all"), ("none", "activation", "all")


def with_rope():
    """Return an EVA block with rotary positions for all tokens but one."""
    options = {"swiglu_mlp": True, "scale_mlp": True, "init_values": 0.3, "drop_path": 0.4}
    block = layers.EvaBlock(D, H, qkv_fused=False, **options)
    rope = nn.Buffer(torch.randn(16, 2 * D // H, generator=torch.Generator().manual_seed(3)))
    return FunctionModule(lambda m, x: m.block(x, m.rope), block=block, rope=rope)


BLOCKS = {
    "dropout": lambda: layers.Block(D, H, init_values=0.3, attn_drop=0.2, proj_drop=0.2, drop_path=0.4),
    "qk_norm": lambda: layers.Block(D, H, qk_norm=True, mlp_layer="swiglu"),
    "EVA": with_rope,
}


def saved(model, x):
    return saved_bytes(lambda: model(x), [*model.parameters(), *model.buffers()])


def assert_equal(got, want):
    assert all(torch.equal(got[name], t) for name, t in want.items())


@pytest.mark.parametrize("case", BLOCKS)
def test_gradients_do_not_change(case):
    model, x = randomised(BLOCKS[case]()), tokens(dtype=torch.float32)[0]
    block = model.block if case == "EVA" else model
    want, before, kept = step(model, x), saved(model, x), {}
    for recompute in map(Recompute._make, itertools.product(ATTENTION_CHOICES, MLP_CHOICES)):
        setattr(block, ATTRIBUTE, recompute)
        assert_equal(step(model, x), want)
        kept[recompute] = saved(model, x)
    assert kept[DEFAULT] == before
    for order in (
        [Recompute(a, "none") for a in ATTENTION_CHOICES],
        [Recompute("all", m) for m in MLP_CHOICES],
    ):
        several = [kept[recompute] for recompute in order]
        assert several == sorted(set(several), reverse=True)


@pytest.mark.parametrize("kind", ["learnt", "steps"])
def test_halves_in_steps(kind):
    """Attention that runs in steps, because no op has it."""

    def forward(m, x):
        half = read_timm.read_attention_half(m.block)
        if kind == "learnt":
            return run.run_attention_half(x, half, ops.Rotary(m.table.sin(), m.table.cos(), 1), **m.options)
        return run.run_attention_half(x, half._replace(branch=half.branch._replace(in_steps=True)), **m.options)

    def gradients():
        model.zero_grad()
        torch.manual_seed(6)
        y = model(x)
        y.square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None} | {"y": y.detach()}

    block = randomised(layers.Block(D, H, attn_drop=0.2, proj_drop=0.2, drop_path=0.4))
    model = FunctionModule(forward, block=block, table=nn.Parameter(torch.randn(16, D // H)), options={})
    x = tokens(dtype=torch.float32)[0]
    want, before = gradients(), saved(model, x)
    for choice in ATTENTION_CHOICES:
        model.options = {"recompute": choice}
        assert_equal(gradients(), want)
        if choice == "none":
            assert saved(model, x) == before
        else:
            assert saved(model, x) <= 2 * x.nbytes < before  # x, and in training the state of the generator
    with torch.no_grad():
        torch.manual_seed(6)
        assert torch.equal(model(x), want["y"])
