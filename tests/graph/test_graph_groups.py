"""Keys and values that heads of q share, in graphs: attention reads them once in every spelling of the repetition."""

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import compile_and_check, details, graph_for_inner
from graph_models import D, FunctionModule, N, half, joined, scores, together
from torch import Tensor, nn


def grouped(*attends, kv: int = 2) -> FunctionModule:
    """attends: functions (model, q, k, v) of 4 heads of q and `kv` of k and v; (B, heads, N, 16)"""

    def around(attend):
        def forward(m, x):
            y = m.norm(x)
            q, k, v = (layer(y).unflatten(-1, (-1, 16)).transpose(1, 2) for layer in (m.q, m.k, m.v))
            return x + m.out(joined(attend(m, q, k, v)))

        return forward

    layers = {"q": nn.Linear(D, 64), "k": nn.Linear(D, 16 * kv), "v": nn.Linear(D, 16 * kv), "out": nn.Linear(64, D)}
    return half(together(map(around, attends)), **layers, bias=nn.Parameter(torch.randn(4, N, N)))


def repeat_kv(x: Tensor, n: int) -> Tensor:
    """The function of transformers"""
    images, of, tokens, size = x.shape
    return x[:, :, None, :, :].expand(images, of, n, tokens, size).reshape(images, of * n, tokens, size)


def tokens_first(x: Tensor, n: int) -> Tensor:
    return x.transpose(1, 2).unsqueeze(3).expand(-1, -1, -1, n, -1).flatten(2, 3).transpose(1, 2)


REPEATED = {
    "repeat_kv": repeat_kv,
    "repeat_interleave": lambda x, n: x.repeat_interleave(n, dim=1),
    "tokens first": tokens_first,
    "tokens first, interleaved": lambda x, n: torch.repeat_interleave(x.transpose(1, 2), n, 2).transpose(1, 2),
}
HEADS = "attention (k and v with fewer heads than q)"


@pytest.mark.parametrize(("kv", "dynamic"), [(1, False), (2, False), (2, True)])
def test_repeated_keys_are_read_as_they_were(kv, dynamic, x):
    def written_out(repeat):
        return lambda m, q, k, v: (scores(q, repeat(k, 4 // kv)) + m.bias).softmax(-1) @ repeat(v, 4 // kv)

    def called(repeat):
        return lambda m, q, k, v: F.scaled_dot_product_attention(q, repeat(k, 4 // kv), repeat(v, 4 // kv))

    attends = [spelling(repeat) for spelling in (written_out, called) for repeat in REPEATED.values()]
    attends.append(lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=m.bias, enable_gqa=True))
    if kv == 1:
        attends.append(lambda m, q, k, v: scores(q, k).softmax(-1) @ v)
    if dynamic:
        attends = [written_out(REPEATED["repeat_kv"]), called(REPEATED["tokens first, interleaved"])]
    model = grouped(*attends, kv=kv)
    assert details(compile_and_check(model, x, dynamic=dynamic), "attention") == [HEADS] * len(attends)
    names = [str(node.target) for node in graph_for_inner(model, x, dynamic=dynamic).nodes]
    assert not any("repeat" in name or "expand" in name for name in names)


def test_heads_that_share_keys_and_are_no_neighbours(x):
    """Head i of k for i, i + 2, ...: attention reads them repeated."""

    def around(x):
        return x[:, None].expand(-1, 2, -1, -1, -1).flatten(1, 2)

    model = grouped(
        lambda m, q, k, v: F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)),
        lambda m, q, k, v: F.scaled_dot_product_attention(q, around(k), around(v)),
        lambda m, q, k, v: F.scaled_dot_product_attention(q, repeat_kv(k, 2), around(v)),
    )
    assert details(compile_and_check(model, x), "attention") == [
        f"attention ({name} between projection and attention)" for name in ("repeat", "expand", "expand")
    ]


def test_repeated_keys_that_are_used_elsewhere(x):
    def forward(m, x):
        q, k, v = (of(m.norm(x)).unflatten(-1, (-1, 16)).transpose(1, 2) for of in (m.q, m.k, m.v))
        k, v = repeat_kv(k, 2), repeat_kv(v, 2)
        return m.out(joined(F.scaled_dot_product_attention(q, k, v))), k.square()

    model = grouped()
    model._function = forward
    assert details(compile_and_check(model, x), "attention") == [HEADS]


def test_keys_of_groups_without_a_batch(x):
    def forward(m, x):
        q, k = (of(x[0]).unflatten(-1, (-1, 16)).transpose(0, 1) for of in (m.q, m.k))
        return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    model = grouped()
    model._function = forward
    assert details(compile_and_check(model, x), "attention") == ["left: queries in groups without a batch"]
