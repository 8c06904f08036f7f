"""Dtypes and layouts of q, k and v for the tests of attention."""

import torch

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
