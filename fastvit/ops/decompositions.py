"""The forward ops in functions that exporters know, such as LayerNorm, GELU and attention, for `torch.onnx.export` and
`fastvit.export.decompositions`. Nothing is computed in place: torch refuses that there."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops.attention.window_places import from_windows, mask_of_windows, to_windows, window_places
from fastvit.ops.attention.within import Positions, Sequences, is_added, unpacked, within_of
from fastvit.ops.rotary.aten import by_token, rotated_part, signed, swapped
from fastvit.ops.runtime.activations import activate
from fastvit.ops.runtime.dtypes import promoted_dtype, stat_dtype
from fastvit.ops.runtime.epilogue import scale_samples


def _activate(x: Tensor, name: str) -> Tensor:
    if name == "quick_gelu":
        return x * (1.702 * x).sigmoid()
    return x if name == "none" else activate(x, name)


def _add_residual(
    x: Tensor, layer_scale: Tensor | None = None, row_scale: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    x = x.to(promoted_dtype(x, layer_scale, residual))
    x = scale_samples(x if layer_scale is None else x * layer_scale, row_scale)
    return x if residual is None else x + residual


def layer_norm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None, rms: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    out_dtype, wide = out_dtype or x.dtype, x.to(stat_dtype(x))
    if rms:
        rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (wide * rstd * weight).to(out_dtype), x.new_empty(0), rstd
    rstd = (wide.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    if weight.dtype is not x.dtype:
        x, weight, bias = wide, weight.to(wide.dtype), None if bias is None else bias.to(wide.dtype)
    return F.layer_norm(x, weight.shape, weight, bias, eps).to(out_dtype), wide.mean(-1, keepdim=True), rstd


def add_layer_norm_fwd(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, layer_scale: Tensor | None,
    row_scale: Tensor | None, eps: float, rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    s = _add_residual(branch, layer_scale, row_scale, residual).to(promoted_dtype(residual, branch))
    return s, *layer_norm_fwd(s, weight, bias, eps, None, rms)


def linear_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None, residual: Tensor | None = None, value_weight: Tensor | None = None,
    value_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    h, _ = linear_act_fwd(x, weight, bias, activation, value_weight, value_bias)
    return _add_residual(h, layer_scale, row_scale, residual)


def linear_act_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, value_weight: Tensor | None = None,
    value_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pre = F.linear(x, weight, bias)
    h = _activate(pre, activation)
    if value_weight is None:
        return h, pre
    value = F.linear(x, value_weight, value_bias)
    return h * value, torch.cat((pre, value), dim=-1)


def dropout(x: Tensor, seed: Tensor, p: float, *epilogue: Tensor | None) -> Tensor:
    return _add_residual(F.dropout(x, p), *epilogue)


def attention_fwd(
    q: Tensor, k: Tensor | None, v: Tensor | None, mask: Tensor | None, seed: Tensor | None, scale: float,
    dropout_p: float, causal: bool = False, *positions: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    p, given = Positions(*positions), (q, k, v)
    q, k, v = unpacked(q, k, v)
    within, numbers = within_of(q, p), (scale, dropout_p, causal)
    if isinstance(within, Sequences):
        return _of_sequences(q, k, v, within, mask, *numbers)
    bias = None if p.rows is None or p.columns is None else (p.rows, p.columns)
    if within is None:
        return _of_samples(q, k, v, mask, *numbers, bias)
    at = window_places(within.grid, within.window, within.shift, q.device)
    tensors = [to_windows(t, at) for t in given if t is not None]
    in_windows = unpacked(*tensors)
    mask = mask_of_windows(mask, at, within.shift_bias, stat_dtype(q))
    if mask is not None and mask.shape[0] > 1:
        mask = mask.repeat(q.shape[0], 1, 1, 1)
    bias = bias and (to_windows(bias[0], at), to_windows(bias[1], at))
    o, lse = _of_samples(*in_windows, mask, *numbers, bias)
    return from_windows(o, at, q), lse


def _of_samples(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout_p: float, causal: bool,
    relative: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if k.shape[2] != q.shape[2]:
        k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = q.to(stat_dtype(q)) @ k.to(stat_dtype(q)).transpose(2, 3) * scale
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril()[None, None]
        if mask is None:
            mask = seen
        else:
            mask = mask & seen if mask.dtype is torch.bool else torch.where(seen, mask, -torch.inf)
    two_numbers = is_added(mask)
    if relative is not None:
        mask = (relative[0].unsqueeze(4) + relative[1].unsqueeze(3)).flatten(3).transpose(1, 2)
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf) if mask.dtype is torch.bool else scores + mask
        mask = mask if mask.dtype is torch.bool else _in_range(mask, q.dtype)
    o = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=scale)
    lse = scores.logsumexp(-1)
    return o.transpose(1, 2).contiguous(), torch.stack((lse, torch.ones_like(lse)), 2) if two_numbers else lse


def _in_range(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a mask to the scores' dtype. Finite numbers stay finite, so that they hide no key."""
    lowest = torch.finfo(dtype).min
    if torch.finfo(mask.dtype).min < lowest:
        mask = torch.where(mask == -torch.inf, mask, mask.clamp(min=lowest))
    return mask.to(dtype)


