"""q, k and v for the tests of attention, and what shows a dropout mask."""

import math

import torch
from op_cases import tensors_of


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
