"""ops.linear and the registered ops under it, plain and gated: exact sums, tiles in groups, operands by TMA, the
backward pass of an activation."""

import dataclasses
import functools
import importlib

import pytest
import torch
import torch.nn.functional as F
from op_cases import tensors_of
from oracle import assert_as_accurate, assert_op_as_accurate, assert_op_is_exact, inputs

from fastvit import ops
from fastvit.kernels import _configs
from fastvit.reference.ops import ACTIVATIONS
from fastvit.reference.ops import linear as eager

registered = torch.ops.fastvit
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
BRANCH = ("layer_scale", "row_scale", "residual")


def tensors(*shape, out, dtype, device, bias=True, epilogue=(), kind="normal"):
    """x (*shape), weight, bias and what the epilogue names."""
    shapes = {"x": shape, "weight": (out, shape[-1]), "bias": (out,) if bias else None}
    optional = {"layer_scale": (out,), "row_scale": shape[:1], "residual": (*shape[:-1], out)}
    shapes |= {name: optional[name] for name in epilogue}
    return tensors_of(shapes, dtype, device, kind)


def test_inference(backend, device):
    """Out of training the activation and all that scales it run in one kernel."""
    arguments = tensors(5, 13, 40, out=24, dtype=BF16, device=device, epilogue=BRANCH)
    fused, same = (functools.partial(fn, activation="gelu") for fn in (ops.linear, eager))
    with torch.inference_mode():
        exact = same(**{name: t.double() for name, t in arguments.items()})
        assert_as_accurate(fused(**arguments), same(**arguments), exact)


# one row and one column; K of 588 = 9 * 64 + 12 (patches of 14 x 14 x 3); several tiles in a group
SHAPES = {"single": (1, 1, 1, 1), "patch": (1, 5, 588, 24), "tiles": (1, 300, 40, 200)}


@pytest.mark.parametrize("name", SHAPES)
def test_integers_are_exact(name, backend, device):
    """Sums of products of small integers have no rounding: any difference is an indexing error."""
    *shape, out = SHAPES[name]
    arguments = tensors(*shape, out=out, dtype=F32, device=device, epilogue=("residual",), kind="integer")
    assert_op_is_exact(ops.linear, eager, arguments)


@pytest.mark.parametrize("pair", [False, True], ids=["packed", "pair"])
def test_integers_of_a_gated_layer_are_exact(pair, backend, device):
    """Every element is in its place, over several tiles: relu keeps small integers integers."""
    shapes = (3, 50, 16), (70, 16), (70,), (70, 16), (70,)
    x, *layers = (inputs("integer", *s, dtype=F32, device=device, seed=i) for i, s in enumerate(shapes))
    if not pair:
        layers[::2], layers[1::2] = (torch.cat(layers[i::2]).chunk(2) for i in range(2))
    weight, bias, *value = layers
    want = [F.linear(x, w, b) for w, b in ((weight, bias), value)]
    h, pre = registered.linear_act_fwd(x, weight, bias, "relu", *value)
    assert torch.equal(pre, torch.cat(want, -1))
    assert torch.equal(h, want[0].relu() * want[1])
    assert torch.equal(registered.linear_fwd(x, weight, bias, "relu", None, None, h, *value), h + h)


def test_grouped_tiles(triton_backend, device, monkeypatch):
    """With weights larger than the cache, row tiles are computed in groups, the last of them smaller."""
    config = _configs.GemmConfig(32, 32, 32, 4, 4, 2)
    monkeypatch.setattr(_configs, "gemm", lambda *_: config)
    arguments = tensors(1, 180, 40, out=70, dtype=F32, device=device, kind="integer")
    assert torch.equal(ops.linear(**arguments), eager(**arguments))


# ---- operands by TMA, in a persistent grid ----


@pytest.fixture
def launched_by_tma(triton_backend, monkeypatch):
    """Within a test, linear_fwd_kernel takes TMA where it can. Yields whether each launch did."""
    tile = _configs.GemmConfig(64, 64, 32, 2, 4, 3)
    described = dataclasses.replace(tile, programs_per_sm=1)
    monkeypatch.setattr(_configs, "gemm", lambda m, n, k, itemsize, arch, can=False: described if can else tile)
    launch_of_linear = importlib.import_module("fastvit.ops.linear.launch")
    monkeypatch.setattr(launch_of_linear, "is_our_matmul", lambda *_, **__: True)
    monkeypatch.setattr(launch_of_linear, "_gemm_plan", launch_of_linear._gemm_plan.__wrapped__)  # remembers another
    runtime = importlib.import_module("fastvit.ops.runtime.launch")
    launches, launch = [], runtime.launch

    def seen(kernel, programs, tensors, numbers, constants):
        if kernel.__name__ == "linear_fwd_kernel":
            launches.append(constants["TMA"])
        return launch(kernel, programs, tensors, numbers, constants)

    monkeypatch.setattr(runtime, "launch", seen)
    return launches


