"""A norm before one or several linear layers in a graph: one op, or left, and right."""

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import check_under_autocast, compile_and_check, compiled, details
from graph_models import B, D, FunctionModule, half
from torch import nn

from fastvit.study.memory.peak import saved_bytes


def test_layer_norm_before_one_layer(x):
    model = half(lambda m, x: (m.qkv(m.norm(x)).sin(), m.qkv(m.norm(x) * 1.0)))
    assert details(compile_and_check(model, x), "LayerNorm") == ["layer_norm_linear", "left: mul after it"]


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
    fused, _ = compiled(model, fullgraph=True)
    plain = torch.compile(model, backend="aot_eager", fullgraph=True)
    rows = B * 64
    kept = [saved_bytes(lambda run=run: run(x), others) / 4 for run in (fused, plain)]
    assert kept[0] == rows * (D + 2 + 2 * 24)
    assert kept[1] == kept[0] + rows * D


def test_several_layers_under_autocast(x):
    def forward(m, x):
        y = m.norm(x)
        return m.a(y), m.c(y)

    report = check_under_autocast(three(forward).to(x.device), x, torch.bfloat16, within=True)
    assert details(report, "LayerNorm") == ["layer_norm_linears"]


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
