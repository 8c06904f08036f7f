"""The ops' formulas in plain PyTorch, every intermediate result materialised: what the oracle compares with."""

import functools
from itertools import pairwise

import torch
import torch.nn.functional as F

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "silu": F.silu,
}
GATED = {"swiglu": F.silu, "geglu": F.gelu}


def attention(q, k, v, scale=None, mask=None, attn_mask=None):
    """mask: factors of the attention weights, (B, H, N, N)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask.to(scores.dtype)
    nowhere = (scores == -torch.inf).all(-1, keepdim=True)  # to look: zeros, as of F.scaled_dot_product_attention
    p = torch.softmax(scores.masked_fill(nowhere, 0.0), -1).masked_fill(nowhere, 0.0)
    return ((p if mask is None else p * mask.to(p.dtype)) @ v).transpose(1, 2)


def attention_qkvpacked(qkv, **options):
    return attention(*qkv.unbind(2), **options)


def attention_varlen(q, k, v, cu_seqlens, max_seqlen=None, scale=None, masks=None):
    """masks: as `attention`'s, of each sequence."""
    outputs = []
    for i, (first, end) in enumerate(pairwise(cu_seqlens.tolist())):
        its = (t[None, first:end] for t in (q, k, v))
        outputs.append(attention(*its, scale=scale, mask=None if masks is None else masks[i])[0])
    return torch.cat(outputs)


