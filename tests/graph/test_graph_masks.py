"""Masks and biases of the scores in graphs: part of the op in every spelling that is provably the same, else left."""

import pytest
import torch
import torch.nn.functional as F
from compiled_graphs import compile_and_check, compiled, details, run
from graph_models import B, D, FunctionModule, H, N, half, heads, joined, scores, together
from torch import nn

LEAST = torch.finfo(torch.float32).min
d = D // H


def attending(*attends, **layers) -> FunctionModule:
    """attends: functions (model, q, k, v) of (B, H, N, d); the model has a bias, and a mask that keeps a part."""

    def around(attend):
        return lambda m, x: x + m.proj(joined(attend(m, *heads(m.qkv(m.norm(x))))))

    model = half(together(map(around, attends)), bias=nn.Parameter(torch.randn(H, N, N)), **layers)
    model.register_buffer("mask", (torch.rand(N, N) > 0.4) | torch.eye(N, dtype=torch.bool))
    return model


def shifted(m, q, k, v):
    s = scores(q, k)
    s += m.bias
    return s.softmax(-1) @ v


def filled_in_place(m, q, k, v):
    s = scores(q, k) + m.bias
    s = s.masked_fill_(~m.mask, -torch.inf)
    return s.softmax(-1) @ v


def filled_by_a_statement(m, q, k, v):
    s = scores(q, k)
    s.masked_fill_(~m.mask, -torch.inf)
    return s.softmax(-1) @ v


def constant(m, q, k, v):
    """The spelling of transformers' text models"""
    return torch.where(m.mask, scores(q, k), torch.full([], LEAST, dtype=q.dtype)).softmax(-1) @ v


SPELLINGS = {
    "sdpa, bool": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=m.mask),
    "sdpa, float": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, m.bias, scale=0.2),
    "bias": lambda m, q, k, v: (scores(q, k) + m.bias).softmax(-1) @ v,
    "bias first": lambda m, q, k, v: torch.add(m.bias[None], scores(q, k)).softmax(-1) @ v,
    "bias, in place": shifted,
    "bias, scaled with the scores": lambda m, q, k, v: ((q @ k.mT + m.bias) / 3.0).softmax(-1) @ v,
    "bias, with the scale on q": lambda m, q, k, v: (q * 0.2 @ k.mT + m.bias).softmax(-1) @ v,
    "two biases": lambda m, q, k, v: ((scores(q, k) + m.bias) * 0.5 + m.bias.mT.sin()).softmax(-1) @ v,
    "softmax in float32": lambda m, q, k, v: (scores(q, k) + m.bias).float().softmax(-1).to(q.dtype) @ v,
    "masked_fill": lambda m, q, k, v: scores(q, k).masked_fill(~m.mask, -torch.inf).softmax(-1) @ v,
    "masked_fill with the least number": lambda m, q, k, v: scores(q, k).masked_fill(~m.mask, LEAST).softmax(-1) @ v,
    "masked_fill, scaled": lambda m, q, k, v: ((q @ k.mT).masked_fill(m.mask == 0, -1e32) * 0.3).softmax(-1) @ v,
    "masked_fill, in place": filled_in_place,
    "where": lambda m, q, k, v: torch.where(m.mask, scores(q, k), LEAST).softmax(-1) @ v,
    "where not": lambda m, q, k, v: torch.where(~m.mask, -torch.inf, scores(q, k)).softmax(-1) @ v,
    "where, of a constant": constant,
    "where, as a method": lambda m, q, k, v: scores(q, k).where(m.mask, torch.tensor(-torch.inf)).softmax(-1) @ v,
    "mask and bias": lambda m, q, k, v: (
        (
            (scores(q, k) + m.bias).masked_fill(~m.mask, LEAST).masked_fill(m.mask.roll(1, 1) & ~m.mask.mT, LEAST)
        ).softmax(-1)
        @ v
    ),
}


