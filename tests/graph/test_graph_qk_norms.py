"""Norms of q and k in graphs: part of the attention half in the layouts of libraries, and left where they are another
formula."""

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import check_under_autocast, compile_and_check, details
from graph_models import NORMS, D, FunctionModule, H, N, RMSNorm, half, heads, joined, together
from library_imports import import_library
from torch import nn

d = D // H


def three(m, x):
    y = m.norm(x)
    return (layer(y).unflatten(-1, (H, -1)) for layer in (m.q, m.k, m.v))


def tokens_first(m, x):
    """The layout of Qwen: norms of (B, N, H, d)"""
    q, k, v = three(m, x)
    return (t.transpose(1, 2) for t in (m.of_q(q), m.of_k(k), v))


def heads_first(m, x):
    """The layout of timm: norms of (B, H, N, d)"""
    q, k, v = heads(m.qkv(m.norm(x)))
    return m.of_q(q), m.of_k(k) * 0.5, v


def shared(m, x):
    qk, v = m.qkv(m.norm(x)).unflatten(-1, (3, H, d)).split((2, 1), 2)
    q, k = m.of_q(qk).permute(2, 0, 3, 1, 4)
    return q, k, v.squeeze(2).transpose(1, 2)


def rotated(m, x):
    q, k, v = heads_first(m, x)
    return rotate(m, q), rotate(m, k), v


def rotate(m, t):
    first, second = t.chunk(2, -1)
    return t * m.cos + torch.cat((-second, first), -1) * m.sin


def attending(*arranges, of_q=None, of_k=None) -> FunctionModule:
    def around(arrange):
        return lambda m, x: x + m.proj(joined(F.scaled_dot_product_attention(*arrange(m, x))))

    layers = {name: nn.Linear(D, D) for name in "qkv"} | {"of_q": of_q or RMSNorm(d), "of_k": of_k or RMSNorm(d)}
    model = half(together(map(around, arranges)), **layers, all=RMSNorm(D))
    for name in ("sin", "cos"):
        model.register_buffer(name, torch.randn(N, d))
    return model


@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_q_and_k(kind, x):
    arranges = [tokens_first, heads_first, shared, rotated]
    report = compile_and_check(attending(*arranges, of_q=NORMS[kind](d), of_k=NORMS[kind](d)), x)
    assert details(report, "attention") == ["layer_norm_attention"] * len(arranges)
    assert set(details(report, kind)) == {"layer_norm_attention"}


def test_norms_of_q_and_k_with_symbolic_sizes_and_in_16_bits(x):
    report = compile_and_check(attending(tokens_first).bfloat16(), x.bfloat16(), dynamic=True)
    assert details(report, "attention") == ["layer_norm_attention"]


@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_q_and_k_under_autocast(kind, x):
    """q and k are in bfloat16, their norms' weights in float32."""
    model = attending(rotated, of_q=NORMS[kind](d), of_k=NORMS[kind](d))
    assert details(check_under_autocast(model, x, torch.bfloat16), "attention") == ["layer_norm_attention"]


def test_attention_of_timm_with_norms_of_q_and_k(device):
    """The attention of Sapiens 2, without its queries in groups, is one op with the LayerNorm before it."""
    timm = import_library("timm")
    layer = timm.layers.AttentionRope(
        64, 4, qkv_fused=False, norm_layer=timm.layers.RmsNormFp32, qk_norm=True, scale_norm=True
    )
    model = FunctionModule(lambda m, x, rope: x + m.attn(m.norm(x), rope.detach()), norm=nn.LayerNorm(64), attn=layer)
    report = compile_and_check(model, torch.randn(2, N, 64, device=device), torch.randn(N - 1, 32, device=device))
    assert details(report, "attention") == ["layer_norm_attention"]
    assert details(report, "RMSNorm") == ["layer_norm_attention"] * 3


def of_all_heads(m, x):
    """The layout of InternVL"""
    y = m.norm(x)
    return (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (m.all(m.q(y)), m.all(m.k(y)), m.v(y)))


def after_a_rotation(m, x):
    q, k, v = heads(m.qkv(m.norm(x)))
    return m.of_q(rotate(m, q)), m.of_k(rotate(m, k)), v


def after_a_factor(m, x):
    q, k, v = heads(m.qkv(m.norm(x)))
    return m.of_q(q * 0.1), m.of_k(k), v


def of_k_alone(m, x):
    q, k, v = heads(m.qkv(m.norm(x)))
    return q, m.of_k(k), v


def of_v_too(m, x):
    q, k, v = heads(m.qkv(m.norm(x)))
    return m.of_q(q), m.of_k(k), m.of_k(v)


def across_heads(m, x):
    """Rows of the last half of a head and the first of the next."""
    q, k, v = heads(m.qkv(m.norm(x)))
    moved = (joined(t).roll(d // 2, -1).unflatten(-1, (H, -1)).transpose(1, 2) for t in (m.of_q(q), m.of_k(k)))
    return *moved, v


OTHERS = {
    of_all_heads: "a norm of all heads at once between projection and attention",
    after_a_rotation: "add between projection and attention",
    after_a_factor: "mul between projection and attention",
    of_k_alone: "q and k with different norms",
    of_v_too: "rms_norm between projection and attention",
    across_heads: "roll between projection and attention",
}


def test_other_norms_of_q_and_k_are_left(x):
    report = compile_and_check(attending(*OTHERS), x)
    found = dict(zip(OTHERS, details(report, "attention"), strict=True))
    assert found == {arrange: f"attention ({reason})" for arrange, reason in OTHERS.items()}


def test_norms_of_two_formulas_are_left(x):
    for of_q, of_k in ((nn.RMSNorm(d, 1e-5), nn.RMSNorm(d, 1e-6)), (nn.RMSNorm(d, 1e-5), nn.LayerNorm(d, 1e-5))):
        report = compile_and_check(attending(heads_first, of_q=of_q, of_k=of_k), x)
        assert details(report, "attention") == ["attention (q and k with different norms)"]
