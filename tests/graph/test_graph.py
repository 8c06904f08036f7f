"""Rewrites of graphs: what is provably the same is fused in every spelling, what is not is left, and either way outputs
and gradients are right."""

import math

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import compile_and_check, compiled, details
from graph_models import B, D, FunctionModule, H, N, half, heads, joined, together
from torch import Tensor, nn


def sdpa(m: FunctionModule, x: Tensor, **options) -> Tensor:
    return joined(F.scaled_dot_product_attention(*heads(m.qkv(m.norm(x))), **options))


def manual(m, x, attend):
    q, k, v = heads(m.qkv(m.norm(x)))
    return x + m.proj(joined(attend(q, k, v)))


d = D // H
SPELLINGS = {
    "matmul": lambda q, k, v: torch.matmul(((q @ k.transpose(-2, -1)) / math.sqrt(d)).softmax(-1), v),
    "scale on q": lambda q, k, v: F.softmax((q * d**-0.5) @ k.mT, dim=-1) @ v,
    "einsum": lambda q, k, v: torch.einsum(
        "bhij,bhjd->bhid", torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * d**-0.5, dim=-1), v
    ),
    "softmax in float32": lambda q, k, v: (
        F.softmax(torch.matmul(q, k.permute(0, 1, 3, 2)) * 0.3, dim=-1, dtype=torch.float32).to(q.dtype).matmul(v)
    ),
    "three dimensions": lambda q, k, v: torch.bmm(
        (d**-0.5 * torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))).softmax(2), v.flatten(0, 1)
    ).view(B, H, N, d),
    "five dimensions": lambda q, k, v: (
        F.scaled_dot_product_attention(*(t.unflatten(2, (3, 3)).transpose(2, 3) for t in (q, k, v)))
        .transpose(2, 3)
        .flatten(2, 3)
    ),
    "contiguous": lambda q, k, v: (
        (q.contiguous() @ k.transpose(-2, -1).contiguous()).mul(0.2).softmax(dim=-1).contiguous() @ v.contiguous()
    ),
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.4),
    "x.mT as torch 2.15 traces it": lambda q, k, v: (q @ torch.ops.aten.mT(k)).mul(0.2).softmax(-1) @ v,
    "dropout of nothing": lambda q, k, v: F.dropout((q @ k.mT).mul(0.1).softmax(-1), 0.3, training=False) @ v,
}


def test_attention_is_found_in_every_spelling(x):
    forwards = [lambda m, x, attend=attend: manual(m, x, attend) for attend in SPELLINGS.values()]
    found = details(compile_and_check(half(together(forwards)), x), "attention")
    expected = dict.fromkeys(SPELLINGS, "layer_norm_attention") | {"five dimensions": "attention"}
    assert dict(zip(SPELLINGS, (detail.partition(" (")[0] for detail in found), strict=True)) == expected


def three(m, x):
    y = m.norm(x)
    q, k, v = (layer(y).view(*y.shape[:2], H, -1).transpose(1, 2) for layer in (m.q, m.k, m.v))
    return x + m.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


def three_chunks(m, x):
    q, k, v = m.qkv(m.norm(x)).chunk(3, dim=-1)
    q, k, v = (t.unflatten(-1, (H, -1)).swapaxes(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v)
    return x + m.proj(torch.moveaxis(out, 1, 2).contiguous().view(*x.shape))


def split_and_indexed(m, x):
    qkv = m.qkv(m.norm(x))
    q = qkv[..., :D].reshape(*x.shape[:2], H, d).permute(0, 2, 1, 3)
    k, v = (t.reshape(*x.shape[:2], H, d).permute(0, 2, 1, 3) for t in qkv[:, :, D:].split([D, D], dim=2))
    return x + m.proj(F.scaled_dot_product_attention(q, k, v).permute(0, 2, 1, 3).reshape(*x.shape[:2], -1))


def sequence_first(m, x):
    qkv = m.qkv(m.norm(x).transpose(0, 1)).view(x.shape[1], x.shape[0], 3, H, d)
    q, k, v = (qkv[:, :, i].permute(1, 2, 0, 3) for i in range(3))
    out = F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).reshape(-1, D)
    return x + m.proj(out).view(x.shape[1], x.shape[0], D).transpose(0, 1)


def rows(m, x):
    qkv = m.qkv(m.norm(x).view(-1, D)).view(*x.shape[:2], 3, H, d)
    q, k, v = (t.squeeze(2).transpose(1, 2) for t in qkv.split(1, dim=2))
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    return x + m.proj(out.reshape(-1, D)).view_as(x)


def native(m, x):
    y = m.norm(x)
    return x + m.attn(y, y, y, need_weights=False)[0]


