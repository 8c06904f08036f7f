"""Rotary positions in graphs: part of the attention half in the spellings of libraries, and nothing else is."""

import pytest
import torch
import torch.nn.functional as F
from graph_models import D, H, N, compile_and_check, details, half, heads, joined
from torch import Tensor, nn

P, d = 2, D // H


@pytest.fixture
def tables(device) -> Tensor:
    """sin beside cos, of the patches."""
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


def behind_prefix(t, sin, cos, turned=halves):
    return torch.cat([t[:, :, :P], rotate(t[:, :, P:], sin, cos, turned)], dim=2).type_as(t)


def behind_split(t, sin, cos):
    prefix, patches = t.split((P, N - P), dim=-2)
    return torch.cat((prefix, (patches * cos) + (halves_chunked(patches) * sin)), dim=-2)


def other_way_round(t, sin, cos):
    patches = t.narrow(2, P, N - P)
    return torch.cat([t.narrow(2, 0, P), sin * halves(patches) + cos * patches], dim=2)


def rotary_half(rotate_q, rotate_k=None):
    def forward(m, x, tables):
        tables = tables.detach()
        q, k, v = heads(m.qkv(m.norm(x)))
        q = rotate_q(q, *tables.chunk(2, -1))
        k = (rotate_k or rotate_q)(k, *tables.chunk(2, -1))
        return x + m.proj(joined(F.scaled_dot_product_attention(q, k, v)))

    return forward


SPELLINGS = {
    "halves": behind_prefix,
    "split and chunk": behind_split,
    "pairs": lambda t, sin, cos: behind_prefix(t, sin, cos, pairs),
    "operands the other way round": other_way_round,
    "tables of heads": lambda t, sin, cos: behind_prefix(t, sin.expand(1, H, -1, -1), cos.expand(1, H, -1, -1)),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rotation_is_found(spelling, x, tables):
    report = compile_and_check(half(rotary_half(SPELLINGS[spelling])), x, tables)
    assert details(report, "attention") == ["layer_norm_attention"]


def test_rotation_of_all_tokens(x, tables):
    def of_all(t, sin, cos):
        return rotate(t, *(torch.cat([a[:P], a]) for a in (sin, cos)))

    (detail,) = details(compile_and_check(half(rotary_half(of_all)), x, tables), "attention")
    assert detail == "attention (q and k with different rotary positions)"  # two tables, of the same values

    def forward(m, x, tables):
        sin, cos = torch.cat([tables[:P], tables]).detach().chunk(2, -1)
        q, k, v = heads(m.qkv(m.norm(x)))
        q, k = rotate(q * d**-0.5, sin, cos), rotate(k, sin, cos)
        return x + m.proj(joined(F.scaled_dot_product_attention(q, k, v, scale=1.0)))

    assert details(compile_and_check(half(forward), x, tables), "attention") == ["layer_norm_attention"]


def turned_the_other_way(t):
    first, second = t.chunk(2, -1)
    return torch.cat((second, -first), dim=-1)


LEFT = {
    "the other way": lambda t, sin, cos: behind_prefix(t, sin, cos, turned_the_other_way),
    "not turned": lambda t, sin, cos: behind_prefix(t, sin, cos, lambda t: t),
    "pairs in another order": lambda t, sin, cos: behind_prefix(
        t, sin, cos, lambda t: torch.stack([-t[..., ::2], t[..., 1::2]], -1).reshape(t.shape)
    ),
    "pairs as halves": lambda t, sin, cos: behind_prefix(
        t, sin, cos, lambda t: torch.cat([-t[..., 1::2], t[..., ::2]], -1)
    ),
    "sums of another": lambda t, sin, cos: behind_prefix(t, sin, cos, lambda t: halves(t.flip(-1))),
    "prefix behind": lambda t, sin, cos: torch.cat([rotate(t[:, :, P:], sin, cos), t[:, :, :P]], dim=2),
    "another prefix": lambda t, sin, cos: torch.cat([t[:, :, -P:], rotate(t[:, :, P:], sin, cos)], dim=2),
    "first tokens": lambda t, sin, cos: torch.cat([t[:, :, :P], rotate(t[:, :, :-P], sin, cos)], dim=2),
    "part of a head": lambda t, sin, cos: behind_prefix(t, sin[:, :1], cos[:, :1]),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_only_looks_like_a_rotation_is_left(name, x, tables):
    (detail,) = details(compile_and_check(half(rotary_half(LEFT[name])), x, tables), "attention")
    assert detail.startswith("attention (")


def test_q_and_k_by_different_tables(x, tables):
    model = half(rotary_half(behind_prefix, lambda t, sin, cos: behind_prefix(t, cos, sin)))
    (detail,) = details(compile_and_check(model, x, tables), "attention")
    assert detail == "attention (q and k with different rotary positions)"
    (detail,) = details(compile_and_check(half(rotary_half(SPELLINGS["pairs"], behind_prefix)), x, tables), "attention")
    assert detail == "attention (q and k with different rotary positions)"  # of the same tables
    (detail,) = details(compile_and_check(half(rotary_half(behind_prefix, lambda t, *_: t)), x, tables), "attention")
    assert detail == "attention (q and k with different rotary positions)"


def test_learnt_tables_keep_their_gradients(x, tables):
    def forward(m, x):
        sin, cos = m.tables.chunk(2, -1)
        q, k, v = heads(m.qkv(m.norm(x)))
        q, k = behind_prefix(q, sin, cos), behind_prefix(k, sin, cos)
        return x + m.proj(joined(F.scaled_dot_product_attention(q, k, v)))

    (detail,) = details(compile_and_check(half(forward, tables=nn.Parameter(tables)), x), "attention")
    assert detail == "attention (rotary positions that are learnt)"


@torch.no_grad()
def test_tables_that_change_between_q_and_k(x, tables):
    def forward(m, x, tables):
        sin, cos = tables.chunk(2, -1)
        q, k, v = heads(m.qkv(m.norm(x)))
        q = behind_prefix(q, sin, cos)
        tables.mul_(0.5)
        return x + m.proj(joined(F.scaled_dot_product_attention(q, behind_prefix(k, sin, cos), v)))

    (detail,) = details(compile_and_check(half(forward), x, tables), "attention")
    assert detail == "attention (what it reads is changed in place before its end)"
