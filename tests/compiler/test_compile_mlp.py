"""MLPs, epilogues of linear layers and patch embeddings in graphs: fused, or left, and right."""

import math

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import check_rows, compile_and_check, compiled, details, graph_for_inner
from graph_models import B, D, FunctionModule, N, mlp, together
from torch import Tensor, nn

from fastvit.compiler.match.calls import name_of

MLP, HIDDEN = "layer_norm_mlp", 3 * D


def between(gated):
    """Return the MLP with gated(model, y) between the norm and the second layer."""
    return lambda m, x: x + m.fc2(gated(m, m.norm(x)))


def activated(act):
    return between(lambda m, y: act(m.gate(y)))


def of_pixels(layer):
    """Return the MLP whose second layer reads an image, as DPT's readout has it."""
    return lambda m, x: layer(m, F.gelu(m.gate(m.norm(x))).permute(0, 2, 1).reshape(-1, HIDDEN, 3, 3))


def norm_read_twice(m, x):
    y = m.norm(x)
    return y + m.fc2(F.gelu(m.gate(y)))


def halves(m, y):
    return m.fc1(y).chunk(2, dim=-1)


MLPS = {
    "gelu": (activated(F.gelu), MLP),
    "gelu_tanh": (activated(lambda h: F.gelu(h, approximate="tanh")), MLP),
    "gelu_tanh, written out": (
        activated(lambda h: 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h.pow(3.0))))), MLP,
    ),
    "quick_gelu": (activated(lambda h: h * torch.sigmoid(1.702 * h)), MLP),
    "relu in place": (activated(lambda h: F.relu(h, inplace=True)), MLP),
    "value first": (between(lambda m, y: m.value(y) * F.silu(m.gate(y))), MLP),
    "value by keyword": (between(lambda m, y: torch.mul(F.silu(m.gate(y)), other=m.value(y))), MLP),
    "gate in the first half": (between(lambda m, y: (lambda gate, value: F.silu(gate) * value)(*halves(m, y))), MLP),
    "gate in the last half": (
        between(lambda m, y: (lambda value, gate: F.gelu(gate) * value)(*m.fc1(y).split(HIDDEN, -1))), MLP,
    ),
    "a gate of gelu_tanh": (
        between(lambda m, y: m.value(y) * F.gelu(m.gate(y), approximate="tanh")), MLP,
    ),
    "inner norm": (between(lambda m, y: m.inner(F.silu(m.gate(y)) * m.value(y))), MLP),
    "a layer of pixels": (of_pixels(lambda m, h: F.conv2d(h, m.pixels, m.inner.bias[:D])), MLP),
    "a layer of pixels, from rows": (
        lambda m, x: F.conv2d(F.gelu(m.gate(m.norm(x))).unflatten(1, (3, 3)).permute(0, 3, 1, 2), m.pixels), MLP,
    ),
    "norm read twice": (norm_read_twice, "mlp (the output of its layer_norm is used elsewhere, too)"),
    # what is another function
    "a slice": (between(lambda m, y: F.gelu(m.fc1(y)[..., :HIDDEN])), "left: no linear layer but getitem"),
    "a gate of other values": (
        between(lambda m, y: (lambda a, b: F.silu(a) * a.sin())(*halves(m, y))), "left: a gate for sin",
    ),
    "a gate that overlaps": (
        between(lambda m, y: (lambda h: F.silu(h[..., :HIDDEN]) * h[..., 1 : HIDDEN + 1])(m.fc1(y))),
        "left: gate and value are not the two halves of a layer",
    ),
    "a gate of relu": (between(lambda m, y: (lambda a, b: F.relu(a) * b)(*halves(m, y))), "left: a gate with relu"),
    "gate and value of two tensors": (
        lambda m, x: m.fc2(F.silu(m.gate(m.norm(x))) * m.value(x)), "left: gate and value are of different tensors",
    ),
    "two uses": (
        between(lambda m, y: (lambda a: a[..., :HIDDEN] + a[..., HIDDEN:])(F.gelu(m.fc1(y)))),
        "left: the output of its gelu is used 2 times",
    ),
    "a sum after it": (
        between(lambda m, y: F.gelu(m.fc1(y)).unflatten(-1, (2, -1)).sum(-2)), "left: unflatten after its activation",
    ),
    "a layer of pixels in columns": (
        of_pixels(lambda m, h: F.conv2d(h.transpose(2, 3), m.pixels)), "left: permute after its activation",
    ),
    "a layer of one image": (
        lambda m, x: F.conv2d(F.gelu(m.gate(m.norm(x)))[0].T.unflatten(1, (3, 3)), m.pixels),
        "left: getitem after its activation",
    ),
    "a layer of every other pixel": (
        of_pixels(lambda m, h: F.conv2d(h, m.pixels, stride=2)), "left: permute after its activation",
    ),
    "a layer of groups of pixels": (
        of_pixels(lambda m, h: F.conv2d(h, m.pixels[:30, :D], groups=3)), "left: permute after its activation",
    ),
    "a factor": (between(lambda m, y: F.gelu(m.fc1(y)[..., :HIDDEN]) * 2.0), "left: an activation times a number"),
}  # fmt: skip