FINITE_FILLS = (
    "masked_fill with the least number", "masked_fill, scaled", "where", "where, of a constant", "mask and bias",
)  # fmt: skip
ROWS_OF_Q_MASKED = "attention (masked_fill between projection and attention)"  # where they want a gradient


@pytest.mark.parametrize(
    ("spellings", "dynamic"), [([*SPELLINGS], False), (["sdpa, bool", "bias, in place", "mask and bias"], True)]
)
def test_masks_and_biases_are_found_in_every_spelling(spellings, dynamic, x):
    report = compile_and_check(attending(*map(SPELLINGS.get, spellings)), x, dynamic=dynamic)
    expected = {name: ROWS_OF_Q_MASKED if name in FINITE_FILLS else "layer_norm_attention" for name in spellings}
    assert dict(zip(spellings, details(report, "attention"), strict=True)) == expected


SHAPES = [(N,), (N, N), (1, N), (N, 1), (H, N, N), (H, 1, N), (B, 1, 1, N), (1, H, N, 1), (B, H, N, N)]


@pytest.mark.parametrize("written_out", [False, True])
def test_masks_of_every_shape(written_out, x):
    def of_shape(i):
        def attend(m, q, k, v):
            given = getattr(m, f"given{i}")
            if written_out:
                return (scores(q, k) + given).masked_fill(given < -1.0, -torch.inf).softmax(-1) @ v
            return F.scaled_dot_product_attention(q, k, v, attn_mask=given)

        return attend

    torch.manual_seed(1)
    masks = {}
    for i, shape in enumerate(SHAPES):
        given = torch.randn(shape)
        given[given < -1.0] += 1.0 if shape[-1] == 1 else 0.0  # a row keeps something
        given[..., 0] = given[..., 0].abs()
        masks[f"given{i}"] = nn.Parameter(given)
    report = compile_and_check(attending(*map(of_shape, range(len(SHAPES))), **masks), x)
    assert dict(zip(SHAPES, details(report, "attention"), strict=True)) == dict.fromkeys(SHAPES, "layer_norm_attention")


def test_a_mask_that_is_an_input(x):
    """Padding comes with the image."""

    def forward(m, x, mask):
        q, k, v = heads(m.qkv(m.norm(x)))
        return x + m.proj(joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])))

    mask = torch.ones(B, N, dtype=torch.bool, device=x.device)
    mask[1, 5:] = False
    report = compile_and_check(half(forward), x, mask, dynamic=True)
    assert details(report, "attention") == ["layer_norm_attention"]


def test_rows_that_are_filled_with_minus_infinity_are_zero(x):
    """Softmax makes NaN of them."""
    model = attending(lambda m, q, k, v: scores(q, k).masked_fill(~m.mask, -torch.inf).softmax(-1) @ v).to(x.device)
    model.mask[2] = False
    (got,), (eager,) = compiled(model)[0](x), model(x)
    torch.testing.assert_close(got[:, 3:], eager[:, 3:])
    torch.testing.assert_close(got[:, 2], x[:, 2] + model.proj.bias)


@pytest.mark.parametrize("fill", [LEAST, torch.finfo(torch.bfloat16).min])
def test_rows_in_which_nothing_is_kept(fill, x):
    """All keys weigh the same, as in the graph, gradients included."""
    model = attending(
        lambda m, q, k, v: scores(q, k).masked_fill(~m.mask, fill).softmax(-1) @ v,
        lambda m, q, k, v: (scores(q, k) + m.bias).masked_fill(~m.mask, fill).softmax(-1) @ v,
        lambda m, q, k, v: (scores(q, k) + torch.where(m.mask, 0.0, fill)).softmax(-1) @ v,
    )
    model.mask[2] = False
    found = details(compile_and_check(model, x), "attention")
    assert found == [ROWS_OF_Q_MASKED, ROWS_OF_Q_MASKED, "layer_norm_attention"]
    model.bias.requires_grad_(False)
    with torch.no_grad():
        assert details(compile_and_check(model, x), "attention") == ["layer_norm_attention"] * 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_windows(dynamic, x):
    """Swin of torchvision: two windows of every image, each with its mask."""

    def attend(m, q, k, v):
        s = scores(q, k) + m.bias
        mask = torch.stack((m.mask, m.mask.mT)).to(q.dtype) * 100.0 - 100.0
        s = (s.view(-1, 2, H, N, N) + mask.unsqueeze(1).unsqueeze(0)).view(-1, H, N, N)
        return s.softmax(-1) @ v

    for images in (3,) if dynamic else (1, 3):
        report = compile_and_check(attending(attend), torch.randn(2 * images, N, D, device=x.device), dynamic=dynamic)
        assert details(report, "attention") == ["layer_norm_attention"]


