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
    checked_mask,
    checked_scale,
)
from fastvit.ops.block.norm_linear import (
    Biases,
    Weights,
    check_norm_and_layers,
    flat_layers,
    layer_norm_linear_backward,
    side_by_side,
)
from fastvit.ops.dropout.op import draw_seeds
from fastvit.ops.layer_norm.op import NO_NORM, Norm, NormTuple, checked_norm, layer_norm_fwd, norm_backward
from fastvit.ops.linear.op import check_linear, linear_fwd
from fastvit.ops.qk_norm.op import checked_norms, qk_norm_bwd, qk_norm_fwd
from fastvit.ops.rotary.op import Rotary, broadcast_tables, check_tables, in_place, rotary_op
from fastvit.ops.runtime.autograd import FusedHalf, cast_to, consume_saved, needs_autograd, run
from fastvit.ops.runtime.checks import as_rows, empty_like
from fastvit.ops.runtime.dispatch import choose_backend
from fastvit.ops.runtime.epilogue import (
    Epilogue,
    EpilogueTuple,
    input_gradient_operands,
    parameter_gradients,
    product_over_rows,
    scale_samples,
    total_dtype,
    total_over_rows,
)
from fastvit.ops.runtime.plans import AFRESH, Plans, recall


class _Options(NamedTuple):
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
    interleaved: bool  # rotary positions, if there are any
    cast: torch.dtype | None  # autocast's dtype, for the layers


