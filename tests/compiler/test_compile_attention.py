"""Attention in graphs: what is provably the same is fused in every spelling, what is not is left, and either way
outputs and gradients are right."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import check_rows, compiled, details
from graph_models import B, D, FunctionModule, H, N, half, heads, joined, together
from torch import nn

from fastvit.ops.attention import functions

HALF = "layer_norm_attention"
LENGTH = "attention (k and v of another length than q)"
d = D // H


def spelled(attend):
    """Return the attention half in which attend(q, k, v), (B, H, N, d) each, is the attention."""
    return lambda m, x: x + m.proj(joined(attend(*heads(m.qkv(m.norm(x))))))


def reshaped_scores(q, k, v):
    probabilities = (q @ k.mT * 0.2).view(B, H, 3, -1).softmax(-1)
    return probabilities.view(B, H, N, N) @ v


def products(q, k, v):
    return (q @ k.mT * 0.2).softmax(-1) @ v


def small_heads(q, k, v):
    q, k, v = (t.unflatten(-1, (2, -1)).permute(0, 1, 3, 2, 4).flatten(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).unflatten(1, (H, 2)).transpose(2, 3).flatten(3)


SPELLINGS = {
    "matmul": (lambda q, k, v: torch.matmul(((q @ k.transpose(-2, -1)) / math.sqrt(d)).softmax(-1), v), HALF),
    "einsum": (
        lambda q, k, v: torch.einsum(
            "bhij,bhjd->bhid", torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * d**-0.5, dim=-1), v
        ),
        HALF,
    ),
    "softmax in float32": (
        lambda q, k, v: (
            F.softmax(torch.matmul(q, k.permute(0, 1, 3, 2)) * 0.3, dim=-1, dtype=torch.float32).to(q.dtype).matmul(v)
        ),
        HALF,
    ),
    "five dimensions": (
        lambda q, k, v: (
            F.scaled_dot_product_attention(*(t.unflatten(2, (3, 3)).transpose(2, 3) for t in (q, k, v)))
            .transpose(2, 3)
            .flatten(2, 3)
        ),
        "attention (...",
    ),
    "fewer keys": (lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, 1:], v[:, :, 1:]), LENGTH),
    "fewer keys, causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, 3:], v[:, :, 3:], is_causal=True), LENGTH,
    ),
    "fewer queries, causal": (
        lambda q, k, v: F.pad(F.scaled_dot_product_attention(q[:, :, 4:], k, v, is_causal=True), (0, 0, 4, 0)), LENGTH,
    ),
    "fewer keys, in five dimensions": (
        lambda q, k, v: products(*(t.unflatten(0, (-1, 2)) for t in (q, k[:, :, 1:], v[:, :, 1:]))).flatten(0, 1),
        LENGTH,
    ),
    "causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), HALF),
    "x.mT as torch 2.15 traces it": (lambda q, k, v: (q @ torch.ops.aten.mT(k)).mul(0.2).softmax(-1) @ v, HALF),
    "q, k and v in another order": (
        lambda q, k, v: F.scaled_dot_product_attention(k, v, q), "attention (heads in another order than (3, H, d))",
    ),
    "a factor of v": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v * 1.5),
        "attention (mul between projection and attention)",
    ),
    # what is another function
    "another batch": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k[:1], v[:1]),
        "left: k and v of another batch or other heads than q",
    ),
    "wide values": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, torch.cat([v, v], -1))[..., :d],
        "left: values that are wider or narrower than keys",
    ),
    "scaled by a tensor": (
        lambda q, k, v: (q @ k.mT * v.mean()).softmax(-1) @ v, "attention (mul between projection and attention)",
    ),
    "over queries": (lambda q, k, v: (q @ k.mT * 0.2).softmax(-2) @ v, "left: a softmax over another dimension"),
    "reshaped scores": (reshaped_scores, "left: a reshape of scores or probabilities"),
    "the diagonal": (
        lambda q, k, v: torch.einsum("bhii,bhid->bhid", (q @ k.mT * 0.2).softmax(-1), v),
        "left: einsum 'bhii,bhid->bhid'",
    ),
    "small heads": (small_heads, "left: head_dim..."),
}  # fmt: skip
ROWS = {name: (spelled(attend), outcome) for name, (attend, outcome) in SPELLINGS.items()}


def row(outcome):
    """Add a half, a function of the module and x, to the table."""

    def add(forward):
        ROWS[forward.__name__] = forward, outcome
        return forward

    return add


# ---- where q, k and v come from, and where the output goes ----


@row(HALF)
def split_and_indexed(m, x):
    qkv = m.qkv(m.norm(x))
    q = qkv[..., :D].reshape(*x.shape[:2], H, d).permute(0, 2, 1, 3)
    k, v = (t.reshape(*x.shape[:2], H, d).permute(0, 2, 1, 3) for t in qkv[:, :, D:].split([D, D], dim=2))
    return x + m.proj(F.scaled_dot_product_attention(q, k, v).permute(0, 2, 1, 3).reshape(*x.shape[:2], -1))


@row(HALF)
def rows_of_tokens(m, x):
    qkv = m.qkv(m.norm(x).view(-1, D)).view(*x.shape[:2], 3, H, d)
    q, k, v = (t.squeeze(2).transpose(1, 2) for t in qkv.split(1, dim=2))
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    return x + m.proj(out.reshape(-1, D)).view_as(x)


@row(HALF)
def multihead_attention(m, x):
    y = m.norm(x)
    return x + m.attn(y, y, y, need_weights=False)[0]


@row(HALF)
def heads_in_the_batch(m, x):
    """The spelling of transformers 4, with probabilities viewed there and back."""
    q, k, v = (t.contiguous().view(-1, x.shape[1], d) for t in heads(m.qkv(m.norm(x))))
    probabilities = (0.3 * torch.bmm(q, k.transpose(1, 2))).softmax(2)
    probabilities = probabilities.view(x.shape[0], H, x.shape[1], x.shape[1]).view(-1, x.shape[1], x.shape[1])
    out = torch.bmm(F.dropout(probabilities, 0.1, training=False), v)
    return x + m.proj(out.view(x.shape[0], H, x.shape[1], d).transpose(1, 2).reshape(x.shape))


@row(HALF)
def factors_of_q_and_k(m, x):
    q, k, v = m.qkv(m.norm(x)).chunk(3, -1)
    q, k, v = (t.unflatten(-1, (H, -1)).swapaxes(1, 2) for t in (q * 0.5, k / 0.2, v))
    out = torch.moveaxis(F.scaled_dot_product_attention(q, k, v), 1, 2)
    return x + m.proj(out.contiguous().view(*x.shape))


@row("attention (q, k and v are of different tensors)")
def tokens_with_positions(m, x):
    """The attention of detectors"""
    y = m.norm(x)
    return x + m.sequence_first(y + m.positions, y + m.positions, y, need_weights=False)[0]


@row("attention (q, k and v are of different tensors)")
def across(m, x):
    """The attention of decoders, here to as many tokens"""
    y = m.norm(x)
    return x + m.attn(y, m.positions.expand_as(x), m.positions.expand_as(x), need_weights=False)[0]


@row(LENGTH)
def masked(m, x):
    """The attention of Mask2Former's decoder to every pixel, but those hidden; where all are, to all"""
    y, hidden = m.norm(x), m.hidden & ~m.hidden.all(-1, keepdim=True)
    return x + m.attn(y, m.pixels, m.pixels, attn_mask=hidden)[0]


