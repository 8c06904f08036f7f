"""The attention half of a pre-norm block as one autograd node."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops.attention.op import (
    attention_bwd,
    attention_bwd_with_mask,
    attention_fwd,
    attention_qkvpacked_bwd,
    attention_qkvpacked_bwd_with_mask,
    attention_qkvpacked_fwd,
    broadcast_mask,
    check_mask,
    checked_scale,
)
from fastvit.ops.block.norm_linear import (
    Biases,
    NormedRows,
    Weights,
    check_norm_and_layers,
    flat_layers,
    norm_linear_backward,
    side_by_side,
)
from fastvit.ops.dropout.op import draw_seeds
from fastvit.ops.layer_norm.op import (
    NO_NORM,
    Norm,
    NormTuple,
    Residual,
    checked_norm,
    layer_norm_fwd,
    norm_backward,
)
from fastvit.ops.linear.op import check_linear, linear_fwd
from fastvit.ops.qk_norm.op import checked_norms, qk_norm_bwd, qk_norm_fwd
from fastvit.ops.rotary.op import Rotary, broadcast_tables, check_tables, rotary_op
from fastvit.ops.runtime.autograd import FusedNode, needs_autograd, run
from fastvit.ops.runtime.call import Call, begin
from fastvit.ops.runtime.epilogue import Epilogue, EpilogueTuple, LastLayer, scale_samples
from fastvit.ops.runtime.registry import takes_out
from fastvit.ops.runtime.rows import as_rows, empty_like


class _Options(NamedTuple):
    op: str
    eps: float
    rms: bool  # whether the norm is RMSNorm
    scale_eps: float
    scale_rms: bool
    qk_eps: float
    qk_rms: bool
    heads: tuple[int, int, int]  # 3, H, d
    scale: float
    dropout_p: float
    residual_is_x: bool
    residual_dtype: torch.dtype | None  # of a residual that is not x
    interleaved: bool  # rotary positions, if there are any
    cast: torch.dtype | None  # autocast's dtype, for the layers


class _Inputs(NamedTuple):
    x: Tensor
    norm_weight: Tensor
    norm_bias: Tensor | None
    qkv_weight: Tensor  # q's alone, if k and v have layers of their own
    qkv_bias: Tensor | None
    k_weight: Tensor | None
    k_bias: Tensor | None
    v_weight: Tensor | None
    v_bias: Tensor | None
    q_norm_weight: Tensor | None
    q_norm_bias: Tensor | None
    k_norm_weight: Tensor | None
    k_norm_bias: Tensor | None
    scale_weight: Tensor | None  # of the norm before proj
    scale_bias: Tensor | None
    proj_weight: Tensor
    proj_bias: Tensor | None
    layer_scale: Tensor | None
    row_scale: Tensor | None
    residual: Tensor | None  # None if it is x
    mask: Tensor | None
    seed: Tensor | None
    sin: Tensor | None
    cos: Tensor | None
    options: _Options
    call: Call


class _Wanted(NamedTuple):
    """What gradients are wanted of, or by way of."""

    norm: bool  # x or its norm
    weights: bool  # q's, k's or v's
    qkv: bool  # these, their biases, the norms of q and k, or the mask
    scale_norm: bool
    last: bool  # proj's weight or LayerScale, which need proj's input

    @classmethod
    def of(cls, wants: Any) -> _Wanted:
        """Return it for Inputs of bools."""
        norm = wants.x or wants.norm_weight or wants.norm_bias
        weights = wants.qkv_weight or wants.k_weight or wants.v_weight
        biases = wants.qkv_bias or wants.k_bias or wants.v_bias
        q_norm, k_norm = wants.q_norm_weight or wants.q_norm_bias, wants.k_norm_weight or wants.k_norm_bias
        qkv = norm or weights or biases or q_norm or k_norm or wants.mask
        return cls(norm, weights, qkv, wants.scale_weight or wants.scale_bias, wants.proj_weight or wants.layer_scale)


class _LayerNormAttention(FusedNode):
    """residual + row_scale * layer_scale * proj(scale_norm(attention(norm(x)))), with norms of q and k. All norms
    except the first are optional, and the residual may be x."""

    Inputs = _Inputs
    casts = ("qkv_weight", "qkv_bias", "k_weight", "k_bias", "v_weight", "v_bias", "proj_weight", "proj_bias")
    saves = (
        "x", "norm_weight", "norm_bias", "mean", "rstd", "qkv_weight", "k_weight", "v_weight",
        "q_norm_weight", "q_norm_bias", "k_norm_weight", "k_norm_bias", "qkv", "attended", "lse",
        "mask", "seed", "sin", "cos", "scale_weight", "scale_bias", "scale_mean", "scale_rstd",
        "proj_weight", "proj_bias", "layer_scale", "row_scale",
    )  # fmt: skip

    @classmethod
    def kept(cls, t: _Inputs) -> tuple[str, ...]:
        of_scale_norm = ("scale_mean", "scale_rstd") if t.scale_weight is not None else ()
        return "mean", "rstd", "qkv", "attended", "lse", *of_scale_norm

    @staticmethod
    def compute(t: _Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        o, call = t.options, t.call
        y, mean, rstd = layer_norm_fwd(t.x, t.norm_weight, t.norm_bias, o.eps, t.qkv_weight.dtype, o.rms, call=call)
        qkv = F.linear(y, t.qkv_weight, t.qkv_bias) if t.k_weight is None else side_by_side(y, *_layers(t))
        del y
        B, N, _ = t.x.shape
        qkv = qkv.view(B, N, *o.heads)
        if t.q_norm_weight is not None:  # not in place: the backward pass reads q and k as they are here
            q, k, v = qkv.unbind(2)
            norms = t.q_norm_weight, t.q_norm_bias, t.k_norm_weight, t.k_norm_bias
            q, k = qk_norm_fwd(q, k, *norms, t.sin, t.cos, o.qk_eps, o.qk_rms, o.interleaved, call=call)
            attended, lse = attention_fwd(q, k, v, t.mask, t.seed, o.scale, o.dropout_p, call=call)
            del q, k
        else:
            if t.sin is not None:
                heads = qkv.flatten(2, 3)
                heads = rotary_op(heads, t.sin, t.cos, 2 * o.heads[1], o.interleaved, False, call=call, out=heads)
                qkv = heads.view(qkv.shape)
            attended, lse = attention_qkvpacked_fwd(qkv, t.mask, t.seed, o.scale, o.dropout_p, call=call)
        kept = {"mean": mean, "rstd": rstd, "qkv": qkv, "attended": attended, "lse": lse}
        rows = attended.view(B, N, t.proj_weight.shape[1])
        if t.scale_weight is not None:
            norm = t.scale_weight, t.scale_bias, o.scale_eps, t.proj_weight.dtype, o.scale_rms
            rows, kept["scale_mean"], kept["scale_rstd"] = layer_norm_fwd(rows, *norm, call=call.child("scale_norm"))
        epilogue = t.layer_scale, t.row_scale, t.x if o.residual_is_x else t.residual
        return (linear_fwd(rows, t.proj_weight, t.proj_bias, "none", *epilogue, call=call),), kept

    @staticmethod
    def reads(t: _Inputs, kept: dict[str, Any], wants: Any) -> dict[str, bool]:
        o, wanted = t.options, _Wanted.of(wants)
        return {
            "x": wanted.norm or wanted.weights, "mean": wanted.norm and not o.rms, "rstd": wanted.norm,
            "qkv": wanted.qkv, "lse": wanted.qkv, "attended": wanted.qkv or wanted.scale_norm or wanted.last,
            "scale_mean": not o.scale_rms,
        }  # fmt: skip

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: _Options, wants: Any, call: Call) -> dict[str, Any]:
        (dout,), wanted = douts, _Wanted.of(wants)
        found = {"residual": dout.to(o.residual_dtype) if wants.residual else None}
        if not (wanted.qkv or wanted.scale_norm or wanted.last or wants.proj_bias):
            return found
        proj = LastLayer(
            s["proj_weight"], s["proj_bias"], s["layer_scale"], wants.proj_weight, wants.proj_bias, wants.layer_scale
        )
        g = as_rows(scale_samples(dout.to(proj.weight.dtype), s["row_scale"]))
        rows, do, of_scale_norm = _scale_norm_backward(s, g, proj, o, wanted, dout.shape[:-1], call)
        found |= {name: t for name, t in of_scale_norm.items() if getattr(wants, name)}
        G = proj.product(g, rows)
        # the pass that adds dout to the gradient of x also sums it over rows
        in_norm = o.residual_is_x and wanted.norm
        total = None if in_norm else proj.total(g)
        if wanted.qkv:
            do = torch.mm(*proj.input_operands(g)) if do is None else do
            del g, rows
            found |= _qkv_backward(s, do.view(s["attended"].shape), o, wants, call)
            del do
            residual = Residual(
                dout.to(s["x"].dtype) if in_norm else None, s["row_scale"], proj.total_dtype() if in_norm else None
            )
            dqkv: Any = found.pop("qkv")
            of_norm, dout_total = _input_backward(s, dqkv, residual, o, wants, call)
            found |= of_norm
            total = dout_total if in_norm else total
        dweight, dbias, dlayer_scale = proj.gradients(G, total)
        return found | {"proj_weight": dweight, "proj_bias": dbias, "layer_scale": dlayer_scale}


def _layers(t: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the weights and biases of q, k and v, of Inputs; bools for those of bools."""
    if t.k_weight is None:
        return [t.qkv_weight], [t.qkv_bias]
    return [t.qkv_weight, t.k_weight, t.v_weight], [t.qkv_bias, t.k_bias, t.v_bias]