def mlps(forwards) -> FunctionModule:
    layers = {"gate": nn.Linear(D, HIDDEN), "value": nn.Linear(D, HIDDEN), "inner": nn.LayerNorm(HIDDEN)}
    layers |= {"pixels": nn.Parameter(torch.randn(D, HIDDEN, 1, 1))}
    return mlp(together(forwards), widened=2, **layers)


def test_mlps(x):
    check_rows("MLP", MLPS, mlps, x)


def test_layers_that_are_shared_or_frozen(x):
    """One MLP called twice, and fc2's weight that is also a layer's of its own; x without a gradient."""

    def forward(m, x):
        x = x.detach()
        for _ in range(2):
            x = x + m.fc2(F.gelu(m.fc1(m.norm(x))))
        return F.linear(x, m.fc2.weight.t())

    model = mlp(forward)
    model.fc1.weight.requires_grad_(False)
    model.norm.requires_grad_(False)
    assert details(compile_and_check(model, x), "MLP") == [MLP] * 2


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


# ---- epilogues of a linear layer ----


def drop(x: Tensor, keep: float = 0.5) -> Tensor:
    """Stochastic depth, drawn without the generator."""
    return (torch.arange(x.shape[0], device=x.device) % 2).to(x).view(-1, 1, 1) / keep


EPILOGUES = {
    "residual second": lambda m, x, y: y + x,
    "residual in place": lambda m, x, y: y.add_(x),
    "layer scale": lambda m, x, y: x + m.gamma * y,
    "layer scale in place": lambda m, x, y: x + y.mul_(m.gamma),
    "drop path": lambda m, x, y: x + y * drop(x),
    "drop path, divided": lambda m, x, y: x + y.div(0.5) * drop(x, 1.0),
    "drop path in place": lambda m, x, y: x + m.gamma * y * x.new_ones(B, 1, 1).mul_(0.5),
    "both, of another tensor": lambda m, x, y: torch.add(drop(x) * (y * m.gamma), x.flip(0)),
}
NO_EPILOGUES = {
    "broadcast residual": lambda m, x, y: x[:, :1] + y,
    "learnt row scale": lambda m, x, y: x + y * m.rows,
    "a number": lambda m, x, y: x + 0.5 * y,
    "squared": lambda m, x, y: x + y * y,
    "alpha": lambda m, x, y: torch.add(x, y, alpha=2.0),
}


@pytest.mark.parametrize("kind", ["MLP", "linear"])
def test_epilogues(kind, x):
    def before(end):
        def forward(m, x):
            y = m.norm(x).sin() if kind == "linear" else F.gelu(m.fc1(m.norm(x)))
            return end(m, x, m.fc2(y)) * 2.0

        return forward

    rows = {name: (before(end), MLP if kind == "MLP" else "linear") for name, end in EPILOGUES.items()}
    learnt = {"gamma": nn.Parameter(torch.randn(D)), "rows": nn.Parameter(torch.randn(B, 1, 1))}
    check_rows(kind, rows, lambda forwards: mlp(together(forwards), D if kind == "linear" else HIDDEN, **learnt), x)


