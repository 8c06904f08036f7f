"""Graphs in which a rewrite could change the result: writes in place, strides, dtypes on the way, `out=`, keywords,
transforms. Outputs and gradients are those of eager mode."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import compile_and_check, compiled, details
from graph_models import B, D, FunctionModule, H, N, heads, joined, together
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastvit.compiler.match.values import mutated
from fastvit.compiler.rewrites import mlp

checked = partial(compile_and_check, aot=True)
ROOT, SIZE = 0.7978845608028654, 16  # the root of 2 / pi; of a head


def module(*forwards) -> FunctionModule:
    """Return a module with the outputs of all of these functions of the module and its inputs."""
    return FunctionModule(
        together(forwards), norm=nn.LayerNorm(D), fc1=nn.Linear(D, 96), fc2=nn.Linear(96, D), a=nn.Linear(D, D),
        b=nn.Linear(D, D), qkv=nn.Linear(D, 3 * D), conv=nn.Conv2d(3, D, 4, 4),
        pos=nn.Parameter(torch.randn(1, 16, D)), cls=nn.Parameter(torch.randn(1, 1, D)),
    )  # fmt: skip


def attend(q: Tensor) -> Tensor:
    """(B, H, N, d), contiguous in eager mode"""
    return (q @ q.mT).softmax(-1) @ q


def tokens(m: FunctionModule, image: Tensor) -> Tensor:
    """(B, N, D), with the strides of the convolution's output"""
    return m.conv(image).flatten(2).transpose(1, 2)


def written(t: Tensor, view: Tensor) -> Tensor:
    view.mul_(2.0)
    return t * 1.0


# ---- of heads, (B, H, N, d) ----


def reshaped(m, q):
    out = attend(q)
    return written(out, out.reshape(B, -1))


def added_to(m, q):
    return attend(q).add_(1.0)


def scores_as_integers(m, q):
    return (q @ q.mT).to(torch.int32).to(q.dtype).softmax(-1) @ q


def probabilities_in_half(m, q):
    return (q @ q.mT).softmax(-1).half().to(q.dtype) @ q


def viewed(m, q):
    """Views that need the strides of a product: the op's output has others."""
    out = attend(q)
    return out.view(-1, N, SIZE), (out + 1.0).view(-1, SIZE)


# ---- of tokens, (B, N, D) ----


def leaky_relu(m, x):
    return F.leaky_relu(m.a(m.norm(x)), inplace=True)


def set_item(m, x):
    h = m.a(m.norm(x))
    h[:, 0] = 0.0
    return h


def gelu_of_scaled(m, x):
    h = m.fc1(x)
    return m.fc2(h * torch.sigmoid(h.mul_(1.702)))


def tanh_gelu_of_halved(m, x):
    h = m.fc1(x)
    half = h.mul_(0.5)
    return m.fc2(half * (1 + torch.tanh(ROOT * (h + 0.044715 * h**3))))


def learnt_gate_out_of_a_view(m, x):
    """The gate is a view of an MLP that is fused before."""
    gate = m.fc2(F.gelu(m.fc1(x)))[:, :1, :1]
    return x + m.fc2(F.gelu(m.fc1(m.norm(x)))) * gate


def keywords(m, x):
    y = F.layer_norm(input=x, normalized_shape=(D,), weight=m.norm.weight, bias=m.norm.bias)
    h = F.gelu(F.linear(input=y, weight=m.fc1.weight, bias=m.fc1.bias))
    q = torch.reshape(input=F.linear(input=h, weight=m.fc2.weight), shape=(B, N, H, -1)).transpose(1, 2)
    p = F.softmax(input=torch.matmul(input=q, other=q.mT), dim=-1)
    return torch.tanh(input=torch.add(torch.matmul(input=p, other=q), other=q)) * torch.sigmoid(input=q)


ON_HEADS = [reshaped, added_to, scores_as_integers, probabilities_in_half, viewed]
ON_TOKENS = [
    leaky_relu, set_item, gelu_of_scaled, tanh_gelu_of_halved, learnt_gate_out_of_a_view, keywords,
]  # fmt: skip


@pytest.mark.parametrize(
    ("forwards", "shape"), [(ON_HEADS, (B, H, N, SIZE)), (ON_TOKENS, (B, N, D))], ids=["heads", "tokens"]
)
def test_right(forwards, shape, device):
    assert not checked(module(*forwards), torch.randn(shape, device=device)).left


def written_patches(m, image):
    y = tokens(m, image) + m.pos
    return written(y, y.transpose(1, 2).reshape(B, -1)).sum(1)


@torch.no_grad()
def test_patches(device):
    image = torch.randn(B, 3, 16, 16, device=device)
    checked(module(written_patches, lambda m, i: m.conv(i[0]).flatten(1)), image)
    checked(module(lambda m, i: torch.cat([m.cls.expand(0, -1, -1), tokens(m, i)], dim=1) * 1.0), image[:0])


