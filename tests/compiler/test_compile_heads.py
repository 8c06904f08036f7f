"""The patterns between the projection and attention in graphs: norms of q and k, rotary positions, and keys and values
that heads of q share. Part of the op in the spellings of libraries, and left where it is another formula."""

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import check_rows, check_under_autocast, details, graph_for_inner
from graph_models import NORMS, D, FunctionModule, H, N, RMSNorm, half, heads, joined, scores, together
from torch import nn

HALF = "layer_norm_attention"
P, d = 2, D // H


def attending(arranges, **norms) -> FunctionModule:
    """Return the attention halves in which arranges(model, x) are q, k and v."""

    def around(arrange):
        return lambda m, x: x + m.proj(joined(F.scaled_dot_product_attention(*arrange(m, x))))

    layers = {name: nn.Linear(D, D) for name in "qkv"} | {"learnt": nn.Parameter(torch.randn(N - P, 2 * d))}
    model = half(together(map(around, arranges)), **layers, **norms)
    model.register_buffer("tables", torch.randn(N - P, 2 * d))  # sin and cos of the patches, side by side
    model.register_buffer("tables_of_all", torch.randn(N, 2 * d))
    return model


# ---- norms of q and k ----


def tokens_first(m, x):
    """The layout of Qwen: norms of (B, N, H, d)"""
    y = m.norm(x)
    q, k, v = (layer(y).unflatten(-1, (H, -1)) for layer in (m.q, m.k, m.v))
    return (t.transpose(1, 2) for t in (m.norm_of_q(q), m.norm_of_k(k), v))


def heads_first(m, x):
    """The layout of timm: norms of (B, H, N, d)"""
    q, k, v = heads(m.qkv(m.norm(x)))
    return m.norm_of_q(q), m.norm_of_k(k) * 0.5, v


def shared(m, x):
    qk, v = m.qkv(m.norm(x)).unflatten(-1, (3, H, d)).split((2, 1), 2)
    q, k = m.norm_of_q(qk).permute(2, 0, 3, 1, 4)
    return q, k, v.squeeze(2).transpose(1, 2)


def rotated(m, x):
    q, k, v = heads_first(m, x)
    return *(rotate(t, *m.tables_of_all.chunk(2, -1)) for t in (q, k)), v


def norm_of_all_heads(m, x):
    """The layout of InternVL"""
    y = m.norm(x)
    q, k, v = (m.norm_of_all(m.q(y)), m.norm_of_all(m.k(y)), m.v(y))
    return (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (q, k, v))


def after_a_rotation(m, x):
    q, k, v = heads(m.qkv(m.norm(x)))
    q, k = (rotate(t, *m.tables_of_all.chunk(2, -1)) for t in (q, k))
    return m.norm_of_q(q), m.norm_of_k(k), v


def changed(change):
    def arrange(m, x):
        return change(m, *heads(m.qkv(m.norm(x))))

    return arrange


SOME = {
    "norm_of_q": RMSNorm(d), "norm_of_k": RMSNorm(d), "norm_of_all": RMSNorm(D), "other_eps": nn.RMSNorm(d, 1e-6),
    "other_kind": nn.LayerNorm(d),
}  # fmt: skip
TWO_FORMULAS = "attention (q and k with different norms)"
OTHER_NORMS = {
    "all heads": (norm_of_all_heads, "attention (a norm of all heads at once between projection and attention)"),
    "after a rotation": (after_a_rotation, "attention (add between projection and attention)"),
    "after a factor": (
        changed(lambda m, q, k, v: (m.norm_of_q(q * 0.1), m.norm_of_k(k), v)),
        "attention (mul between projection and attention)",
    ),
    "k alone": (changed(lambda m, q, k, v: (q, m.norm_of_k(k), v)), TWO_FORMULAS),
    "another eps": (changed(lambda m, q, k, v: (m.norm_of_q(q), m.other_eps(k), v)), TWO_FORMULAS),
    "another kind": (changed(lambda m, q, k, v: (m.norm_of_q(q), m.other_kind(k), v)), TWO_FORMULAS),
    "v, too": (
        changed(lambda m, q, k, v: (m.norm_of_q(q), m.norm_of_k(k), m.norm_of_k(v))),
        "attention (rms_norm between projection and attention)",
    ),
}