@pytest.mark.parametrize(
    ("epilogue", "bias", "activation", "dtype"),
    [
        ((), True, "gelu", BF16),  # in training, with the activation's input
        (("layer_scale",), False, None, F16),
        (("row_scale",), True, None, F16),
        (("residual",), False, None, BF16),
        (BRANCH, True, "silu", BF16),
    ],
    ids=str,
)
def test_linear_by_tma(epilogue, bias, activation, dtype, device, launched_by_tma):
    """M = 309, N = 90 and K = 72 fill no tile; the programs take several tiles each. Out of training, a branch and its
    activation are one launch."""
    arguments = tensors(3, 103, 72, out=90, dtype=dtype, device=device, bias=bias, epilogue=epilogue)
    fused, same = (functools.partial(function, activation=activation) for function in (ops.linear, eager))
    if epilogue and activation:
        with torch.inference_mode():
            exact = same(**{name: t.double() for name, t in arguments.items()})
            assert_as_accurate(fused(**arguments), same(**arguments), exact)
    else:
        assert_op_as_accurate(fused, same, arguments)
    assert launched_by_tma == [True]


@pytest.mark.parametrize("group", [1, 2])
def test_every_tile_is_computed_by_tma(group, device, launched_by_tma, monkeypatch):
    """Integers are exact, whichever program has the tile; a residual of its own strides."""
    config = _configs.GemmConfig(64, 32, 16, group, 4, 2, programs_per_sm=1)
    monkeypatch.setattr(_configs, "gemm", lambda *_: config)
    arguments = tensors(5, 65, 40, out=100, dtype=F32, device=device, epilogue=("residual",), kind="integer")
    wide = torch.zeros(5, 65, 112, device=device)[..., :100].copy_(arguments["residual"].detach())
    arguments["residual"] = wide
    assert torch.equal(ops.linear(**arguments), eager(**arguments))
    assert launched_by_tma == [True]


@pytest.mark.parametrize(
    ("first", "width", "k", "by_tma"),
    [
        (8, 96, 72, True),  # strided rows
        (4, 96, 72, False),  # x begins at 8 bytes
    ],
)
def test_what_tma_cannot_copy_is_loaded(first, width, k, by_tma, device, launched_by_tma):
    rows = torch.zeros(90 * width + first, dtype=F16, device=device)[first:].view(90, width)[:, :k]
    rows.copy_(inputs("integer", 90, k, dtype=F16, device=device, seed=1))
    weight = inputs("integer", 72, k, dtype=F16, device=device, seed=2)
    for _ in range(3):  # a replayed call, too
        got = ops.linear(rows, weight, activation="relu")
        assert torch.equal(got, torch.relu(rows @ weight.T))
    assert set(launched_by_tma) == {by_tma}


# ---- the backward pass of an activation ----


def test_nan_passes_an_activation(backend, device):
    """Also one that is a maximum or a choice: of the pre-activation's NaN neither 0 nor a gradient of 0 is made."""
    one = torch.ones(1, 1, device=device)
    for name, activation in ACTIVATIONS.items():
        pre = torch.tensor([[-2.0], [torch.nan], [0.5]], device=device, requires_grad=True)
        want = activation(pre)
        h, _ = registered.linear_act_fwd(pre.detach(), one, None, name)
        torch.testing.assert_close(h, want, equal_nan=True, msg=name)
        dpre, h, _ = registered.linear_dact(torch.ones_like(pre), one, pre.detach(), name)
        torch.testing.assert_close(h, want, equal_nan=True, msg=name)
        torch.testing.assert_close(dpre, *torch.autograd.grad(want.sum(), pre), equal_nan=True, msg=name)


def test_bias_gradient_of_many_row_tiles(backend, device):
    """More partial sums than are added up at a time; of integers, so that the sum is exact."""
    dy, pre = (inputs("integer", 2500, 8, dtype=F32, device=device, seed=s) for s in (1, 2))
    want = torch.where(pre > 0, dy, 0)
    dpre, dbias = registered.act_bwd(dy, pre, "relu")
    assert torch.equal(dpre, want)
    assert torch.equal(dbias, want.sum(0))
    dpre, _, dbias = registered.linear_dact(dy, torch.eye(8, device=device), pre, "relu")
    assert torch.equal(dpre, want)
    assert torch.equal(dbias, want.sum(0))


def test_dact_without_our_matmul(triton_backend, device, monkeypatch):
    """float32 on a GPU: the vendor's matmul, then one elementwise pass that also recomputes h."""
    launch = importlib.import_module("fastvit.ops.linear.launch")
    monkeypatch.setattr(launch, "is_our_matmul", lambda *_, **__: False)
    dy, weight, pre = (torch.randn(*s, device=device) for s in ((70, 24), (24, 40), (70, 40)))
    got = registered.linear_dact(dy, weight, pre, "gelu")
    with ops.use_backend("aten"):
        want = registered.linear_dact(dy, weight, pre, "gelu")
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    x = torch.randn(2, 5, 24, device=device)
    torch.testing.assert_close(ops.linear(x, weight.t(), activation="gelu"), eager(x, weight.t(), activation="gelu"))
