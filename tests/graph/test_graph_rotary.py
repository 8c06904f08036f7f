"""Rotary positions in graphs: part of the attention half in the spellings of libraries, and nothing else is."""

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import compile_and_check, details
from graph_models import D, H, N, half, heads, joined, together
from torch import Tensor, nn

P, d = 2, D // H


@pytest.fixture
def tables(device) -> Tensor:
    """sin and cos of the patches, side by side"""
    return torch.randn(N - P, 2 * d, device=device)


def halves(t):
    first, second = t[..., : d // 2], t[..., d // 2 :]
    return torch.cat((-second, first), dim=-1)


def halves_chunked(t):
    first, second = t.chunk(2, dim=-1)
    return torch.cat([second.neg(), first], -1)


def pairs(t):
    return torch.stack([-t[..., 1::2], t[..., ::2]], -1).reshape(t.shape)


def rotate(t, sin, cos, turned=halves):
    return t * cos + turned(t) * sin


def after_prefix(t, sin, cos, turned=halves):
    return torch.cat([t[:, :, :P], rotate(t[:, :, P:], sin, cos, turned)], dim=2).type_as(t)


def after_split(t, sin, cos):
    prefix, patches = t.split((P, N - P), dim=-2)
    return torch.cat((prefix, (patches * cos) + (halves_chunked(patches) * sin)), dim=-2)


def other_way_round(t, sin, cos):
    patches = t.narrow(2, P, N - P)
    return torch.cat([t.narrow(2, 0, P), sin * halves(patches) + cos * patches], dim=2)


def rotary_half(rotate_q, rotate_k=None):
    """Return the attention half whose q and k are turned by these functions (t, sin, cos)."""

    def forward(m, x, tables):
        tables = tables.detach()
        q, k, v = heads(m.qkv(m.norm(x)))
        q = rotate_q(q, *tables.chunk(2, -1))
        k = (rotate_k or rotate_q)(k, *tables.chunk(2, -1))
        return x + m.proj(joined(F.scaled_dot_product_attention(q, k, v)))

    return forward


SPELLINGS = {
    "halves": after_prefix,
    "split and chunk": after_split,
    "pairs": lambda t, sin, cos: after_prefix(t, sin, cos, pairs),
    "operands the other way round": other_way_round,
    "tables of heads": lambda t, sin, cos: after_prefix(t, sin.expand(1, H, -1, -1), cos.expand(1, H, -1, -1)),
}


def found(rotations, x, tables):
    """Return the outcome of attention for each of these rotations of q and k."""
    report = compile_and_check(half(together(map(rotary_half, rotations.values()))), x, tables)
    return dict(zip(rotations, details(report, "attention"), strict=True))


def test_rotations_are_found(x, tables):
    assert found(SPELLINGS, x, tables) == dict.fromkeys(SPELLINGS, "layer_norm_attention")


def test_rotation_of_all_tokens(x, tables):
    def of_all(t, sin, cos):
        return rotate(t, *(torch.cat([a[:P], a]) for a in (sin, cos)))

    def forward(m, x, tables):
        sin, cos = torch.cat([tables[:P], tables]).detach().chunk(2, -1)
        q, k, v = heads(m.qkv(m.norm(x)))
        q, k = rotate(q * d**-0.5, sin, cos), rotate(k, sin, cos)
        return x + m.proj(joined(F.scaled_dot_product_attention(q, k, v, scale=1.0)))

    assert details(compile_and_check(half(together([rotary_half(of_all), forward])), x, tables), "attention") == [
        "attention (q and k with different rotary positions)",  # two tables, of the same values
        "layer_norm_attention",
    ]


def turned_the_other_way(t):
    first, second = t.chunk(2, -1)
    return torch.cat((second, -first), dim=-1)


LEFT = {
    "the other way": lambda t, sin, cos: after_prefix(t, sin, cos, turned_the_other_way),
    "not turned": lambda t, sin, cos: after_prefix(t, sin, cos, lambda t: t),
    "pairs in another order": lambda t, sin, cos: after_prefix(
        t, sin, cos, lambda t: torch.stack([-t[..., ::2], t[..., 1::2]], -1).reshape(t.shape)
    ),
    "pairs as halves": lambda t, sin, cos: after_prefix(
        t, sin, cos, lambda t: torch.cat([-t[..., 1::2], t[..., ::2]], -1)
    ),
    "sums of another": lambda t, sin, cos: after_prefix(t, sin, cos, lambda t: halves(t.flip(-1))),
    "prefix last": lambda t, sin, cos: torch.cat([rotate(t[:, :, P:], sin, cos), t[:, :, :P]], dim=2),
    "another prefix": lambda t, sin, cos: torch.cat([t[:, :, -P:], rotate(t[:, :, P:], sin, cos)], dim=2),
    "first tokens": lambda t, sin, cos: torch.cat([t[:, :, :P], rotate(t[:, :, :-P], sin, cos)], dim=2),
    "part of a head": lambda t, sin, cos: after_prefix(t, sin[:, :1], cos[:, :1]),
}


def test_what_only_looks_like_a_rotation_is_left(x, tables):
    for name, detail in found(LEFT, x, tables).items():
        assert detail.startswith("attention ("), name


def test_q_and_k_by_different_tables(x, tables):
    halves = [
        rotary_half(after_prefix, lambda t, sin, cos: after_prefix(t, cos, sin)),
        rotary_half(SPELLINGS["pairs"], after_prefix),  # of the same tables
        rotary_half(after_prefix, lambda t, *_: t),
    ]
    report = compile_and_check(half(together(halves)), x, tables)
    assert details(report, "attention") == ["attention (q and k with different rotary positions)"] * 3


def test_learnt_tables_keep_their_gradients(x, tables):
    def forward(m, x):
        sin, cos = m.tables.chunk(2, -1)
        q, k, v = heads(m.qkv(m.norm(x)))
        q, k = after_prefix(q, sin, cos), after_prefix(k, sin, cos)
        return x + m.proj(joined(F.scaled_dot_product_attention(q, k, v)))

    (detail,) = details(compile_and_check(half(forward, tables=nn.Parameter(tables)), x), "attention")
    assert detail == "attention (rotary positions that are learnt)"
