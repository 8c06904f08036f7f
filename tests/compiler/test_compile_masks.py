"""Masks and biases of the scores in graphs: part of the op in every spelling that is provably the same, else left."""

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import check_rows, check_under_autocast, compile_and_check, compiled, details
from graph_models import B, D, FunctionModule, H, N, half, heads, joined, scores, together
from torch import nn

LEAST = torch.finfo(torch.float32).min
ATTEND, HALF = F.scaled_dot_product_attention, "layer_norm_attention"
ROWS_OF_Q_MASKED = "attention (masked_fill between projection and attention)"  # finite fills, for q's gradient
FACTOR_OF_Q = "attention (mul between projection and attention)"
LONGER = "attention (k and v of another length than q)"
d = D // H


def in_place(m, q, k, v):
    s = scores(q, k)
    s += m.bias
    s = s.masked_fill_(~m.mask, -torch.inf)
    return s.softmax(-1) @ v


def filled_twice(m, q, k, v):
    s = (scores(q, k) + m.bias).masked_fill(~m.mask, LEAST)
    return s.masked_fill(m.mask.roll(1, 1) & ~m.mask.mT, LEAST).softmax(-1) @ v


def filled_with_a_constant(m, q, k, v):
    """The spelling of transformers' text models"""
    return torch.where(m.mask, scores(q, k), torch.full([], LEAST, dtype=q.dtype)).softmax(-1) @ v


def halves_of_the_batch(m, q, k, v):
    """q (B, 2, H, N, d)"""
    q, k, v = (t.unflatten(0, (-1, 2)) for t in (q, k, v))
    return ATTEND(q, k, v, attn_mask=m.halves).flatten(0, 1)


def more_scores_than_products(m, q, k, v):
    """The bias has a batch, q has none."""
    return (scores(q[:1], k[:1]) + torch.stack((m.bias, m.bias.mT))).softmax(-1) @ v[:1]


def of_cosines(m, q, k, v):
    """Swin v2: a factor of every head"""
    cosines = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
    return (cosines * torch.clamp(m.factor, max=2.0).exp() + m.bias).softmax(-1) @ v


# functions (model, q, k, v) of (B, H, N, d); the model has a bias, and a mask that keeps a part
SPELLINGS = {
    "sdpa, bool": (lambda m, q, k, v: ATTEND(q, k, v, attn_mask=m.mask), HALF),
    "sdpa, float": (lambda m, q, k, v: ATTEND(q, k, v, m.bias, scale=0.2), HALF),
    "of each image": (lambda m, q, k, v: ATTEND(q, k, v, m.bias[0, 0].expand(len(q), 1, 1, -1)), HALF),
    "of each half of the batch": (halves_of_the_batch, "attention (..."),
    "bias first": (lambda m, q, k, v: torch.add(m.bias[None], scores(q, k)).softmax(-1) @ v, HALF),
    "bias, scaled with the scores": (lambda m, q, k, v: ((q @ k.mT + m.bias) / 3.0).softmax(-1) @ v, HALF),
    "two biases": (lambda m, q, k, v: ((scores(q, k) + m.bias) * 0.5 + m.bias.mT.sin()).softmax(-1) @ v, HALF),
    "fill": (lambda m, q, k, v: scores(q, k).masked_fill(~m.mask, -torch.inf).softmax(-1) @ v, HALF),
    "fill, scaled": (
        lambda m, q, k, v: ((q @ k.mT).masked_fill(m.mask == 0, -1e32) * 0.3).softmax(-1) @ v, ROWS_OF_Q_MASKED,
    ),
    "in place": (in_place, HALF),
    "where not": (lambda m, q, k, v: torch.where(~m.mask, -torch.inf, scores(q, k)).softmax(-1) @ v, HALF),
    "where, of a constant": (filled_with_a_constant, ROWS_OF_Q_MASKED),
    "where, as a method": (
        lambda m, q, k, v: scores(q, k).where(m.mask, torch.tensor(-torch.inf)).softmax(-1) @ v, HALF,
    ),
    "two fills and a bias": (filled_twice, ROWS_OF_Q_MASKED),
    # what is another function
    "a fill that scores may reach": (
        lambda m, q, k, v: scores(q, k).masked_fill(~m.mask, -1e9).softmax(-1) @ v,
        "left: a mask: masked_fill with -1000000000.0",
    ),
    "a fill that is scaled up to them": (
        lambda m, q, k, v: ((q @ k.mT).masked_fill(~m.mask, -1e32) * 1e-6).softmax(-1) @ v,
        "left: a mask: masked_fill with -1e+26",
    ),
    "a fill that is turned over": (
        lambda m, q, k, v: (scores(q, k).masked_fill(~m.mask, -1e32) * -1.0).softmax(-1) @ v,
        "left: a mask: masked_fill with 1e+32",
    ),
    "two different fills": (
        lambda m, q, k, v: scores(q, k).masked_fill(~m.mask, LEAST).masked_fill(m.mask.mT, -torch.inf).softmax(-1) @ v,
        "left: masks that fill in different numbers",
    ),
    "fill of every shape": (
        lambda m, q, k, v: scores(q, k).masked_fill(~m.mask[:1], -torch.inf).softmax(-1) @ v, HALF,
    ),
    "other scores": (
        lambda m, q, k, v: torch.where(m.mask, scores(q, k), m.bias).softmax(-1) @ v,
        "left: a mask: where with a tensor",
    ),
    "True counts one": (
        lambda m, q, k, v: (scores(q, k) + m.mask).softmax(-1) @ v, "left: torch.bool is added to the scores",
    ),
    "a number times a bias": (
        lambda m, q, k, v: torch.add(scores(q, k), m.bias, alpha=2).softmax(-1) @ v,
        "left: add between scores and softmax",
    ),
    "a factor of heads, then a bias": (of_cosines, FACTOR_OF_Q),
    "a factor of queries, then a fill": (
        lambda m, q, k, v: (m.bias[..., :1] * scores(q, k)).masked_fill(~m.mask, LEAST).softmax(-1) @ v,
        ROWS_OF_Q_MASKED,
    ),
    "a factor of keys": (
        lambda m, q, k, v: (scores(q, k) * m.bias[:, :1]).softmax(-1) @ v, "left: mul between scores and softmax",
    ),
    "a factor of other views of scores": (
        lambda m, q, k, v: (scores(q, k).unsqueeze(0) * m.bias[:, None, :1, :1]).flatten(0, 1).softmax(-1) @ v,
        "left: a reshape of scores or probabilities",
    ),
    "a bias, then a factor": (
        lambda m, q, k, v: ((scores(q, k) + m.bias) * m.factor).softmax(-1) @ v,
        "left: a mask or bias of the scores before a factor that is a tensor",
    ),
    "more scores than products": (more_scores_than_products, "left: add between scores and softmax"),
}  # fmt: skip