def rotary(x, rotary):
    sin, cos, prefix, interleaved = rotary
    patches = x.transpose(1, 2)[:, :, prefix:]
    if interleaved:
        turned = torch.stack((-patches[..., 1::2], patches[..., ::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-patches[..., patches.shape[-1] // 2 :], patches[..., : patches.shape[-1] // 2]), -1)
    rotated = (patches * cos + turned * sin).to(x.dtype).transpose(1, 2)
    return torch.cat((x[:, :prefix], rotated), 1)


_rotary = rotary


def rotary_qkvpacked(qkv, rotary):
    q, k, v = qkv.unbind(2)
    return torch.stack((_rotary(q, rotary), _rotary(k, rotary), v), 2)


def qk_norm(q, k, q_norm, k_norm, rotary=None):
    q, k = (layer_norm(x, *norm).to(x.dtype) for x, norm in ((q, q_norm), (k, k_norm)))
    return (q, k) if rotary is None else (_rotary(q, rotary), _rotary(k, rotary))


_qk_norm = qk_norm


def layer_norm(x, weight, bias=None, eps=1e-6, norm="layer"):
    if norm == "rms":
        return rms_norm(x, weight, eps)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm(x, weight, eps=1e-6):
    if x.is_cuda and torch.is_autocast_enabled("cuda"):  # as layer_norm; PyTorch 2.11 leaves it out of its list
        x, weight = x.float(), weight.float()
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def add_layer_norm(residual, branch, weight, bias=None, layer_scale=None, row_scale=None, eps=1e-6, norm="layer"):
    total = add_branch(branch, layer_scale, row_scale, residual)
    return total, layer_norm(total, weight, bias, eps, norm)


def rounded_add_layer_norm(residual, branch, weight, bias, layer_scale, row_scale, **options):
    """`add_layer_norm`, where a layer_scale wider than residual and branch does not widen the sum."""
    total = add_branch(branch, layer_scale, row_scale, residual).to(torch.promote_types(residual.dtype, branch.dtype))
    return total, layer_norm(total, weight, bias, **options)


def linear(x, weight, bias=None, layer_scale=None, row_scale=None, residual=None, activation=None):
    y = F.linear(x, weight, bias)
    if activation is not None:
        y = ACTIVATIONS[activation](y)
    return add_branch(y, layer_scale, row_scale, residual)


def mlp(
    x,
    fc1_weight,
    fc1_bias,
    fc2_weight,
    fc2_bias,
    layer_scale=None,
    row_scale=None,
    residual=None,
    activation="gelu",
    masks=(1, 1),
    inner_norm=None,
):
    """masks: what dropout multiplies with, after the activation and after fc2."""
    if activation in GATED:
        h = gated(x, fc1_weight, fc1_bias, GATED[activation])
    else:
        h = ACTIVATIONS[activation](F.linear(x, fc1_weight, fc1_bias))
    h = h * masks[0]
    h = h if inner_norm is None else layer_norm(h, *inner_norm)
    return add_branch(F.linear(h, fc2_weight, fc2_bias) * masks[1], layer_scale, row_scale, residual)


def gated(x, weight, bias, activation):
    """weight and bias may be of two layers, of the gate and of the value, or of both in one."""
    if isinstance(weight, torch.Tensor):
        weight, bias = weight.chunk(2), bias if bias is None else bias.chunk(2)
    gate, value = (F.linear(x, w, b) for w, b in zip(weight, bias or (None, None), strict=True))
    return activation(gate) * value


def layer_norm_linear(x, norm_weight, norm_bias, weight, bias=None, eps=1e-6, norm="layer"):
    """weight and bias may be of several layers, side by side in the output."""
    y = layer_norm(x, norm_weight, norm_bias, eps, norm)
    if isinstance(weight, torch.Tensor):
        weight, bias = [weight], [bias]
    return torch.cat([F.linear(y, w, b) for w, b in zip(weight, bias, strict=True)], dim=-1)


def layer_norm_attention(
    x,
    norm_weight,
    norm_bias,
    qkv_weight,
    qkv_bias,
    proj_weight,
    proj_bias,
    num_heads,
    layer_scale=None,
    row_scale=None,
    residual=None,
    eps=1e-6,
    scale=None,
    mask=None,
    rotary=None,
    norm="layer",
    scale_norm=None,
    qk_norm=None,
    attn_mask=None,
):
    """qkv_weight and qkv_bias may be of three layers; mask: factors of the attention weights, (B, H, N, N)."""
    qkv = layer_norm_linear(x, norm_weight, norm_bias, qkv_weight, qkv_bias, eps, norm)
    qkv = qkv.unflatten(-1, (3, num_heads, -1))
    q, k, v = qkv.unbind(2)
    if qk_norm is not None:
        q, k = _qk_norm(q, k, *qk_norm, rotary)
    elif rotary is not None:
        q, k = _rotary(q, rotary), _rotary(k, rotary)
    out = attention(q, k, v, scale=scale, mask=mask, attn_mask=attn_mask).flatten(2)
    out = out if scale_norm is None else layer_norm(out, *scale_norm)
    return linear(out, proj_weight, proj_bias, layer_scale, row_scale, residual)


def layer_norm_mlp(x, norm_weight, norm_bias, *args, eps=1e-6, norm="layer", **kwargs):
    return mlp(layer_norm(x, norm_weight, norm_bias, eps, norm), *args, **kwargs)


def patch_embed(image, weight, bias=None, pos_embed=None, prefix=None, mean=None, std=None):
    """Pixels are normalised in float32, as torchvision's transforms do, and cast for the convolution."""
    if mean is not None:
        pixels = image.to(torch.promote_types(weight.dtype, torch.float32))
        mean, std = (torch.tensor(t, dtype=pixels.dtype, device=image.device)[:, None, None] for t in (mean, std))
        image = ((pixels / 255 - mean) / std).to(weight.dtype)
    patches = F.conv2d(image, weight, bias, stride=weight.shape[2:]).flatten(2).transpose(1, 2)
    if pos_embed is not None:
        patches = patches + pos_embed
    if prefix is not None:
        patches = torch.cat([prefix.expand(image.shape[0], -1, -1), patches], 1)
    return patches


def add_branch(y, layer_scale, row_scale, residual):
    if layer_scale is not None:
        y = y * layer_scale
    if row_scale is not None:
        y = y * row_scale.to(y.dtype).view(-1, *(1,) * (y.dim() - 1))
    return y if residual is None else residual + y