def residual_that_changes(m, x):
    x = x * 1.0
    branch = F.scaled_dot_product_attention(*heads(m.qkv(m.norm(x))))
    x.add_(1.0)
    return x + m.a(joined(branch))


def residual_in_place(m, x):
    x = x * 1.0
    view = x.view(-1)
    x += m.a(joined(F.scaled_dot_product_attention(*heads(m.qkv(m.norm(x))))))
    return view * 1.0


@torch.no_grad()
def test_residuals(x):
    report = checked(module(residual_that_changes, residual_in_place), x)
    in_between = "attention_qkvpacked (what it reads is changed in place before its end)"
    assert details(report, "attention") == [in_between, "layer_norm_attention"]


@torch.no_grad()
def test_out_is_written(x):
    def softmax(m, x, scores, hidden):
        return torch.softmax(x @ x.mT, -1, out=scores) @ x, scores * 1.0

    def sigmoid(m, x, scores, hidden):
        h = m.fc1(x)
        return m.fc2(h * torch.sigmoid(1.702 * h, out=hidden)), hidden * 1.0

    checked(module(softmax, sigmoid), x, x.new_zeros(B, N, N), x.new_zeros(B, N, 96))


@torch.no_grad()
def test_ops_of_others_that_write(x):
    def negate(x):
        x.neg_()

    library = torch.library.Library("fastvit_test", "FRAGMENT")
    library.define("negate_(Tensor(a!) x) -> ()")
    library.impl("negate_", negate, "CompositeExplicitAutograd")
    torch.library.register_fake("fastvit_test::negate_", lambda x: None, lib=library)

    def forward(m, x):
        x = x * 1.0
        y = m.norm(x)
        torch.ops.fastvit_test.negate_(x)
        return m.fc2(F.gelu(m.fc1(y)))

    checked(module(forward), x)


def before_a_break(m, q):
    out = attend(q)
    torch._dynamo.graph_break()
    return out.view(B, -1)


def out_of_a_checkpoint(m, q):
    return checkpoint(attend, q, use_reentrant=False).view(B, -1)


def into_a_checkpoint(m, q):
    return checkpoint(lambda out: out.view(B, -1) * 2.0, torch.relu(attend(q)), use_reentrant=False)


@pytest.mark.parametrize("forward", [before_a_break, out_of_a_checkpoint, into_a_checkpoint])
def test_strides_that_others_see_are_eagers(forward, device):
    model = module(forward).to(device)
    x = torch.randn(B, H, N, SIZE, device=device)
    torch.testing.assert_close(compiled(model)[0](x), model(x))


def test_one_sample_has_the_strides_of_any(device):
    """A dimension of size 1 may have any stride: no copy, and nothing left."""

    def forward(m, qkv):  # (N, 3, H, d), as towers of packed images have it
        parts = zip(*(t.transpose(0, 1).unsqueeze(0).split(9, 2) for t in qkv.unbind(1)), strict=True)
        out = [F.scaled_dot_product_attention(q, k, v).transpose(1, 2) for q, k, v in parts]
        return torch.cat(out, dim=1).flatten(2) * 1.0

    report = checked(module(forward), torch.randn(2 * N, 3, H, SIZE, device=device))
    assert report.fused("attention") == (2, 2)


@torch.no_grad()
def test_views_of_another_dtype(x):
    def forward(m, x):
        q, k, v = heads(m.qkv(m.norm(x)).view(torch.float16))
        return m.a(joined(F.scaled_dot_product_attention(q, k, v)).view(torch.bfloat16))

    model, x = module(forward).to(x.device, torch.bfloat16), x.bfloat16()
    function, reports = compiled(model)
    torch.testing.assert_close(function(x), model(x), atol=0.01, rtol=0.02)
    assert details(reports[0], "attention") == ["attention (view between projection and attention)"]


@torch.no_grad()
def test_a_failure_of_a_rewrite_leaves_the_graph_as_it_was(x, monkeypatch, caplog):
    monkeypatch.setattr(mlp, "only_user", None)
    report = checked(module(lambda m, x: m.fc2(F.gelu(m.fc1(m.a(m.norm(x)))))), x)
    assert "a graph was left as it was" in caplog.text
    assert not any(entry.fused for entry in report.entries)
    assert str(report) == "left as it was: TypeError: 'NoneType' object is not callable"


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_that_returns_its_input_writes_only_in_place(inplace):
    """torch 2.15 returns the input if p is 0."""
    graph, value = torch.fx.Graph(), torch.zeros(2)
    x = graph.placeholder("x")
    for arguments, keywords in (((x, 0.0, True, inplace), {}), ((x, 0.0), {"inplace": inplace})):
        dropout = graph.call_function(F.dropout, arguments, keywords)
        x.meta["example_value"] = dropout.meta["example_value"] = value
        assert bool(mutated(dropout)) == inplace
