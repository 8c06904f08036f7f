"""ops.linear and the registered ops under it, against float64 and eager PyTorch, on both backends."""

import dataclasses
import functools
import importlib

import pytest
import torch
from op_cases import tensors_of
from oracle import GRADIENT, assert_as_accurate, assert_op_as_accurate, assert_op_is_exact, inputs
from torch.utils.flop_counter import FlopCounterMode

from fastvit import ops
from fastvit.kernels import _configs, _tuned
from fastvit.study.accuracy.formulas import ACTIVATIONS
from fastvit.study.accuracy.formulas import linear as eager

registered = torch.ops.fastvit
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPILOGUES = {  # what of layer_scale, row_scale, residual is present
    "plain": (),
    "layer_scale": ("layer_scale",),
    "row_scale": ("row_scale",),
    "residual": ("residual",),
    "branch": ("layer_scale", "row_scale", "residual"),
}


def tensors(*shape, out, dtype, device, bias=True, epilogue=(), kind="normal"):
    """x (*shape), weight, bias and what the epilogue names."""
    shapes = {"x": shape, "weight": (out, shape[-1]), "bias": (out,) if bias else None}
    optional = {"layer_scale": (out,), "row_scale": shape[:1], "residual": (*shape[:-1], out)}
    shapes |= {name: optional[name] for name in epilogue}
    return tensors_of(shapes, dtype, device, kind)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=list(EPILOGUES))
