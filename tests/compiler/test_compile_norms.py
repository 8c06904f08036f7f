"""LayerNorms and RMSNorms in graphs, in the spellings of libraries: before linear layers, after a residual sum, before
attention's projection. Fused, or left, and right."""

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import check_rows, compile_and_check, compiled, details, graph_for_inner
from graph_models import EPS, NORMS, D, FunctionModule, H, N, half, heads, joined, together
from torch import nn

from fastvit.compiler.match.calls import name_of

LINEAR, d = "layer_norm_linear", D // H


def normalized(x, variance):
    return x * torch.rsqrt(variance + EPS)


def mean_square(x, dim=-1):
    return x.pow(2).mean(dim, keepdim=True)


# ---- spellings of RMSNorm ----


def t5(m, x):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + EPS)
    return m.weight * (x.to(m.weight.dtype) if m.weight.dtype in (torch.float16, torch.bfloat16) else x)


def gemma(m, x):
    h = x.float()
    return (h * torch.pow(h.pow(2).mean(-1, keepdim=True) + EPS, -0.5) * (1.0 + m.weight.float())).type_as(x)


def in_place(m, x):
    variance = x.square().mean((2,), True)
    variance += EPS
    return x * variance.rsqrt_() * m.weight


def rows_for_columns(m, x):
    """A norm of a square matrix: means of rows for its columns, of which there are as many."""
    s = x[0, :1].mT * x[0, :1]
    return normalized(s, s.pow(2).mean(-1)) * m.weight


def root_used_twice(m, x):
    root = torch.rsqrt(mean_square(x) + EPS)
    return x * root * m.weight + root


def rounded_first(m, x):
    return normalized(x.bfloat16().float(), mean_square(x.bfloat16().float())) * m.weight


SPELLINGS = {
    "torch": (lambda m, x: F.rms_norm(x, (D,), m.weight, EPS), LINEAR),
    "llama": (lambda m, x: m.weight * normalized(x.float(), mean_square(x.float())).to(x.dtype), LINEAR),
    "t5": (t5, LINEAR),
    "divided": (lambda m, x: x / torch.sqrt(EPS + (x**2).mean([-1], keepdim=True)) * m.weight, LINEAR),
    "gemma": (gemma, LINEAR),
    "in place": (in_place, LINEAR),
}
OTHER_DIMENSION, NO_WEIGHT = "left: an RMSNorm over another dimension", "left: an RMSNorm without weight"
ROUNDED = "left: an RMSNorm that is rounded on the way"
LEFT = {
    "over tokens": (lambda m, x: normalized(x, mean_square(x, 1)) * m.weight, OTHER_DIMENSION),
    "over rows, for columns": (rows_for_columns, OTHER_DIMENSION),
    "of another": (
        lambda m, x: normalized(x, mean_square(x.sin())) * m.weight, "left: a mean of squares of another tensor",
    ),
    "no weight": (lambda m, x: normalized(x, mean_square(x)), NO_WEIGHT),
    "a weight of tokens": (lambda m, x: normalized(x, mean_square(x)) * x[:, :1], NO_WEIGHT),
    "the root by x": (
        lambda m, x: (mean_square(x) + EPS).sqrt() / x * m.weight, "left: div after the root of a mean of squares",
    ),
    "rounded": (lambda m, x: normalized(x, mean_square(x)).bfloat16().float() * m.weight, ROUNDED),
    "rounded first": (rounded_first, ROUNDED),
    "a learnt eps": (
        lambda m, x: x * torch.rsqrt(mean_square(x) + m.weight[0]) * m.weight,
        "left: an RMSNorm whose eps is a tensor",
    ),
    "root used twice": (root_used_twice, "left: the output of its rsqrt is used 2 times"),
}  # fmt: skip
NO_NORMS = [
    lambda m, x: normalized(x, x.pow(3).mean(-1, keepdim=True).abs()) * m.weight,
    lambda m, x: normalized(x, x.mean(-1, keepdim=True).abs()) * m.weight,
]


def before_linear(norms) -> FunctionModule:
    """Return a module with each of these norms before a linear layer."""
    forwards = [lambda m, x, norm=norm: m.qkv(norm(m, x)) for norm in norms]
    return half(together(forwards), weight=nn.Parameter(1.0 + 0.1 * torch.randn(D)))


def test_rms_norms(x):
    check_rows("RMSNorm", SPELLINGS | LEFT, lambda norms: before_linear([*norms, *NO_NORMS]), x)


def test_rms_norms_in_16_bits(x):
    rows = SPELLINGS | {"gemma": (gemma, "left: type_as after it")}  # 1 + weight is in float32
    check_rows("RMSNorm", rows, lambda norms: before_linear(norms).bfloat16(), x.bfloat16())


def test_default_eps_is_that_of_the_dtype(x):
    model = before_linear([lambda m, x: F.rms_norm(x, (D,), m.weight)])
    small = 1e-3 * x
    assert details(compile_and_check(model, small), "RMSNorm") == [LINEAR]
    report = compile_and_check(model.bfloat16(), small.bfloat16())
    assert details(report, "RMSNorm") == ["left: an RMSNorm of torch.bfloat16 without eps"]