def _backward(saved: list[Any], dout: Tensor, o: _Options, wants: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Return gradients, or None. wants: for proj's weight and bias, layer_scale, weight and bias of the norm before
    proj, of q's and of k's norm, the mask, then those of `layer_norm_linear_backward`."""
    plans = recall("layer_norm_attention backward", (dout, *saved), (*o, wants))
    backend = None if plans is AFRESH else plans
    proj_weight, proj_bias, layer_scale, row_scale, scale_weight, scale_bias, *rest = saved
    *qk_norms, mask, seed, sin, cos, scale_mean, scale_rstd, qkv, attended, lse, x = rest[:14]
    rest = rest[14:]
    saved.clear()
    features = proj_weight.shape[1]
    g = as_rows(scale_samples(dout.to(proj_weight.dtype), row_scale))
    rows: Any = None if attended is None else attended.view(*dout.shape[:-1], features)
    do = dscale_weight = dscale_bias = None
    if scale_weight is not None and (qkv is not None or any(wants[3:5])):
        do = torch.mm(*input_gradient_operands(g, proj_weight, layer_scale))
        norm = scale_mean, scale_rstd, scale_weight, scale_bias
        do, dscale_weight, dscale_bias, rows, _ = norm_backward(
            do.view(rows.shape), rows, *norm, want_y=True, backend=backend
        )
    elif scale_weight is not None and rows is not None:
        rows, *_ = layer_norm_fwd(
            rows, scale_weight, scale_bias, o.scale_eps, proj_weight.dtype, o.scale_rms, backend=backend
        )
    proj_arguments = proj_weight, proj_bias, layer_scale, wants[:3]
    dscale_norm = dscale_weight, dscale_bias if wants[4] else None
    G, dtype = product_over_rows(g, rows, layer_scale, wants[:3]), total_dtype(*proj_arguments)
    # the pass that adds dout to the gradient of x also sums it over rows
    in_norm = dtype if o.residual_is_x and any(wants[10:13]) else None
    total = total_over_rows(g, dtype) if in_norm is None else None
    if qkv is None:
        plans.keep()
        return *parameter_gradients(G, total, *proj_arguments), *dscale_norm, *(None,) * len(wants[5:])
    do = torch.mm(*input_gradient_operands(g, proj_weight, layer_scale)) if do is None else do
    do = do.view(attended.shape)
    del g, rows
    attention = mask, attended, lse, seed, o.scale, o.dropout_p
    dqk: tuple[Tensor | None, ...] = (None,) * 4
    dmask = None
    if qk_norms[0] is not None:
        dqkv, dqk, dmask = _backward_of_normed(do, qkv, attention, qk_norms, sin, cos, o, wants[9], backend)
    else:
        if wants[9]:
            dqkv, dmask = attention_qkvpacked_bwd_with_mask(do, qkv, *attention, backend=backend)
        else:
            dqkv = attention_qkvpacked_bwd(do, qkv, *attention, backend=backend)
    del do, qkv, attended, attention
    if sin is not None and qk_norms[0] is None:
        heads = dqkv.flatten(2, 3)
        rotary_backend = backend or choose_backend(heads, sin, cos)
        arguments = heads, sin, cos, 2 * o.heads[1], o.interleaved, True, *in_place(heads, rotary_backend)
        dqkv = rotary_op(*arguments, backend=rotary_backend)
    dresidual = dout.to(x.dtype) if o.residual_is_x and x is not None else None
    dqkv = dqkv.view(-1, 3 * features)
    residual = dresidual, row_scale, in_norm
    *dlayers, dout_total = layer_norm_linear_backward(
        dqkv, residual, o.eps, o.rms, wants[10:], x, *rest, backend=backend
    )
    plans.keep()
    after = *parameter_gradients(G, total if in_norm is None else dout_total, *proj_arguments), *dscale_norm
    return *after, *dqk, dmask, *dlayers


def _backward_of_normed(
    do: Tensor, qkv: Tensor, attention: tuple[Any, ...], qk_norms: list[Any], sin: Tensor | None, cos: Tensor | None,
    o: _Options, want_mask: bool, backend: Any,
) -> tuple[Tensor, tuple[Tensor | None, ...], Tensor | None]:  # fmt: skip
    """Compute the backward pass of attention after norms of q and k. attention: the op's arguments after v; qk_norms:
    weight and bias of both norms. Return gradients of the packed qkv, which is written once, of these, and of the
    mask."""
    backend = backend or choose_backend(do, qkv, sin, cos, *qk_norms)
    q_weight, q_bias, k_weight, _ = qk_norms
    q, k, v = qkv.unbind(2)
    normed = qk_norm_fwd(q, k, *qk_norms, sin, cos, o.qk_eps, o.qk_rms, o.interleaved, backend=backend)
    # if nothing observes the call, both ops write into the packed gradient, the second over what it reads
    packed = empty_like(qkv) if in_place(qkv, backend) else None
    out: Any = () if packed is None else packed.unbind(2)
    dmask = None
    if want_mask:
        dq, dk, dv, dmask = attention_bwd_with_mask(do, *normed, v, *attention, *out, backend=backend)
    else:
        dq, dk, dv = attention_bwd(do, *normed, v, *attention, *out, backend=backend)
    del normed
    options = o.qk_eps, o.qk_rms, q_bias is not None, o.interleaved
    arguments = dq, dk, q, k, q_weight, k_weight, sin, cos, *options, *out[:2]
    dq, dk, dq_weight, dk_weight, dq_bias, dk_bias = qk_norm_bwd(*arguments, backend=backend)
    if q_bias is None:
        dq_bias = dk_bias = None
    dqkv = torch.stack((dq, dk, dv), 2) if packed is None else packed
    return dqkv, (dq_weight, dq_bias, dk_weight, dk_bias), dmask


_LAYERS = 20  # tensors and options before the layers of q, k and v


class _LayerNormAttention(FusedHalf):
    """residual + row_scale * layer_scale * proj(scale_norm(attention(norm(x)))), with norms of q and k. All norms
    except the first are optional, and the residual may be x."""

    @staticmethod
    def forward(
        x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None,
        proj_weight: Tensor, proj_bias: Tensor | None, layer_scale: Tensor | None,
        scale_weight: Tensor | None, scale_bias: Tensor | None,
        q_weight: Tensor | None, q_bias: Tensor | None, k_weight: Tensor | None, k_bias: Tensor | None,
        row_scale: Tensor | None, residual: Tensor | None, mask: Tensor | None, seed: Tensor | None,
        sin: Tensor | None, cos: Tensor | None, o: _Options, plans: Plans | None, *layers: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return the output, what the backward pass reads, and the mean and rstd of scale_norm if there is one."""
        qk_norms: Any = q_weight, q_bias, k_weight, k_bias
        backend: Any = plans
        if backend is None:
            parameters = norm_weight, norm_bias, *layers, proj_weight, proj_bias, scale_weight, scale_bias, *qk_norms
            backend = choose_backend(x, *parameters, layer_scale, row_scale, residual, mask, sin, cos)
        y, mean, rstd = layer_norm_fwd(x, norm_weight, norm_bias, o.eps, layers[0].dtype, o.rms, backend=backend)
        qkv = F.linear(y, *layers) if len(layers) == 2 else side_by_side(y, layers)
        del y
        B, N, _ = x.shape
        qkv = qkv.view(B, N, *o.heads)
        attention: Any = mask, seed, o.scale, o.dropout_p
        if q_weight is not None:  # not in place: the backward pass reads q and k as they are here
            q, k, v = qkv.unbind(2)
            q, k = qk_norm_fwd(q, k, *qk_norms, sin, cos, o.qk_eps, o.qk_rms, o.interleaved, backend=backend)
            attended, lse = attention_fwd(q, k, v, *attention, backend=backend)
            del q, k
        else:
            if sin is not None:
                heads = qkv.flatten(2, 3)
                rotary = heads, sin, cos, 2 * o.heads[1], o.interleaved, False, *in_place(heads, backend)
                qkv = rotary_op(*rotary, backend=backend).view(qkv.shape)
            attended, lse = attention_qkvpacked_fwd(qkv, *attention, backend=backend)
        epilogue = layer_scale, row_scale, x if o.residual_is_x else residual
        rows = attended.view(B, N, proj_weight.shape[1])
        scale_statistics: list[Tensor] = []
        if scale_weight is not None:
            norm = scale_weight, scale_bias, o.scale_eps, proj_weight.dtype, o.scale_rms
            rows, *scale_statistics = layer_norm_fwd(rows, *norm, backend=backend)
        out = linear_fwd(rows, proj_weight, proj_bias, "none", *epilogue, backend=backend)
        return out, mean, rstd, qkv, attended, lse, *scale_statistics

    @staticmethod
    def cast(*inputs: Any) -> tuple[Any, ...]:
        cast = inputs[18].cast
        if cast is None:
            return inputs
        return *inputs[:3], *cast_to(cast, *inputs[3:5]), *inputs[5:_LAYERS], *cast_to(cast, *inputs[_LAYERS:])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, norm_weight, norm_bias, *proj = inputs[:6]
        scale_weight, scale_bias, *qk_norms, row_scale, residual, mask, seed, sin, cos, o, _ = inputs[6:_LAYERS]
        _, mean, rstd, qkv, attended, lse, *scale_statistics = output
        layers, wants = inputs[_LAYERS:], ctx.needs_input_grad
        weights = layers[: len(layers) // 2]
        want_norm = any(wants[:3])
        keep_x = want_norm or any(wants[_LAYERS : _LAYERS + len(weights)])
        scale_mean, scale_rstd = scale_statistics or (None, None)
        if not (want_norm or any(wants[8:12]) or wants[14] or any(wants[_LAYERS:])):
            qkv = lse = None
            attended = attended if wants[3] or any(wants[5:8]) else None
        mean, rstd = (None if o.rms else mean, rstd) if want_norm else (None, None)
        ctx.save_for_backward(
            *proj, row_scale, scale_weight, scale_bias, *qk_norms,
            mask, seed, sin, cos, None if o.scale_rms else scale_mean, scale_rstd, qkv, attended, lse,
            x if keep_x else None, norm_weight, norm_bias, mean, rstd, *weights,
        )  # fmt: skip
        ctx.options = o
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Any, ...]:
        wants = ctx.needs_input_grad
        if dout is None:
            return (None,) * len(wants)
        dresidual = dout.to(ctx.residual_dtype) if wants[13] else None
        wants = (*wants[3:12], wants[14], *wants[:3], *wants[_LAYERS:])
        gradients: tuple[Tensor | None, ...] = (None,) * len(wants)
        if any(wants):
            gradients = consume_saved(ctx, "layer_norm_attention", _backward, dout, ctx.options, wants)
        of_mask = gradients[9]
        return *gradients[10:13], *gradients[:9], None, dresidual, of_mask, *(None,) * 5, *gradients[13:]


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
    before = norm_weight, norm_bias, eps, norm
    tensors = x, norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, layer_scale, row_scale
    after = None if residual is x else residual, rotary, scale_norm, qk_norm, attn_mask
    options = residual is x, num_heads, type(num_heads), eps, norm, scale, dropout_p
    plans = recall("layer_norm_attention", (*tensors, *after), options)
    autograd, o = plans.plan(
        _checked, x, before, qkv_weight, qkv_bias, proj_weight, proj_bias, num_heads, scale, dropout_p,
        (layer_scale, row_scale, residual), rotary, scale_norm, qk_norm, attn_mask,
    )  # fmt: skip
    of_scale = (None, None) if scale_norm is None else Norm(*scale_norm)[:2]
    qk_norms = (None,) * 4 if qk_norm is None else [t for one in qk_norm for t in Norm(*one)[:2]]
    sin, cos = (None, None) if rotary is None else broadcast_tables(rotary)
    mask = None if attn_mask is None else checked_mask(attn_mask, "x", x, x.shape[0], x.shape[1], num_heads)
    seed = draw_seeds(1, x.device) if dropout_p else None
    residual = None if residual is x else residual  # torch.compile refuses one tensor as two inputs
    arguments = (
        x, norm_weight, norm_bias, proj_weight, proj_bias, layer_scale, *of_scale, *qk_norms,
        row_scale, residual, mask, seed, sin, cos, o, None if plans is AFRESH else plans,
        *flat_layers(qkv_weight, qkv_bias),
    )  # fmt: skip
    out: Tensor = run(_LayerNormAttention, autograd, *arguments)
    plans.keep()
    return out


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
        checked_mask(attn_mask, "x", x, x.shape[0], x.shape[1], num_heads)
    layers = flat_layers(qkv_weight, qkv_bias)
    tensors = x, *before[:2], *layers, proj_weight, proj_bias, *after[:2], *q_norm[:2], *k_norm[:2], attn_mask
    autograd = needs_autograd("layer_norm_attention", *tensors, branch.layer_scale, branch.residual)
    options = _Options(
        before[2], before[3] == "rms", after[2], after[3] == "rms", q_norm[2], q_norm[3] == "rms",
        (3, num_heads, head_dim), scale, dropout_p, branch.residual is x,
        rotary is not None and rotary.interleaved, cast,
    )  # fmt: skip
    return autograd, options
