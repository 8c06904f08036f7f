"""MLPs, epilogues of linear layers, LayerNorms and patch embeddings in graphs: fused, or left, and right."""

import math

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import compile_and_check, compiled, details, graph_for_inner
from graph_models import B, D, FunctionModule, N, half, mlp, together
from torch import Tensor, nn

from fastvit.graph.match.calls import name_of

HIDDEN = 3 * D


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "gelu_tanh, written out": lambda h: (
        0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))
    ),
    "quick_gelu": lambda h: h * torch.sigmoid(1.702 * h),
    "relu": F.relu,
    "relu in place": lambda h: F.relu(h, inplace=True),
    "silu": F.silu,
}


def test_activations_are_found(x):
    forwards = [lambda m, x, act=act: x + m.fc2(act(m.fc1(m.norm(x)))) for act in ACTIVATIONS.values()]
    report = compile_and_check(mlp(together(forwards)), x)
    for kind in ("MLP", "LayerNorm"):
        found = dict(zip(ACTIVATIONS, details(report, kind), strict=True))
        assert found == dict.fromkeys(ACTIVATIONS, "layer_norm_mlp")


GATES = {
    "two layers": lambda m, y: F.silu(m.gate(y)) * m.value(y),
    "two layers, value first": lambda m, y: m.value(y) * F.silu(m.gate(y)),
    "gate first": lambda m, y: (lambda gate, value: F.silu(gate) * value)(*m.fc1(y).chunk(2, dim=-1)),
    "gate last": lambda m, y: (lambda value, gate: F.gelu(gate) * value)(*m.fc1(y).split(HIDDEN, -1)),
    "inner norm": lambda m, y: m.inner(F.silu(m.gate(y)) * m.value(y)),
}


def test_gates_are_found(x):
    layers = {"gate": nn.Linear(D, HIDDEN), "value": nn.Linear(D, HIDDEN), "inner": nn.LayerNorm(HIDDEN)}
    forwards = [lambda m, x, gated=gated: x + m.fc2(gated(m, m.norm(x))) for gated in GATES.values()]
    report = compile_and_check(mlp(together(forwards), widened=2, **layers), x)
    assert dict(zip(GATES, details(report, "MLP"), strict=True)) == dict.fromkeys(GATES, "layer_norm_mlp")


LEFT = {
    "a slice": (lambda m, h: F.gelu(h[..., :HIDDEN]), "no linear layer but getitem"),
    "a gate of other values": (lambda m, h: F.silu(h[..., :HIDDEN]) * h[..., :HIDDEN].sin(), "a gate for sin"),
    "a gate that overlaps": (
        lambda m, h: F.silu(h[..., :HIDDEN]) * h[..., 1 : HIDDEN + 1],
        "gate and value are not the two halves of a layer",
    ),
    "a gate of relu": (lambda m, h: (lambda a, b: F.relu(a) * b)(*h.chunk(2, -1)), "a gate with relu"),
    "two uses": (
        lambda m, h: (lambda a: a[..., :HIDDEN] + a[..., HIDDEN:])(F.gelu(h)),
        "the output of its gelu is used 2 times",
    ),
    "a sum after it": (lambda m, h: F.gelu(h).unflatten(-1, (2, -1)).sum(-2), "unflatten after its activation"),
    "a factor": (lambda m, h: F.gelu(h[..., :HIDDEN]) * 2.0, "an activation times a number"),
}


def test_mlps_are_left(x):
    forwards = [lambda m, x, act=act: x + m.fc2(act(m, m.fc1(m.norm(x)))) for act, _ in LEFT.values()]
    found = details(compile_and_check(mlp(together(forwards), widened=2), x), "MLP")
    for detail, (name, (_, reason)) in zip(found, LEFT.items(), strict=True):
        assert detail.startswith(f"left: {reason}"), name


def test_gate_and_value_of_different_tensors(x):
    layers = {name: nn.Linear(D, HIDDEN) for name in ("gate", "value")}
    model = mlp(lambda m, x: m.fc2(F.silu(m.gate(m.norm(x))) * m.value(x)), **layers)
    assert details(compile_and_check(model, x), "MLP") == ["left: gate and value are of different tensors"]


def test_batch_norm_between_linear_and_activation(x):
    def forward(m, x):
        return m.fc2(F.gelu(m.between(m.fc1(m.norm(x)).flatten(0, 1)).view(B, N, -1)))

    assert not details(compile_and_check(mlp(forward, between=nn.BatchNorm1d(HIDDEN)), x), "MLP")


def test_layers_that_are_shared(x):
    """One MLP called twice, and fc2's weight that is also a layer's of its own."""

    def forward(m, x):
        for _ in range(2):
            x = x + m.fc2(F.gelu(m.fc1(m.norm(x))))
        return F.linear(x, m.fc2.weight.t())

    report = compile_and_check(mlp(forward), x)
    assert details(report, "MLP") == ["layer_norm_mlp"] * 2