def test_linear(epilogue, dtype, backend, device):
    """M = 102, N = 90 and K = 100 fill no tile; rows of a sample cross tiles."""
    arguments = tensors(3, 34, 100, out=90, dtype=dtype, device=device, epilogue=EPILOGUES[epilogue])
    assert_op_as_accurate(ops.linear, eager, arguments, what=epilogue)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(activation, dtype, backend, device):
    arguments = tensors(2, 37, 72, out=88, dtype=dtype, device=device)
    fused, same = (functools.partial(fn, activation=activation) for fn in (ops.linear, eager))
    assert_op_as_accurate(fused, same, arguments, what=activation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inference", [False, True], ids=["training", "inference"])
def test_activation_inside_a_branch(inference, dtype, backend, device):
    """Out of training the activation and all that scales it run in one kernel."""
    arguments = tensors(5, 13, 40, out=24, dtype=dtype, device=device, epilogue=EPILOGUES["branch"])
    fused, same = (functools.partial(fn, activation="gelu") for fn in (ops.linear, eager))
    if not inference:
        assert_op_as_accurate(fused, same, arguments)
        return
    with torch.inference_mode():
        exact = same(**{name: t.double() for name, t in arguments.items()})
        assert_as_accurate(fused(**arguments), same(**arguments), exact)


# one row and one column; K of 588 = 9 * 64 + 12 (patches of 14 x 14 x 3); exact tiles; several tiles in a group
SHAPES = {"single": (1, 1, 1, 1), "patch": (1, 5, 588, 24), "exact": (2, 64, 64, 128), "tiles": (1, 300, 40, 200)}


@pytest.mark.parametrize("name", SHAPES)
def test_integers_are_exact(name, backend, device):
    """Sums of products of small integers have no rounding: any difference is an indexing error."""
    *shape, out = SHAPES[name]
    arguments = tensors(*shape, out=out, dtype=torch.float32, device=device, epilogue=("residual",), kind="integer")
    assert_op_is_exact(ops.linear, eager, arguments)


def test_grouped_tiles(triton_backend, device, monkeypatch):
    """With weights larger than the cache, row tiles are computed in groups, the last of them smaller."""
    config = _configs.GemmConfig(32, 32, 32, 4, 4, 2)
    monkeypatch.setattr(_configs, "gemm", lambda *_: config)
    arguments = tensors(1, 180, 40, out=70, dtype=torch.float32, device=device, kind="integer")
    assert torch.equal(ops.linear(**arguments), eager(**arguments))


# ---- operands by TMA, in a persistent grid ----


@pytest.fixture
def launched_by_tma(triton_backend, monkeypatch):
    """Within a test, linear_fwd_kernel takes TMA where it can. Yields whether each launch did."""
    tile = _configs.GemmConfig(64, 64, 32, 2, 4, 3)
    described = dataclasses.replace(tile, programs_per_sm=1)
    monkeypatch.setattr(_configs, "gemm", lambda m, n, k, itemsize, arch, can=False: described if can else tile)
    monkeypatch.setattr(importlib.import_module("fastvit.ops.linear.launch"), "is_our_matmul", lambda *_, **__: True)
    runtime = importlib.import_module("fastvit.ops.runtime.launch")
    found, launch = [], runtime.launch

    def seen(kernel, programs, tensors, numbers, constants):
        if kernel.__name__ == "linear_fwd_kernel":
            found.append(constants["TMA"])
        return launch(kernel, programs, tensors, numbers, constants)

    monkeypatch.setattr(runtime, "launch", seen)
    _tuned.clear_caches()
    yield found
    _tuned.clear_caches()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=list(EPILOGUES))
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_linear_by_tma(bias, epilogue, dtype, device, launched_by_tma):
    """M = 309, N = 90 and K = 72 fill no tile; the programs take several tiles each. Float32 is for the interpreter:
    on a GPU it is the vendor's, whose sums are in parts."""
    if device.type == "cuda" and dtype is torch.float32:
        pytest.skip("never launched")
    arguments = tensors(3, 103, 72, out=90, dtype=dtype, device=device, bias=bias, epilogue=EPILOGUES[epilogue])
    assert_op_as_accurate(ops.linear, eager, arguments, what=epilogue)
    assert launched_by_tma == [True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_by_tma(activation, dtype, device, launched_by_tma):
    """In training, with the activation's input; and out of it, inside a branch."""
    arguments = tensors(2, 135, 80, out=88, dtype=dtype, device=device, epilogue=EPILOGUES["branch"])
    fused, same = (functools.partial(fn, activation=activation) for fn in (ops.linear, eager))
    assert_op_as_accurate(fused, same, {name: arguments[name] for name in ("x", "weight", "bias")}, what=activation)
    with torch.inference_mode():
        exact = same(**{name: t.double() for name, t in arguments.items()})
        assert_as_accurate(fused(**arguments), same(**arguments), exact)
    assert launched_by_tma == [True, True]


@pytest.mark.parametrize("group", [1, 2, 8])
def test_every_tile_is_computed_by_tma(group, device, launched_by_tma, monkeypatch):
    """Integers are exact, whichever program has the tile; a residual of its own strides."""
    config = _configs.GemmConfig(64, 32, 16, group, 4, 2, programs_per_sm=1)
    monkeypatch.setattr(_configs, "gemm", lambda *_: config)
    arguments = tensors(5, 65, 40, out=100, dtype=torch.float32, device=device, epilogue=("residual",), kind="integer")
    wide = torch.zeros(5, 65, 112, device=device)[..., :100].copy_(arguments["residual"].detach())
    arguments["residual"] = wide
    assert torch.equal(ops.linear(**arguments), eager(**arguments))
    assert launched_by_tma == [True]


@pytest.mark.parametrize(
    ("first", "width", "k", "by_tma"),
    [
        (0, 96, 72, True),  # strided rows
        (8, 96, 72, True),
        (4, 96, 72, False),  # x begins at 8 bytes
        (0, 100, 100, False),  # rows of 200 bytes
    ],
)
def test_what_tma_cannot_copy_is_loaded(first, width, k, by_tma, device, launched_by_tma):
    rows = torch.zeros(90 * width + first, dtype=torch.float16, device=device)[first:].view(90, width)[:, :k]
    rows.copy_(inputs("integer", 90, k, dtype=torch.float16, device=device, seed=1))
    weight = inputs("integer", 72, k, dtype=torch.float16, device=device, seed=2)
    for _ in range(3):  # a remembered call, too
        got = ops.linear(rows, weight, activation="relu")
        assert torch.equal(got, torch.relu(rows @ weight.T))
    assert set(launched_by_tma) == {by_tma}


def test_one_plan_takes_tensors_of_any_address(device, launched_by_tma):
    """Calls with the same shapes and strides share what is worked out once."""
    weight = inputs("integer", 72, 64, dtype=torch.float16, device=device, seed=2)
    memory = inputs("integer", 90 * 64 + 4, dtype=torch.float16, device=device, seed=1)
    for first in (0, 4, 0, 4, 0):
        x = memory[first:][: 90 * 64].view(90, 64)
        assert torch.equal(ops.linear(x, weight, activation="relu"), torch.relu(x @ weight.T))
    assert launched_by_tma[:2] == [True, False]


def test_residual_of_wider_dtype(backend, device):
    """A bfloat16 matmul on a float32 residual stream."""
    arguments = tensors(2, 17, 40, out=24, dtype=torch.bfloat16, device=device, epilogue=EPILOGUES["branch"])
    arguments["residual"] = arguments["residual"].detach().float().requires_grad_()
    assert ops.linear(**arguments).dtype is torch.float32
    assert_op_as_accurate(ops.linear, eager, arguments)


def test_a_wider_layer_scale_is_not_rounded_to_the_matmul_s_dtype(device):
    """Under autocast, on ATen, where the matmul's own result is rounded: exact products of 8 and 24 bits."""
    tensors_ = tensors(3, 17, 40, out=24, dtype=torch.float32, device=device, epilogue=EPILOGUES["branch"])
    x, weight, bias, layer_scale, row_scale, residual = (t.detach() for t in tensors_.values())
    row_scale = row_scale * 1.1
    with torch.autocast(device.type, torch.bfloat16), ops.use_backend("aten"):
        got = ops.linear(x, weight, bias, layer_scale=layer_scale, row_scale=row_scale, residual=residual)
        branch = ops.linear(x, weight, bias)
    assert branch.dtype is torch.bfloat16
    want = residual.double() + row_scale.double()[:, None, None] * layer_scale.double() * branch.double()
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_only_wanted_gradients_are_computed(activation, backend, device):
    """A frozen weight keeps no x for the backward pass and runs no matmul for itself."""
    arguments = tensors(4, 8, 64, out=32, dtype=torch.float32, device=device, bias=False)
    matmul = 2 * 32 * 64 * 32
    for frozen, matmuls, keeps_x in (("weight", 1, False), ("x", 1, True), (None, 2, True)):
        x, weight = (arguments[n].detach().clone().requires_grad_(n != frozen) for n in ("x", "weight"))
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.shape) or t, lambda t: t):
            y = ops.linear(x, weight, activation=activation)
        assert (x.shape in kept) == keeps_x
        with FlopCounterMode(display=False) as counter:
            y.sum().backward()
        assert counter.get_total_flops() == matmuls * matmul
        assert (x.grad is None) == (frozen == "x")
        assert (weight.grad is None) == (frozen == "weight")


