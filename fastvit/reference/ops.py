"""Every public op in plain PyTorch, under the op's name and argument names: what tests, benchmarks and `verify` hold
the ops against, what modules run that cannot fuse, and what the ops are made of where they run without kernels.

Of two spellings the one that was faster on a CPU was chosen: q is scaled and not the N x N scores, `addcmul` takes a
product and a sum, and a linear layer of a matrix of patches embeds them instead of a convolution. Attention
materialises the N x N scores, or calls SDPA with `sdpa=True`. Dropout is given as the factors that it multiplies by.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.reference.windows import from_windows, mask_of_windows, to_windows

Relative = tuple[Tensor, Tensor]  # rows and columns, as ops.Relative
Rotary = tuple[Tensor, Tensor, int, bool]  # sin, cos, num_prefix_tokens and interleaved, as ops.Rotary
Norm = tuple[Any, ...]  # weight, bias, eps and perhaps the kind, as ops.Norm


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
}
GATED = {"swiglu": ACTIVATIONS["silu"], "geglu": F.gelu, "geglu_tanh": ACTIVATIONS["gelu_tanh"]}  # of the gate


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False,
    relative: Relative | None = None, scale: float | None = None, factors: Tensor | None = None,
    empty_rows: bool = False, sdpa: bool = False, dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """q (B, M, H, d), k and v (B, N, H, d) perhaps with fewer heads -> (B, M, H, d). factors: (B, H, M, N), what
    dropout multiplies the weights by; SDPA takes its probability, dropout_p. empty_rows: see `visible_softmax`."""
    if relative is not None:
        attn_mask = relative_bias(*relative)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if sdpa:
        if attn_mask is not None:
            attn_mask, is_causal = _mask_of_sdpa(attn_mask, q, k, is_causal), False
        shared = bool(k.shape[1] != q.shape[1])  # torch.jit.trace makes tensors of sizes
        out = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=shared)
        return out.transpose(1, 2).contiguous()
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)
    weights = visible_softmax(scores, attn_mask, is_causal, empty_rows=empty_rows)
    weights = weights if factors is None else weights * factors.to(weights.dtype)
    return (weights @ v).transpose(1, 2).contiguous()


def _mask_of_sdpa(mask: Tensor, q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    """Cast a mask to the scores' dtype. Finite numbers stay finite, so that they hide no key. Put causal order into it,
    next to which SDPA takes no mask."""
    if is_causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        mask = visible(mask, seen)
    if mask.dtype is torch.bool:
        return mask
    lowest = torch.finfo(q.dtype).min
    if torch.finfo(mask.dtype).min < lowest:
        mask = torch.where(mask == -torch.inf, mask, mask.clamp(min=lowest))
    return mask.to(q.dtype)


def visible(mask: Tensor, seen: Tensor) -> Tensor:
    """Hide in a mask what is False in `seen`."""
    return mask & seen if mask.dtype is torch.bool else torch.where(seen, mask, -torch.inf)


def relative_bias(rows: Tensor, columns: Tensor) -> Tensor:
    """(B, M, H, kh) and (B, M, H, kw) -> (B, H, M, kh * kw), what relative positions add to the scores."""
    rows, columns = (t.transpose(1, 2).contiguous() for t in (rows, columns))  # so that the large sum is contiguous
    return (rows.unsqueeze(4) + columns.unsqueeze(3)).flatten(3)


def visible_scores(scores: Tensor, attn_mask: Tensor | None, is_causal: bool = False) -> Tensor:
    """Add a mask to scores (B, H, M, N), or hide with minus infinity what is False in it. is_causal: query i sees keys
    0 to i only."""
    if attn_mask is not None:
        hides = attn_mask.dtype is torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if hides else scores + attn_mask.to(scores.dtype)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


def visible_softmax(
    scores: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, *, empty_rows: bool = False
) -> Tensor:
    """Compute the weights of attention from its scores, (B, H, M, N). empty_rows: the weights of a query that sees no
    key are zero and not NaN, which takes another pass over the scores."""
    scores = visible_scores(scores, attn_mask, is_causal)
    if not empty_rows:
        return scores.softmax(dim=-1)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)


def attention_qkvpacked(qkv: Tensor, **options: Any) -> Tensor:
    """(B, N, 3, H, d) -> (B, N, H, d), with the options of `attention`."""
    return attention(*qkv.unbind(2), **options)


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | Sequence[int], max_seqlen: int | None = None, *,
    cu_seqlens_k: Tensor | Sequence[int] | None = None, max_seqlen_k: int | None = None,
    attn_mask: Tensor | None = None, factors: Sequence[Tensor] | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Run one sequence after the other, (T, H, d) each -> (T, H, d). attn_mask: (..., longest, longest), of all
    sequences. factors: one tensor a sequence."""
    ends, ends_k = (
        t.tolist() if isinstance(t, Tensor) else t
        for t in (cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k)
    )
    outputs = []
    for i, ((first, end), (first_k, end_k)) in enumerate(zip(pairwise(ends), pairwise(ends_k), strict=True)):
        one = q[None, first:end], k[None, first_k:end_k], v[None, first_k:end_k]
        mask = None if attn_mask is None else attn_mask[..., : end - first, : end_k - first_k]
        outputs.append(attention(*one, attn_mask=mask, factors=None if factors is None else factors[i], **options)[0])
    return torch.cat(outputs)


