"""ops.mlp and ops.layer_norm_mlp, plain and gated, against float64 and eager PyTorch, on both backends."""

import pytest
import torch
from op_cases import gathered, saved_numel, tensors_of
from oracle import GRADIENT, assert_as_accurate, assert_draws_as_accurate, assert_op_as_accurate, inputs

from fastvit import ops
from fastvit.ops.dropout.op import draw_seeds, dropout_op
from fastvit.study.accuracy import formulas
from fastvit.study.accuracy.formulas import ACTIVATIONS, GATED

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LAYERS = ("gate_weight", "gate_bias", "value_weight", "value_bias")


def run(module, activation="gelu", itself=False, **options):
    """Return the module's mlp, or layer_norm_mlp if there is a norm. itself: x is its own residual."""

    def call(x, **tensors):
        op = gathered(module.layer_norm_mlp if "norm_weight" in tensors else module.mlp)
        residual = {"residual": x} if itself else {}
        return op(x=x, activation=activation, **tensors, **residual, **options)

    return call


def tensors(
    *shape, activation="gelu", hidden=20, out=None, dtype, device,
    norm=False, inner=False, pair=False, scales=("layer_scale", "row_scale"), seed=0,
):  # fmt: skip
    """Draw x (*shape), the parameters, and what is asked for. pair: gate and value are two layers."""
    D, out = shape[-1], out or shape[-1]
    rows = 2 * hidden if activation in GATED else hidden
    shapes = {"x": shape} | ({"norm_weight": (D,), "norm_bias": (D,)} if norm else {})
    if pair:
        shapes |= {name: (hidden, D) if "weight" in name else (hidden,) for name in LAYERS}
    else:
        shapes |= {"fc1_weight": (rows, D), "fc1_bias": (rows,)}
    shapes |= {"inner_weight": (hidden,), "inner_bias": (hidden,)} if inner else {}
    shapes |= {"fc2_weight": (out, hidden), "fc2_bias": (out,)}
    sizes = {"layer_scale": (out,), "row_scale": shape[:1]}
    return tensors_of(shapes | {name: sizes[name] for name in scales}, dtype, device, seed=seed)


@pytest.mark.parametrize(
    ("activation", "norm", "inner", "pair", "dtype", "recompute"),
    [
        ("gelu", False, False, False, F32, "none"),
        ("gelu", False, False, False, BF16, "all"),
        ("gelu", False, False, False, F16, "activation"),
        ("gelu", True, False, False, F32, "all"),
        ("gelu", True, False, False, BF16, "activation"),
        ("gelu", True, False, False, F16, "none"),
        ("gelu", False, True, False, F32, "activation"),
        ("gelu", True, True, False, BF16, "none"),
        ("gelu", True, True, False, F32, "all"),
        ("swiglu", False, False, False, F32, "none"),
        ("swiglu", False, False, True, BF16, "activation"),
        ("swiglu", False, True, True, F32, "activation"),
        ("swiglu", False, True, False, BF16, "all"),
        ("swiglu", True, False, False, F16, "activation"),
        ("swiglu", True, False, True, F32, "all"),
        ("swiglu", True, True, True, BF16, "none"),
        ("swiglu", True, True, False, F32, "all"),
    ],
    ids=str,
)
def test_everything_at_once(activation, norm, inner, pair, dtype, recompute, backend, device):
    """Every two of the choices together; test_fuzz.py draws the others."""
    parts = {"norm": norm, "inner": inner, "pair": pair}
    args = tensors(3, 7, 24, activation=activation, hidden=40, dtype=dtype, device=device, **parts)
    calls = run(ops, activation, True, recompute=recompute), run(formulas, activation, True)
    assert_op_as_accurate(*calls, args, what=recompute)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize(("recompute", "dtype"), [("none", F32), ("activation", BF16), ("all", F32)], ids=str)
def test_rms_norms(recompute, dtype, activation, backend, device):
    """Before fc1 and before fc2, then each with a LayerNorm at the other place."""
    kinds = [("rms", ("norm_bias", "inner_bias")), ("rms", ("norm_bias",)), ("layer", ("inner_bias",))]
    args = tensors(3, 7, 24, activation=activation, hidden=40, dtype=dtype, device=device, norm=True, inner=True)
    for norm, without in kinds:
        calls = run(ops, activation, True, recompute=recompute, norm=norm), run(formulas, activation, True, norm=norm)
        assert_op_as_accurate(*calls, args | dict.fromkeys(without), what=f"{norm}, without {without}")


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED])
def test_activations(activation, backend, device):
    for dtype in (F32, BF16):
        args = tensors(2, 5, 16, activation=activation, dtype=dtype, device=device, out=8, scales=())
        assert_op_as_accurate(run(ops, activation), run(formulas, activation), args, what=activation)