def _of_sequences(
    q: Tensor, k: Tensor, v: Tensor, within: Sequences, mask: Tensor | None, scale: float, dropout_p: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Mask the scores between different sequences."""
    T, H, _ = q.shape
    token = torch.arange(T, device=q.device)
    sequence = of_key = torch.searchsorted(within.ends, token, right=True)
    place = place_of_key = token - within.ends[sequence - 1]  # in the sequence
    if within.ends_k is not None:
        key = torch.arange(k.shape[0], device=q.device)
        of_key = torch.searchsorted(within.ends_k, key, right=True)
        place_of_key = key - within.ends_k[of_key - 1]
    together = (sequence[:, None] == of_key)[None, None]
    if causal:
        together = together & (place[:, None] >= place_of_key)
    if mask is not None:
        mask = mask.expand(-1, -1, within.longest, -1)[:, :, place][..., place_of_key]
        together = mask & together if mask.dtype is torch.bool else torch.where(together, mask, -torch.inf)
    o, lse = _of_samples(q[None], k[None], v[None], together, scale, dropout_p, False)
    length = (within.ends[sequence] - within.ends[sequence - 1])[:, None]
    head, numbers = torch.arange(H, device=q.device)[:, None, None], lse.shape[2] if lse.dim() == 4 else 1
    number = torch.arange(numbers, device=q.device)[:, None]
    before = (within.ends[sequence - 1] * H)[None, None] * numbers
    at = before + (head * numbers + number) * length.T[None] + place  # [H, numbers, T]
    return o[0], lse.new_zeros(T * H * numbers).scatter(0, at.flatten().long(), lse.flatten())


def rotary(x: Tensor, sin: Tensor, cos: Tensor, rotated: int, interleaved: bool, transposed: bool) -> Tensor:
    P = x.shape[1] - sin.shape[2]
    turned = rotated_part(x, sin, rotated).to(torch.promote_types(promoted_dtype(x, sin, cos), torch.float32))
    y = turned * by_token(cos) + swapped(turned, interleaved) * by_token(signed(sin, interleaved, transposed))
    y = torch.cat((y.flatten(2, 3).to(x.dtype), x[:, P:, rotated:]), 2)
    return torch.cat((x[:, :P], y), 1).contiguous()


def qk_norm_fwd(
    q: Tensor, k: Tensor, q_weight: Tensor, q_bias: Tensor | None, k_weight: Tensor, k_bias: Tensor | None,
    sin: Tensor | None, cos: Tensor | None, eps: float, rms: bool, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    normed = []
    for x, weight, bias in ((q, q_weight, q_bias), (k, k_weight, k_bias)):
        y, *_ = layer_norm_fwd(x.to(stat_dtype(x)), weight, bias, eps, None, rms)
        y = y if sin is None or cos is None else rotary(y, sin, cos, x.shape[2], interleaved, False)
        normed.append(y.to(x.dtype).contiguous())
    return normed[0], normed[1]


def patch_embed_fwd(
    image: Tensor, weight: Tensor, bias: Tensor | None,
    pos_embed: Tensor | None, prefix: Tensor | None, normalize: Tensor | None,
) -> Tensor:  # fmt: skip
    if normalize is not None:
        scale, shift = normalize.view(2, -1, *[1] * (image.dim() - 2))
        image = image.to(normalize.dtype) * scale + shift
    bias = None if bias is None else bias.to(weight.dtype)
    convolution = F.conv2d if weight.dim() == 4 else F.conv3d
    tokens = convolution(image.to(weight.dtype), weight, bias, weight.shape[2:]).flatten(2).transpose(1, 2)
    if pos_embed is not None:
        tokens = tokens + pos_embed
    dtype = promoted_dtype(weight, pos_embed, prefix)
    if prefix is not None:
        tokens = torch.cat([prefix.to(dtype).expand(tokens.shape[0], -1, -1), tokens.to(dtype)], dim=1)
    return tokens.to(dtype).contiguous()
