"""RMSNorms in graphs, in the spellings of libraries and wherever a LayerNorm may be, and norms before attention's
projection: fused, or left, and right."""

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import compile_and_check, compiled, details, graph_for_inner
from graph_models import EPS, NORMS, D, FunctionModule, H, half, heads, joined, together
from torch import nn

from fastvit.graph.match.calls import name_of

d = D // H


# ---- spellings ----


def rounded_after_the_weight(x, weight):
    h = x.float()
    return (h * torch.rsqrt(torch.mean(h * h, dim=-1, keepdim=True) + EPS) * weight.float()).to(x.dtype)


def of_t5(x, weight):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + EPS)
    return weight * (x.to(weight.dtype) if weight.dtype in (torch.float16, torch.bfloat16) else x)


def of_gemma(x, weight):
    h = x.float()
    return (h * torch.pow(h.pow(2).mean(-1, keepdim=True) + EPS, -0.5) * (1.0 + weight.float())).type_as(x)


def in_place(x, weight):
    variance = x.square().mean((2,), True)
    variance += EPS
    return x * variance.rsqrt_() * weight


SPELLINGS = {
    "torch": lambda x, weight: F.rms_norm(x, (D,), weight, EPS),
    "llama": lambda x, weight: (
        weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
    ),
    "rounded after the weight": rounded_after_the_weight,
    "t5": of_t5,
    "timm": lambda x, weight: x * torch.rsqrt(torch.mean(x.pow(2), dim=(-1,), keepdim=True) + EPS) * weight,
    "divided": lambda x, weight: x / torch.sqrt(EPS + (x**2).mean([-1], keepdim=True)) * weight,
    "gemma": of_gemma,
    "in place": in_place,
}