def test_eps_that_changes_in_a_dynamic_graph(x):
    model = half(lambda m, x: m.qkv(x * torch.rsqrt(mean_square(x) + m.eps) * m.norm.weight)).to(x.device)
    function, reports = compiled(model, dynamic=True)
    for eps in (1e-5, 1.0):
        model.eps = eps
        torch.testing.assert_close(function(x), model(x))
        assert details(reports[-1], "RMSNorm") == [LINEAR]


def test_rms_norm_that_no_op_takes_is_one_call(x):
    model = FunctionModule(lambda m, x: SPELLINGS["llama"][0](m, x).cos(), weight=nn.Parameter(torch.randn(D)))
    graph = graph_for_inner(model.to(x.device), x)
    assert [name_of(node) for node in graph.nodes if node.op.startswith("call")] == ["rms_norm", "cos"]


@pytest.mark.parametrize(("kind", "dynamic"), [("RMSNorm", True), ("LayerNorm", False)])
def test_whole_block(kind, dynamic, x):
    def forward(m, x):
        x = x + m.proj(joined(F.scaled_dot_product_attention(*heads(m.qkv(m.norm1(x))))))
        y = m.norm2(x)
        x = x + m.fc2(m.inner(F.silu(m.gate(y)) * m.value(y)))
        s = x + x.tanh()
        return s, m.norm3(s).cos(), m.fc2(F.gelu(m.value(s))) * s.shape[1]  # a symbol if dynamic

    layers = {name: NORMS[kind]() for name in ("norm1", "norm2", "norm3")}
    layers |= {"inner": NORMS[kind](48), "gate": nn.Linear(D, 48), "value": nn.Linear(D, 48), "fc2": nn.Linear(48, D)}
    report = compile_and_check(half(forward, **layers), x, dynamic=dynamic)
    assert details(report, kind) == ["layer_norm_attention", "layer_norm_mlp", "layer_norm_mlp", "add_layer_norm"]
    assert details(report, "attention") == ["layer_norm_attention"]
    assert details(report, "MLP") == ["layer_norm_mlp", "mlp (no norm before it but add)"]


# ---- before linear layers ----


def with_gradients_of_one(m, x):
    y = m.norm(x)
    with torch.no_grad():
        c = m.c(y)
    return m.a(y) * c


def by_its_own_rows(m, x):
    y = m.norm(x[0])
    return m.a(y), F.linear(y, y)


def three_layers(m, x):
    y = m.norm(x)
    a = m.a(y).sin()
    return a, m.b(y).unflatten(-1, (5, 8)).transpose(1, 2), m.c(y) * a


BEFORE_LAYERS = {
    "one layer": (lambda m, x: m.a(m.norm(x)).sin(), LINEAR),
    "a cast to its own dtype": (lambda m, x: m.a(m.norm(x).to(x.dtype)), LINEAR),  # open_clip's
    "something else": (lambda m, x: m.a(m.norm(x) * 1.0), "left: mul after it"),
    "three layers": (three_layers, "layer_norm_linears"),
    "written into": (
        lambda m, x: (lambda y: (m.a(y), m.c(y).mul_(2.0)))(m.norm(x)), "left: its output is changed in place",
    ),
    "grad mode between": (with_gradients_of_one, "left: autocast or grad mode changes within it"),
    "its weight is the rows": (by_its_own_rows, "left: what it computes on the way is used by its end, too"),
    "no weight": (lambda m, x: m.a(m.bare(x)), "left: a LayerNorm without weight"),
    "of two dimensions": (lambda m, x: m.a(m.wide(x)), "left: a LayerNorm over more than the last dimension"),
}  # fmt: skip


def layers(forwards) -> FunctionModule:
    """A norm, and layers of three widths, one without a bias"""
    return FunctionModule(
        together(forwards), norm=nn.LayerNorm(D), a=nn.Linear(D, 24), b=nn.Linear(D, 40, bias=False),
        c=nn.Linear(D, 24), bare=nn.LayerNorm(D, elementwise_affine=False), wide=nn.LayerNorm((N, D)),
    )  # fmt: skip


def test_layer_norms(x):
    check_rows("LayerNorm", BEFORE_LAYERS, layers, x)


# ---- before attention's projection ----

BEFORE_PROJECTION = {
    "LayerNorm": (lambda m, out: m.all(joined(out)), "layer_norm_attention"),
    "RMSNorm": (lambda m, out: m.rms(joined(out)), "layer_norm_attention"),
    "of each head": (
        lambda m, out: m.head(out.transpose(1, 2)).flatten(2),
        "attention_qkvpacked (a norm of single heads after attention)",
    ),
    "heads in another order": (
        lambda m, out: m.all(out.permute(0, 2, 3, 1).flatten(2)),
        "attention_qkvpacked (a norm of single heads after attention)",
    ),
    "two": (lambda m, out: m.all(m.all(joined(out))), "attention_qkvpacked (layer_norm after attention)"),
    "used elsewhere": (
        lambda m, out: (lambda y: m.all(y) + y)(joined(out)),
        "attention_qkvpacked (attention's output is used more than once)",
    ),
}


def test_norms_before_the_projection(x):
    def build(betweens):
        def around(between):
            return lambda m, x: x + m.proj(between(m, F.scaled_dot_product_attention(*heads(m.qkv(m.norm(x))))))

        return half(together(map(around, betweens)), head=nn.LayerNorm(d), all=nn.LayerNorm(D), rms=NORMS["RMSNorm"]())

    report = check_rows("attention", BEFORE_PROJECTION, build, x)
    assert details(report, "RMSNorm") == ["layer_norm_attention"]
