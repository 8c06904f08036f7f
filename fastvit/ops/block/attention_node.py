"""The attention half of a pre-norm block as one autograd node."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops.attention.groups import LastArguments
from fastvit.ops.attention.op import attention_bwd, attention_fwd
from fastvit.ops.block.norm_linear import by_layer, norm_linear_backward, side_by_side
from fastvit.ops.layer_norm.op import Residual, layer_norm_fwd, norm_backward
from fastvit.ops.linear.op import linear_fwd
from fastvit.ops.qk_norm.op import qk_norm_bwd, qk_norm_fwd
from fastvit.ops.rotary.op import rotary_op
from fastvit.ops.runtime.autograd import Computed, FusedNode, in_backward
from fastvit.ops.runtime.backend import Route
from fastvit.ops.runtime.epilogue import LastLayer, scale_samples
from fastvit.ops.runtime.registry import takes_out
from fastvit.ops.runtime.rows import as_rows, empty_like


class AttentionOptions(NamedTuple):
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
    causal: bool
    residual_is_x: bool
    residual_dtype: torch.dtype | None  # of a residual that is not x
    max_seqlen: int | None  # of sequences in x (T, D); None for x (B, N, D)
    interleaved: bool  # rotary positions, if there are any
    keep_qkv: bool  # for the backward pass
    keep_attended: bool  # attention's output and log-sum-exp
    cast: torch.dtype | None  # autocast's dtype, for the layers


class AttentionInputs(NamedTuple):
    options: AttentionOptions
    route: Route
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
    cu_seqlens: Tensor | None
    seed: Tensor | None
    sin: Tensor | None
    cos: Tensor | None


class _Wanted(NamedTuple):
    """Groups of gradients, and whether one of a group is wanted."""

    norm: bool  # x or its norm
    weights: bool  # q's, k's or v's
    qkv: bool  # these, their biases, the norms of q and k, or the mask
    scale_norm: bool
    last: bool  # proj's weight or LayerScale, which need proj's input

    @classmethod
    def of(cls, needs_grad: Any) -> _Wanted:
        """Summarise which gradients are needed; `needs_grad` has a bool for each input."""
        norm = needs_grad.x or needs_grad.norm_weight or needs_grad.norm_bias
        weights = needs_grad.qkv_weight or needs_grad.k_weight or needs_grad.v_weight
        biases = needs_grad.qkv_bias or needs_grad.k_bias or needs_grad.v_bias
        q_norm = needs_grad.q_norm_weight or needs_grad.q_norm_bias
        k_norm = needs_grad.k_norm_weight or needs_grad.k_norm_bias
        qkv = norm or weights or biases or q_norm or k_norm or needs_grad.mask
        return cls(
            norm,
            weights,
            qkv,
            needs_grad.scale_weight or needs_grad.scale_bias,
            needs_grad.proj_weight or needs_grad.layer_scale,
        )


class NormAttention(FusedNode):
    """residual + row_scale * layer_scale * proj(scale_norm(attention(norm(x)))), with norms of q and k. All norms
    except the first are optional, and the residual may be x."""

    Inputs = AttentionInputs
    casts = ("qkv_weight", "qkv_bias", "k_weight", "k_bias", "v_weight", "v_bias", "proj_weight", "proj_bias")
    saved = (
        "x", "norm_weight", "norm_bias", "qkv_weight", "qkv_bias", "k_weight", "k_bias", "v_weight", "v_bias",
        "q_norm_weight", "q_norm_bias", "k_norm_weight", "k_norm_bias", "mask", "cu_seqlens", "seed", "sin", "cos",
        "scale_weight", "scale_bias", "proj_weight", "proj_bias", "layer_scale", "row_scale",
        "mean", "rstd", "qkv", "attended", "lse", "scale_mean", "scale_rstd",
    )  # fmt: skip

    @classmethod
    def intermediates_of(cls, t: AttentionInputs) -> tuple[str, ...]:
        of_scale_norm = ("scale_mean", "scale_rstd") if t.scale_weight is not None else ()
        return "mean", "rstd", "attended", "lse", *("qkv",) * t.options.keep_qkv, *of_scale_norm

    @staticmethod
    def compute(t: AttentionInputs) -> Computed:
        o, route = t.options, t.route
        qkv, mean, rstd = _packed(t, route)
        attended, lse = attention_fwd(*_heads(t, qkv, route), t.mask, *_options(t), route=route)
        intermediates = {"mean": mean, "rstd": rstd, "attended": attended, "lse": lse}
        if o.keep_qkv:
            intermediates["qkv"] = qkv
        del qkv
        rows = attended.flatten(-2)
        if t.scale_weight is not None:
            norm = t.scale_weight, t.scale_bias, o.scale_eps, t.proj_weight.dtype, o.scale_rms
            rows, intermediates["scale_mean"], intermediates["scale_rstd"] = layer_norm_fwd(rows, *norm, route=route)
        epilogue = t.layer_scale, t.row_scale, t.x if o.residual_is_x else t.residual
        return (linear_fwd(rows, t.proj_weight, t.proj_bias, "none", *epilogue, route=route),), intermediates

    @staticmethod
    def needed(t: AttentionInputs, intermediates: dict[str, Any], needs_grad: Any) -> dict[str, bool]:
        o, wanted = t.options, _Wanted.of(needs_grad)
        # attention's output alone is smaller than what it is computed from
        keep_attended, qkv_again = o.keep_attended or not wanted.qkv, wanted.qkv and not o.keep_qkv
        return {
            "x": wanted.norm or wanted.weights or qkv_again, "mean": wanted.norm and not o.rms, "rstd": wanted.norm,
            **dict.fromkeys(("qkv_bias", "k_bias", "v_bias"), qkv_again),
            "qkv": wanted.qkv, "cu_seqlens": wanted.qkv, "lse": wanted.qkv and keep_attended,
            "attended": (wanted.qkv or wanted.scale_norm or wanted.last) and keep_attended,
            "scale_mean": not o.scale_rms,
        }  # fmt: skip

    @staticmethod
    def gradients(s: dict[str, Any], douts: Any, o: AttentionOptions, needs_grad: Any, route: Route) -> dict[str, Any]:
        t, (dout,), wanted = _inputs_of(s, o, route), douts, _Wanted.of(needs_grad)
        found: dict[str, Any] = {"residual": dout.to(o.residual_dtype) if needs_grad.residual else None}
        if not (wanted.qkv or wanted.scale_norm or wanted.last or needs_grad.proj_bias):
            return found
        proj = LastLayer(
            t.proj_weight,
            t.proj_bias,
            t.layer_scale,
            needs_grad.proj_weight,
            needs_grad.proj_bias,
            needs_grad.layer_scale,
        )
        g = as_rows(scale_samples(dout.to(proj.weight.dtype), t.row_scale))
        if wanted.qkv and not o.keep_attended:
            _attend_again(t, s, dout)
        rows, do, dscale_weight, dscale_bias = _scale_norm_backward(t, s, g, proj, wanted, dout.shape[:-1])
        G = proj.product(g, rows)
        # the pass that adds dout to the gradient of x also sums it over rows
        in_norm = o.residual_is_x and wanted.norm
        total = None if in_norm else proj.total(g)
        if wanted.qkv:
            do = torch.mm(*proj.input_operands(g)) if do is None else do
            s["do"] = do.view(s["attended"].shape)
            del g, rows, do
            if s["qkv"] is None:
                s["qkv"] = _qkv_again(t, dout)
            found |= _qkv_backward(t, s, needs_grad)
            residual = Residual(
                dout.to(t.x.dtype) if in_norm else None, t.row_scale, proj.total_dtype() if in_norm else None
            )
            before, dout_total = _input_backward(t, s, found.pop("qkv"), residual, needs_grad)
            found |= before
            total = dout_total if in_norm else total
        dweight, dbias, dlayer_scale = proj.gradients(G, total)
        return found | {
            "scale_weight": dscale_weight if needs_grad.scale_weight else None,
            "scale_bias": dscale_bias if needs_grad.scale_bias else None,
            "proj_weight": dweight, "proj_bias": dbias, "layer_scale": dlayer_scale,
        }  # fmt: skip


def _packed(t: AttentionInputs, route: Route) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, (B, N, 3, H, d) or (T, 3, H, d), and the norm's mean and rstd. Without norms of their own q
    and k are rotated; with these, not: their norms' backward pass reads them as they are here."""
    o = t.options
    y, mean, rstd = layer_norm_fwd(t.x, t.norm_weight, t.norm_bias, o.eps, t.qkv_weight.dtype, o.rms, route=route)
    qkv = F.linear(y, t.qkv_weight, t.qkv_bias) if t.k_weight is None else side_by_side(y, *_layers(t))
    del y
    qkv = qkv.view(*t.x.shape[:-1], *o.heads)
    if t.sin is not None and t.q_norm_weight is None:
        heads = _as_batch(qkv.flatten(-3, -2), o)
        heads = rotary_op(heads, t.sin, t.cos, 2 * o.heads[1], o.interleaved, False, route=route, out=heads)
        qkv = heads.view(qkv.shape)
    return qkv, mean, rstd