def attending(attends, keys=N, **layers) -> FunctionModule:
    """Return the attention halves in which attends(model, q, k, v) are the attention, of so many keys."""

    def around(attend):
        def forward(m, x):
            q, k, v = heads(m.qkv(m.norm(x)))
            if keys > N:
                k, v = (torch.cat([t, t[:, :, : keys - N] * 0.5], 2) for t in (k, v))
            return x + m.proj(joined(attend(m, q, k, v)))

        return forward

    model = half(together(map(around, attends)), bias=nn.Parameter(torch.randn(H, N, keys)), **layers)
    model.factor = nn.Parameter(1.0 + torch.randn(H, 1, 1))
    model.halves = nn.Parameter(torch.randn(2, 1, N, keys))
    model.register_buffer("mask", (torch.rand(N, keys) > 0.4) | torch.eye(N, keys, dtype=torch.bool))
    return model


def test_masks_and_biases(x):
    check_rows("attention", SPELLINGS, attending, x)


def test_masks_and_biases_with_symbolic_sizes(x):
    rows = {name: SPELLINGS[name] for name in ("of each image", "two fills and a bias")}
    check_rows("attention", rows, attending, x, dynamic=True)


@pytest.mark.parametrize(("keys", "outcome"), [(N, HALF), (N + 4, LONGER)])
def test_masks_of_every_shape(keys, outcome, x):
    """By turns written out and given to scaled_dot_product_attention"""
    torch.manual_seed(1)
    images = [(B, 1, 1, keys), (1, H, N, 1), (B, H, N, keys)]
    shapes = [(keys,), (N, keys), (1, keys), (N, 1), (H, N, keys), (H, 1, keys), *images]
    masks = {f"given{i}": nn.Parameter(torch.randn(shape)) for i, shape in enumerate(shapes)}

    def written_out(name):
        return lambda m, q, k, v: (scores(q, k) + getattr(m, name)).softmax(-1) @ v

    def called(name):
        return lambda m, q, k, v: ATTEND(q, k, v, attn_mask=getattr(m, name))

    rows = {name: ((written_out, called)[i % 2](name), outcome) for i, name in enumerate(masks)}
    rows |= {"halves": (halves_of_the_batch, "attention (...")}
    check_rows("attention", rows, lambda attends: attending(attends, keys, **masks), x, dynamic=keys > N)


def test_rows_that_are_filled_with_minus_infinity_are_zero(x):
    """Softmax makes NaN of them."""
    model = attending([SPELLINGS["fill"][0]]).to(x.device)
    model.mask[2] = False
    (got,), (eager,) = compiled(model)[0](x), model(x)
    torch.testing.assert_close(got[:, 3:], eager[:, 3:])
    torch.testing.assert_close(got[:, 2], x[:, 2] + model.proj.bias)


