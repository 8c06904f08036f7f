"""ops.mlp and ops.layer_norm_mlp with gated activations, against float64 and eager PyTorch, on both backends."""

import pytest
import torch
import torch.nn.functional as F
from op_cases import (
    gathered,
    outputs_and_gradients,
    saved_numel,
    tensors_of,
)
from oracle import GRADIENT, assert_as_accurate, assert_op_as_accurate, inputs
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fastvit import ops
from fastvit.ops.dropout.op import draw_seeds, dropout_op
from fastvit.ops.linear import gated as registered
from fastvit.study.accuracy import formulas
from fastvit.study.accuracy.formulas import GATED

LAYERS = ("gate_weight", "gate_bias", "value_weight", "value_bias")


def run(module, activation="swiglu", itself=False, **options):
    """Return the module's mlp, or layer_norm_mlp if there is a norm. itself: x is its own residual."""

    def call(x, **tensors):
        op = gathered(module.layer_norm_mlp if "norm_weight" in tensors else module.mlp)
        residual = {"residual": x} if itself else {}
        return op(x=x, activation=activation, **tensors, **residual, **options)

    return call


def tensors(
    *shape, hidden=20, out=None, dtype, device, norm=False, inner=False, pair=False, scales=False, kind="normal"
):
    """x (*shape), the parameters, and what is asked for."""
    D, out = shape[-1], out or shape[-1]
    shapes = {"x": shape} | ({"norm_weight": (D,), "norm_bias": (D,)} if norm else {})
    if pair:
        shapes |= {name: (hidden, D) if "weight" in name else (hidden,) for name in LAYERS}
    else:
        shapes |= {"fc1_weight": (2 * hidden, D), "fc1_bias": (2 * hidden,)}
    shapes |= {"inner_weight": (hidden,), "inner_bias": (hidden,)} if inner else {}
    shapes |= {"fc2_weight": (out, hidden), "fc2_bias": (out,)}
    return tensors_of(shapes | ({"layer_scale": (out,), "row_scale": shape[:1]} if scales else {}), dtype, device, kind)


both_norms = pytest.mark.parametrize("norm", [False, True], ids=["mlp", "layer_norm_mlp"])
with_inner = pytest.mark.parametrize("inner", [False, True], ids=["", "inner_norm"])
packed_or_not = pytest.mark.parametrize("pair", [False, True], ids=["packed", "pair"])


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("norm", "inner", "pair", "dtype", "recompute"),
    [
        (False, False, False, F32, "none"),
        (False, False, True, BF16, "activation"),
        (False, True, True, F32, "activation"),
        (False, True, False, BF16, "all"),
        (True, False, False, F16, "activation"),
        (True, False, True, F32, "all"),
        (True, True, True, BF16, "none"),
        (True, True, False, F32, "all"),
    ],
    ids=str,
)
def test_everything_at_once(norm, inner, pair, dtype, recompute, backend, device):
    """Every two of the choices together; test_fuzz.py draws the others."""
    args = tensors(3, 7, 24, hidden=40, dtype=dtype, device=device, norm=norm, inner=inner, pair=pair, scales=True)
    calls = run(ops, itself=True, recompute=recompute), run(formulas, itself=True)
    assert_op_as_accurate(*calls, args, what=recompute)


@pytest.mark.parametrize(("recompute", "dtype"), [("none", F32), ("activation", BF16), ("all", F32)], ids=str)
def test_rms_norms(recompute, dtype, backend, device):
    """Before fc1 and before fc2, then each with a LayerNorm at the other place."""
    args = tensors(3, 7, 24, hidden=40, dtype=dtype, device=device, norm=True, inner=True)
    for norm, without in (("rms", ("norm_bias", "inner_bias")), ("rms", ("norm_bias",)), ("layer", ("inner_bias",))):
        calls = run(ops, itself=True, recompute=recompute, norm=norm), run(formulas, itself=True, norm=norm)
        assert_op_as_accurate(*calls, args | dict.fromkeys(without), what=f"{norm}, without {without}")


