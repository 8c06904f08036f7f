"""Dtypes and layouts of q, k and v for the tests of attention, and what shows a dropout mask."""

import math

import torch
from op_cases import tensors_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

LAYOUTS = {
    "packed": lambda q, k, v: torch.stack([q, k, v], 2).unbind(2),
    "heads_first": lambda *qkv: [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv],
    "batch_inside": lambda *qkv: [t.transpose(0, 1).contiguous().transpose(0, 1) for t in qkv],
    # rows 3 elements longer, filled with NaN: no 16-byte alignment
    "row_strided": lambda *qkv: [torch.cat([t, torch.full_like(t[..., :3], torch.nan)], -1)[..., :24] for t in qkv],
    "multiples_of_4": lambda *qkv: [torch.cat([t, torch.full_like(t[..., :4], torch.nan)], -1)[..., :24] for t in qkv],
    "offset": lambda *qkv: [torch.cat([t.new_full((1,), torch.nan), t.flatten()])[1:].view_as(t) for t in qkv],
    "head_dim_strided": lambda *qkv: [t.transpose(1, 3).contiguous().transpose(1, 3) for t in qkv],
    "expanded": lambda q, k, v: (q, k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v)),
    "unlike": lambda q, k, v: (q, k.transpose(1, 2).contiguous().transpose(1, 2), torch.stack([v, v], 2)[:, :, 1]),
}


def draw_qkv(*shape, kv_heads=None, dtype=torch.float32, device, kind="normal"):
    """Draw q (B, N, H, d) or, packed, (T, H, d), and k and v, which may have fewer heads."""
    *tokens, heads, d = shape
    return tensors_of({"q": shape, **dict.fromkeys("kv", (*tokens, kv_heads or heads, d))}, dtype, device, kind)


def with_identities(tensors):
    """Replace v of sequences of d tokens by identity matrices, so that the output is the weights."""
    v = tensors["v"]
    *tokens, _, d = v.shape
    identity = torch.eye(d, dtype=v.dtype, device=v.device).repeat(math.prod(tokens) // d, 1).view(*tokens, 1, d)
    return tensors | {"v": identity.expand(v.shape).detach().requires_grad_()}


def seeded(op, **options):
    """Return op with these options, which draws the same mask in every call."""

    def run(**tensors):
        torch.manual_seed(7)
        return op(**tensors, **options)

    return run