@pytest.mark.parametrize("keys", [N, N + 4])
def test_rows_in_which_nothing_is_kept(keys, x):
    """All keys weigh the same, as in the graph, gradients included."""
    least = torch.finfo(torch.bfloat16).min
    rows = {
        "of 16 bits": (lambda m, q, k, v: scores(q, k).masked_fill(~m.mask, least).softmax(-1) @ v, ROWS_OF_Q_MASKED),
        "and a bias": (
            lambda m, q, k, v: (scores(q, k) + m.bias).masked_fill(~m.mask, LEAST).softmax(-1) @ v, ROWS_OF_Q_MASKED,
        ),
        "and a factor": SPELLINGS["a factor of queries, then a fill"],
        "added": (lambda m, q, k, v: (scores(q, k) + torch.where(m.mask, 0.0, LEAST)).softmax(-1) @ v, HALF),
    }  # fmt: skip

    def build(attends):
        model = attending(attends, keys).requires_grad_(torch.is_grad_enabled())
        model.mask[2] = False
        return model

    if keys > N:
        rows = {name: (attend, LONGER) for name, (attend, _) in rows.items()}
    check_rows("attention", rows, build, x)
    with torch.no_grad():
        outcome = HALF if keys == N else LONGER
        rows = {name: (attend, outcome) for name, (attend, _) in rows.items() if name != "and a factor"}
        check_rows("attention", rows, build, x)


@pytest.mark.parametrize(("images", "dynamic"), [(1, False), (3, True)])
def test_windows(images, dynamic, x):
    """Swin of torchvision: two windows of every image, each with its mask."""

    def attend(m, q, k, v):
        s = scores(q, k) + m.bias
        mask = torch.stack((m.mask, m.mask.mT)).to(q.dtype) * 100.0 - 100.0
        s = (s.view(-1, 2, H, N, N) + mask.unsqueeze(1).unsqueeze(0)).view(-1, H, N, N)
        return s.softmax(-1) @ v

    windows = torch.randn(2 * images, N, D, device=x.device)
    check_rows("attention", {"windows": (attend, HALF)}, attending, windows, dynamic=dynamic)


@pytest.mark.parametrize(("shape", "dynamic"), [((B, 1, N, N), False), ((1, H, N, N), True)])
def test_heads_in_the_batch_and_views_of_scores(shape, dynamic, x):
    """The spelling of transformers 4: a mask of images or of heads between two views of the scores."""

    def forward(m, x):
        q, k, v = (t.reshape(-1, N, d) for t in heads(m.qkv(m.norm(x))))
        s = torch.bmm(q, k.transpose(1, 2)) * 0.3
        s = s.view(-1, H, N, N) + m.given
        out = torch.bmm(s.view(-1, N, N).softmax(-1), v).view(-1, H, N, d)
        return x + m.proj(joined(out))

    report = compile_and_check(half(forward, given=nn.Parameter(torch.randn(shape))), x, dynamic=dynamic)
    assert details(report, "attention") == ["attention (a mask of heads in the batch)"]


def by_reshape_as(m, q, s):
    tall = torch.einsum("bhwc,hkc->bhwk", q, m.rows)
    wide = torch.einsum("bhwc,wkc->bhwk", q, m.columns)
    return s + (tall[..., :, None] + wide[..., None, :]).reshape_as(s)


def in_five_dimensions(m, q, s):
    tall = torch.einsum("bhwc,hkc->bhwk", q, m.rows)
    return (s.view(-1, 3, 3, 3, 3) + tall[..., :, None]).view(-1, N, N)


def test_a_bias_over_rows_and_columns(x):
    """The bias of SAM, of a grid of patches"""

    def around(biased):
        def forward(m, x):
            q, k, v = (t.reshape(-1, N, d) for t in heads(m.qkv(m.norm(x))))
            s = biased(m, q.view(-1, 3, 3, d), q @ k.transpose(1, 2) * 0.3)
            return x + m.proj(joined((s.softmax(-1) @ v).view(-1, H, N, d)))

        return forward

    def build(biases):
        tables = {name: nn.Parameter(torch.randn(3, 3, d)) for name in ("rows", "columns")}
        return half(together(map(around, biases)), **tables)

    check_rows("attention", {b.__name__: (b, "attention (...") for b in (by_reshape_as, in_five_dimensions)}, build, x)


def test_a_factor_of_heads_in_bfloat16(x):
    """It multiplies q, which is rounded once more. Eager mode rounds the scores before and after."""
    report = compile_and_check(attending([of_cosines]).bfloat16(), x.bfloat16())
    assert details(report, "attention") == [FACTOR_OF_Q]
    report = check_under_autocast(attending([of_cosines]), x, torch.bfloat16)  # a float32 factor of rounded q
    assert details(report, "attention") == ["attention (to between projection and attention)"]


def test_autocast(x):
    rows = {name: SPELLINGS[name] for name in ("sdpa, float", "two biases", "two fills and a bias")}
    report = check_under_autocast(attending([attend for attend, _ in rows.values()]), x, torch.bfloat16)
    assert details(report, "attention") == [outcome for _, outcome in rows.values()]