def test_residual_that_is_the_norms_output(x):
    def forward(m, x):
        y = m.norm(x)
        return y + m.fc2(F.gelu(m.fc1(y)))

    (detail,) = details(compile_and_check(mlp(forward), x), "MLP")
    assert detail == "mlp (the output of its layer_norm is used elsewhere, too)"


def test_frozen_weights_and_no_gradient_of_x(x):
    model = mlp(lambda m, x: x.detach() + m.fc2(F.gelu(m.fc1(m.norm(x.detach())))))
    model.fc1.weight.requires_grad_(False)
    model.norm.requires_grad_(False)
    assert details(compile_and_check(model, x), "MLP") == ["layer_norm_mlp"]


# ---- epilogues of a linear layer ----


def drop(x: Tensor, keep: float = 0.5) -> Tensor:
    """Stochastic depth, drawn without the generator."""
    return (torch.arange(x.shape[0], device=x.device) % 2).to(x).view(-1, 1, 1) / keep


EPILOGUES = {
    "residual": lambda m, x, y: x + y,
    "residual second": lambda m, x, y: y + x,
    "layer scale": lambda m, x, y: x + m.gamma * y,
    "layer scale in place": lambda m, x, y: x + y.mul_(m.gamma),
    "drop path": lambda m, x, y: x + y * drop(x),
    "drop path, divided": lambda m, x, y: x + y.div(0.5) * drop(x, 1.0),
    "drop path in place": lambda m, x, y: x + m.gamma * y * x.new_ones(B, 1, 1).mul_(0.5),
    "both": lambda m, x, y: x + drop(x) * (y * m.gamma),
    "of another tensor": lambda m, x, y: torch.add(y * m.gamma, x.flip(0)),
}


@pytest.mark.parametrize("kind", ["MLP", "linear"])
def test_epilogues_are_found(kind, x):
    def with_end(epilogue):
        def forward(m, x):
            y = m.norm(x).sin() if kind == "linear" else F.gelu(m.fc1(m.norm(x)))
            return epilogue(m, x, m.fc2(y)) * 2.0

        return forward

    hidden = D if kind == "linear" else HIDDEN
    model = mlp(together(map(with_end, EPILOGUES.values())), hidden=hidden, gamma=nn.Parameter(torch.randn(D)))
    report = compile_and_check(model, x)
    op = "layer_norm_mlp" if kind == "MLP" else "linear"
    assert dict(zip(EPILOGUES, details(report, kind), strict=True)) == dict.fromkeys(EPILOGUES, op)
    assert not [e for e in report.entries if e.kind == "linear" and not e.fused]


NO_EPILOGUES = {
    "broadcast residual": lambda m, x, y: x[:, :1] + y,
    "learnt row scale": lambda m, x, y: x + y * m.rows,
    "a number": lambda m, x, y: x + 0.5 * y,
    "squared": lambda m, x, y: x + y * y,
    "alpha": lambda m, x, y: torch.add(x, y, alpha=2.0),
}


def test_what_is_no_epilogue_is_left(x):
    forwards = [lambda m, x, end=end: end(m, x, m.fc2(m.norm(x).sin())) for end in NO_EPILOGUES.values()]
    model = mlp(together(forwards), hidden=D, rows=nn.Parameter(torch.randn(B, 1, 1)))
    assert "linear" not in details(compile_and_check(model, x), "linear")


def test_dropout_of_an_mlp_is_that_of_the_op(x):
    """Both layers are the identity on ones: every element is dropped twice, or (1 / (1 - p))**2."""

    def forward(x, weight, p1, p2):
        return F.dropout(F.linear(F.dropout(F.relu(F.linear(x, weight)), p1), weight), p2)

    eye, ones = torch.eye(D, device=x.device), torch.ones(64, N, D, device=x.device)
    for p1, p2, fused in ((0.5, 0.5, True), (0.0, 0.5, True), (0.5, 0.25, False), (0.5, 0.0, False)):
        function, reports = compiled(forward)
        out = function(ones, eye, p1, p2)
        assert [entry.fused for entry in reports[0].entries] == [fused]
        kept = 1.0 / ((1 - p1) * (1 - p2))
        torch.testing.assert_close(out.unique(), torch.tensor([0.0, kept], device=x.device))
        assert abs((out > 0).double().mean().item() * kept - 1.0) < 0.05


# ---- LayerNorms ----


def test_residual_sum_before_a_layer_norm(x):
    def forward(m, x):
        s = x + m.proj(x.sin()).tanh()
        return s, m.norm(s).cos()

    assert details(compile_and_check(half(forward), x), "LayerNorm") == ["add_layer_norm"]


