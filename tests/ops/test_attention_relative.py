"""ops.attention with decomposed relative positions, on both backends."""

import pytest
import torch
from attention_inputs import DTYPES
from op_cases import gathered, tensors_of
from oracle import assert_op_as_accurate

from fastvit import ops
from fastvit.ops.attention import aten, relative_aten
from fastvit.ops.runtime import backend as backends
from fastvit.study.accuracy.formulas import attention as eager
from fastvit.study.memory.peak import saved_bytes

# (queries, head_dim, rows of the grid, columns). One row and one column have gradients of rounding alone.
SHAPES = {
    "one tile": (12, 16, 3, 4),
    "a padded column and row": (37, 24, 5, 7),
    "a row a tile": (20, 72, 3, 32),
    "tiles of columns": (33, 16, 2, 40),
    "several tiles of queries and rows": (70, 32, 12, 8),
    "three queries": (3, 16, 3, 5),
}


def draw(M, d, height, width, dtype=torch.float32, B=2, H=2, *, device):
    shapes = {"q": (B, M, H, d), **dict.fromkeys("kv", (B, height * width, H, d))}
    return tensors_of({**shapes, "rows": (B, M, H, height), "columns": (B, M, H, width)}, dtype, device)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape, backend, device):
    assert_op_as_accurate(gathered(ops.attention), gathered(eager), draw(*SHAPES[shape], B=1, device=device))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_dtypes(dtype, backend, device):
    tensors = draw(37, 24, 5, 7, dtype, device=device)
    assert_op_as_accurate(gathered(ops.attention), gathered(eager), tensors)


def test_products_of_queries_and_tables(backend, device):
    """SAM makes them so: rows and columns have the layouts of einsum, and q gets a gradient from both. q, k and v are
    parts of one tensor; the gradient of the output has heads before tokens."""
    B, h, w, H, d = 2, 3, 5, 2, 16
    made = tensors_of(
        {"qkv": (B, h * w, 3, H, d), "of_rows": (h, h, d), "of_columns": (w, w, d)}, torch.float32, device
    )

    def attend(attention, qkv, of_rows, of_columns):
        q, k, v = qkv.unbind(2)
        grid = q.unflatten(1, (h, w))
        rows = torch.einsum("byxhc,ykc->byxhk", grid, of_rows).flatten(1, 2)
        columns = torch.einsum("byxhc,xkc->byxhk", grid, of_columns).flatten(1, 2)
        return attention(q, k, v, relative=ops.Relative(rows, columns), scale=0.3).transpose(1, 2)

    assert_op_as_accurate(lambda **t: attend(ops.attention, **t), lambda **t: attend(eager, **t), made)


@pytest.mark.parametrize("flash", [True, False])
def test_blocks_of_scores(flash, device, monkeypatch):
    """On ATen: several samples or queries at a time change no value, by PyTorch's kernel and by the formula."""
    tensors = draw(20, 16, 4, 8, B=3, device=device)
    monkeypatch.setattr(aten, "_FLASH", flash)
    runs = []
    for scores in (3 * 2 * 20 * 32, 2 * 20 * 32, 2 * 7 * 32, 32):
        monkeypatch.setattr(relative_aten, "_BYTES", scores * 4)
        with ops.use_backend("aten"):
            o = gathered(ops.attention)(**tensors)
            runs.append((o, *torch.autograd.grad(o, list(tensors.values()), tensors["q"].detach())))
    for run in runs[1:]:
        torch.testing.assert_close(run, runs[0], atol=1e-5, rtol=1e-5)


def test_saves_nothing_of_the_size_of_the_scores(device):
    """Nothing of the size of the scores is kept for the backward pass: q, k, v, o, two biases and the LSE."""
    B, h, w, H, d = 1, 8, 8, 2, 16
    tensors = draw(h * w, d, h, w, B=B, H=H, device=device)
    saved = saved_bytes(lambda: gathered(ops.attention)(**tensors), [])
    assert saved == 4 * B * H * h * w * (4 * d + h + w + 1)


@pytest.mark.skipif(not backends.HAVE_TRITON, reason="triton is not installed")
def test_float64_runs_on_aten(device):
    tensors = {name: t.detach().double() for name, t in draw(12, 16, 3, 4, device=device).items()}
    with ops.use_backend("triton", strict=True), pytest.raises(backends.KernelUnsupported, match=r"float64"):
        gathered(ops.attention)(**tensors)
    with ops.use_backend("aten"):
        torch.testing.assert_close(gathered(ops.attention)(**tensors), gathered(eager)(**tensors))