@pytest.mark.parametrize("activation", GATED)
def test_activations(activation, backend, device):
    for dtype in (torch.float32, torch.bfloat16):
        args = tensors(2, 5, 16, dtype=dtype, device=device, out=8)
        assert_op_as_accurate(run(ops, activation), run(formulas, activation), args, what=activation)


@pytest.mark.parametrize("missing", [("gate_bias",), ("value_bias",), ("gate_bias", "value_bias", "fc2_bias")])
def test_biases_of_a_pair(missing, backend, device):
    args = tensors(2, 5, 16, dtype=torch.float32, device=device, pair=True) | dict.fromkeys(missing)
    assert_op_as_accurate(run(ops), run(formulas), args, what=str(missing))


@with_inner
@both_norms
def test_without_options(norm, inner, backend, device):
    """No biases, no scales, no residual; one token; odd sizes."""
    args = tensors(1, 1, 13, hidden=27, out=5, dtype=torch.float32, device=device, norm=norm, inner=inner)
    assert_op_as_accurate(run(ops), run(formulas), args | {"fc1_bias": None, "fc2_bias": None}, what="plain")


@pytest.mark.parametrize(("hidden", "pair"), [(1365, True), (2730, False)])
def test_odd_widths(hidden, pair, triton_backend, device):
    """EVA-02's widths: rows of 2730 and 5460 bytes; also several column tiles, the last one short."""
    args = tensors(2, 3, 48, hidden=hidden, dtype=torch.bfloat16, device=device, pair=pair, inner=True)
    assert_op_as_accurate(run(ops), run(formulas), args, what=str(hidden))


@packed_or_not
def test_integers(pair, backend, device):
    """Every element is in its place, over several tiles: relu keeps small integers integers."""
    x, gate_weight, value_weight, gate_bias, value_bias = (
        inputs("integer", *shape, dtype=torch.float32, device=device, seed=i)
        for i, shape in enumerate(((3, 50, 16), (70, 16), (70, 16), (70,), (70,)))
    )
    want = [F.linear(x, w, b) for w, b in ((gate_weight, gate_bias), (value_weight, value_bias))]
    layers = gate_weight, value_weight, gate_bias, value_bias
    if not pair:
        layers = [half for i in (0, 2) for half in torch.cat(layers[i : i + 2]).chunk(2)]
    h, pre = registered.gated_act_fwd(x, *layers, "relu")
    assert torch.equal(pre, torch.cat(want, -1))
    assert torch.equal(h, want[0].relu() * want[1])
    assert torch.equal(registered.gated_fwd(x, *layers, "relu"), h)


def test_weights_of_other_strides(triton_backend, device):
    """Each is read by its own, without a copy."""
    args = tensors(2, 5, 16, dtype=torch.float32, device=device, pair=True)
    want = run(ops)(**args)
    wide = torch.cat([args["value_weight"], torch.full((20, 32), torch.nan, device=device)], 1)[:, :16]
    assert torch.equal(run(ops)(**args | {"value_weight": wide}), want)


def test_value_rows_first(backend, device):
    """The two halves as views, in the other order: of the same values the same, bit for bit."""
    args = tensors(2, 5, 16, dtype=torch.float32, device=device)
    first = outputs_and_gradients(run(ops), args)
    turned = {n: torch.cat(args[n].detach().chunk(2)[::-1]).requires_grad_() for n in ("fc1_weight", "fc1_bias")}

    def as_views(fc1_weight, fc1_bias, **rest):
        pairs = {"fc1_weight": fc1_weight.chunk(2)[::-1], "fc1_bias": fc1_bias.chunk(2)[::-1]}
        return ops.mlp(**rest, **pairs, activation="swiglu")

    (out,), gradients = outputs_and_gradients(as_views, args | turned)
    torch.testing.assert_close(out, first[0][0])
    for name, gradient in first[1].items():
        got = gradients[name]
        torch.testing.assert_close(torch.cat(got.chunk(2)[::-1]) if name in turned else got, gradient)