def _scale_norm_backward(
    s: dict[str, Any], g: Tensor, proj: LastLayer, o: _Options, wanted: _Wanted, shape: torch.Size, call: Call
) -> tuple[Any, Any, dict[str, Any]]:
    """Return proj's input, or None if it is not saved; attention's gradient, if there is a norm in between; and
    gradients of the norm. g: of proj's result; shape: (B, N)."""
    if s["attended"] is None:
        return None, None, {}
    rows = s["attended"].view(*shape, proj.weight.shape[1])
    weight, bias, call = s["scale_weight"], s["scale_bias"], call.child("scale_norm")
    if weight is None:
        return rows, None, {}
    if not (wanted.qkv or wanted.scale_norm):
        rows, *_ = layer_norm_fwd(rows, weight, bias, o.scale_eps, proj.weight.dtype, o.scale_rms, call=call)
        return rows, None, {}
    do = torch.mm(*proj.input_operands(g)).view(rows.shape)
    do, dweight, dbias, rows, _ = norm_backward(
        do, rows, s["scale_mean"], s["scale_rstd"], weight, bias, want_y=True, call=call
    )
    return rows, do, {"scale_weight": dweight, "scale_bias": dbias}


def _qkv_backward(s: dict[str, Any], do: Tensor, o: _Options, wants: Any, call: Call) -> dict[str, Any]:
    """Return gradients of the packed qkv, of the norms of q and k, and of the mask. do: of attention's result."""
    qkv, sin, cos = s.pop("qkv"), s["sin"], s["cos"]
    attention = s["mask"], s.pop("attended"), s.pop("lse"), s["seed"], o.scale, o.dropout_p
    if s["q_norm_weight"] is not None:
        return _normed_qkv_backward(s, do, qkv, attention, o, wants, call)
    dmask = None
    if wants.mask:
        dqkv, dmask = attention_qkvpacked_bwd_with_mask(do, qkv, *attention, call=call)
    else:
        dqkv = attention_qkvpacked_bwd(do, qkv, *attention, call=call)
    if sin is not None:
        heads = dqkv.flatten(2, 3)
        dqkv = rotary_op(heads, sin, cos, 2 * o.heads[1], o.interleaved, True, call=call, out=heads)
    return {"qkv": dqkv, "mask": dmask}