def both_masks(x):
    padding = torch.arange(12, device=x.device) > torch.tensor([[11], [7]], device=x.device)
    return {"key_padding_mask": padding, "attn_mask": padding.new_ones(N, 12).triu(2)}


@row(LENGTH)
def padded(m, x):
    return x + m.attn(x, m.pixels, m.pixels, need_weights=False, **both_masks(x))[0]


@row(LENGTH)
def padded_by_the_function(m, x):
    """Masks in bool, which nn.MultiheadAttention makes floats"""
    x, pixels = x.transpose(0, 1), m.pixels.transpose(0, 1)
    layers = m.attn.in_proj_weight, m.attn.in_proj_bias, None, None, False, 0.0, m.proj.weight, m.proj.bias
    return x + F.multi_head_attention_forward(x, pixels, pixels, D, H, *layers, **both_masks(x))[0]


@row(LENGTH)
def pooled(m, x):
    """One learnt query for all images"""
    _, k, v = heads(m.qkv(m.norm(x)))
    return x + m.proj(joined(F.scaled_dot_product_attention(m.probe.expand(x.shape[0], -1, -1, -1), k, v)))


@row(LENGTH)
def of_fewer_channels(m, x):
    """CoCa's pooling"""
    return x + m.narrow(x, m.pixels[..., :20], m.pixels[..., 12:], need_weights=False)[0]


