"""The costs of a call: FLOPs, as PyTorch counts them, and what is kept for the backward pass."""

import pytest
import torch
from op_cases import FORMULAS, ROWS, function, made, outputs_of, saved_numel, wanted
from torch.utils.flop_counter import FlopCounterMode

from fastvit import ops
from fastvit.reference import ops as formulas
from fastvit.study.memory.peak import saved_bytes

B, N, D, H, d, HIDDEN, GATED = 2, 6, 16, 2, 16, 40, 20
HD, ROWS_OF_X = H * d, B * N


def matmuls(*products, passes=3):
    """Products (in, out) of all rows, in `passes` of the forward pass and the two gradients."""
    return passes * sum(2 * ROWS_OF_X * i * o for i, o in products)


# two matmuls forward and five backward; queries and keys count in full
SCORES = 14 * B * H * d * N * N
PROJECTIONS = matmuls((D, 3 * HD), (HD, D))
FLOPS = {  # of rows whose formula has others
    "mlp recompute": matmuls((D, HIDDEN), (HIDDEN, D)) + matmuls((D, HIDDEN), passes=1),
    # PyTorch's counter does not see the product that is added to x's gradient
    "layer_norm_mlp gated": matmuls((D, 2 * GATED), (GATED, D)) - matmuls((D, GATED), passes=1),
    "attention_varlen": B * SCORES,  # max_seqlen is not given: each query has the keys of all
    "attention_varlen cross": 14 * B * N * H * d * 5,
    "layer_norm_attention": PROJECTIONS + SCORES,
    "layer_norm_attention lengths": PROJECTIONS + B * SCORES,
    "layer_norm_attention qk_norm": PROJECTIONS + SCORES,
    "layer_norm_attention rotary": PROJECTIONS + SCORES,
    "layer_norm_attention recompute": PROJECTIONS + matmuls((D, 3 * HD), passes=1) + SCORES * 9 // 7,
}


def counted(name, device, frozen=(), module=ops):
    tensors = {
        key: t.detach().requires_grad_(t.requires_grad and key not in frozen)
        for key, t in made(name, B, N, device).items()
    }
    with FlopCounterMode(display=False) as counter:
        outputs = outputs_of(function(name, module)(**tensors))
        torch.autograd.grad(sum(o.sum() for o in outputs), list(wanted(tensors).values()))
    return counter.get_total_flops()


@pytest.mark.parametrize("name", dict.fromkeys([*FORMULAS, *FLOPS]))
def test_flops(name, device):
    """Those of the formula; but the backward pass of attention has five matmuls, and the formula's four."""
    want = FLOPS.get(name)
    if want is None:
        want = counted(name, device, module=formulas)
        want = want * 7 // 6 if ROWS[name].op.startswith("attention") else want
    assert counted(name, device) == want


@pytest.mark.parametrize("frozen", ["x", "weight"])
@pytest.mark.parametrize("name", ["linear gelu", "layer_norm_linear"])
def test_no_matmul_for_a_frozen_tensor(name, frozen, device):
    """If x is frozen, so is the norm before it."""
    others = ("norm_weight", "norm_bias") if frozen == "x" else ()
    assert counted(name, device, (frozen, *others)) == counted(name, device) * 2 // 3


# ---- what is saved, in float32 elements, without parameters and tensors other than x ----

X, INNER, STATISTICS, LSE = B * N * D, B * N * HD, 2 * B * N, B * N * H
RECOMPUTED_ATTENTION = {
    "none": X + 4 * INNER + STATISTICS + LSE,
    "attention": X + 3 * INNER + STATISTICS,
    "qkv": X + INNER + STATISTICS + LSE,
    "all": X + STATISTICS,
}
# of what wants a gradient alone, for every choice of recompute
ALONE = {
    "norm_weight": RECOMPUTED_ATTENTION,
    "qkv_weight": {choice: saved - STATISTICS for choice, saved in RECOMPUTED_ATTENTION.items()},
    "qkv_bias": {"none": 4 * INNER + LSE, "attention": 3 * INNER, "qkv": X + INNER + LSE, "all": X},
    "proj_weight": dict.fromkeys(RECOMPUTED_ATTENTION, INNER),  # is smaller than what it is computed from
    "layer_scale": dict.fromkeys(RECOMPUTED_ATTENTION, INNER),
    "proj_bias": dict.fromkeys(RECOMPUTED_ATTENTION, 0),
}


