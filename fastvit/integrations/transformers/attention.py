"""Read attention of transformers (version 5) by the names that its parts have in all models: q, k and v in one layer or
in three, the last layer, norms of q and k, and dropout; in one module, or in two."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from fastvit.blocks import read, run
from fastvit.blocks.read import LINEAR
from fastvit.blocks.spec import AttentionSpec, LinearSpec
from fastvit.blocks.submodules import CannotFuse, qualified_name, submodules
from fastvit.integrations.transformers import classes, hooks
from fastvit.ops import Norm, Rotary

_SEPARATE = {"q_proj": ("q_proj", "k_proj", "v_proj"), "query": ("query", "key", "value"), "q": ("q", "k", "v")}
_LAST = "o_proj", "out_proj", "proj", "projection", "projection_layer"
_HEAD_DIM = "head_dim", "attention_head_size"
_DROPOUTS = "attn_drop", "attention_dropout", "dropout_prob", "dropout"


class WithoutWeights(NamedTuple):
    """Attention of a module that returns only the output, without weights."""

    attention: AttentionSpec


def inner_of(attn: Any) -> str | None:
    """Return the name of the first of two modules, which has q, k and v; the second has the last layer and its dropout.
    None if attention is one module."""
    return next((name for name in ("attention", "self") if name in attn._modules), None)


def read_attention(attn: Any, dropout: read.Dropout = None) -> AttentionSpec:
    """Read attention within a sample. dropout: the layer's, if it applies to attention too."""
    inner = inner_of(attn)
    if inner is not None:
        module = hooks.attention_of(attn, inner, classes.SELF_ATTENTION)
        (output,) = submodules(attn, output=classes.SELF_OUTPUT)
        out, dropout = submodules(output, dense=LINEAR, dropout=read.DROPOUT)
    else:
        module, out = attn, last_of(attn)
    if qualified_name(module) not in classes.PLAIN_ATTENTION:
        hooks.check_attention(module)
    return describe(module, out, dropout)


def last_of(attn: Any) -> Any:
    """Return the last layer of attention in one module."""
    name = next((name for name in _LAST if name in attn._modules), _LAST[0])
    return submodules(attn, {name: LINEAR})[0]


def describe(attn: Any, out: nn.Linear, dropout: read.Dropout) -> AttentionSpec:
    """Describe attention with q, k and v in `attn`, up to the last layer and the dropout after it."""
    parameters = {name for name, parameter in attn._parameters.items() if parameter is not None}
    if parameters - {"relative_position_bias_table"}:  # such as VideoMAE's biases before version 5.8
        raise CannotFuse(f"parameters beside its layers: {', '.join(sorted(parameters))}")
    children = attn._modules
    if "projection_dropout" in children:
        (own,) = submodules(attn, projection_dropout={nn.Identity, *read.DROPOUT})
        dropout = None if type(own) is nn.Identity else own
    heads = attn.num_heads if hasattr(attn, "num_heads") else attn.num_attention_heads
    d = next((getattr(attn, name) for name in _HEAD_DIM if hasattr(attn, name)), out.in_features // heads)
    if "qkv" in children:
        (qkv,) = submodules(attn, qkv=LINEAR)
        layers: tuple[LinearSpec, ...] = (read.read_layer(qkv),)
        rest = qkv.out_features - out.in_features
        widths = out.in_features, rest // 2, rest - rest // 2
    else:
        names = next((names for name, names in _SEPARATE.items() if name in children), _SEPARATE["q_proj"])
        q, k, v = submodules(attn, dict.fromkeys(names, LINEAR))
        layers = read.read_layer(q), read.read_layer(k), read.read_layer(v)
        widths = q.out_features, k.out_features, v.out_features
    if widths[0] != out.in_features or widths[1] != widths[2] or widths[1] % d:
        raise CannotFuse(f"q, k and v have {widths[0]}, {widths[1]} and {widths[2]} outputs")
    scale = next((getattr(attn, name) for name in ("scaling", "scale") if hasattr(attn, name)), None)
    qk_norm = read.read_qk_norm(attn, classes.NORM, read_norm)
    heads, kv_heads, p = widths[0] // d, widths[1] // d, _attention_dropout(attn)
    return read.describe_attention(layers, out, heads, scale, p, dropout, qk_norm=qk_norm, kv_heads=kv_heads)


def _attention_dropout(attn: Any) -> float:
    """Return the probability with which attention drops its weights: a module's or a number. Mllama's has neither."""
    for name in _DROPOUTS:
        if name in attn._modules:
            (module,) = submodules(attn, {name: read.DROPOUT})
            return module.p if module.training else 0.0
        if hasattr(attn, name):
            return getattr(attn, name) if attn.training else 0.0
    return 0.0


def read_attention_alone(attn: Any) -> AttentionSpec | WithoutWeights:
    hooks.check_version()
    if inner_of(attn) is not None:
        return WithoutWeights(read_attention(attn))
    if qualified_name(attn) in classes.PLAIN_ATTENTION:
        raise CannotFuse("it returns its weights as well")
    hooks.check_no_weights(attn)
    return read_attention(attn)


def run_attention(
    x: Tensor, attn: AttentionSpec | WithoutWeights, rotary: Rotary | None = None, attn_mask: Tensor | None = None
) -> Tensor | tuple[Tensor, None]:
    if isinstance(attn, WithoutWeights):
        return run.run_attention(x, attn.attention, rotary, attn_mask)
    return run.run_attention(x, attn, rotary, attn_mask), None


def read_norm(norm: Any) -> Norm:
    if "variance_epsilon" in norm.__dict__:  # T5's RMSNorm
        return read.rms_norm(norm.weight, norm.variance_epsilon)
    return read.read_norm(norm)
