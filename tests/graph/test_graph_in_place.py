"""Graphs in which a rewrite could change the result: writes in place, strides, dtypes on the way, `out=`, keywords,
transforms. Outputs and gradients are those of eager mode."""

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import compile_and_check, compiled, details
from graph_models import B, D, FunctionModule, H, N
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastvit.graph.match.values import mutated
from fastvit.graph.rewrites import mlp

ROOT = 0.7978845608028654  # of 2 / pi


def layers() -> dict[str, nn.Module | nn.Parameter]:
    return {
        "norm": nn.LayerNorm(D), "fc1": nn.Linear(D, 96), "fc2": nn.Linear(96, D), "a": nn.Linear(D, D),
        "b": nn.Linear(D, D), "gate": nn.Linear(D, 1), "conv": nn.Conv2d(3, D, 4, 4),
        "pos": nn.Parameter(torch.randn(1, 16, D)), "cls": nn.Parameter(torch.randn(1, 1, D)),
    }  # fmt: skip


def attend(q: Tensor) -> Tensor:
    """(B, H, N, d), contiguous in eager mode"""
    return (q @ q.mT).softmax(-1) @ q


def tokens(m: FunctionModule, image: Tensor) -> Tensor:
    """(B, N, D), with the strides of the convolution's output"""
    return m.conv(image).flatten(2).transpose(1, 2)


def written(t: Tensor, view: Tensor) -> Tensor:
    view.mul_(2.0)
    return t * 1.0


def reshaped(m, q):
    out = attend(q)
    return written(out, out.reshape(B, -1))


def added_to(m, q):
    return attend(q).add_(1.0)


def leaky_relu(m, x):
    return F.leaky_relu(m.a(m.norm(x)), inplace=True)


def set_item(m, x):
    h = m.a(m.norm(x))
    h[:, 0] = 0.0
    return h


def scaled_in_place(m, x):
    y = m.norm(x)
    q, k = m.a(y), m.b(y)
    q *= 0.25
    return q + k


def gelu_of_scaled(m, x):
    h = m.fc1(x)
    return m.fc2(h * torch.sigmoid(h.mul_(1.702)))


def tanh_gelu_of_halved(m, x):
    h = m.fc1(x)
    half = h.mul_(0.5)
    return m.fc2(half * (1 + torch.tanh(ROOT * (h + 0.044715 * h**3))))


IN_PLACE = [reshaped, added_to, leaky_relu, set_item, scaled_in_place, gelu_of_scaled, tanh_gelu_of_halved]


def tanh_gelu_with_alpha(m, x):
    h = m.fc1(x)
    return m.fc2(0.5 * h * (1 + torch.tanh(ROOT * torch.add(h, 0.044715 * h**3, alpha=2))))


def scores_as_integers(m, q):
    return (q @ q.mT).to(torch.int32).to(q.dtype).softmax(-1) @ q


def probabilities_in_half(m, q):
    return (q @ q.mT).softmax(-1).half().to(q.dtype) @ q


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


OTHERS = [
    tanh_gelu_with_alpha, scores_as_integers, probabilities_in_half, learnt_gate_out_of_a_view, keywords,
]  # fmt: skip
OF_HEADS = [reshaped, added_to, scores_as_integers, probabilities_in_half]


@pytest.mark.parametrize("forward", IN_PLACE + OTHERS, ids=lambda f: f.__name__)
def test_right(forward, device):
    shape = (B, H, N, 16) if forward in OF_HEADS else (B, N, D)
    compile_and_check(FunctionModule(forward, **layers()), torch.randn(shape, device=device))


@torch.no_grad()
@pytest.mark.parametrize("after", [lambda m, y: y + m.pos, lambda m, y: y.relu()], ids=["sum", "relu"])
def test_patches_that_are_written_to(after, device):
    def forward(m, image):
        y = after(m, tokens(m, image))
        return written(y, y.transpose(1, 2).reshape(B, -1)).sum(1)

    compile_and_check(FunctionModule(forward, **layers()), torch.randn(B, 3, 16, 16, device=device))


@torch.no_grad()
def test_out_is_written(x):
    def of_softmax(m, x, buffer):
        return torch.softmax(x @ x.mT, -1, out=buffer) @ x, buffer * 1.0

    def of_sigmoid(m, x, buffer):
        h = m.fc1(x)
        return m.fc2(h * torch.sigmoid(1.702 * h, out=buffer)), buffer * 1.0

    for forward, columns in ((of_softmax, N), (of_sigmoid, 96)):
        compile_and_check(FunctionModule(forward, **layers()), x, x.new_zeros(B, N, columns))


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

    compile_and_check(FunctionModule(forward, **layers()), x)