@both_norms
def test_other_residual(norm, backend, device):
    """A float32 residual that is not x, after bfloat16; more rows than hidden units."""
    args = tensors(5, 11, 16, dtype=torch.bfloat16, device=device, norm=norm, scales=True)
    args["residual"] = inputs("normal", 5, 11, 16, dtype=torch.float32, device=device, seed=77).requires_grad_()
    assert_op_as_accurate(run(ops), run(formulas), args, what="stream")


@pytest.mark.parametrize(
    ("norm", "inner", "recompute"),
    [(False, False, "none"), (False, True, "activation"), (True, False, "all"), (True, True, "none")],
)
def test_dropout(norm, inner, recompute, backend, device):
    """Against eager with the masks that the op draws from the same seeds."""
    args = tensors(3, 7, 24, dtype=torch.float32, device=device, norm=norm, inner=inner, scales=True)
    torch.manual_seed(11)
    seeds = draw_seeds(2, device)
    masks = [
        dropout_op(torch.ones(21, n, device=device), seed, 0.3).view(3, 7, n)
        for seed, n in zip(seeds.split(1), (20, 24), strict=True)
    ]
    call = run(ops, itself=True, dropout_p=0.3, recompute=recompute)

    def seeded(**kwargs):
        torch.manual_seed(11)
        return call(**kwargs)

    assert_op_as_accurate(seeded, run(formulas, itself=True, factors=masks), args, what="dropout")


@with_inner
def test_saves_what_recompute_says(inner, backend, device):
    args = tensors(2, 5, 16, hidden=32, dtype=torch.float32, device=device, norm=True, inner=inner)
    x, hidden, statistics = 160, 320, 20 + 20 * inner
    for recompute, want in (("none", x + 3 * hidden), ("activation", x + 2 * hidden), ("all", x)):
        assert saved_numel(run(ops, itself=True, recompute=recompute), args) == want + statistics
    args = {n: t.detach().requires_grad_(n == "fc2_bias") for n, t in args.items()}
    assert saved_numel(run(ops, itself=True), args) == 20  # nothing that fc2's bias needs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_registered_gradients(activation, dtype, backend, device):
    """gated_dact, gated_act_bwd and gated_act against float64 and eager, of rows that are wider apart than they are."""
    wide = inputs("normal", 3, 50, 2 * 96 + 16, dtype=dtype, device=device)
    pre, weight = wide[..., : 2 * 96], inputs("normal", 40, 96, dtype=dtype, device=device, seed=1) / 6
    dy = inputs("normal", 3, 50, 40, dtype=dtype, device=device, seed=2)
    act = {"silu": GATED["swiglu"], "gelu": GATED["geglu"]}[activation]

    def eager(dtype):
        leaf = pre.detach().to(dtype).requires_grad_()
        gate, value = leaf.chunk(2, -1)
        h = act(gate) * value
        (dpre,) = torch.autograd.grad(h, leaf, dy.to(dtype) @ weight.to(dtype))
        return dpre, h.detach(), dpre.sum((0, 1))

    same, exact = eager(dtype), eager(torch.float64)
    assert_all(registered.gated_dact(dy, weight, pre, activation), same, exact)
    (dpre, dbias), h = registered.gated_act_bwd(dy @ weight, pre, activation), registered.gated_act(pre, activation)
    assert_all((dpre, h, dbias), same, exact)