@row("attention (heads in another order than (3, H, d))")
def interleaved(m, x):
    """(H, 3, d)"""
    q, k, v = m.qkv(m.norm(x)).view(*x.shape[:2], H, 3, d).permute(3, 0, 2, 1, 4)
    return x + m.proj(joined(F.scaled_dot_product_attention(q, k, v)))


@row("attention_qkvpacked (the projection reads heads in another order...")
def mixed(m, x):
    """The projection reads (d, H)."""
    return x + m.proj(F.scaled_dot_product_attention(*heads(m.qkv(m.norm(x)))).permute(0, 2, 3, 1).flatten(2))


@row("attention_qkvpacked (the output of its linear is used elsewhere, too)")
def projection_used_elsewhere(m, x):
    qkv = m.qkv(m.norm(x))
    return x + m.proj(joined(F.scaled_dot_product_attention(*heads(qkv)))), qkv


def attending(forwards) -> FunctionModule:
    layers = {"attn": nn.MultiheadAttention(D, H, batch_first=True), "positions": nn.Parameter(torch.randn(N, D))}
    layers |= {"pixels": nn.Parameter(torch.randn(B, 12, D)), "probe": nn.Parameter(torch.randn(1, H, 1, d))}
    layers["narrow"] = nn.MultiheadAttention(D, H, kdim=20, vdim=20, batch_first=True)
    model = half(together(forwards), **layers, sequence_first=nn.MultiheadAttention(D, H, bias=False))
    model.register_buffer("hidden", (torch.rand(B * H, N, 12) > 0.4).index_fill(1, torch.tensor([2]), True))
    return model


def test_attention(x):
    report = check_rows("attention", ROWS, attending, x)
    alone = sum(outcome != HALF for _, outcome in ROWS.values()) - 7  # 6 are noted with attention, 1 sum broadcasts
    assert details(report, "linear") == ["linear"] * alone  # the last projections, with their residuals


def test_attention_with_symbolic_sizes(x):
    rows = {name: ROWS[name] for name in ("rows_of_tokens", "heads_in_the_batch", "pooled", "padded")}
    check_rows("attention", rows, attending, x, dynamic=True)


@pytest.mark.parametrize(
    ("attend", "keys"),
    [
        (lambda q, v, mask: F.dropout((q @ q.mT).softmax(-1), 0.25, training=True) @ v, 32),
        (lambda q, v, mask: F.scaled_dot_product_attention(q, q, v, attn_mask=mask, dropout_p=0.25), 16),
    ],
    ids=["products", "sdpa, masked"],
)
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


def test_few_tokens_of_many_heads_are_not_taken_for_another_layout(device):
    q = torch.randn(2, 8, 4, 16, device=device)
    functions._warn_of_layout.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "fastvit.ops.attention reads dimension 1 as tokens")
        function, reports = compiled(lambda q: F.scaled_dot_product_attention(q, q, q), inner="eager")
        function(q)
    assert reports[0].fused("attention") == (1, 1)
