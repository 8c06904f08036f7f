"""ops.attention and ops.attention_qkvpacked with a mask, and with heads that share keys, on both backends."""

from itertools import cycle

import pytest
import torch
from attention_inputs import DTYPES, draw_qkv, seeded, with_identities
from op_cases import assert_freezing_changes_no_other_gradient, assert_layout_does_not_matter, gathered, tensors_of
from oracle import assert_op_as_accurate, inputs

from fastvit import ops
from fastvit.ops.attention import aten
from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime import device as devices
from fastvit.study.accuracy import formulas
from fastvit.study.accuracy.formulas import attention as eager
from fastvit.study.accuracy.formulas import attention_qkvpacked

registered = torch.ops.fastvit

# Broadcast along each dimension; as many dimensions as there are. N is and is no multiple of 16.
SHAPES = {
    "all": (2, 2, 37, 37),
    "keys": (2, 1, 1, 37),
    "heads": (1, 2, 37, 37),
    "relative positions": (2, 48, 48),
    "one": (37, 37),
    "queries": (2, 2, 37, 1),
    "short": (37,),
}
# of scores: a tile with a tail, and several tiles: float32 has tiles of 32 keys
LONG = [((1, 70, 1, 32), torch.float32), ((1, 197, 1, 64), torch.bfloat16), ((1, 300, 1, 96), torch.float16)]


def drawn(*shape, kind, device, seed=9):
    """A mask: "bool", True at nine of ten; or what is added, of that dtype, and wants a gradient. Not more, and scales
    are small: PyTorch's flash kernel on the CPU takes exponentials within 20 ulp, which shows where few keys have all
    of the weight."""
    m = inputs("normal", *shape, dtype=torch.float64, device=device, seed=seed)
    return m > -1.28 if kind == "bool" else (m / 2).to(kind).requires_grad_()


def check(tensors, mask, **options):
    """Values and gradients, the mask's among them where it is added."""
    fixed = {} if mask.requires_grad else {"attn_mask": mask}
    tensors = tensors if fixed else {**tensors, "attn_mask": mask}
    assert_op_as_accurate(
        lambda **t: ops.attention(**t, **fixed, **options),
        lambda **t: eager(**t, **fixed, **options, empty_rows=mask.dtype is torch.bool),
        tensors,
    )


@pytest.mark.parametrize(
    ("shape", "kv_heads", "kind"),
    [
        (shape, kv_heads, kind)
        for shape, heads in zip(SHAPES, cycle([(2, 1), (1, 2)]))
        for kv_heads, kind in zip(heads, ["bool", torch.float32], strict=True)
    ],
    ids=str,
)
def test_every_shape(shape, kv_heads, kind, backend, device):
    mask = drawn(*SHAPES[shape], kind=kind, device=device)
    N = 48 if shape == "relative positions" else 37
    check(draw_qkv(2, N, 2, 16, kv_heads=kv_heads, device=device), mask, scale=0.25 if kv_heads == 2 else 0.15)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(kind, dtype, backend, device):
    mask = drawn(1, 2, 40, 40, kind=kind, device=device)
    check(draw_qkv(2, 40, 2, 24, dtype=dtype, device=device), mask, scale=0.15)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(("shape", "dtype"), LONG, ids=str)
def test_long(shape, dtype, kind, backend, device):
    B, N, H, _ = shape
    mask = drawn(B, H, N, N, kind="bool" if kind == "bool" else dtype, device=device)
    check(draw_qkv(*shape, dtype=dtype, device=device), mask)
    check(draw_qkv(*shape, dtype=dtype, device=device), mask[:, :, :1])


@pytest.mark.parametrize(("kv_heads", "dtype"), zip([1, 2, 3], DTYPES, strict=True), ids=str)
def test_heads_that_share_keys(dtype, kv_heads, backend, device):
    for N in (5, 70):
        tensors = draw_qkv(2, N, 6, 24, kv_heads=kv_heads, dtype=dtype, device=device)
        assert_op_as_accurate(ops.attention, eager, tensors)


def test_programs_that_share_a_tile_of_the_gradient(backend, device):
    """With the interpreter's 4 multiprocessors, a tile's last program has fewer samples, or heads, than its others."""
    check(draw_qkv(5, 37, 1, 16, device=device), drawn(37, 37, kind=torch.float32, device=device))
    check(draw_qkv(1, 37, 5, 16, device=device), drawn(1, 1, 1, 37, kind=torch.bfloat16, device=device))