def _as_batch(x: Tensor, o: AttentionOptions) -> Tensor:
    """View heads (T, H, d) as a batch of one; those of a batch are returned as they are."""
    return x if o.max_seqlen is None else x[None]


def _heads(t: AttentionInputs, qkv: Tensor, route: Route) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return what attention reads: qkv alone; or q, k and v, if there are norms of q and k."""
    if t.q_norm_weight is None:
        return qkv, None, None
    o, norms = t.options, (t.q_norm_weight, t.q_norm_bias, t.k_norm_weight, t.k_norm_bias)
    q, k, v = qkv.unbind(-3)
    q, k = _as_batch(q, o), _as_batch(k, o)
    q, k = qk_norm_fwd(q, k, *norms, t.sin, t.cos, o.qk_eps, o.qk_rms, o.interleaved, route=route)
    return q.view(v.shape), k.view(v.shape), v


def _options(t: AttentionInputs, *wants_mask: bool) -> tuple[Any, ...]:
    """Return the arguments of attention's ops from `seed` on. wants_mask: for the backward op only."""
    o = t.options
    sequences: tuple[Any, ...] = ()
    if o.max_seqlen is not None:
        sequences = LastArguments(ends=t.cu_seqlens, max_seqlen=o.max_seqlen, max_seqlen_k=o.max_seqlen)
    return t.seed, o.scale, o.dropout_p, o.causal, *wants_mask, *sequences