def _normed_qkv_backward(
    s: dict[str, Any], do: Tensor, qkv: Tensor, attention: tuple[Any, ...], o: _Options, wants: Any, call: Call
) -> dict[str, Any]:
    """Return what `_qkv_backward` does, after norms of q and k. attention: the op's arguments after v. The packed
    gradient is written once."""
    sin, cos, q_weight, q_bias = s["sin"], s["cos"], s["q_norm_weight"], s["q_norm_bias"]
    k_weight, k_bias = s["k_norm_weight"], s["k_norm_bias"]
    q, k, v = qkv.unbind(2)
    norms = q_weight, q_bias, k_weight, k_bias
    normed = qk_norm_fwd(q, k, *norms, sin, cos, o.qk_eps, o.qk_rms, o.interleaved, call=call)
    # both ops write into the packed gradient, the second over what it reads
    packed = empty_like(qkv) if takes_out(call) else None
    out = None if packed is None else packed.unbind(2)
    dmask = None
    if wants.mask:
        dq, dk, dv, dmask = attention_bwd_with_mask(do, *normed, v, *attention, call=call, out=out)
    else:
        dq, dk, dv = attention_bwd(do, *normed, v, *attention, call=call, out=out)
    del normed
    dq, dk, *of_norms = qk_norm_bwd(
        dq, dk, q, k, q_weight, k_weight, sin, cos, o.qk_eps, o.qk_rms, q_bias is not None, o.interleaved,
        call=call, out=None if out is None else out[:2],
    )  # fmt: skip
    found = {"qkv": torch.stack((dq, dk, dv), 2) if packed is None else packed, "mask": dmask}
    names = "q_norm_weight", "k_norm_weight", "q_norm_bias", "k_norm_bias"
    of_parameters = dict(zip(names, of_norms, strict=True))
    return found | {name: t for name, t in of_parameters.items() if getattr(wants, name)}


