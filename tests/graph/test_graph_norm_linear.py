"""A norm before one or several linear layers in a graph: one op, or left, and right."""

import pytest
import torch
import torch.nn.functional as F
from graph_models import B, D, FunctionModule, compile_and_check, details, half
from torch import nn

import fastvit
from fastvit.study.memory.peak import saved_bytes


def test_layer_norm_before_one_layer(x):
    def one(m, x):
        return m.qkv(m.norm(x)).sin()

    assert details(compile_and_check(half(one), x), "LayerNorm") == ["layer_norm_linear"]

    def scaled(m, x):
        return m.qkv(m.norm(x) * 1.0)

    assert details(compile_and_check(half(scaled), x), "LayerNorm") == ["left: mul after it"]


def three(forward):
    """norm and layers of three widths, one without a bias"""
    layers = {"a": nn.Linear(D, 24), "b": nn.Linear(D, 40, bias=False), "c": nn.Linear(D, 24)}
    return FunctionModule(forward, norm=nn.LayerNorm(D), **layers)


@pytest.mark.parametrize("dynamic", [False, True])
def test_layer_norm_before_several_layers(dynamic, x):
    def forward(m, x):
        y = m.norm(x)
        a = m.a(y).sin()
        b = m.b(y)
        return a, b.unflatten(-1, (5, 8)).transpose(1, 2), m.c(y) * a

    assert details(compile_and_check(three(forward), x, dynamic=dynamic), "LayerNorm") == ["layer_norm_linears"]


def test_several_layers_save_their_input_once():
    """They save x and the statistics, and not the normalised rows."""

    def forward(m, x):
        y = m.norm(x)
        return m.a(y).sin() + m.c(y).sin()

    x = torch.randn(B, 64, D, requires_grad=True)
    model = three(forward)
    others = [*model.parameters()]
    torch._dynamo.reset()
    fused = fastvit.compile(model, inner="aot_eager", fullgraph=True)
    plain = torch.compile(model, backend="aot_eager", fullgraph=True)
    rows = B * 64
    kept = [saved_bytes(lambda run=run: run(x), others) / 4 for run in (fused, plain)]
    assert kept[0] == rows * (D + 2 + 2 * 24)
    assert kept[1] == kept[0] + rows * D


def test_several_layers_under_autocast(x, device):
    def forward(m, x):
        with torch.autocast(device.type, torch.bfloat16):
            y = m.norm(x)
            return m.a(y), m.c(y)

    model, reports = three(forward).to(device), []
    torch._dynamo.reset()
    got = fastvit.compile(model, inner="aot_eager", fullgraph=True, report=reports.append)(x)
    assert details(reports[0], "LayerNorm") == ["layer_norm_linears"]
    for g, want in zip(got, model(x), strict=True):
        assert g.dtype == want.dtype == torch.bfloat16
        torch.testing.assert_close(g, want, atol=0.05, rtol=0.02)


LEFT = {
    "written into": "its output is changed in place",
    "grad mode between": "autocast or grad mode changes within it",
    "its weight is the rows": "what it computes on the way is used by its end, too",
}


@pytest.mark.parametrize("case", LEFT)
def test_several_layers_that_are_no_op(case, x):
    def forward(m, x):
        if case == "its weight is the rows":
            y = m.norm(x[0])
            return m.a(y), F.linear(y, y)
        y = m.norm(x)
        a = m.a(y)
        if case == "written into":
            return a, m.c(y).mul_(2.0)
        with torch.no_grad():
            c = m.c(y)
        return a * c

    assert details(compile_and_check(three(forward), x), "LayerNorm") == [f"left: {LEFT[case]}"]