def saved(name, device, alone=None, compiled=False, **options):
    tensors = {
        key: t.detach().requires_grad_(t.requires_grad and alone in (None, key))
        for key, t in made(name, B, N, device).items()
        if key != "row_scale"
    }
    run = lambda **tensors: ROWS[name].call(**options)(**tensors)  # noqa: E731
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(run, backend="aot_eager")
        run(**tensors)
    return saved_numel(run, tensors)


@pytest.mark.parametrize("recompute", RECOMPUTED_ATTENTION)
def test_attention_saves_what_recompute_says(recompute, device):
    options = {"num_heads": H, "recompute": recompute}
    assert saved("layer_norm_attention", device, **options) == RECOMPUTED_ATTENTION[recompute]
    for alone, numbers in ALONE.items():
        assert saved("layer_norm_attention", device, alone, **options) == numbers[recompute], alone


def test_attention_saves_on_triton_what_it_says(triton_backend, device):
    assert saved("layer_norm_attention", device, num_heads=H, recompute="none") == RECOMPUTED_ATTENTION["none"]


MLPS = {  # x, the activation's input and the activation, statistics
    "mlp gelu": (HIDDEN, HIDDEN, 0),
    "layer_norm_mlp gelu": (HIDDEN, HIDDEN, 1),
    "layer_norm_mlp inner": (HIDDEN, HIDDEN, 2),
    "mlp swiglu": (2 * GATED, GATED, 0),
    "layer_norm_mlp gated": (2 * GATED, GATED, 2),
}


@pytest.mark.parametrize("name", MLPS)
def test_an_mlp_saves_what_recompute_says(name, device):
    before, after, norms = MLPS[name]
    kept = X + norms * STATISTICS
    for recompute, more in (("none", before + after), ("activation", before), ("all", 0)):
        assert saved(name, device, recompute=recompute) == kept + ROWS_OF_X * more, recompute
    assert saved(name, device, "fc2_bias") == (STATISTICS if norms else 0)


@pytest.mark.parametrize(
    ("name", "recompute", "want"),
    [
        ("layer_norm_attention", "all", RECOMPUTED_ATTENTION["all"]),
        ("layer_norm_attention", "qkv", RECOMPUTED_ATTENTION["qkv"]),
        ("layer_norm_mlp gated", "all", X + 2 * STATISTICS),
    ],
)
def test_the_compiler_saves_what_it_says(name, recompute, want, device):
    """It does not find results of the forward pass for what the backward pass computes again."""
    heads = {"num_heads": H} if "attention" in name else {}
    assert saved(name, device, compiled=True, recompute=recompute, **heads) == want


OF_TOKENS = ("x", "q", "k", "v", "qkv", "rows", "columns", "branch")
GRID = 8 * 12 * B * H
SEED = 2  # int64
SAVED = {  # elements of the tokens' dtype, and of float32
    "layer_norm_linear": (X, STATISTICS),
    "rms_norm": (X, STATISTICS // 2),
    "linear gelu": (X + ROWS_OF_X * HIDDEN, 0),
    "linear residual": (X, 0),
    "mlp dropout": (X + 2 * ROWS_OF_X * HIDDEN, 3 * SEED),  # the second is not used
    "attention_qkvpacked": (4 * INNER, LSE),
    "attention_qkvpacked dropout": (4 * INNER, LSE + SEED),
    "attention relative": (4 * INNER + B * N * H * (2 + 3), LSE),
    "attention_windows relative": (GRID * (4 * d + 4 + 6), GRID),
    "qk_norm": (B * N * 3 * d, 0),
    "patch_embed": (0, 0),  # but the image
    "layer_norm_attention qk_norm": (X + 4 * INNER, STATISTICS + LSE),
    "layer_norm_attention dropout": (X + 4 * INNER, STATISTICS + LSE + SEED),
}


@pytest.mark.parametrize("name", SAVED)
def test_saves(name, device):
    """Nothing of the size of the scores, nothing twice, and no tokens of 16 bits in float32."""
    tensors = made(name, B, N, device, torch.bfloat16)
    parameters = [t for key, t in tensors.items() if key not in OF_TOKENS]
    of_tokens, of_float32 = SAVED[name]
    assert saved_bytes(lambda: function(name)(**tensors), parameters) == 2 * of_tokens + 4 * of_float32