def test_flop_formulas(backend, device):
    arguments = tensors(4, 8, 64, out=32, dtype=torch.float32, device=device)
    rows = arguments["x"].detach().view(32, 64)
    pre = torch.randn(32, 16, device=device)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        ops.linear(**arguments)
        registered.linear_act_fwd(rows, arguments["weight"], None, "gelu")
        registered.linear_dact(rows, torch.randn(64, 16, device=device), pre, "gelu")
    assert counter.get_total_flops() == 2 * 32 * 64 * (32 + 32 + 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_dact(activation, dtype, backend, device):
    """dpre, h and dbias, with more than one row tile."""
    dy = inputs("normal", 150, 40, dtype=dtype, device=device, seed=1)
    weight = inputs("normal", 40, 72, dtype=dtype, device=device, seed=2) / 40**0.5
    pre = inputs("normal", 150, 72, dtype=dtype, device=device, seed=3) * 2

    def step(dy, weight, pre):
        leaf = pre.detach().requires_grad_()
        h = ACTIVATIONS[activation](leaf)
        (dpre,) = torch.autograd.grad(h, leaf, dy @ weight)
        return dpre, h.detach(), dpre.sum(0)

    got = registered.linear_dact(dy, weight, pre, activation)
    rest = step(dy, weight, pre), step(dy.double(), weight.double(), pre.double())
    for name, *triple in zip(("dpre", "h", "dbias"), got, *rest, strict=True):
        assert_as_accurate(*triple, factor=GRADIENT, what=f"{activation} {name}")
    unfused = registered.act_bwd(dy @ weight, pre, activation)
    for name, *triple in zip(("dpre", "dbias"), unfused, *(r[::2] for r in rest), strict=True):
        assert_as_accurate(*triple, factor=GRADIENT, what=f"act_bwd {activation} {name}")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_passes_an_activation(activation, backend, device):
    """Also one that is a maximum or a choice: of the pre-activation's NaN neither 0 nor a gradient of 0 is made."""
    pre = torch.tensor([[-2.0], [torch.nan], [0.5]], device=device, requires_grad=True)
    one = torch.ones(1, 1, device=device)
    want = ACTIVATIONS[activation](pre)
    h, _ = registered.linear_act_fwd(pre.detach(), one, None, activation)
    torch.testing.assert_close(h, want, equal_nan=True)
    dpre, h, _ = registered.linear_dact(torch.ones_like(pre), one, pre.detach(), activation)
    torch.testing.assert_close(h, want, equal_nan=True)
    torch.testing.assert_close(dpre, *torch.autograd.grad(want.sum(), pre), equal_nan=True)


def test_bias_gradient_of_many_row_tiles(backend, device):
    """More partial sums than are added up at a time; of integers, so that the sum is exact."""
    dy, pre = (inputs("integer", 2500, 8, dtype=torch.float32, device=device, seed=s) for s in (1, 2))
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