@pytest.mark.parametrize("missing", [("gate_bias",), ("value_bias",), ("gate_bias", "value_bias", "fc2_bias")])
def test_biases_of_a_pair(missing, backend, device):
    args = tensors(2, 5, 16, activation="swiglu", dtype=F32, device=device, pair=True, scales=())
    calls = run(ops, "swiglu"), run(formulas, "swiglu")
    assert_op_as_accurate(*calls, args | dict.fromkeys(missing), what=str(missing))


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("inner", [False, True], ids=["", "inner"])
@pytest.mark.parametrize("norm", [False, True], ids=["mlp", "layer_norm_mlp"])
def test_without_options(norm, inner, activation, backend, device):
    """No biases, no scales, no residual; one token; odd sizes."""
    parts = {"hidden": 27, "out": 5, "norm": norm, "inner": inner, "scales": ()}

    def draw(seed):
        args = tensors(1, 1, 13, activation=activation, dtype=F32, device=device, seed=seed, **parts)
        return args | {"fc1_bias": None, "fc2_bias": None}

    assert_draws_as_accurate(run(ops, activation), run(formulas, activation), draw)


@pytest.mark.parametrize(("hidden", "pair"), [(1365, True), (2730, False)])
def test_odd_widths(hidden, pair, triton_backend, device):
    """EVA-02's widths: rows of 2730 and 5460 bytes; also several column tiles, the last one short."""
    parts = {"hidden": hidden, "pair": pair, "inner": True, "scales": ()}
    args = tensors(2, 3, 48, activation="swiglu", dtype=BF16, device=device, **parts)
    assert_op_as_accurate(run(ops, "swiglu"), run(formulas, "swiglu"), args, what=str(hidden))


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("norm", [False, True], ids=["mlp", "layer_norm_mlp"])
def test_other_residual(norm, activation, backend, device):
    """A residual that is not x, also a float32 one after bfloat16 matmuls; more rows than hidden units."""
    for scales, wide in (
        (("layer_scale",), F32),
        (("row_scale",), BF16),
        (("layer_scale", "row_scale"), F32),
        ((), BF16),
    ):
        args = tensors(5, 11, 16, activation=activation, dtype=BF16, device=device, norm=norm, scales=scales)
        args["residual"] = inputs("normal", 5, 11, 16, dtype=wide, device=device, seed=77).requires_grad_()
        assert_op_as_accurate(run(ops, activation), run(formulas, activation), args, what=f"{scales} {wide}")


@pytest.mark.parametrize("hidden", [16, 64], ids=["more_rows", "fewer_rows"])
def test_small_layer_scale_in_float16(hidden, backend, device):
    """DINOv2's 1e-5 with the gradients that loss scaling makes of it: layer_scale * weight would underflow, and the
    weight's gradient before layer_scale would overflow."""
    args = tensors(4, 8, 16, hidden=hidden, dtype=F32, device=device, scales=("layer_scale",))
    args["layer_scale"] = torch.full((16,), 1e-5, device=device, requires_grad=True)
    dout = inputs("offset", 4, 8, 16, dtype=F32, device=device, seed=70) * 8

    def gradients(module, dtype):
        cast = {name: t.detach().to(dtype or t.dtype).requires_grad_() for name, t in args.items()}
        with torch.autocast(device.type, torch.float16, enabled=dtype is None):
            out = run(module, itself=True)(**cast)
        return torch.autograd.grad(out, list(cast.values()), dout.to(out.dtype))

    runs = gradients(ops, None), gradients(formulas, None), gradients(formulas, torch.float64)
    for name, got, same, exact in zip(args, *runs, strict=True):
        assert_as_accurate(got, same, exact, factor=GRADIENT, what=name)


@pytest.mark.parametrize(
    ("activation", "norm", "inner", "recompute"),
    [
        ("gelu", False, False, "none"),
        ("gelu", True, False, "activation"),
        ("gelu", True, False, "all"),
        ("gelu", True, True, "activation"),
        ("swiglu", False, False, "none"),
        ("swiglu", False, True, "activation"),
        ("swiglu", True, False, "all"),
        ("swiglu", True, True, "none"),
    ],
)
def test_dropout(activation, norm, inner, recompute, backend, device):
    """Against eager with the factors that the op draws from the same seeds."""
    args = tensors(3, 7, 24, activation=activation, dtype=F32, device=device, norm=norm, inner=inner)
    torch.manual_seed(11)
    seeds = draw_seeds(2, device)
    factors = [
        dropout_op(torch.ones(21, n, device=device), seed, 0.3).view(3, 7, n)
        for seed, n in zip(seeds.split(1), (20, 24), strict=True)
    ]
    assert not torch.equal(factors[0], factors[1][..., :20])
    call = run(ops, activation, True, dropout_p=0.3, recompute=recompute)

    def seeded(**kwargs):
        torch.manual_seed(11)
        return call(**kwargs)

    assert_op_as_accurate(seeded, run(formulas, activation, True, factors=factors), args, what="dropout")


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("inner", [False, True], ids=["", "inner"])
def test_saves_what_recompute_says(inner, activation, backend, device):
    parts = {"hidden": 32, "norm": True, "inner": inner, "scales": ()}
    args = tensors(2, 5, 16, activation=activation, dtype=F32, device=device, **parts)
    x, hidden, statistics = 160, 320, 20 + 20 * inner
    pre = 2 * hidden if activation in GATED else hidden
    for recompute, want in (("none", x + pre + hidden), ("activation", x + pre), ("all", x)):
        assert saved_numel(run(ops, activation, True, recompute=recompute), args) == want + statistics
    args = {n: t.detach().requires_grad_(n == "fc2_bias") for n, t in args.items()}
    assert saved_numel(run(ops, activation, True), args) == 20  # nothing that fc2's bias needs
