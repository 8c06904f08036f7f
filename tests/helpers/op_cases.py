"""The public ops and small tensors for them, by name: "mlp dropout" is ops.mlp with OPTIONS["mlp dropout"]. Rotary
positions are the tensors "sin" and "cos", or "fixed_sin" and "fixed_cos" where they take no gradient."""

import math

import torch
from oracle import inputs
from torch import Tensor

from fastvit import ops
from fastvit.study.memory.peak import saved_bytes

# "B", "N", "BN" and "T": the batch, the tokens of a sample and of all, and those of one with a rotary position
X = ("B", "N", 16)
BRANCH = {"layer_scale": (16,), "row_scale": ("B",)}
LINEAR = {"weight": (16, 16), "bias": (16,)}
NORM = {"norm_weight": (16,), "norm_bias": (16,)}
RMS_NORM = {"norm_weight": (16,)}
SCALE_NORM = {"scale_weight": (32,), "scale_bias": (32,)}
FIXED = {"fixed_sin": ("T", 16), "fixed_cos": ("T", 16)}
HEADS = {"qkv_weight": (96, 16), "qkv_bias": (96,), "proj_weight": (16, 32), "proj_bias": (16,)}
HEAD = {"qkv_weight": (48, 16), "qkv_bias": (48,), "proj_weight": (16, 16), "proj_bias": (16,)}
MASK = {"attn_mask": (2, "N", "N")}
QK = {"q_weight": (16,), "q_bias": (16,), "k_weight": (16,), "k_bias": (16,)}
FC = {"fc1_weight": (40, 16), "fc1_bias": (40,), "fc2_weight": (16, 40), "fc2_bias": (16,)}
GATED = {"fc1_weight": (40, 16), "fc1_bias": (40,), "fc2_weight": (16, 20), "fc2_bias": (16,)}
PAIR = {"gate_weight": (20, 16), "gate_bias": (20,), "value_weight": (20, 16), "value_bias": (20,)}
INNER = {"inner_weight": (20,), "inner_bias": (20,)}
RMS_INNER = {"inner_weight": (20,)}
PAIRED = {**PAIR, "fc2_weight": (16, 20), "fc2_bias": (16,)}
IMAGE = {"image": ("B", 3, 8, "2N"), "weight": (24, 3, 4, 4)}
TOKENS = {"bias": (24,), "pos_embed": ("N", 24), "prefix": (1, 24)}
SHAPES = {
    "layer_norm": {"x": X, "weight": (16,), "bias": (16,)},
    "rms_norm": {"x": X, "weight": (16,)},
    "linear": {"x": X, **LINEAR, **BRANCH, "residual": X},
    "linear gelu": {"x": X, **LINEAR},
    "layer_norm_linear": {"x": X, **NORM, **LINEAR},
    "layer_norm_attention": {"x": X, **NORM, **HEADS, **BRANCH},
    "layer_norm_attention rotary": {"x": X, **RMS_NORM, **HEADS, **SCALE_NORM, **BRANCH, **FIXED, **MASK},
    "layer_norm_attention qk_norm": {"x": X, **NORM, **HEAD, "q_weight": (16,), "k_weight": (16,), **FIXED},
    "mlp": {"x": X, **FC, **BRANCH},
    "layer_norm_mlp": {"x": X, **NORM, **FC, **BRANCH},
    "mlp gated": {"x": X, **GATED, **BRANCH},
    "mlp gated dropout": {"x": X, **GATED, **BRANCH},
    "layer_norm_mlp gated": {"x": X, **NORM, **PAIRED, **INNER, **BRANCH},
    "layer_norm_mlp gated recompute": {"x": X, **RMS_NORM, **PAIRED, **RMS_INNER, **BRANCH},
    "add_layer_norm": {"residual": X, "branch": X, "weight": (16,), "bias": (16,), **BRANCH},
    "attention": dict.fromkeys("qkv", ("B", "N", 2, 16)),
    "attention mask": {"q": ("B", "N", 2, 16), **dict.fromkeys("kv", ("B", "N", 1, 16)), **MASK},
    "attention_qkvpacked": {"qkv": ("B", "N", 3, 2, 16)},
    "attention_varlen": {"q": ("BN", 2, 16), **dict.fromkeys("kv", ("BN", 1, 16))},
    "rotary": {"x": ("B", "N", 2, 16), "sin": ("T", 16), "cos": ("T", 16)},
    "rotary_qkvpacked": {"qkv": ("B", "N", 3, 2, 16), "sin": ("B", 1, "T", 16), "cos": ("B", 1, "T", 16)},
    "rotary_qkvpacked interleaved": {"qkv": ("B", "N", 3, 2, 16), "sin": (2, "T", 16), "cos": (2, "T", 16)},
    "qk_norm": {"qkv": ("B", "N", 3, 1, 16), **QK, **FIXED},
    "patch_embed": {**IMAGE, **TOKENS},
}
OPTIONS = {
    "linear gelu": {"activation": "gelu"},
    "layer_norm_attention": {"num_heads": 2},
    "layer_norm_attention rotary": {"num_heads": 2, "norm": "rms"},
    "layer_norm_attention qk_norm": {"num_heads": 1},
    "layer_norm_attention dropout": {"num_heads": 2, "dropout_p": 0.4},
    "patch_embed uint8": {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
    "mlp recompute": {"recompute": "all", "activation": "silu"},
    "layer_norm_mlp recompute": {"recompute": "all", "activation": "silu"},
    "mlp dropout": {"recompute": "none", "dropout_p": 0.3},
    "layer_norm_mlp dropout": {"recompute": "none", "dropout_p": 0.3},
    "mlp gated": {"activation": "swiglu"},
    "mlp gated dropout": {"activation": "geglu", "recompute": "none", "dropout_p": 0.3},
    "layer_norm_mlp gated": {"activation": "geglu"},
    "layer_norm_mlp gated recompute": {"activation": "swiglu", "recompute": "all", "norm": "rms"},
    "attention_qkvpacked dropout": {"dropout_p": 0.4},
    "attention": {"scale": 0.7},
    "dropout": {"p": 0.5},
}
SHAPES = {name: SHAPES.get(name.split()[0], {"x": X}) for name in OPTIONS} | SHAPES
FORMULAS = [name for name in SHAPES if not name.endswith(("dropout", "recompute"))]  # the names that formulas.py has


def function(name, module=ops):
    """The op, or its formula, of tensors by name; the residual of an MLP and of attention behind a norm is its x."""
    op, options = gathered(getattr(module, name.split()[0])), OPTIONS.get(name, {})

    def call(**tensors):
        tensors = positioned(name, tensors)
        if "mlp" in name or name.startswith("layer_norm_attention"):
            tensors["residual"] = tensors["x"]
        return op(**tensors, **options)

    return call


def positioned(name, tensors):
    """With rotary positions in the place of their tables."""
    tables = [tensors[key] for key in tensors if key.endswith(("sin", "cos"))]
    rest = {key: t for key, t in tensors.items() if not key.endswith(("sin", "cos"))}
    return rest | {"rotary": ops.Rotary(*tables, 1, name.endswith("interleaved"))} if tables else rest


def gathered(op, eps=1e-6):
    """op of tensors by name, with the two layers of a gated MLP in a pair, and norms but the first in one argument
    each; without a bias they are RMSNorms."""

    def call(gate_weight=None, value_weight=None, gate_bias=None, value_bias=None, **rest):
        if gate_weight is not None:
            rest |= {"fc1_weight": (gate_weight, value_weight), "fc1_bias": (gate_bias, value_bias)}
        for name in ("inner", "scale", "q", "k"):
            weight, bias = (rest.pop(f"{name}_{of}", None) for of in ("weight", "bias"))
            if weight is not None:
                rest[f"{name}_norm"] = ops.Norm(weight, bias, eps, "rms" if bias is None else "layer")
        if "norm_weight" in rest:
            rest.setdefault("norm_bias", None)
            rest |= {"qk_norm": (rest.pop("q_norm"), rest.pop("k_norm"))} if "q_norm" in rest else {}
        elif "q_norm" in rest:
            rest |= dict(zip("qk", rest.pop("qkv").unbind(2), strict=False))
        return op(**rest)

    return call


def tensors_of(shapes, dtype, device, kind="normal"):
    """Tensors by name, None for a shape of None. All but row_scale and what is fixed require a gradient, and are of
    this kind of input; matrices are divided by the root of what they sum over, unless they are to stay integer."""
    made: dict[str, Tensor | None] = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        if shape is None:
            made[name] = None
        elif name == "row_scale":
            made[name] = torch.arange(*shape, device=device).to(dtype) * 1.25  # of no two samples the same
        else:
            t = inputs(kind, *shape, dtype=torch.float64, device=device, seed=seed)
            if name.endswith("weight") and len(shape) > 1 and kind == "normal":
                t = t / math.prod(shape[1:]) ** 0.5
            t = getattr(t, name[-3:])() if name.endswith(("sin", "cos")) else t
            made[name] = t.to(dtype).requires_grad_(not name.startswith("fixed"))
    return made


def made(name, B, N, device, dtype=torch.float32):
    sizes = {"B": B, "N": N, "2N": 2 * N, "BN": B * N, "T": N - 1}
    shapes = {key: tuple(sizes.get(n, n) for n in shape) for key, shape in SHAPES[name].items()}
    tensors = tensors_of(shapes, dtype, device)
    if name == "patch_embed uint8":
        tensors["image"] = (tensors["image"].detach() * 40).to(torch.uint8)
    elif name == "attention_varlen":
        tensors["cu_seqlens"] = torch.tensor([0, *[min(N - 1, B * N)] * 2, B * N], dtype=torch.int32, device=device)
    return tensors


def wanted(tensors):
    return {name: t for name, t in tensors.items() if t is not None and t.requires_grad}


def outputs_of(result):
    return result if isinstance(result, tuple) else (result,)


def outputs_and_gradients(op, tensors):
    """Outputs, and gradients by name; what is random is drawn anew, and the same."""
    torch.manual_seed(4)
    outputs, leaves = outputs_of(op(**tensors)), wanted(tensors)
    through = [o for o in outputs if o.requires_grad]
    douts = [inputs("normal", *o.shape, dtype=o.dtype, device=o.device, seed=50 + i) for i, o in enumerate(through)]
    return outputs, dict(zip(leaves, torch.autograd.grad(through, list(leaves.values()), douts), strict=True))


def results(op, tensors):
    outputs, gradients = outputs_and_gradients(op, tensors)
    return *outputs, *gradients.values()


def assert_freezing_changes_no_other_gradient(op, tensors, choices):
    """choices: names of the tensors that are frozen together"""
    _, everything = outputs_and_gradients(op, tensors)
    for frozen in choices:
        partly = {n: t.detach().requires_grad_(t.requires_grad and n not in frozen) for n, t in tensors.items()}
        _, gradients = outputs_and_gradients(op, partly)
        assert gradients.keys() == everything.keys() - set(frozen)
        for name, got in gradients.items():
            want = everything[name]
            atol = 1e-6 * max(1.0, float(want.abs().max()))  # sums round by their largest terms
            torch.testing.assert_close(got, want, atol=atol, rtol=1e-5, msg=f"{name} with {frozen} frozen")


def saved_numel(op, tensors):
    """Elements of float32 that a call keeps for backward, but for all tensors other than x."""
    return saved_bytes(lambda: op(**tensors), [t for name, t in tensors.items() if name != "x"]) / 4


def assert_layout_does_not_matter(name, tensors, arrange_dout, bitwise):
    """The results of contiguous tensors; ATen's matmuls may round otherwise."""
    runs = []
    for arranged, arrange in (
        ({k: t.contiguous() for k, t in tensors.items()}, lambda t: arrange_dout(t).contiguous()),
        (tensors, arrange_dout),
    ):
        leaves = {k: t.detach().requires_grad_(tensors[k].requires_grad) for k, t in arranged.items()}
        torch.manual_seed(4)
        outputs = outputs_of(function(name)(**leaves))
        assert outputs[0].is_contiguous()
        douts = [arrange(inputs("normal", *o.shape, dtype=o.dtype, device=o.device, seed=50)) for o in outputs]
        runs.append((*outputs, *torch.autograd.grad(outputs, list(wanted(leaves).values()), douts)))
    for plain, strided in zip(*runs, strict=True):
        assert not bitwise or torch.equal(strided, plain)
        torch.testing.assert_close(strided, plain, atol=1e-5 if name.startswith("attention") else 2e-6, rtol=1e-5)