def test_layer_norms_are_left(x):
    norms = {"no_weight": nn.LayerNorm(D, elementwise_affine=False), "two_dimensions": nn.LayerNorm((N, D))}
    model = half(lambda m, x: (m.qkv(m.no_weight(x)), m.qkv(m.two_dimensions(x))), **norms)
    reasons = ["left: a LayerNorm without weight", "left: a LayerNorm over more than the last dimension"]
    assert details(compile_and_check(model, x), "LayerNorm") == reasons


# ---- patch embeddings ----


def embedding(forward) -> FunctionModule:
    return FunctionModule(
        forward, conv=nn.Conv2d(3, D, 4, 4), cls=nn.Parameter(torch.randn(1, 1, D)),
        registers=nn.Parameter(torch.randn(1, 2, D)), pos=nn.Parameter(torch.randn(1, 6 + 3, D)),
        of_each=nn.Parameter(torch.randn(B, 6, D)),
    )  # fmt: skip


def patches(m, image):
    return m.conv(image).flatten(2).transpose(1, 2)


def with_prefix(m, image):
    return torch.cat([t.expand(image.shape[0], -1, -1) for t in (m.cls, m.registers)] + [patches(m, image)], dim=1)


EMBEDDINGS = {
    "patches": patches,
    "prefix": with_prefix,
    "prefix and positions of all": lambda m, i: with_prefix(m, i) + m.pos,
    "positions of patches, then prefix": lambda m, i: torch.cat(
        (m.cls.expand(len(i), -1, -1), patches(m, i) + m.pos[:, 3:]), dim=1
    ),
    "positions of patches": lambda m, i: m.pos[0, 3:] + m.conv(i).reshape(len(i), D, -1).permute(0, 2, 1),
}
PARTLY = {  # the op computes patches only
    "a table of each image": lambda m, i: patches(m, i) + m.of_each,
    "a prefix of each image": lambda m, i: torch.cat([m.cls * i.mean((1, 2, 3)).view(-1, 1, 1), patches(m, i)], dim=1),
}


def doubled(forwards):
    return together(lambda m, image, forward=forward: forward(m, image) * 2.0 for forward in forwards)


def test_patch_embeddings_are_found(device):
    image, spellings = torch.randn(B, 3, 8, 12, device=device), EMBEDDINGS | PARTLY
    report = compile_and_check(embedding(doubled(spellings.values())), image)
    found = dict(zip(spellings, details(report, "patch embedding"), strict=True))
    assert found == dict.fromkeys(spellings, "patch_embed")


def test_positions_are_added_by_the_op(device):
    model = embedding(doubled(of for name, of in EMBEDDINGS.items() if "positions" in name)).to(device)
    graph = graph_for_inner(model, torch.randn(B, 3, 8, 12, device=device))
    sums = [node for node in graph.nodes if name_of(node) == "add"]
    assert all(node.meta["example_value"].shape == (3, D) for node in sums)  # prefix and positions


OTHER_CONVOLUTIONS = {
    "overlapping": lambda m, i: F.conv2d(i, m.conv.weight, stride=2).flatten(2).transpose(1, 2),
    "padded": lambda m, i: F.conv2d(i, m.conv.weight, stride=4, padding=2).flatten(2).transpose(1, 2),
    "an image": lambda m, i: m.conv(i).relu(),
    "columns first": lambda m, i: m.conv(i).transpose(2, 3).flatten(2).transpose(1, 2),
    "channels first": lambda m, i: m.conv(i).flatten(2),
}


VIDEO_EMBEDDINGS = {
    "positions": lambda m, x: m.conv(x).flatten(2).transpose(1, 2) + m.pos,
    "by reshape": lambda m, x: m.conv(x).permute(0, 2, 3, 4, 1).reshape(len(x), -1, D),
    "rows before frames": lambda m, x: m.conv(x).transpose(2, 3).flatten(2).transpose(1, 2),  # another order: left
}


def test_tubelets_are_found(device):
    conv, pos = nn.Conv3d(3, D, (2, 4, 4), (2, 4, 4)), nn.Parameter(torch.randn(1, 12, D))
    model = FunctionModule(doubled(VIDEO_EMBEDDINGS.values()), conv=conv, pos=pos)
    report = compile_and_check(model, torch.randn(B, 3, 4, 8, 12, device=device))
    assert details(report, "patch embedding") == ["patch_embed"] * 2


def test_other_convolutions_are_left(device):
    image = torch.randn(B, 3, 8, 12, device=device)
    assert not details(compile_and_check(embedding(doubled(OTHER_CONVOLUTIONS.values())), image), "patch embedding")