def attention_varlen_qkvpacked(qkv: Tensor, *lengths: Any, **options: Any) -> Tensor:
    """(T, 3, H, d) -> (T, H, d), with the options of `attention_varlen`."""
    q, k, v = qkv.unbind(1)
    return attention_varlen(q, k, v, *lengths, **options)


def attention_windows(
    qkv: Tensor, window: tuple[int, int], *, shift: tuple[int, int] = (0, 0), shift_bias: float = -math.inf,
    attn_mask: Tensor | None = None, relative: Relative | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """(B, gh, gw, 3, H, d) -> (B, gh, gw, H, d), as Swin writes it: roll, cut into windows, add shift_bias to the
    scores of tokens that the roll has made neighbours, and back. Where the grid is no multiple of the window, what is
    padded is hidden. attn_mask: (windows or 1, H or 1, n or 1, n). options: those of `attention`, whose samples are
    the windows of all samples."""
    B, gh, gw = qkv.shape[:3]
    grid, (sh, sw) = (gh, gw), shift
    shift = sh % gh, sw % gw
    q, k, v = to_windows(qkv, window, shift).unbind(2)
    if relative is not None:
        rows, columns = (to_windows(t, window, shift) for t in relative)
        relative = rows, columns
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    mask = mask_of_windows(attn_mask, grid, window, shift, shift_bias, qkv)
    if mask is not None and mask.shape[0] > 1:
        mask = mask.repeat(B, 1, 1, 1)
    o = attention(q, k, v, attn_mask=mask, relative=relative, **options)
    return from_windows(o, grid, window, shift).contiguous()


def rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """(B, N, H, d) -> the same. Prefix tokens are turned by no angle, which is faster than to take them out."""
    sin, cos, P, interleaved = rotary
    sin, cos = (F.pad(t, (0, 0, P, 0), value=of_prefix) for t, of_prefix in ((sin, 0.0), (cos, 1.0)))
    sin, cos = (t.unsqueeze(-2) if t.dim() == 2 else t.transpose(-3, -2) for t in (sin, cos))  # next to (N, H, d)
    return torch.addcmul(x * cos, swapped(x, interleaved), signed(sin, interleaved)).to(x.dtype)


def swapped(x: Tensor, interleaved: bool) -> Tensor:
    """Swap the partners of the pairs that a rotation turns: neighbours, or elements of the two halves."""
    first, second = _pairs(x, interleaved)
    return _joined(second, first, interleaved)


def signed(sin: Tensor, interleaved: bool) -> Tensor:
    """Return the factors of `swapped`: a rotation turns (x1, x2) into (x1 cos - x2 sin, x2 cos + x1 sin)."""
    first, second = _pairs(sin, interleaved)
    return _joined(-first, second, interleaved)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    return (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)


def _joined(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    return torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)


def rotary_qkvpacked(qkv: Tensor, rotary: Rotary) -> Tensor:
    q, k, v = qkv.unbind(2)
    return torch.stack((_rotary(q, rotary), _rotary(k, rotary), v), 2)


def qk_norm(q: Tensor, k: Tensor, q_norm: Norm, k_norm: Norm, rotary: Rotary | None = None) -> tuple[Tensor, Tensor]:
    """(B, N, H, d) each -> the same, as timm writes it."""
    q, k = (layer_norm(x, *norm).to(x.dtype) for x, norm in ((q, q_norm), (k, k_norm)))
    return (q, k) if rotary is None else (_rotary(q, rotary), _rotary(k, rotary))


_rotary, _qk_norm = rotary, qk_norm


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-6, norm: str = "layer") -> Tensor:
    if norm == "rms":
        return rms_norm(x, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    if x.is_cuda and torch.is_autocast_enabled("cuda"):  # as layer_norm; PyTorch 2.11 leaves it out of its list
        x, weight = x.float(), weight.float()
    return F.rms_norm(x, weight.shape, weight, eps)


def add_layer_norm(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None = None, *, layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None, eps: float = 1e-6, norm: str = "layer",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sum has the dtype of residual and branch, whatever layer_scale has."""
    total = add_branch(branch, layer_scale, row_scale, residual).to(torch.promote_types(residual.dtype, branch.dtype))
    return total, layer_norm(total, weight, bias, eps, norm)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None, **branch: Any
) -> Tensor:
    y = F.linear(x, weight, bias)
    return add_branch(y if activation is None else ACTIVATIONS[activation](y), **branch)


def mlp(
    x: Tensor, fc1_weight: Any, fc1_bias: Any, fc2_weight: Tensor, fc2_bias: Tensor | None, *,
    activation: str = "gelu", inner_norm: Norm | tuple[Tensor, Tensor, float] | None = None,
    factors: tuple[Any, Any] = (None, None), **branch: Any,
) -> Tensor:  # fmt: skip
    """fc1_weight and fc1_bias: one tensor each, or the gate's and the value's. factors: what dropout multiplies by,
    after the activation and after fc2."""
    if activation in GATED:
        gate, value = _side_by_side(x, fc1_weight, fc1_bias).chunk(2, dim=-1)
        h = GATED[activation](gate) * value
    else:
        h = linear(x, fc1_weight, fc1_bias, activation=activation)
    h = h if factors[0] is None else h * factors[0]
    h = h if inner_norm is None else layer_norm(h, *inner_norm)
    y = F.linear(h, fc2_weight, fc2_bias)
    return add_branch(y if factors[1] is None else y * factors[1], **branch)


def _side_by_side(x: Tensor, weight: Any, bias: Any) -> Tensor:
    """weight and bias: one tensor each, or one a layer; the layers' outputs are next to each other."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    return torch.cat([F.linear(x, w, b) for w, b in zip(weight, bias or (None, None), strict=True)], dim=-1)


def layer_norm_linear(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Any, bias: Any = None, *,
    eps: float = 1e-6, norm: str = "layer",
) -> Tensor:  # fmt: skip
    return _side_by_side(layer_norm(x, norm_weight, norm_bias, eps, norm), weight, bias)


def layer_norm_attention(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, qkv_weight: Any, qkv_bias: Any, proj_weight: Tensor,
    proj_bias: Tensor | None, num_heads: int, *, eps: float = 1e-6, norm: str = "layer",
    rotary: Rotary | None = None, qk_norm: tuple[Norm, Norm] | None = None, scale_norm: Norm | None = None,
    attn_mask: Tensor | None = None, cu_seqlens: Tensor | Sequence[int] | None = None, max_seqlen: int | None = None,
    scale: float | None = None, factors: Tensor | None = None, sdpa: bool = False, **branch: Any,
) -> Tensor:  # fmt: skip
    qkv = layer_norm_linear(x, norm_weight, norm_bias, qkv_weight, qkv_bias, eps=eps, norm=norm)
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).unbind(-3)
    if qk_norm is not None:
        q, k = _qk_norm(q, k, *qk_norm, rotary)
    elif rotary is not None:
        q, k = _rotary(q, rotary), _rotary(k, rotary)
    if cu_seqlens is not None:
        out = attention_varlen(q, k, v, cu_seqlens, scale=scale, sdpa=sdpa).flatten(1)
    else:
        out = attention(q, k, v, attn_mask=attn_mask, scale=scale, factors=factors, sdpa=sdpa).flatten(2)
    out = out if scale_norm is None else layer_norm(out, *scale_norm)
    return linear(out, proj_weight, proj_bias, **branch)


def layer_norm_mlp(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, *fc: Any, eps: float = 1e-6, norm: str = "layer",
    **options: Any,
) -> Tensor:  # fmt: skip
    return mlp(layer_norm(x, norm_weight, norm_bias, eps, norm), *fc, **options)


def add_branch(
    y: Tensor, layer_scale: Tensor | None = None, row_scale: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """residual + row_scale * layer_scale * y, without what is None."""
    if row_scale is not None:
        y = y * row_scale.to(y.dtype).view(-1, *(1,) * (y.dim() - 1))
    if residual is None:
        return y if layer_scale is None else y * layer_scale
    return residual + y if layer_scale is None else torch.addcmul(residual, y, layer_scale)


def patch_embed(
    image: Tensor, weight: Tensor, bias: Tensor | None = None, *, pos_embed: Tensor | None = None,
    prefix: Tensor | None = None, mean: Sequence[float] | None = None, std: Sequence[float] | None = None,
) -> Tensor:  # fmt: skip
    """(B, C, H, W) or (B, C, T, H, W) -> (B, P + n, D). mean, std: for an image of bytes, which is normalised in
    float32, as torchvision does, and cast for the matmul."""
    if mean is not None and std is not None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        ones = [1] * (image.dim() - 2)
        m, s = (torch.tensor(values, dtype=wide, device=image.device).view(-1, *ones) for values in (mean, std))
        image = ((image.to(wide) / 255 - m) / s).to(weight.dtype)
    B, patch = image.shape[0], weight.shape[2:]
    for axis, step in enumerate(patch, 1):  # (B, C, ...) -> (B, grid, C, ..., patch)
        image = image.unflatten(2 * axis, (-1, step)).movedim(2 * axis, axis)
    patches = F.linear(image.flatten(len(patch) + 1).flatten(1, -2), weight.flatten(1), bias)
    if pos_embed is not None:
        patches = patches + pos_embed
    return patches if prefix is None else torch.cat([prefix.expand(B, -1, -1), patches], dim=1)