@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_q_and_k(kind, x):
    rows = {f.__name__: (f, HALF) for f in (tokens_first, heads_first, shared, rotated)}
    rows |= OTHER_NORMS if kind == "RMSNorm" else {}
    norms = SOME | {"norm_of_q": NORMS[kind](d), "norm_of_k": NORMS[kind](d)}
    report = check_rows("attention", rows, lambda arranges: attending(arranges, **norms), x)
    if kind == "LayerNorm":
        assert set(details(report, kind)) == {HALF}


def test_norms_of_q_and_k_under_autocast(x):
    """q and k are in bfloat16, their norms' weights in float32."""
    assert details(check_under_autocast(attending([rotated], **SOME), x, torch.bfloat16), "attention") == [HALF]


# ---- rotary positions ----


def halves(t):
    first, second = t[..., : d // 2], t[..., d // 2 :]
    return torch.cat((-second, first), dim=-1)


def pairs(t):
    return torch.stack([-t[..., 1::2], t[..., ::2]], -1).reshape(t.shape)


def rotate(t, sin, cos, turned=halves):
    return t * cos + turned(t) * sin


def after_prefix(t, sin, cos, turned=halves):
    return torch.cat([t[:, :, :P], rotate(t[:, :, P:], sin, cos, turned)], dim=2).type_as(t)


def after_split(t, sin, cos):
    prefix, patches = t.split((P, N - P), dim=-2)
    first, second = patches.chunk(2, dim=-1)
    return torch.cat((prefix, patches * cos + torch.cat([second.neg(), first], -1) * sin), dim=-2)


def other_way_round(t, sin, cos):
    patches = t.narrow(2, P, N - P)
    return torch.cat([t.narrow(2, 0, P), sin * halves(patches) + cos * patches], dim=2)


def both(rotate_q, rotate_k=None, tables="tables"):
    """Return the half whose q and k are turned by functions (t, sin, cos)."""

    def arrange(m, x):
        q, k, v = heads(m.qkv(m.norm(x)))
        sin, cos = getattr(m, tables).chunk(2, -1)
        return rotate_q(q, sin, cos), (rotate_k or rotate_q)(k, sin, cos), v

    return arrange


def turning(turned):
    return both(lambda t, sin, cos: after_prefix(t, sin, cos, turned))


DIFFERENT, OTHER = "attention (q and k with different rotary positions)", "attention (..."
ROTATIONS = {
    "halves": (both(after_prefix), HALF),
    "split": (both(after_split), HALF),
    "pairs": (turning(pairs), HALF),
    "operands the other way round": (both(other_way_round), HALF),
    "tables of heads": (
        both(lambda t, sin, cos: after_prefix(t, sin.expand(1, H, -1, -1), cos.expand(1, H, -1, -1))), HALF,
    ),
    "learnt tables": (both(after_prefix, tables="learnt"), "attention (rotary positions that are learnt)"),
    "sin for cos of k": (both(after_prefix, lambda t, sin, cos: after_prefix(t, cos, sin)), DIFFERENT),
    "pairs of q alone": (both(lambda t, *tables: after_prefix(t, *tables, pairs), after_prefix), DIFFERENT),
    "the other way": (turning(lambda t: -halves(t)), OTHER),
    "pairs in another order": (
        turning(lambda t: torch.stack([-t[..., ::2], t[..., 1::2]], -1).reshape(t.shape)), OTHER,
    ),
    "of another": (turning(lambda t: halves(t.flip(-1))), OTHER),
    "prefix last": (
        both(lambda t, sin, cos: torch.cat([rotate(t[:, :, P:], sin, cos), t[:, :, :P]], dim=2)), OTHER,
    ),
    "another prefix": (
        both(lambda t, sin, cos: torch.cat([t[:, :, -P:], rotate(t[:, :, P:], sin, cos)], dim=2)), OTHER,
    ),
    "first tokens": (
        both(lambda t, sin, cos: torch.cat([t[:, :, :P], rotate(t[:, :, :-P], sin, cos)], dim=2)), OTHER,
    ),
    "part of a head": (both(lambda t, sin, cos: after_prefix(t, sin[:, :1], cos[:, :1])), OTHER),
}  # fmt: skip


def test_rotations(x):
    check_rows("attention", ROTATIONS, attending, x)


# ---- keys and values that heads of q share ----


def repeat_kv(x, n):
    """The function of transformers"""
    images, shared, tokens, size = x.shape
    return x[:, :, None, :, :].expand(images, shared, n, tokens, size).reshape(images, shared * n, tokens, size)


def around(x, n):
    return x[:, None].expand(-1, n, -1, -1, -1).flatten(1, 2)


def repeated_before(x, n):
    return x.transpose(1, 2).unsqueeze(3).expand(-1, -1, -1, n, -1).flatten(2, 3).transpose(1, 2)


def grouped(attends, *, kv=2) -> FunctionModule:
    """Return halves in which attends(model, q, k, v) are the attention of 4 heads of q and kv of k and v."""

    def around(attend):
        def forward(m, x):
            y = m.norm(x)
            q, k, v = (layer(y).unflatten(-1, (-1, 16)).transpose(1, 2) for layer in (m.q, m.k, m.v))
            return x + m.out(joined(attend(m, q, k, v)))

        return forward

    layers = {"q": nn.Linear(D, 64), "k": nn.Linear(D, 16 * kv), "v": nn.Linear(D, 16 * kv), "out": nn.Linear(64, D)}
    return half(together(map(around, attends)), **layers, bias=nn.Parameter(torch.randn(4, N, N)))


def written_out(repeat):
    return lambda m, q, k, v: (scores(q, repeat(k, 4 // k.shape[1])) + m.bias).softmax(-1) @ repeat(v, 4 // v.shape[1])


def called(repeat, repeat_v=None):
    return lambda m, q, k, v: F.scaled_dot_product_attention(q, repeat(k, 2), (repeat_v or repeat)(v, 2))


def without_a_batch(m, q, k, v):
    return F.scaled_dot_product_attention(q[0], k[0], v[0], enable_gqa=True)[None]


def used_elsewhere(m, q, k, v):
    k = repeat_kv(k, 2)
    return F.scaled_dot_product_attention(q, k, repeat_kv(v, 2)) + k.square()


FEWER = "attention (k and v with fewer heads than q)"
GROUPS = {
    "repeat_kv": (written_out(repeat_kv), FEWER),
    "repeat_interleave": (called(lambda x, n: x.repeat_interleave(n, dim=1)), FEWER),
    "tokens first": (written_out(repeated_before), FEWER),
    "tokens first, interleaved": (
        called(lambda x, n: torch.repeat_interleave(x.transpose(1, 2), n, 2).transpose(1, 2)), FEWER,
    ),
    "by the function itself": (
        lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=m.bias, enable_gqa=True), FEWER,
    ),
    "fewer keys": (
        lambda m, q, k, v: F.scaled_dot_product_attention(
            q, k[:, :, :5], v[:, :, :5], attn_mask=m.bias[..., :5], enable_gqa=True
        ),
        "attention (k and v of another length than q)",
    ),
}  # fmt: skip
OTHER_GROUPS = {
    # what attention reads repeated: head i of k for the heads i, i + 2, ... of q
    "repeat": (called(lambda x, n: x.repeat(1, n, 1, 1)), "attention (repeat between projection and attention)"),
    "v alone": (called(repeat_kv, around), "attention (expand between projection and attention)"),
    "used elsewhere": (used_elsewhere, FEWER),
    "without a batch": (without_a_batch, "left: queries in groups without a batch"),
}
ONE_HEAD = {
    "repeat_kv": GROUPS["repeat_kv"],
    "broadcast": (lambda m, q, k, v: scores(q, k).softmax(-1) @ v, FEWER),
}


@pytest.mark.parametrize(
    ("kv", "dynamic", "rows"),
    [
        (2, False, GROUPS),
        (2, True, {"tokens first, interleaved": GROUPS["tokens first, interleaved"]}),
        (1, False, ONE_HEAD),
    ],
    ids=["two heads", "symbolic sizes", "one head"],
)
def test_repeated_keys_are_read_as_they_were(kv, dynamic, rows, x):
    check_rows("attention", rows, lambda attends: grouped(attends, kv=kv), x, dynamic=dynamic)
    model = grouped([attend for attend, _ in rows.values()], kv=kv)
    names = [str(node.target) for node in graph_for_inner(model, x, dynamic=dynamic).nodes]
    assert not any("repeat" in name or "expand" in name for name in names)


def test_repeated_keys_that_attention_reads(x):
    check_rows("attention", OTHER_GROUPS, grouped, x)