def heads_in_the_batch(m, x):
    """The spelling of transformers 4, with probabilities viewed there and back."""
    q, k, v = (t.contiguous().view(-1, x.shape[1], d) for t in heads(m.qkv(m.norm(x))))
    probabilities = (torch.bmm(q, k.transpose(1, 2)) * 0.3).softmax(dim=-1)
    probabilities = probabilities.view(x.shape[0], H, x.shape[1], x.shape[1]).view(-1, x.shape[1], x.shape[1])
    out = torch.bmm(F.dropout(probabilities, 0.1, training=False), v)
    return x + m.proj(out.view(x.shape[0], H, x.shape[1], d).transpose(1, 2).reshape(x.shape))


def factors_of_q_and_k(m, x):
    q, k, v = m.qkv(m.norm(x)).chunk(3, -1)
    q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (q * 0.5, k / 0.2, v))
    return x + m.proj(joined(F.scaled_dot_product_attention(q, k, v)))


ARRANGEMENTS = [
    three, three_chunks, split_and_indexed, sequence_first, rows, native, heads_in_the_batch, factors_of_q_and_k,
]  # fmt: skip


@pytest.mark.parametrize(("forwards", "dynamic"), [(ARRANGEMENTS, False), ([rows, heads_in_the_batch], True)])
def test_heads_are_found_however_they_are_arranged(forwards, dynamic, x):
    layers = {name: nn.Linear(D, D, bias=name != "k") for name in "qkv"}
    model = half(together(forwards), **layers, attn=nn.MultiheadAttention(D, H, batch_first=True))
    report = compile_and_check(model, x, dynamic=dynamic)
    assert details(report, "attention") == ["layer_norm_attention"] * len(forwards)


@pytest.mark.parametrize(
    ("options", "dynamic"),
    [({"batch_first": True}, False), ({"batch_first": False, "bias": False}, False), ({"batch_first": True}, True)],
    ids=str,
)
def test_multihead_attention_of_different_tensors(options, dynamic, x):
    """The attention of detectors: q and k with positions, v without."""

    def forward(m, x):
        y = m.norm(x)
        placed = y + m.positions
        return x + m.attn(placed, placed, y, need_weights=False)[0]

    model = half(forward, positions=nn.Parameter(torch.randn(N, D)), attn=nn.MultiheadAttention(D, H, **options))
    report = compile_and_check(model, x, dynamic=dynamic)
    assert details(report, "attention") == ["attention (q, k and v are of different tensors)"]


def interleaved(m, x):
    """(H, 3, d)"""
    q, k, v = m.qkv(m.norm(x)).view(*x.shape[:2], H, 3, d).permute(3, 0, 2, 1, 4)
    return x + m.proj(joined(F.scaled_dot_product_attention(q, k, v)))


def turned(m, x):
    k, v, q = heads(m.qkv(m.norm(x)))
    return x + m.proj(joined(F.scaled_dot_product_attention(q, k, v)))


def mixed(m, x):
    """The projection reads (d, H)."""
    return x + m.proj(F.scaled_dot_product_attention(*heads(m.qkv(m.norm(x)))).permute(0, 2, 3, 1).flatten(2))


def alternating(m, x):
    """(d, H) instead of (H, d): the same tensor of the same size at the same place."""
    y = m.norm(x)
    q, k, v = (layer(y).view(*x.shape[:2], d, H).permute(0, 3, 1, 2) for layer in (m.q, m.k, m.v))
    return x + m.proj(joined(F.scaled_dot_product_attention(q, k, v)))


def factor_of_all(m, x):
    return x + m.proj(joined(F.scaled_dot_product_attention(*heads(m.qkv(m.norm(x)) * 1.5))))


def rows_used_elsewhere(m, x):
    y = m.norm(x)
    return x + m.proj(joined(F.scaled_dot_product_attention(*heads(m.qkv(y))))), y.square()


def projection_used_elsewhere(m, x):
    qkv = m.qkv(m.norm(x))
    return x + m.proj(joined(F.scaled_dot_product_attention(*heads(qkv)))), qkv


PARTLY = {
    interleaved: "attention (heads in another order than (3, H, d))",
    turned: "attention (heads in another order than (3, H, d))",
    mixed: "attention_qkvpacked (the projection reads heads in another order",
    alternating: "attention (heads in another order)",
    factor_of_all: "attention (mul between projection and attention)",
    rows_used_elsewhere: "attention_qkvpacked (the output of its layer_norm is used elsewhere, too)",
    projection_used_elsewhere: "attention_qkvpacked (the output of its linear is used elsewhere, too)",
}


def test_attention_is_fused_in_part(x):
    report = compile_and_check(half(together(PARTLY), **{name: nn.Linear(D, D) for name in "qkv"}), x)
    for detail, (forward, expected) in zip(details(report, "attention"), PARTLY.items(), strict=True):
        assert detail.startswith(expected), forward
    assert details(report, "linear") == ["linear"] * len(PARTLY)  # the last projections


DROPPED = {
    "products": (lambda q, v, mask: F.dropout((q @ q.mT).softmax(-1), 0.25, training=True) @ v, 32),
    "sdpa, masked": (lambda q, v, mask: F.scaled_dot_product_attention(q, q, v, attn_mask=mask, dropout_p=0.25), 16),
}