@pytest.mark.skipif(not backends.HAVE_TRITON, reason="triton is not installed")
@pytest.mark.parametrize(
    ("images", "mask", "parts", "programs"),
    [
        ((128 * 64, 49, 3, 32), (1, 3), 88, 264),  # Swin-T, stage 1: windows of 128 images
        ((256, 197, 12, 64), (1, 1), 33, 528),  # 17 parts would make 272 programs, of which 8 wait for the others
        ((256, 197, 12, 64), (1, 12), 4, 768),  # three rounds of 64 samples; one part would take a round of 256
        ((2, 197, 12, 64), (2, 1), 6, 192),  # two heads each; one each would make two rounds
        ((8, 197, 12, 64), (8, 12), 1, 1536),  # nothing to add up
        ((256, 1025, 16, 64), (1, 16), 1, 4624),
    ],
)
def test_gradients_of_masks_fill_a_gpu(images, mask, parts, programs, monkeypatch):
    """The grid on a GPU of 132 multiprocessors, each with room for two programs."""
    from fastvit.ops.attention import mask_launch
    from fastvit.ops.runtime import launch
    from fastvit.ops.runtime.backend import Path
    from fastvit.ops.runtime.call import UNKEPT

    monkeypatch.setattr(devices, "without_gpu", 132)
    launched = []
    q = torch.empty(images, dtype=torch.bfloat16, device="meta")
    B, N, H, _ = images
    lse = torch.empty(B, H, 2, N, device="meta")
    with launch.launching(lambda kernel, programs, tensors, *_: launched.append((kernel.__name__, programs, tensors))):
        bias = torch.empty(*mask, N, N, dtype=torch.bfloat16, device="meta")
        *_, dmask = mask_launch.attention_bwd_with_mask(
            q, q, q, q, bias, q, lse, None, 0.125, 0.0, call=UNKEPT[Path.TRITON]
        )
    assert (dmask.shape, dmask.dtype) == (bias.shape, bias.dtype)
    (_, grid, tensors), *sums = launched[2:]
    assert grid == programs
    assert tensors[-1].shape == (parts, mask[0] * mask[1], N, -(-N // 16) * 16)
    assert tensors[-1].dtype is (torch.bfloat16 if parts == 1 else torch.float32)
    assert [name for name, *_ in sums] == ["column_sum_kernel"] * (parts > 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_blocks_of_scores(kv_heads, dtype, device, monkeypatch):
    """On ATen: several samples, heads or queries at a time change neither a value, nor what is dropped, nor a gradient,
    the mask's among them, which samples share."""
    tensors = draw_qkv(3, 20, 4, 16, kv_heads=kv_heads, dtype=dtype, device=device)
    tensors["attn_mask"] = drawn(4, 20, 20, kind=torch.float32, device=device)
    runs = []
    for scores in (3 * 4 * 400, 2 * 4 * 400, 2 * 400, 7 * 20, 1):
        monkeypatch.setattr(aten, "_BYTES", scores * 4)
        with ops.use_backend("aten"):
            torch.manual_seed(3)
            o = ops.attention(**tensors, dropout_p=0.3)
            runs.append((o, *torch.autograd.grad(o, list(tensors.values()), tensors["q"].detach())))
    tolerance = 1e-5 if dtype is torch.float32 else 4e-2
    for other in runs[1:]:
        torch.testing.assert_close(other, runs[0], atol=tolerance, rtol=tolerance)


def test_packed(backend, device):
    tensors = tensors_of({"qkv": (2, 18, 3, 2, 16), "attn_mask": (2, 18, 18)}, torch.float32, device)
    assert_op_as_accurate(ops.attention_qkvpacked, attention_qkvpacked, tensors)
    assert_freezing_changes_no_other_gradient(ops.attention_qkvpacked, tensors, [{"qkv"}, {"attn_mask"}])


@pytest.mark.parametrize("of", ["plain", "qk_norm", "a frozen rest"])
def test_after_a_norm(of, backend, device):
    """In layer_norm_attention; with norms of q and k the gradient is of what these made. Or nothing else wants one."""
    shapes = {"x": (2, 18, 16), "norm_weight": (16,), "norm_bias": (16,), "attn_mask": (2, 18, 18)}
    shapes |= {"qkv_weight": (96, 16), "qkv_bias": (96,), "proj_weight": (16, 32), "proj_bias": (16,)}
    tensors = tensors_of(
        shapes | ({"q_weight": (16,), "k_weight": (16,)} if of == "qk_norm" else {}), torch.float32, device
    )
    if of == "a frozen rest":
        tensors = {name: t.detach().requires_grad_(name == "attn_mask") for name, t in tensors.items()}
    options = {"num_heads": 2, "scale": 0.15}
    assert_op_as_accurate(
        lambda **t: gathered(ops.layer_norm_attention)(**t, **options),
        lambda **t: gathered(formulas.layer_norm_attention)(**t, **options),
        tensors,
    )


@pytest.mark.parametrize("hidden", ["first", "last", "all but two", "all"])
@pytest.mark.parametrize("kind", ["bool", "minus infinity", "lowest"])
def test_hidden_keys(kind, hidden, backend, device):
    """Across tiles; where a query sees none, it and what it would have changed get zeros, unless the lowest number
    hides them: that is finite, and all keys weigh the same."""
    N = 70
    visible = torch.ones(1, 1, N, N, dtype=torch.bool, device=device)
    which = {"first": slice(0, 33), "last": slice(33, N), "all but two": slice(2, N), "all": slice(0, N)}[hidden]
    visible[..., which] = False
    visible[..., 3, :] = True  # but a query
    lowest = -torch.inf if kind == "minus infinity" else torch.finfo(torch.float32).min
    mask = visible if kind == "bool" else torch.zeros(visible.shape, device=device).masked_fill(~visible, lowest)
    tensors = draw_qkv(1, N, 2, 16, device=device)
    assert_op_as_accurate(
        lambda **t: ops.attention(**t, attn_mask=mask), lambda **t: eager(**t, attn_mask=mask, empty_rows=True), tensors
    )
    if hidden == "all" and kind != "lowest":
        assert not ops.attention(**tensors, attn_mask=mask)[:, 4:].any()


@pytest.mark.parametrize("N", [5, 17, 70])
@pytest.mark.parametrize("fill", [-1e9, -65504.0, torch.finfo(torch.float32).min, 1e9])
def test_rows_whose_keys_all_have_a_huge_number(fill, N, backend, device):
    """A padded sample and a padded query: the weights sum to one, and gradients are those of these weights.
    Integers, so that scores and mask have the same sum in any order."""
    tensors = tensors_of(dict.fromkeys("qkv", (2, N, 1, 16)), torch.float32, device, "integer")
    mask = torch.zeros(2, 1, N, N, device=device)
    mask[1] = mask[0, :, 3] = fill
    tensors["attn_mask"] = mask.requires_grad_()
    runs = []
    for function in (ops.attention, eager):
        o = function(**tensors, scale=0.125)
        do = inputs("normal", *o.shape, dtype=o.dtype, device=device, seed=5)
        fixed = function(**tensors | {"attn_mask": mask.detach()}, scale=0.125)
        of_fixed = torch.autograd.grad(fixed, [tensors[name] for name in "qkv"], do)
        runs.append((o, *torch.autograd.grad(o, list(tensors.values()), do), *of_fixed))
    torch.testing.assert_close(*runs, atol=1e-5, rtol=1e-4)
    ones = ops.attention(tensors["q"], tensors["k"], torch.ones_like(o), attn_mask=mask[:, :, :1])
    torch.testing.assert_close(ones, torch.ones_like(o))


def test_a_row_below_the_least_float32(device):
    """On ATen: of a float64 mask, it hides all keys of float32, also in a backward pass that computes weights again."""
    mask = torch.zeros(20, 20, dtype=torch.float64, device=device)
    mask[0] = -1e300
    for p in (0.0, 0.3):
        tensors = {**draw_qkv(1, 20, 2, 16, device=device), "attn_mask": mask.clone().requires_grad_()}
        with ops.use_backend("aten"):
            o = ops.attention(**tensors, dropout_p=p)
            gradients = torch.autograd.grad(o.sum(), list(tensors.values()))
        assert not o[:, 0].any()
        assert all(t.isfinite().all() for t in gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_of_the_lowest_number_in_16_bits(dtype, backend, device):
    mask = torch.zeros(2, 1, 33, 33, dtype=dtype, device=device)
    mask[1] = mask[0, :, 3] = torch.finfo(dtype).min
    check(draw_qkv(2, 33, 1, 16, dtype=dtype, device=device), mask.requires_grad_())


def test_what_is_hidden_changes_nothing(backend, device):
    """Not even NaN: padded tokens hold anything. Their own rows are garbage, as they are in PyTorch."""
    tensors = {name: t.detach() for name, t in draw_qkv(2, 40, 2, 16, device=device).items()}
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool, device=device)
    mask[1, ..., 25:] = False
    clean = ops.attention(**tensors, attn_mask=mask)
    tensors["k"][1, 25:] = 1e4
    assert torch.equal(ops.attention(**tensors, attn_mask=mask), clean)
    alone = ops.attention(*(t[1:, :25] for t in tensors.values()))
    torch.testing.assert_close(clean[1:, :25], alone, atol=2e-6, rtol=2e-6)


LAYOUTS = {
    "keys_first": lambda m: m.transpose(2, 3).contiguous().transpose(2, 3),
    "heads_last": lambda m: m.transpose(1, 3).contiguous().transpose(1, 3),
    "padded": lambda m: torch.cat([torch.full_like(m, torch.nan), m], 3)[..., m.shape[3] :],
    "rows_apart": lambda m: torch.stack([m, torch.full_like(m, torch.nan)], 3).flatten(2, 3)[:, :, ::2],
    "offset": lambda m: torch.cat([m.new_full((1,), torch.nan), m.flatten()])[1:].view_as(m),
    "expanded": lambda m: m[:1, :1].expand_as(m),
    "expanded_queries": lambda m: m[:, :, :1].expand_as(m),
    "expanded_keys": lambda m: m[..., :1].expand_as(m),
}


@pytest.mark.parametrize(("layout", "N"), zip(LAYOUTS, cycle([21, 48])))
def test_layouts(layout, N, backend, device):
    tensors = draw_qkv(2, N, 2, 16, device=device)
    tensors["attn_mask"] = LAYOUTS[layout](drawn(2, 2, N, N, kind=torch.float32, device=device))
    assert_layout_does_not_matter("attention", tensors, torch.clone, backend == "triton")


def test_dropout(backend, device):
    """With and without a mask, the same weights are dropped."""
    N, p = 40, 0.3
    tensors, fused = with_identities(draw_qkv(2, N, 2, N, device=device)), seeded(ops.attention, dropout_p=p)
    mask = drawn(1, 2, N, N, kind=torch.float32, device=device)
    with torch.no_grad():
        mask[:, :, 5] = torch.finfo(torch.float32).min  # all keys weigh the same
    factors = (fused(**tensors).detach().transpose(1, 2) != 0) / (1 - p)
    assert_op_as_accurate(fused, lambda **t: eager(**t, factors=factors), {**tensors, "attn_mask": mask})


def test_lse(backend, device):
    """The registered op's LSE is of scores and mask; if a query sees no key, exp(S - LSE) = 0 for any S."""
    q, k, v = (t.detach() for t in draw_qkv(2, 45, 2, 16, device=device).values())
    mask = drawn(2, 2, 45, 45, kind="bool", device=device)
    mask[1, :, 4] = False
    _, lse = registered.attention_fwd(q, k, v, mask, None, 0.3, 0.0)
    scores = q.double().transpose(1, 2) @ k.double().permute(0, 2, 3, 1) * 0.3
    exact = scores.masked_fill(~mask, -torch.inf).logsumexp(-1)
    assert (exact[1, :, 4] == -torch.inf).all()
    assert (lse[1, :, 4] > -torch.inf).all()
    exact[1, :, 4] = lse[1, :, 4].double()
    torch.testing.assert_close(lse, exact.float())


def test_one_key(backend, device):
    """Softmax over one key is constant, and no gradient reaches q and k but rounding; unless that key is hidden."""
    q, k, v = draw_qkv(2, 1, 2, 16, device=device).values()
    o = ops.attention(q, k, v, attn_mask=torch.tensor([True, False], device=device).view(2, 1, 1, 1))
    assert torch.equal(o, torch.stack([v[0], torch.zeros_like(v[0])]))
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
    assert torch.equal(dv, torch.stack([torch.ones_like(v[0]), torch.zeros_like(v[0])]))
    assert max(dq.abs().max(), dk.abs().max()) < 1e-5
    assert not dq[1].any()
    assert not dk[1].any()