def test_heads_in_the_batch_and_views_of_scores(x):
    """The spelling of transformers 4: a mask of (B, 1, N, N) between two views of the scores."""

    def forward(m, x):
        q, k, v = (t.reshape(-1, N, d) for t in heads(m.qkv(m.norm(x))))
        s = torch.bmm(q, k.transpose(1, 2)) * 0.3
        s = s.view(-1, H, N, N) + m.of_images
        out = torch.bmm(s.view(-1, N, N).softmax(-1), v).view(-1, H, N, d)
        return x + m.proj(joined(out))

    for dynamic, shape in ((False, (B, 1, N, N)), (True, (1, H, N, N))):
        model = half(forward, of_images=nn.Parameter(torch.randn(shape)))
        report = compile_and_check(model, x, dynamic=dynamic)
        assert details(report, "attention") == ["attention (a mask of heads in the batch)"]


def test_a_bias_over_rows_and_columns(x):
    """The bias of SAM: of a grid of patches, in the scores' shape by reshape_as."""

    def forward(m, x):
        q, k, v = (t.reshape(-1, N, d) for t in heads(m.qkv(m.norm(x))))
        s = q @ k.transpose(1, 2) * 0.3
        tall = torch.einsum("bhwc,hkc->bhwk", q.view(-1, 3, 3, d), m.rows)
        wide = torch.einsum("bhwc,wkc->bhwk", q.view(-1, 3, 3, d), m.columns)
        s = s + (tall[..., :, None] + wide[..., None, :]).reshape_as(s)
        return x + m.proj(joined((s.softmax(-1) @ v).view(-1, H, N, d)))

    def viewed(m, x):
        q, k, v = (t.reshape(-1, N, d) for t in heads(m.qkv(m.norm(x))))
        tall = torch.einsum("bhwc,hkc->bhwk", q.view(-1, 3, 3, d), m.rows)
        s = (q @ k.transpose(1, 2) * 0.3).view(-1, 3, 3, 3, 3) + tall[..., :, None]
        return x + m.proj(joined((s.view(-1, N, N).softmax(-1) @ v).view(-1, H, N, d)))

    for of in (forward, viewed):
        model = half(of, rows=nn.Parameter(torch.randn(3, 3, d)), columns=nn.Parameter(torch.randn(3, 3, d)))
        (detail,) = details(compile_and_check(model, x), "attention")
        assert detail.startswith("attention (")


def test_more_dimensions_before_the_tokens(x):
    """q (B, 2, H, N, d), and a mask of each half of the batch."""

    def forward(m, x):
        q, k, v = (t.unflatten(0, (-1, 2)) for t in heads(m.qkv(m.norm(x))))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=m.of_halves)
        return x + m.proj(joined(out.flatten(0, 1)))

    model = half(forward, of_halves=nn.Parameter(torch.randn(2, 1, N, N)))
    (detail,) = details(compile_and_check(model, x), "attention")
    assert detail.startswith("attention (")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, x):
    """Outputs and gradients have eager's dtypes, and its values up to the rounding of the operands."""
    spellings = [SPELLINGS[name] for name in ("sdpa, float", "bias", "mask and bias")]
    model = attending(*spellings).to(x.device)
    function, reports = compiled(model)
    with torch.autocast(x.device.type, dtype):
        got, want = (run(f, list(model.parameters()), [x]) for f in (function, model))
    assert details(reports[0], "attention") == ["layer_norm_attention"] * 2 + [ROWS_OF_Q_MASKED]
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        torch.testing.assert_close(g, w, atol=0.03 * w.abs().max().item() + 1e-6, rtol=0)