@pytest.mark.parametrize(("attend", "keys"), DROPPED.values(), ids=DROPPED)
def test_dropout(attend, keys, device):
    """Values are the identity, so the output is the probabilities, dropped."""
    q = torch.zeros(4, 8, 32, 32, device=device)
    v, mask = torch.eye(32, device=device).expand(4, 8, 32, 32), torch.arange(32, device=device) < keys
    function, reports = compiled(attend)
    out = function(q, v, mask[None])
    assert reports[0].fused("attention") == (1, 1)
    assert out[..., keys:].count_nonzero() == 0
    torch.testing.assert_close(out.unique(), torch.tensor([0.0, 1 / keys / 0.75], device=device))
    assert abs((out[..., :keys] == 0).double().mean().item() - 0.25) < 0.01


# ---- attention that is left ----


def with_probabilities(m, x):
    q, k, v = heads(m.qkv(m.norm(x)))
    probabilities = (q @ k.mT * 0.2).softmax(-1)
    return m.proj(joined(probabilities @ v)), probabilities


def cross(m, x):
    q, k, v = heads(m.qkv(m.norm(x)))
    return m.proj(joined(F.scaled_dot_product_attention(q, k[:, :, 1:], v[:, :, 1:])))


def few_queries(m, x):
    y = m.norm(x)
    return m.attn(y[:, :3], y, y, need_weights=False)[0]


def wide_values(m, x):
    q, k, v = heads(m.qkv(m.norm(x)))
    return m.proj(F.scaled_dot_product_attention(q, k, torch.cat([v, v], -1)).sum(1))


def causal(m, x):
    return m.proj(sdpa(m, x, is_causal=True))


def scaled_by_a_tensor(m, x):
    q, k, v = heads(m.qkv(m.norm(x)))
    return m.proj(joined((q @ k.mT * m.scale).softmax(-1) @ v))


def over_queries(m, x):
    q, k, v = heads(m.qkv(m.norm(x)))
    return m.proj(joined((q @ k.mT * 0.2).softmax(-2) @ v))


def reshaped_scores(m, x):
    q, k, v = heads(m.qkv(m.norm(x)))
    scores = (q @ k.mT * 0.2).view(x.shape[0], H, 3, -1).softmax(-1)
    return m.proj(joined(scores.view(x.shape[0], H, x.shape[1], -1) @ v))


def diagonal(m, x):
    q, k, v = heads(m.qkv(m.norm(x)))
    return m.proj(joined(torch.einsum("bhii,bhid->bhid", (q @ k.mT * 0.2).softmax(-1), v)))


def small_heads(m, x):
    q, k, v = (t.unflatten(-1, (2, -1)).permute(0, 1, 3, 2, 4).flatten(1, 2) for t in heads(m.qkv(m.norm(x))))
    return m.proj(F.scaled_dot_product_attention(q, k, v).sum(1).repeat(1, 1, 4)[:, : x.shape[1]])


LEFT = {
    with_probabilities: "the output of its softmax is used elsewhere, too",
    cross: "k and v of another length than q",
    few_queries: "k and v of another length than q",
    wide_values: "values that are wider or narrower than keys",
    causal: "a mask: causal",
    scaled_by_a_tensor: "mul between scores and softmax",
    over_queries: "a softmax over another dimension",
    reshaped_scores: "a reshape of scores or probabilities",
    diagonal: "einsum 'bhii,bhid->bhid'",
    small_heads: "head_dim",
}


def test_attention_is_left(x):
    layers = {"scale": nn.Parameter(torch.tensor(0.3)), "attn": nn.MultiheadAttention(D, H, batch_first=True)}
    report = compile_and_check(half(together(LEFT), **layers), x)
    for detail, (forward, reason) in zip(details(report, "attention"), LEFT.items(), strict=True):
        assert detail.startswith(f"left: {reason}"), forward


@torch.no_grad()
def test_residual_that_changes_in_place_is_read_in_time(x):
    def forward(m, x):
        x = x * 1.0
        branch = sdpa(m, x)
        x.add_(1.0)
        return x + m.proj(branch)

    (detail,) = details(compile_and_check(half(forward), x), "attention")
    assert detail == "attention_qkvpacked (what it reads is changed in place before its end)"


@torch.no_grad()
def test_in_place_residual(x):
    def forward(m, x):
        x = x * 1.0
        x += m.proj(sdpa(m, x))
        return x

    assert details(compile_and_check(half(forward), x), "attention") == ["layer_norm_attention"]


@pytest.mark.parametrize("far", [False, True])
def test_views_that_need_the_strides_of_a_product(far, x):
    """matmul's output is contiguous, the op's is not."""

    def forward(m, x):
        q, k, v = heads(m.qkv(m.norm(x)))
        out = (q @ k.mT).mul(0.2).softmax(-1) @ v
        later = (out + 1.0).view(-1, d)
        return later if far else (out.view(-1, x.shape[1], d), later)

    (detail,) = details(compile_and_check(half(forward), x), "attention")
    assert detail.startswith("attention")