def assert_all(got: tuple[Tensor, ...], same: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    for name, *triple in zip(("dpre", "h", "dbias"), got, same, exact, strict=True):
        assert_as_accurate(*triple, factor=GRADIENT, what=name)


def test_flop_formulas(backend, device):
    x, gate, weight, pre = (torch.randn(*shape, device=device) for shape in ((8, 64), (24, 64), (64, 24), (8, 48)))
    with FlopCounterMode(display=False) as counter:
        registered.gated_fwd(x, gate, gate, None, None, "silu")
        registered.gated_act_fwd(x, gate, gate, None, None, "silu")
        registered.gated_dact(x, weight, pre, "silu")
        registered.gated_act(pre, "silu")
    assert counter.get_total_flops() == 2 * 8 * 64 * 24 * (2 + 2 + 1)


def test_vendor_matmuls(monkeypatch, triton_backend, device):
    """Where the kernel is not used, gate and value are two matmuls into one buffer and a pass over it."""
    from fastvit.ops.linear import gated_launch as launch

    monkeypatch.setattr(launch, "is_our_matmul", lambda *_, **__: False)
    monkeypatch.delattr(launch, "_forward")
    monkeypatch.delattr(launch, "gemm")
    for pair in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            args = tensors(3, 7, 24, dtype=dtype, device=device, norm=True, pair=pair, scales=True)
            assert_op_as_accurate(run(ops, itself=True), run(formulas, itself=True), args, what="vendor")


PAIR = torch.ones(20, 16), torch.ones(20, 16)
SIZES = "fc1_weight must be two of (hidden, in), the gate's and the value's, got (20, 16) and (10, 16)"
BAD = [
    (ValueError, "fc1_weight must have 2 * hidden rows, of the gate and of the value, got 41",
     {"fc1_weight": torch.ones(41, 16), "fc1_bias": None}),
    (ValueError, "fc2_weight must have shape (out, hidden) with hidden = 20", {"fc2_weight": torch.ones(16, 40)}),
    (ValueError, SIZES, {"fc1_weight": (torch.ones(20, 16), torch.ones(10, 16)), "fc1_bias": None}),
    (TypeError, "fc1_weight must be a tensor, or the gate's and the value's, got tuple of 1",
     {"fc1_weight": PAIR[:1]}),
    (TypeError, "fc1_weight must be a tensor, or the gate's and the value's, got NoneType", {"fc1_weight": None}),
    (TypeError, "fc1_bias must be one for each of fc1_weight's two, or None, got Tensor",
     {"fc1_weight": PAIR, "fc1_bias": torch.ones(40)}),
    (ValueError, "fc1_bias[1] must have shape (out,) = (20,)",
     {"fc1_weight": PAIR, "fc1_bias": (None, torch.ones(40))}),
    (TypeError, "fc1_weight[1] must have x's dtype",
     {"fc1_weight": (PAIR[0], torch.ones(20, 16).half()), "fc1_bias": None}),
    (TypeError, "inner_norm must be an ops.Norm, got Tensor", {"inner_norm": torch.ones(20)}),
    (ValueError, "inner_norm.weight must have shape (hidden,) = (20,), got (40,)",
     {"inner_norm": (torch.ones(40), torch.ones(20), 1e-6)}),
    (ValueError, "inner_norm.bias must have shape (hidden,) = (20,), got (40,)",
     {"inner_norm": ops.Norm(torch.ones(20), torch.ones(40))}),
    (ValueError, "inner_norm.bias must be None for the kind 'rms'",
     {"inner_norm": ops.Norm(torch.ones(20), torch.ones(20), kind="rms")}),
    (ValueError, "inner_norm.kind must be one of layer, rms, got 'batch'",
     {"inner_norm": ops.Norm(torch.ones(20), kind="batch")}),
    (ValueError, "inner_norm.eps must be finite", {"inner_norm": (torch.ones(20), torch.ones(20), -1.0)}),
    (ValueError, "inner_norm must be None for the activation 'gelu'",
     {"inner_norm": (torch.ones(20), torch.ones(20), 1e-6), "activation": "gelu"}),
    (ValueError, "activation must be one of gelu, gelu_tanh, quick_gelu, relu, silu, swiglu, geglu, got 'glu'",
     {"activation": "glu"}),
    (ValueError, "recompute must be one of none, activation, all, got 'some'", {"recompute": "some"}),
    (ValueError, "dropout_p must be in [0, 1), got 1.0", {"dropout_p": 1.0}),
    (ValueError, "residual must have shape (..., out)", {"residual": torch.ones(2, 1, 16)}),
]  # fmt: skip


@both_norms
@pytest.mark.parametrize(("error", "message", "wrong"), BAD)
def test_bad_arguments(error, message, wrong, norm):
    args = tensors(2, 4, 16, dtype=torch.float32, device="cpu", norm=norm)
    with pytest.raises(error) as raised:
        (ops.layer_norm_mlp if norm else ops.mlp)(**{**args, "activation": "swiglu", **wrong})
    assert str(raised.value).startswith(message)