def _inputs_of(s: dict[str, Any], o: AttentionOptions, route: Route) -> AttentionInputs:
    """Return the inputs among what was saved."""
    return AttentionInputs._make([o, route, *[s.get(name) for name in AttentionInputs._fields[2:]]])


def _qkv_again(t: AttentionInputs, dout: Tensor) -> Tensor:
    return _packed(t._replace(x=in_backward(t.x, dout)), t.route)[0]


def _attend_again(t: AttentionInputs, s: dict[str, Any], dout: Tensor) -> None:
    """Put attention's output and log-sum-exp, qkv, and what attention reads into s, for its backward pass."""
    if s["qkv"] is None:
        s["qkv"] = _qkv_again(t, dout)
    s["heads"] = _heads(t, in_backward(s["qkv"], dout), t.route)
    s["attended"], s["lse"] = attention_fwd(*s["heads"], t.mask, *_options(t), route=t.route)


def _layers(t: AttentionInputs) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the weights and biases of q, k and v."""
    if t.k_weight is None or t.v_weight is None:
        return [t.qkv_weight], [t.qkv_bias]
    return [t.qkv_weight, t.k_weight, t.v_weight], [t.qkv_bias, t.k_bias, t.v_bias]


def _scale_norm_backward(
    t: AttentionInputs, s: dict[str, Any], g: Tensor, proj: LastLayer, wanted: _Wanted, shape: torch.Size
) -> tuple[Any, Any, Tensor | None, Tensor | None]:
    """Return proj's input, or None if it is not saved; and if there is a norm before it, gradients of attention's
    result, and of the norm's weight and bias. g: of proj's result; shape: (B, N) or (T,)."""
    o, rows, weight, bias = t.options, s["attended"], t.scale_weight, t.scale_bias
    if rows is not None:
        rows = rows.view(*shape, proj.weight.shape[1])
    if rows is None or weight is None:
        return rows, None, None, None
    if not (wanted.qkv or wanted.scale_norm):
        rows, *_ = layer_norm_fwd(rows, weight, bias, o.scale_eps, proj.weight.dtype, o.scale_rms, route=t.route)
        return rows, None, None, None
    do = torch.mm(*proj.input_operands(g)).view(rows.shape)
    do, dweight, dbias, rows, _ = norm_backward(
        do, rows, s["scale_mean"], s["scale_rstd"], weight, bias, want_y=True, route=t.route
    )
    return rows, do, dweight, dbias


def _qkv_backward(t: AttentionInputs, s: dict[str, Any], needs_grad: Any) -> dict[str, Any]:
    """Return the gradients of the packed qkv, the mask, and the norms of q and k, from s["do"], that of attention's
    result."""
    o, route = t.options, t.route
    do, qkv = s.pop("do"), s.pop("qkv")
    saved = t.mask, s.pop("attended"), s.pop("lse"), *_options(t, needs_grad.mask)
    if t.q_norm_weight is not None:
        return _normed_qkv_backward(t, s, do, qkv, saved, needs_grad)
    dqkv, *_, dmask = attention_bwd(do, qkv, None, None, *saved, route=route)
    s.pop("heads", None)
    del do, qkv, saved  # before the rotation, which on ATen makes float32 copies
    if t.sin is not None:
        rotated = _as_batch(dqkv.flatten(-3, -2), o)
        dqkv = rotary_op(rotated, t.sin, t.cos, 2 * o.heads[1], o.interleaved, True, route=route, out=rotated)
    return {"qkv": dqkv, "mask": dmask if needs_grad.mask else None}


def _normed_qkv_backward(
    t: AttentionInputs, s: dict[str, Any], do: Tensor, qkv: Tensor, saved: tuple[Any, ...], needs_grad: Any
) -> dict[str, Any]:
    """Do as `_qkv_backward`, after norms of q and k. saved: the arguments of attention's backward op after v."""
    o, (q, k, v) = t.options, qkv.unbind(-3)
    heads = s.pop("heads", None) or _heads(t, qkv, t.route)
    # both ops write into the packed gradient, the second over what it reads, so that it is written once
    packed = empty_like(qkv) if takes_out(t.route) else None
    out = None if packed is None else packed.unbind(-3)
    dq, dk, dv, *_, dmask = attention_bwd(do, *heads, *saved, route=t.route, out=out)
    del heads
    dq, dk, q, k = (_as_batch(x, o) for x in (dq, dk, q, k))
    norms = t.q_norm_weight, t.k_norm_weight, t.sin, t.cos, o.qk_eps, o.qk_rms, t.q_norm_bias is not None
    dq, dk, *of_norms = qk_norm_bwd(
        dq, dk, q, k, *norms, o.interleaved, route=t.route, out=None if out is None else (dq, dk)
    )
    if packed is None:
        packed = torch.stack((dq.view(v.shape), dk.view(v.shape), dv), -3)
    names = "q_norm_weight", "k_norm_weight", "q_norm_bias", "k_norm_bias"
    wanted = {name: gradient for name, gradient in zip(names, of_norms, strict=True) if getattr(needs_grad, name)}
    return {"qkv": packed, "mask": dmask if needs_grad.mask else None, **wanted}


def _input_backward(
    t: AttentionInputs, s: dict[str, Any], dqkv: Tensor, residual: Residual, needs_grad: Any
) -> tuple[dict[str, Any], Tensor | None]:
    """Return the gradients of x, the norm, and the layers of q, k and v; and the residual's total."""
    of = ("qkv",) if t.k_weight is None else ("qkv", "k", "v")
    weights, _ = _layers(t)
    rows = by_layer(dqkv.view(-1, 3 * t.options.heads[1] * t.options.heads[2]), weights)
    wants_weights, wants_biases = (
        [getattr(needs_grad, f"{name}_{kind}") for name in of] for kind in ("weight", "bias")
    )
    found, dweights, dbiases, total = norm_linear_backward(
        s, t.options, rows, weights, residual, needs_grad, wants_weights, wants_biases, t.route
    )
    for name, dweight, dbias in zip(of, dweights, dbiases, strict=True):
        found |= {f"{name}_weight": dweight, f"{name}_bias": dbias}
    return found, total
