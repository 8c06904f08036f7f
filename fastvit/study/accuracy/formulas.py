"""The baselines in plain PyTorch: each op in the fastest plain spelling, and attention with SDPA. Benchmarks and
`verify` compare with them.

Of two spellings the one that was faster on a CPU was chosen: q is scaled and not the N x N scores, `addcmul` takes a
product and a sum, and a linear layer of a matrix of patches embeds them instead of a convolution.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastvit.ops import Norm, Rotary

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "silu": F.silu,
}
GATED: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": F.silu, "geglu": F.gelu}  # of the gate


def heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, attn_mask: Tensor | None = None) -> Tensor:
    """Materialises N x N. (B, H, N, d) each, k and v perhaps of fewer heads -> (B, N, H, d). mask: (B, H, N, N), what
    dropout multiplies by; attn_mask: as `ops.attention` has it."""
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    if attn_mask is not None:
        hides = attn_mask.dtype is torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if hides else scores + attn_mask.to(scores.dtype)
    weights = scores.softmax(dim=-1)
    return ((weights if mask is None else weights * mask.to(weights.dtype)) @ v).transpose(1, 2).contiguous()


def heads_sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    shared = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask, enable_gqa=shared).transpose(1, 2).contiguous()


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, ends: Sequence[int], heads: Callable[..., Tensor] = heads
) -> Tensor:
    """One sequence after the other, (T, H, d) each -> (T, H, d). ends: from 0 to T."""
    outputs = []
    for first, end in pairwise(ends):
        outputs.append(heads(*(t[None, first:end].transpose(1, 2) for t in (q, k, v)))[0])
    return torch.cat(outputs)


def attention(qkv: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B, N, 3, H, d) -> (B, N, H, d), as `heads`."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return heads(q, k, v, mask)


def attention_sdpa(qkv: Tensor) -> Tensor:
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return heads_sdpa(q, k, v)


def rotary(x: Tensor, positions: Rotary) -> Tensor:
    """(B, N, H, d) -> the same. Prefix tokens are turned by no angle, which is faster than to take them out."""
    sin, cos, P, interleaved = positions
    sin, cos = (F.pad(t, (0, 0, P, 0), value=of_prefix) for t, of_prefix in ((sin, 0.0), (cos, 1.0)))
    sin, cos = (t.unsqueeze(-2) if t.dim() == 2 else t.transpose(-3, -2) for t in (sin, cos))  # next to (N, H, d)
    if interleaved:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    return torch.addcmul(x * cos, turned, sin).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: str = "layer") -> Tensor:
    if norm == "rms":
        return F.rms_norm(x, weight.shape, weight, 1e-6)
    return F.layer_norm(x, weight.shape, weight, bias, 1e-6)


def qk_norm(q: Tensor, k: Tensor, q_norm: Norm, k_norm: Norm, positions: Rotary | None = None) -> tuple[Tensor, Tensor]:
    """(B, N, H, d) each -> the same, as timm writes it; of eps 1e-6."""
    q, k = (layer_norm(x, norm.weight, norm.bias, norm.kind) for x, norm in ((q, q_norm), (k, k_norm)))
    return (q, k) if positions is None else (rotary(q, positions), rotary(k, positions))


def add_layer_norm(
    residual: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, **scales: Any
) -> tuple[Tensor, Tensor]:
    total = end_of_branch(branch, residual=residual, **scales)
    return total, layer_norm(total, weight, bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor, activation: str | None = None, **ends: Any) -> Tensor:
    y = F.linear(x, weight, bias)
    return end_of_branch(y if activation is None else ACTIVATIONS[activation](y), **ends)


def mlp(
    x: Tensor, fc1_weight: Tensor, fc1_bias: Tensor, fc2_weight: Tensor, fc2_bias: Tensor, *,
    activation: str = "gelu", inner_norm: tuple[Tensor, Tensor, float] | None = None,
    **ends: Any,
) -> Tensor:  # fmt: skip
    if activation in GATED:
        gate, value = linear(x, fc1_weight, fc1_bias).chunk(2, dim=-1)
        h = GATED[activation](gate) * value
    else:
        h = linear(x, fc1_weight, fc1_bias, activation)
    if inner_norm is not None:
        h = F.layer_norm(h, h.shape[-1:], *inner_norm)
    return linear(h, fc2_weight, fc2_bias, **ends)


def layer_norm_linear(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return linear(layer_norm(x, norm_weight, norm_bias), weight, bias)


def layer_norm_attention(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor,
    proj_bias: Tensor, num_heads: int, *, residual: Tensor, rotary: Rotary | None = None,
    qk_norm: tuple[Norm, Norm] | None = None, sdpa: bool = False,
) -> Tensor:  # fmt: skip
    qkv = layer_norm_linear(x, norm_weight, norm_bias, qkv_weight, qkv_bias)
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).unbind(2)
    if qk_norm is not None:
        q, k = _qk_norm(q, k, *qk_norm, rotary)
    elif rotary is not None:
        q, k = _rotary(q, rotary), _rotary(k, rotary)
    out = (heads_sdpa if sdpa else heads)(*(t.transpose(1, 2) for t in (q, k, v))).flatten(2)
    return linear(out, proj_weight, proj_bias, residual=residual)


_rotary, _qk_norm = rotary, qk_norm


def layer_norm_mlp(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, *fc: Tensor, **options: Any) -> Tensor:
    return mlp(layer_norm(x, norm_weight, norm_bias), *fc, **options)


def end_of_branch(
    y: Tensor, layer_scale: Tensor | None = None, row_scale: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """residual + row_scale * layer_scale * y, of what is given."""
    if row_scale is not None:
        y = y * row_scale.to(y.dtype).view(-1, *(1,) * (y.dim() - 1))
    if residual is None:
        return y if layer_scale is None else y * layer_scale
    return residual + y if layer_scale is None else torch.addcmul(residual, y, layer_scale)


def patch_embed(
    image: Tensor, weight: Tensor, bias: Tensor, pos_embed: Tensor, prefix: Tensor, *,
    mean: Sequence[float] | None = None, std: Sequence[float] | None = None,
) -> Tensor:  # fmt: skip
    """(B, C, H, W) -> (B, P + n, D), by a linear layer, which is faster than the convolution that models have. mean,
    std: of an image of bytes."""
    if mean is not None and std is not None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        m, s = (torch.tensor(values, dtype=wide, device=image.device)[:, None, None] for values in (mean, std))
        image = ((image.to(wide) / 255 - m) / s).to(weight.dtype)
    (B, C, height, width), (D, _, ph, pw) = image.shape, weight.shape
    grid = image.reshape(B, C, height // ph, ph, width // pw, pw).permute(0, 2, 4, 1, 3, 5)
    patches = F.linear(grid.reshape(B, -1, C * ph * pw), weight.reshape(D, -1), bias)
    return torch.cat([prefix.expand(B, -1, -1), patches + pos_embed], dim=1)