def test_masks_of_16_bits(x):
    report = compile_and_check(attending(SPELLINGS["two biases"]).bfloat16(), x.bfloat16())
    assert details(report, "attention") == ["layer_norm_attention"]


def test_packed_where_there_is_no_norm(x):
    def forward(m, x):
        return m.proj(joined(F.scaled_dot_product_attention(*heads(m.qkv(x.tanh())), attn_mask=m.bias)))

    report = compile_and_check(half(forward, bias=nn.Parameter(torch.randn(H, N, N))), x)
    assert details(report, "attention") == ["attention_qkvpacked (no norm before it but tanh)"]


# ---- what is left ----


def of_the_scores(m, q, k, v):
    s = scores(q, k)
    return (s + s.square()).softmax(-1) @ v


def broadcasting(m, q, k, v):
    """The bias has a batch, q has none."""
    return (scores(q[:1], k[:1]) + torch.stack((m.bias, m.bias.mT))).softmax(-1) @ v[:1]


LEFT = {
    "a fill that scores may reach": (
        lambda m, q, k, v: scores(q, k).masked_fill(~m.mask, -1e9).softmax(-1) @ v,
        "a mask: masked_fill with -1000000000.0",
    ),
    "a fill that is scaled up to them": (
        lambda m, q, k, v: ((q @ k.mT).masked_fill(~m.mask, -1e32) * 1e-6).softmax(-1) @ v,
        "a mask: masked_fill with -1e+26",
    ),
    "two fills": (
        lambda m, q, k, v: scores(q, k).masked_fill(~m.mask, LEAST).masked_fill(m.mask.mT, -torch.inf).softmax(-1) @ v,
        "masks that fill in different numbers",
    ),
    "a fill that is turned over": (
        lambda m, q, k, v: (scores(q, k).masked_fill(~m.mask, -1e32) * -1.0).softmax(-1) @ v,
        "a mask: masked_fill with 1e+32",
    ),
    "what is filled by a statement": (filled_by_a_statement, "the output of its mul is used elsewhere, too"),
    "the largest": (
        lambda m, q, k, v: torch.where(m.mask, scores(q, k), -LEAST).softmax(-1) @ v, "a mask: where with 3.4",
    ),
    "scores instead of others": (
        lambda m, q, k, v: torch.where(m.mask, scores(q, k), m.bias).softmax(-1) @ v, "a mask: where with a tensor",
    ),
    "True counts one": (
        lambda m, q, k, v: (scores(q, k) + m.mask).softmax(-1) @ v, "torch.bool is added to the scores",
    ),
    "a number times what is added": (
        lambda m, q, k, v: torch.add(scores(q, k), m.bias, alpha=2).softmax(-1) @ v, "add between scores and softmax",
    ),
    "a number": (lambda m, q, k, v: (scores(q, k) + 1.0).softmax(-1) @ v, "add between scores and softmax"),
    "a bias of the scores themselves": (of_the_scores, "the output of its mul is used elsewhere, too"),
    "more scores than products": (broadcasting, "add between scores and softmax"),
}  # fmt: skip


def test_masks_that_are_left(x):
    report = compile_and_check(attending(*(attend for attend, _ in LEFT.values())), x)
    for detail, (case, (_, reason)) in zip(details(report, "attention"), LEFT.items(), strict=True):
        assert detail.startswith(f"left: {reason}"), case
