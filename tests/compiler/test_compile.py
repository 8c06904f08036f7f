"""`fastvit.compile` and torch.compile(backend="fastvit") as users call them: names, options, reports, regions, shapes,
checkpoints, memory."""

import itertools
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import entry_points

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import check_under_autocast, compile_and_check, compiled, details, graph_for_inner, run
from graph_models import D, FunctionModule, H
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastvit
from fastvit.compiler import dynamo


class Block(nn.Module):
    """A block of a user's own."""

    def __init__(self, D: int, H: int, **make) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D, **make), nn.LayerNorm(D, **make)
        self.qkv, self.proj = nn.Linear(D, 3 * D, **make), nn.Linear(D, D, **make)
        self.fc1, self.fc2 = nn.Linear(D, 4 * D, **make), nn.Linear(4 * D, D, **make)
        self.H = H

    def attention(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.H, -1)).permute(2, 0, 3, 1, 4)
        return x + self.proj(F.scaled_dot_product_attention(*qkv.unbind(0)).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


def test_report(x, capsys):
    """By module and line of the source, what is alike in one row; printed, or handed to a function."""
    model = nn.Sequential(Block(D, H), Block(D, H)).to(x.device)
    torch._dynamo.reset()
    fastvit.compile(model, inner="aot_eager", report=True)(x)
    printed = capsys.readouterr().out
    line = Block.attention.__code__.co_firstlineno + 1
    assert f"*.norm* (2)  test_compile.py:{line}  LayerNorm  layer_norm_attention\n" in printed
    assert "\nfused: attention 2 of 2, MLP 2 of 2, LayerNorm 4 of 4; " in printed
    function, reports = compiled(model)
    function(x)
    assert str(reports[0]).splitlines()[:-1] == printed.splitlines()[:-1]
    assert reports[0].entries[0].module == reports[0].entries[0].name == "0.norm1"
    torch._dynamo.reset()
    fastvit.compile(lambda x: x.sin(), inner="aot_eager", report=True)(x)
    assert capsys.readouterr().out == "nothing in this graph for fastvit\n"


def test_report_of_a_graph_that_is_left_as_a_whole(x):
    for forward, reason in (
        (lambda x: torch.func.grad(lambda x: x.sin().sum())(x), "a transform of functorch"),
        (lambda x: (x + 1.0).unsqueeze_(0).sin(), "unsqueeze_ reshapes a tensor in place"),
    ):
        function, reports = compiled(forward)
        function(x)
        assert reports[0].left == (reason,)
        assert str(reports[0]) == f"left as it was: {reason}"


@pytest.mark.skipif(not entry_points(group="torch_dynamo_backends", name="fastvit"), reason="fastvit is not installed")
def test_name_is_known_without_an_import():
    program = (
        "import torch, sys\n"
        "block = torch.nn.TransformerEncoderLayer(32, 2, 64, 0.0, 'gelu', batch_first=True, norm_first=True)\n"
        "assert 'fastvit' in torch._dynamo.list_backends() and 'fastvit' not in sys.modules\n"
        "import logging; logging.basicConfig(); logging.getLogger('fastvit.compiler').setLevel('INFO')\n"
        "import fastvit.compiler.dynamo as b; b.default_inner = lambda device: 'aot_eager'\n"
        "print(torch.compile(block, backend='fastvit')(torch.randn(2, 5, 32)).shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "torch.Size([2, 5, 32])\n"
    assert "fused: attention 1 of 1, MLP 1 of 1" in done.stderr


def test_inner_backend_is_inductor_where_that_can_compile(monkeypatch):
    for compiler, inner in (("clang++", "inductor"), ("", "aot_eager")):
        monkeypatch.setattr(dynamo.shutil, "which", lambda name, compiler=compiler: name == compiler or None)
        dynamo.default_inner.cache_clear()
        with (
            nullcontext() if compiler else pytest.warns(UserWarning, match=r"aot_eager: inductor has no C\+\+ compiler")
        ):
            assert dynamo.default_inner("cpu") == inner
    dynamo.default_inner.cache_clear()


def test_inner_backends_get_their_options_and_one_call_for_each_half_of_a_block(x):
    model, seen = Block(D, H, device=x.device), []

    def inner(gm, inputs, **options):
        seen.append(options)
        return gm.forward

    for options in ({"mode": "reduce-overhead"}, {"options": {"a": 1}}):
        torch._dynamo.reset()
        fastvit.compile(model, inner=inner, fullgraph=True, **options)(x)
        assert seen.pop() == options
    with pytest.raises(Exception, match="nonsense"):
        fastvit.compile(Block(D, H, device=x.device), inner="nonsense")(x)
    calls = [node.target for node in graph_for_inner(model, x).nodes if node.op == "call_function"]
    assert calls == [fastvit.ops.layer_norm_attention, fastvit.ops.layer_norm_mlp]


def test_inductor(x):
    model = Block(D, H, device=x.device)
    torch._dynamo.reset()
    function = fastvit.compile(model, inner="inductor", options={"max_autotune": False})
    got, want = (run(f, list(model.parameters()), [x]) for f in (function, model))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, atol=1e-4 * w.abs().max().item(), rtol=0)


@pytest.mark.parametrize(("within", "dtype"), [(False, torch.float16), (True, torch.bfloat16)])
def test_autocast(within, dtype, x):
    report = check_under_autocast(Block(D, H, device=x.device), x, dtype, within=within)
    assert report.fused("attention") == report.fused("MLP") == (1, 1)


@pytest.mark.parametrize(
    ("forward", "block", "fused"),
    [
        (lambda m, x: checkpoint(m.block, checkpoint(m.block, x, use_reentrant=False), use_reentrant=False), Block, 2),
        (lambda m, x: m.block(x), fastvit.Block, 0),
    ],
    ids=["checkpoints", "modules that are fused"],
)
def test_blocks_in_other_surroundings(forward, block, fused, x):
    report = compile_and_check(FunctionModule(forward, block=block(D, H)), x, aot=fused > 1)
    assert details(report, "attention") == ["layer_norm_attention"] * fused
    assert fused or report.entries == ()


def test_shapes_compile_no_oftener_than_without(device):
    """And an empty batch is fused as any other."""
    layers = {"conv": nn.Conv2d(3, D, 4, 4), "block": Block(D, H)}
    model = FunctionModule(lambda m, image: m.block(m.conv(image).flatten(2).transpose(1, 2)), **layers).to(device)
    graphs, (fused, reports) = [], compiled(model, inner="eager", dynamic=True)
    plain = torch.compile(model, backend=lambda gm, inputs: graphs.append(gm) or gm.forward, dynamic=True)
    for function in (plain, fused):
        torch._dynamo.reset()
        for batch, size in itertools.product((1, 2, 5, 0), (8, 12)):
            image = torch.randn(batch, 3, size, size, device=device)
            torch.testing.assert_close(function(image), model(image), rtol=1e-4, atol=1e-5)
    assert 0 < len(reports) <= len(graphs)
    assert {report.fused(kind) for report in reports for kind in ("attention", "MLP")} == {(1, 1)}