def _input_backward(
    s: dict[str, Any], dqkv: Tensor, residual: Residual, o: _Options, wants: Any, call: Call
) -> tuple[dict[str, Any], Any]:
    """Return gradients of x, the norm, and the layers of q, k and v, and the residual's total."""
    names = ("qkv",) if s["k_weight"] is None else ("qkv", "k", "v")
    weights = [s[f"{name}_weight"] for name in names]
    norm = NormedRows(s["x"], s["norm_weight"], s["norm_bias"], s["mean"], s["rstd"], o.eps, o.rms)
    rows = dqkv.view(-1, 3 * o.heads[1] * o.heads[2]).split([len(weight) for weight in weights], dim=1)
    wants_weights, wants_biases = ([getattr(wants, f"{name}_{of}") for name in names] for of in ("weight", "bias"))
    found = norm_linear_backward(rows, norm, weights, residual, wants, wants_weights, wants_biases, call)
    gradients = found.of_norm
    for name, dweight, dbias in zip(names, found.dweights, found.dbiases, strict=True):
        gradients |= {f"{name}_weight": dweight, f"{name}_bias": dbias}
    return gradients, found.total


def _head_dim(weights: tuple[Tensor, ...], num_heads: int) -> int:
    out = tuple([weight.shape[0] for weight in weights])
    each = sum(out) // 3
    if not isinstance(num_heads, int) or num_heads < 1 or each % num_heads or out not in ((3 * each,), (each,) * 3):
        raise ValueError(
            "qkv_weight must have 3 * num_heads * head_dim rows, or be three of num_heads * head_dim rows each, with "
            f"num_heads = {num_heads}, got {', '.join(map(str, out))} rows"
        )
    return each // num_heads