def strides_before_a_break(m, q):
    out = attend(q)
    torch._dynamo.graph_break()
    return out.view(B, -1)


def patches_before_a_break(m, image):
    out = tokens(m, image)
    torch._dynamo.graph_break()
    return out.transpose(1, 2).view(B, -1)


def out_of_a_checkpoint(m, q):
    return checkpoint(attend, q, use_reentrant=False).view(B, -1)


def into_a_checkpoint(m, q):
    return checkpoint(lambda out: out.view(B, -1) * 2.0, torch.relu(attend(q)), use_reentrant=False)


@pytest.mark.parametrize(
    "forward",
    [strides_before_a_break, patches_before_a_break, out_of_a_checkpoint, into_a_checkpoint],
    ids=lambda f: f.__name__,
)
def test_strides_that_others_see_are_eagers(forward, device):
    model = FunctionModule(forward, **layers()).to(device)
    shape = (B, 3, 16, 16) if forward is patches_before_a_break else (B, H, N, 16)
    x = torch.randn(shape, device=device)
    torch.testing.assert_close(compiled(model)[0](x), model(x))


def test_one_sample_has_the_strides_of_any(device):
    """A dimension of size 1 may have any stride: no copy, and nothing left."""

    def forward(m, qkv):  # (N, 3, H, d), as towers of packed images have it
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in qkv.unbind(1))
        parts = [
            F.scaled_dot_product_attention(q, k, v) for q, k, v in zip(*(t.split(9, 2) for t in (q, k, v)), strict=True)
        ]
        return torch.cat([part.transpose(1, 2) for part in parts], dim=1).flatten(2) * 1.0

    report = compile_and_check(FunctionModule(forward), torch.randn(2 * N, 3, H, 16, device=device))
    assert report.fused("attention") == (2, 2)


def test_gradients_of_tokens_that_were_expanded_outside(device):
    m = FunctionModule(None, **layers()).to(device)
    image = torch.randn(B, 3, 16, 16, device=device)
    prefix = torch.ones(1, 1, D, device=device).expand(B, -1, -1).detach().requires_grad_()
    scale = torch.arange(1.0, B + 1, device=device).view(B, 1, 1)

    def call(image, prefix):
        return torch.cat([prefix, tokens(m, image)], 1) * scale

    (got,) = torch.autograd.grad(compiled(call)[0](image, prefix).sum(), prefix)
    assert got[:, 0, 0].tolist() == [1.0, 2.0]


@torch.no_grad()
def test_an_image_without_a_batch_and_an_empty_batch(device):
    m = FunctionModule(lambda m, image: m.conv(image[0]).flatten(1), **layers())
    compile_and_check(m, torch.randn(B, 3, 16, 16, device=device))

    def empty(m, image):
        return torch.cat([m.cls.expand(len(image), -1, -1), tokens(m, image)], dim=1) * 1.0

    compile_and_check(FunctionModule(empty, **layers()), torch.randn(0, 3, 16, 16, device=device))


@torch.no_grad()
def test_views_of_another_dtype(x):
    def forward(m, x):
        qkv = m.qkv(m.norm(x)).view(torch.float16).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        return m.a(F.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2).view(torch.bfloat16))

    model, x = FunctionModule(forward, qkv=nn.Linear(D, 3 * D), **layers()).to(x.device, torch.bfloat16), x.bfloat16()
    function, reports = compiled(model)
    torch.testing.assert_close(function(x), model(x), atol=0.01, rtol=0.02)
    assert details(reports[0], "attention") == ["attention (view between projection and attention)"]


@torch.no_grad()
def test_a_failure_of_a_rewrite_leaves_the_graph_as_it_was(x, monkeypatch, caplog):
    monkeypatch.setattr(mlp, "_only_user", None)
    report = compile_and_check(FunctionModule(lambda m, x: m.fc2(F.gelu(m.fc1(m.a(m.norm(x))))), **layers()), x)
    assert "a graph was left as it was" in caplog.text
    assert not any(entry.fused for entry in report.entries)
    assert report.left == ("TypeError: 'NoneType' object is not callable",)
    assert str(report) == f"left as it was: {report.left[0]}"


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_that_returns_its_input_writes_only_in_place(inplace):
    """torch 2.15 returns the input if p is 0."""
    graph, value = torch.fx.Graph(), torch.zeros(2)
    x = graph.placeholder("x")
    for arguments, keywords in (((x, 0.0, True, inplace), {}), ((x, 0.0), {"inplace": inplace})):
        dropout = graph.call_function(F.dropout, arguments, keywords)
        x.meta["example_value"] = dropout.meta["example_value"] = value
        assert bool(mutated(dropout)) == inplace