def test_what_is_no_epilogue_is_left(x):
    forwards = [lambda m, x, end=end: end(m, x, m.fc2(m.norm(x).sin())) for end in NO_EPILOGUES.values()]
    model = mlp(together(forwards), hidden=D, rows=nn.Parameter(torch.randn(B, 1, 1)))
    assert "linear" not in details(compile_and_check(model, x), "linear")


# ---- patch embeddings ----


def patches(m, image):
    return m.conv(image).flatten(2).transpose(1, 2)


def with_prefix(m, image):
    return torch.cat([t.expand(image.shape[0], -1, -1) for t in (m.cls, m.registers)] + [patches(m, image)], dim=1)


POSITIONS = {
    "of all": lambda m, i: with_prefix(m, i) + m.pos,
    "of patches, then a prefix": lambda m, i: torch.cat(
        (m.cls.expand(len(i), -1, -1), patches(m, i) + m.pos[:, 3:]), dim=1
    ),
    "of patches": lambda m, i: m.pos[0, 3:] + m.conv(i).reshape(len(i), D, -1).permute(0, 2, 1),
}
PARTLY = {  # the op computes patches only
    "a table of each image": lambda m, i: patches(m, i) + m.table_of_each,
    "a prefix of each image": lambda m, i: torch.cat([m.cls * i.mean((1, 2, 3)).view(-1, 1, 1), patches(m, i)], dim=1),
}
OTHER_CONVOLUTIONS = {
    "overlapping": lambda m, i: F.conv2d(i, m.conv.weight, stride=2).flatten(2).transpose(1, 2),
    "padded": lambda m, i: F.conv2d(i, m.conv.weight, stride=4, padding=2).flatten(2).transpose(1, 2),
    "an image": lambda m, i: m.conv(i).relu(),
    "columns first": lambda m, i: m.conv(i).transpose(2, 3).flatten(2).transpose(1, 2),
    "channels first": lambda m, i: m.conv(i).flatten(2),
}
VIDEOS = {
    "positions": lambda m, x: m.conv(x).flatten(2).transpose(1, 2) + m.pos,
    "by reshape": lambda m, x: m.conv(x).permute(0, 2, 3, 4, 1).reshape(len(x), -1, D),
    "rows before frames": lambda m, x: m.conv(x).transpose(2, 3).flatten(2).transpose(1, 2),  # another order: left
}


def doubled(forwards):
    return together(lambda m, image, forward=forward: forward(m, image) * 2.0 for forward in forwards)


def embedding(forwards) -> FunctionModule:
    return FunctionModule(
        doubled(forwards), conv=nn.Conv2d(3, D, 4, 4), cls=nn.Parameter(torch.randn(1, 1, D)),
        registers=nn.Parameter(torch.randn(1, 2, D)), pos=nn.Parameter(torch.randn(1, 6 + 3, D)),
        table_of_each=nn.Parameter(torch.randn(B, 6, D)),
    )  # fmt: skip


def test_patch_embeddings(device):
    image, spellings = torch.randn(B, 3, 8, 12, device=device), {"prefix": with_prefix} | POSITIONS | PARTLY
    rows = {name: (forward, "patch_embed") for name, forward in spellings.items()}
    others = OTHER_CONVOLUTIONS.values()
    report = check_rows("patch embedding", rows, lambda forwards: embedding([*forwards, *others]), image)
    assert not details(report, "MLP")  # an activation after something else than a linear layer
    graph = graph_for_inner(embedding(POSITIONS.values()).to(device), image)
    sums = [node for node in graph.nodes if name_of(node) == "add"]
    assert all(node.meta["example_value"].shape == (3, D) for node in sums)  # prefix and positions; others by the op


def test_tubelets(device):
    conv, pos = nn.Conv3d(3, D, (2, 4, 4), (2, 4, 4)), nn.Parameter(torch.randn(1, 12, D))
    model = FunctionModule(doubled(VIDEOS.values()), conv=conv, pos=pos)
    report = compile_and_check(model, torch.randn(B, 3, 4, 8, 12, device=device))
    assert details(report, "patch embedding") == ["patch_embed"] * 2