def before_linear(norms) -> FunctionModule:
    """Return a module with each of these norms before a linear layer."""
    forwards = [lambda m, x, norm=norm: m.qkv(norm(m, x)) for norm in norms]
    return half(together(forwards), weight=nn.Parameter(1.0 + 0.1 * torch.randn(D)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["32", "16"])
def test_rms_norm_is_found(dtype, x):
    model = before_linear([lambda m, x, norm=norm: norm(x, m.weight) for norm in SPELLINGS.values()])
    found = details(compile_and_check(model.to(dtype), x.to(dtype)), "RMSNorm")
    offset = "layer_norm_linear" if dtype == torch.float32 else "left: type_as after it"  # 1 + weight is in float32
    assert dict(zip(SPELLINGS, found, strict=True)) == dict.fromkeys(SPELLINGS, "layer_norm_linear") | {"gemma": offset}


def test_default_eps_is_that_of_the_dtype(x):
    model = before_linear([lambda m, x: F.rms_norm(x, (D,), m.weight)])
    small = 1e-3 * x
    assert details(compile_and_check(model, small), "RMSNorm") == ["layer_norm_linear"]
    report = compile_and_check(model.bfloat16(), small.bfloat16())
    assert details(report, "RMSNorm") == ["left: an RMSNorm of torch.bfloat16 without eps"]


def normalized(x, variance):
    return x * torch.rsqrt(variance + EPS)


def mean_square(x, dim=-1):
    return x.pow(2).mean(dim, keepdim=True)


LEFT = {
    "over tokens": (lambda m, x: normalized(x, mean_square(x, 1)) * m.weight, "an RMSNorm over another dimension"),
    "over both": (lambda m, x: normalized(x, mean_square(x, (1, 2))) * m.weight, "an RMSNorm over another dimension"),
    "over rows, for columns": (  # of as many
        lambda m, x: (lambda s: normalized(s, s.pow(2).mean(-1)) * m.weight)(x[0, :1].mT * x[0, :1]),
        "an RMSNorm over another dimension",
    ),
    "of another": (lambda m, x: normalized(x, mean_square(x.sin())) * m.weight, "a mean of squares of another tensor"),
    "no weight": (lambda m, x: normalized(x, mean_square(x)), "an RMSNorm without weight"),
    "a weight of tokens": (lambda m, x: normalized(x, mean_square(x)) * x[:, :1], "an RMSNorm without weight"),
    "the root times x": (
        lambda m, x: x * (mean_square(x) + EPS).sqrt() * m.weight, "mul after the root of a mean of squares",
    ),
    "the root by x": (
        lambda m, x: (mean_square(x) + EPS).sqrt() / x * m.weight, "div after the root of a mean of squares",
    ),
    "rounded": (
        lambda m, x: normalized(x, mean_square(x)).bfloat16().float() * m.weight,
        "an RMSNorm that is rounded on the way",
    ),
    "a learnt eps": (
        lambda m, x: x * torch.rsqrt(mean_square(x) + m.weight[0]) * m.weight, "an RMSNorm whose eps is a tensor",
    ),
    "used elsewhere": (
        lambda m, x: (lambda y: y * m.weight + y)(normalized(x, mean_square(x))), "an RMSNorm without weight",
    ),
    "its root used elsewhere": (
        lambda m, x: (lambda r: x * r * m.weight + r)(torch.rsqrt(mean_square(x) + EPS)),
        "the output of its rsqrt is used 2 times",
    ),
    "of cubes": (lambda m, x: normalized(x, x.pow(3).mean(-1, keepdim=True).abs()) * m.weight, None),
    "of deviations": (lambda m, x: normalized(x, x.var(-1, keepdim=True)) * m.weight, None),
    "of no squares": (lambda m, x: normalized(x, x.mean(-1, keepdim=True).abs()) * m.weight, None),
    "rounded first": (
        lambda m, x: normalized(x.bfloat16().float(), mean_square(x.bfloat16().float())) * m.weight,
        "an RMSNorm that is rounded on the way",
    ),
}  # fmt: skip


def test_what_only_looks_like_an_rms_norm_is_left(x):
    report = compile_and_check(before_linear([forward for forward, _ in LEFT.values()]), x)
    expected = {name: f"left: {reason}" for name, (_, reason) in LEFT.items() if reason}
    assert dict(zip(expected, details(report, "RMSNorm"), strict=True)) == expected


# ---- wherever a LayerNorm may be ----


@pytest.mark.parametrize(("kind", "dynamic"), [("RMSNorm", False), ("RMSNorm", True), ("LayerNorm", False)])
def test_whole_block(kind, dynamic, x):
    def forward(m, x):
        x = x + m.proj(joined(F.scaled_dot_product_attention(*heads(m.qkv(m.norm1(x))))))
        y = m.norm2(x)
        x = x + m.fc2(m.inner(F.silu(m.gate(y)) * m.value(y)))
        s = x + x.tanh()
        return s, m.norm3(s).cos()

    layers = {name: NORMS[kind]() for name in ("norm1", "norm2", "norm3")}
    layers |= {"inner": NORMS[kind](48), "gate": nn.Linear(D, 48), "value": nn.Linear(D, 48), "fc2": nn.Linear(48, D)}
    report = compile_and_check(half(forward, **layers), x, dynamic=dynamic)
    assert details(report, kind) == ["layer_norm_attention", "layer_norm_mlp", "layer_norm_mlp", "add_layer_norm"]
    assert details(report, "attention") == ["layer_norm_attention"]
    assert details(report, "MLP") == ["layer_norm_mlp"]


def test_eps_that_changes_in_a_dynamic_graph(x):
    model = half(lambda m, x: m.qkv(x * torch.rsqrt(mean_square(x) + m.eps) * m.norm.weight)).to(x.device)
    function, reports = compiled(model, dynamic=True)
    for eps in (1e-5, 1.0):
        model.eps = eps
        torch.testing.assert_close(function(x), model(x))
        assert details(reports[-1], "RMSNorm") == ["layer_norm_linear"]


def test_rms_norm_that_no_op_takes_is_one_call(x):
    graph = graph_for_inner(lambda x, weight: SPELLINGS["llama"](x, weight).cos(), x, x[0, 0])
    assert [name_of(node) for node in graph.nodes if node.op.startswith("call")] == ["rms_norm", "cos"]


# ---- in front of attention's projection ----


def scaled_half(*betweens, **layers) -> FunctionModule:
    """betweens: functions of the module and attention's output, (B, H, N, d)"""

    def around(between):
        return lambda m, x: x + m.proj(between(m, F.scaled_dot_product_attention(*heads(m.qkv(m.norm(x))))))

    return half(together(map(around, betweens)), **layers)


@pytest.mark.parametrize("kind", NORMS)
def test_norm_in_front_of_the_projection(kind, x):
    report = compile_and_check(scaled_half(lambda m, out: m.scale(joined(out)), scale=NORMS[kind]()), x)
    assert details(report, "attention") == ["layer_norm_attention"]
    assert "layer_norm_attention" in details(report, kind)


OTHER_SCALES = {
    "of each head": (lambda m, out: m.head(out.transpose(1, 2)).flatten(2), "a norm of single heads after attention"),
    "heads in another order": (
        lambda m, out: m.all(out.permute(0, 2, 3, 1).flatten(2)),
        "a norm of single heads after attention",
    ),
    "two": (lambda m, out: m.all(m.all(joined(out))), "layer_norm after attention"),
    "used elsewhere": (
        lambda m, out: (lambda y: m.all(y) + y)(joined(out)),
        "attention's output is used more than once",
    ),
}


def test_other_norms_after_attention_are_left(x):
    betweens = [between for between, _ in OTHER_SCALES.values()]
    report = compile_and_check(scaled_half(*betweens, head=nn.LayerNorm(d), all=nn.LayerNorm(D)), x)
    found = dict(zip(OTHER_SCALES, details(report, "attention"), strict=True))
    assert found == {name: f"attention_qkvpacked ({reason})" for name, (_, reason) in OTHER_SCALES.items()}