def layer_norm_attention(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, qkv_weight: Weights, qkv_bias: Biases,
    proj_weight: Tensor, proj_bias: Tensor | None, num_heads: int,
    *, eps: float = 1e-6, norm: str = "layer", scale: float | None = None, dropout_p: float = 0.0,
    layer_scale: Tensor | None = None, row_scale: Tensor | None = None, residual: Tensor | None = None,
    rotary: Rotary | None = None, scale_norm: Norm | None = None, qk_norm: tuple[Norm, Norm] | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute residual + row_scale * layer_scale * proj(attention(LayerNorm(x))), multi-head self-attention (Vaswani et
    al. 2017, section 3.2.2), as one autograd node. It saves x, q, k, v, attention's output and float32 statistics; the
    backward pass computes the normalised rows again.

    Args:
        x: (B, N, D); float32, float16, bfloat16 or float64, any strides.
        norm_weight, norm_bias: (D,), x's dtype; the bias may be None.
        qkv_weight: (3 * num_heads * head_dim, D), x's dtype, the rows of q, then k, then v; or the three as a sequence.
            head_dim is a multiple of 8 from 16 to 256.
        qkv_bias: (3 * num_heads * head_dim,), x's dtype, or None; for three weights three, each of which may be None.
        proj_weight, proj_bias: (out, num_heads * head_dim) and (out,), x's dtype; the bias may be None.
        num_heads: how many heads share the rows of q, of k and of v.
        eps: added to the variance; not negative.
        norm: "layer", or "rms" for RMSNorm as in `rms_norm`, without a bias.
        scale: factor of the scores; head_dim^-0.5 if None.
        dropout_p: probability of dropping an attention weight, in [0, 1), as in `attention`. Pass 0 in evaluation.
        layer_scale: (out,) LayerScale's gamma (Touvron et al. 2021), x's dtype, or None.
        row_scale: (B,) one factor a sample, as DropPath draws them (Huang et al. 2016), or None. Not differentiated.
        residual: (B, N, out), or None. Its dtype may be wider than x's. When it is x itself, its gradient joins inside
            the LayerNorm's backward pass.
        rotary: rotary positions of q and k, which are rotated in place, forward and backward, or None. The tables are
            not differentiated: for learnt ones put `rotary_qkvpacked` between `layer_norm_linear` and
            `attention_qkvpacked`.
        scale_norm: a norm of attention's output before the projection (Wang et al. 2022, arXiv:2210.06423), or None;
            weight and bias are (num_heads * head_dim,), x's dtype.
        qk_norm: norms of q and of k over the head dimension, before the rotation, as in `qk_norm`, or None. Both have
            one kind and eps; weight and bias are (head_dim,), x's dtype. q and k are saved before their norms and
            normalised again in the backward pass.
        attn_mask: broadcastable to (B, num_heads, N, N), or None, as in `attention`.

    Returns:
        (B, N, out), contiguous, in the dtype that x and residual promote to. Under autocast weights, biases and the
        LayerNorm's output are cast to its dtype, x's dtype may differ from theirs, and the output's dtype is what
        PyTorch gives for the formula.

    Raises:
        TypeError, ValueError: naming the argument, for dtypes, devices, shapes and values that do not fit.
    """
    before, epilogue = (norm_weight, norm_bias, eps, norm), (layer_scale, row_scale, residual)
    tensors = x, norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, layer_scale, row_scale
    after = None if residual is x else residual, rotary, scale_norm, qk_norm, attn_mask
    options = residual is x, num_heads, type(num_heads), eps, norm, scale, dropout_p
    call = begin("layer_norm_attention", (*tensors, *after), options)
    autograd, o = call.once(
        "checked", _checked, x, before, qkv_weight, qkv_bias, proj_weight, proj_bias, num_heads, scale, dropout_p,
        epilogue, rotary, scale_norm, qk_norm, attn_mask,
    )  # fmt: skip
    q_weight, k_weight, v_weight, q_bias, k_bias, v_bias = _of_three(qkv_weight, qkv_bias)
    of_scale = NO_NORM if scale_norm is None else Norm(*scale_norm)
    of_q, of_k = (NO_NORM, NO_NORM) if qk_norm is None else (Norm(*qk_norm[0]), Norm(*qk_norm[1]))
    sin, cos = (None, None) if rotary is None else broadcast_tables(rotary)
    t = _Inputs(
        x=x, norm_weight=norm_weight, norm_bias=norm_bias, qkv_weight=q_weight, qkv_bias=q_bias,
        k_weight=k_weight, k_bias=k_bias, v_weight=v_weight, v_bias=v_bias,
        q_norm_weight=of_q[0], q_norm_bias=of_q[1], k_norm_weight=of_k[0], k_norm_bias=of_k[1],
        scale_weight=of_scale[0], scale_bias=of_scale[1], proj_weight=proj_weight, proj_bias=proj_bias,
        layer_scale=layer_scale, row_scale=row_scale,
        residual=None if residual is x else residual,  # torch.compile refuses one tensor as two inputs
        mask=None if attn_mask is None else broadcast_mask(attn_mask, x.shape[1]),
        seed=draw_seeds(1, x.device) if dropout_p else None, sin=sin, cos=cos, options=o, call=call,
    )  # fmt: skip
    out: Tensor = run(_LayerNormAttention, autograd, t)
    return out


def _of_three(weight: Weights, bias: Biases) -> tuple[Any, ...]:
    """Return three weights and three biases; None after the first ones of a single layer."""
    if isinstance(weight, Tensor):
        return weight, None, None, bias, None, None
    layers = flat_layers(weight, bias)
    return layers if len(weight) == 3 else (layers[0], None, None, layers[1], None, None)


def _checked(
    x: Tensor, before: NormTuple, qkv_weight: Weights, qkv_bias: Biases, proj_weight: Tensor, proj_bias: Tensor | None,
    num_heads: int, scale: float | None, dropout_p: float, epilogue: EpilogueTuple, rotary: Rotary | None,
    scale_norm: Norm | None, qk_norm: tuple[Norm, Norm] | None, attn_mask: Tensor | None,
) -> tuple[bool, _Options]:  # fmt: skip
    """Check a call; return whether it needs autograd."""
    cast = check_norm_and_layers(x, before, qkv_weight, qkv_bias, ("qkv_weight", "qkv_bias"))
    if x.dim() != 3:
        raise ValueError(f"x must have shape (B, N, D), got {tuple(x.shape)}")
    head_dim = _head_dim((qkv_weight,) if isinstance(qkv_weight, Tensor) else tuple(qkv_weight), num_heads)
    scale = checked_scale(head_dim, scale, dropout_p)
    check_linear(
        x, proj_weight, proj_bias, dtype=cast is None, names=("x", "proj_weight", "proj_bias"),
        hidden=("num_heads * head_dim", num_heads * head_dim),
    )  # fmt: skip
    branch = Epilogue(*epilogue)
    branch.check(x, proj_weight.shape[0], dtype=cast is None)
    after = q_norm = k_norm = NO_NORM
    if scale_norm is not None:
        width = "num_heads * head_dim", num_heads * head_dim
        after = checked_norm("scale_norm", x, scale_norm, *width, dtype=cast is None)
    if qk_norm is not None:
        if not isinstance(qk_norm, tuple) or len(qk_norm) != 2:
            raise TypeError(f"qk_norm must be a tuple of two ops.Norm, got {qk_norm!r}")
        q_norm, k_norm = checked_norms(("qk_norm[0]", "qk_norm[1]"), x, qk_norm, head_dim, dtype=cast is None)
    if rotary is not None:
        check_tables(rotary, "x", x, (*x.shape[:2], num_heads, head_dim), "rotary_qkvpacked")
    if attn_mask is not None:
        check_mask(attn_mask, "x", x, x.shape[0], x.shape[1], num_heads)
    layers = flat_layers(qkv_weight, qkv_bias)
    tensors = x, *before[:2], *layers, proj_weight, proj_bias, *after[:2], *q_norm[:2], *k_norm[:2], attn_mask
    autograd = needs_autograd("layer_norm_attention", *tensors, branch.layer_scale, branch.residual)
    residual = branch.residual
    options = _Options(
        "layer_norm_attention", before[2], before[3] == "rms", after[2], after[3] == "rms",
        q_norm[2], q_norm[3] == "rms", (3, num_heads, head_dim), scale, dropout_p,
        residual_is_x=residual is x, residual_dtype=None if residual is None else residual.dtype,
        interleaved=rotary is not None and rotary.interleaved, cast=cast,
    )  # fmt: skip
    return autograd, options
