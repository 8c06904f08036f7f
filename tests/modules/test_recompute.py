"""Attention in steps, recomputed: the same gradients, less saved. Halves that are ops: integrations/test_fit.py."""

import pytest
import torch
from graph_models import FunctionModule
from models import D, H, randomised, tokens
from torch import nn

from fastvit import layers, ops
from fastvit.blocks import read_timm, run
from fastvit.study.memory.peak import saved_bytes


@pytest.mark.parametrize("kind", ["learnt", "steps"])
def test_gradients_do_not_change_and_less_is_saved(kind):
    """Attention that runs in steps, because no op has it."""

    def forward(m, x):
        half = read_timm.read_attention_half(m.block)
        if kind == "learnt":
            return run.run_attention_half(x, half, ops.Rotary(m.table.sin(), m.table.cos(), 1), **m.options)
        return run.run_attention_half(x, half._replace(branch=half.branch._replace(in_steps=True)), **m.options)

    def saved():
        return saved_bytes(lambda: model(x), [*model.parameters(), *model.buffers()])

    def gradients():
        model.zero_grad()
        torch.manual_seed(6)
        y = model(x)
        y.square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None} | {"y": y.detach()}

    block = randomised(layers.Block(D, H, attn_drop=0.2, proj_drop=0.2, drop_path=0.4))
    model = FunctionModule(forward, block=block, table=nn.Parameter(torch.randn(16, D // H)), options={})
    x = tokens(dtype=torch.float32)[0]
    want, before = gradients(), saved()
    for choice in ("none", "attention", "qkv", "all"):
        model.options = {"recompute": choice}
        got = gradients()
        assert all(torch.equal(got[name], t) for name, t in want.items())
        if choice == "none":
            assert saved() == before
        else:
            assert saved() <= 2 * x.nbytes < before  # x, and in training the state of the generator
    with torch.no_grad():
        torch.manual_seed(6)
        assert torch.equal(model(x), want["y"])
