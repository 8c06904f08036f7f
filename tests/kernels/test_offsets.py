"""Offsets beyond 2**31 elements. Memory is reserved but not committed, so that only pages that are touched use any. An
offset that wraps stays inside the reservation and reads zeros: a wrong result, not a crash."""

import importlib
import math
import mmap
from typing import NamedTuple

import numpy as np
import pytest
import torch
from op_cases import FORMULAS, ROWS, function, made, outputs_and_gradients, outputs_of
from oracle import inputs

from fastvit import ops

RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
FAR = 1_100_000_003  # twice this does not fit int32

pytestmark = pytest.mark.usefixtures("triton_backend")


# A tensor [B, N, H, d] and the stride of one of its dimensions.
HEADS = pytest.mark.parametrize(
    ("shape", "dim", "stride"),
    [
        ((3, 20, 1, 16), 0, FAR),
        ((1, 20, 3, 16), 2, FAR),
        ((1, 530, 1, 16), 1, 1 << 22),
        ((1, 130, 1, 16), 1, 1 << 25),  # offsets inside a tile would wrap: the launcher copies
    ],
    ids=["batch", "heads", "tokens", "tokens-copied"],
)


@pytest.fixture(autouse=True)
def _new_memory_is_not_filled():
    torch.utils.deterministic.fill_uninitialized_memory = False


def reserved(count, dtype, device):
    if device.type == "cuda":
        return torch.zeros(count, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize, flags=RESERVE), dtype=dtype)


def far_apart(t, dim, stride):
    """Copy t so that its elements along dim are `stride` apart, with reserved memory where a wrapped offset lands."""
    steps = t.shape[dim] - 1
    inner = t.select(dim, 0).contiguous()
    strides = list(inner.stride())
    strides.insert(dim, stride)
    front = steps * stride
    out = reserved(front + steps * stride + inner.numel(), t.dtype, t.device).as_strided(t.shape, strides, front)
    return out.copy_(t)


def spread(key, t, dim, stride=FAR):
    """Spread a dimension of more than two elements. A row, and a patch of an image, is read as a whole."""
    whole = t.dim() - 1 if key not in ("image", "pixels") else 1
    return far_apart(t, dim, stride) if dim < whole and t.shape[dim] > 2 else t


OPS_OF_FORMULAS = {ROWS[name].op for name in FORMULAS}
EVERY_OP = FORMULAS + [name for name, row in ROWS.items() if row.op not in OPS_OF_FORMULAS]


@pytest.mark.parametrize("name", EVERY_OP)
def test_every_op(name, device):
    """All tensors of a call, and the gradients of its results, are spread at once, one dimension after the other. Rows
    are those of one sample: launchers copy rows of several samples that do not follow each other."""
    if device.type == "cuda":
        pytest.skip("reserves more memory than a GPU has")

    def run(dim):
        leaves = {key: spread(key, t.detach(), dim).requires_grad_(t.requires_grad) for key, t in tensors.items()}
        op = lambda **given: tuple(Spread.apply(y, dim) for y in outputs_of(function(name)(**given)))  # noqa: E731
        outputs, gradients = outputs_and_gradients(op, leaves)
        return *outputs, *gradients.values()

    windows = "windows" in name  # which are many programs
    heads = 1 if windows else 2 if name.startswith("layer_norm_attention") else 3
    for B, dims in ((3, [0][windows:]), (1, [1, 2, 3])):
        tensors = made(name, B, 6, device, H=heads)
        used = [dim for dim in dims if any(dim < t.dim() - 1 and t.shape[dim] > 2 for t in tensors.values())]
        near = run(9) if used else ()  # no tensor has a dimension 9
        for dim in used:
            assert all(map(torch.equal, run(dim), near)), f"dimension {dim}"


class Spread(torch.autograd.Function):
    """Return the tensor. Its gradient is spread, with a stride of its own."""

    @staticmethod
    def forward(ctx, y, dim):
        ctx.dim = dim
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        return spread("dy", dy, ctx.dim, FAR + 10_000), None


def results(op, tensors, dy):
    """Return output and gradients. The memory of tensors that are far apart is freed with the results."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = op(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def check(op, shapes, far, dim, stride, dtype, device):
    """Check that results and gradients of op are the same if the tensors with numbers in `far` are spread out. shapes:
    of op's tensors, then of the gradient of the output."""
    near = [inputs("integer", *s, dtype=dtype, device=device, seed=i) for i, s in enumerate(shapes)]
    apart = [far_apart(t, dim, stride) if i in far else t for i, t in enumerate(near)]
    for got, want in zip(results(op, apart[:-1], apart[-1]), results(op, near[:-1], near[-1]), strict=True):
        assert torch.equal(got, want)


@HEADS
def test_attention(shape, dim, stride, device):
    """float32 takes the backward kernels for long sequences; 16-bit types that for short ones, too."""
    if dim != 1:
        for dtype in (torch.bfloat16, torch.float32):
            check(ops.attention, [shape] * 4, range(4), dim, stride, dtype, device)
        return
    few = (1, 20, 1, 16)  # so that either queries or keys need many programs
    check(ops.attention, [shape, few, few, shape], (0, 3), dim, stride, torch.bfloat16, device)
    check(ops.attention, [few, shape, shape, few], (1, 2), dim, stride, torch.bfloat16, device)


class Touched(NamedTuple):
    loaded: set[int]
    stored: set[int]
    fresh: list[torch.Tensor]


@pytest.fixture
def touched(monkeypatch, device):
    """Record the addresses that the last program of every launch loads from and stores to, and the memory that
    launchers allocate. That memory is only reserved: loads give zeros, nothing is stored, no other program runs."""
    if device.type == "cuda":
        pytest.skip("addresses are recorded in the interpreter")
    from triton.runtime import interpreter

    accesses = Touched(set(), set(), [])
    original = torch.Tensor.new_empty

    def new_empty(like, shape, dtype=None, **of_the_interpreter):
        if of_the_interpreter or 0 in shape:
            return original(like, shape, dtype=dtype, **of_the_interpreter)
        accesses.fresh.append(reserved(math.prod(shape), dtype or like.dtype, like.device).view(shape))
        return accesses.fresh[-1]

    def load(at, mask, *_):
        accesses.loaded.update(at.data[mask.data].tolist())
        dtype = at.get_element_ty()
        return interpreter.TensorHandle(np.zeros(at.data.shape, interpreter._get_np_dtype(dtype)), dtype)

    def store(at, value, mask, *_):
        accesses.stored.update(at.data[mask.data].tolist())

    # The interpreter loops over programs with range(n); loops of kernels have two or three arguments.
    last = lambda *bounds: [bounds[0] - 1] if len(bounds) == 1 else range(*bounds)  # noqa: E731
    monkeypatch.setattr(interpreter, "range", last, raising=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "create_masked_load", load)
    monkeypatch.setattr(interpreter.interpreter_builder, "create_masked_store", store)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    for module in ("launch", "softmax_launch"):
        launch = importlib.import_module(f"fastvit.ops.attention.{module}")
        monkeypatch.setattr(launch, "empty_like", lambda x: new_empty(x, x.shape))
    return accesses


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((9, 2, 1 << 19, 256), torch.bfloat16),
        ((2, 2, 1 << 22, 256), torch.bfloat16),
        ((2, 2, 1 << 24, 64), torch.bfloat16),
        ((1 << 30, 3, 1, 16), torch.bfloat16),
        ((1 << 30, 3, 1, 16), torch.float32),
    ],
    ids=["output", "sample", "sample-short", "statistics-short", "statistics"],
)
def test_attention_of_many_heads(shape, dtype, touched, device):
    """Check that the last program stores the last element of outputs and gradients, and loads the last statistics,
    where the output, one sample of it, or the LSE has more than 2**31 elements."""
    d = shape[-1]
    x = torch.ones(d, dtype=dtype).expand(shape)
    _, lse = torch.ops.fastvit.attention_fwd(x, x, x, None, None, 2**-8, 0.0)
    torch.ops.fastvit.attention_bwd(x, x, x, x, None, x, lse, None, 2**-8, 0.0)
    assert len(touched.fresh) in (5, 6)  # o, LSE, three gradients; statistics if there are two backward kernels
    for t in touched.fresh:
        last = t.data_ptr() + (t.numel() - 1) * t.itemsize
        assert last in touched.stored
        assert last in touched.loaded or t.shape[-1] == d


def test_linear(device):
    """Tiles of rows far apart."""
    dtype = torch.bfloat16

    def linear(x, weight, residual):
        return ops.linear(x, weight, residual=residual)

    check(linear, [(530, 16), (24, 16), (530, 24), (530, 24)], (0, 2, 3), 0, 1 << 22, dtype, device)
    # offsets inside a tile of the epilogue would wrap: the launcher copies
    check(linear, [(70, 16), (24, 16), (70, 24), (70, 24)], (2,), 0, 1 << 26, dtype, device)


OPS = torch.ops.fastvit


def test_pre_activation(device):
    shapes = (70, 16), (16, 24), (70, 48), (70, 24)
    dy, weight, pre, dh = (torch.randn(s, dtype=torch.bfloat16, device=device) for s in shapes)
    for call, width in (
        (lambda pre: OPS.linear_dact(dy, weight, pre, "gelu")[0], 24),
        (lambda pre: OPS.linear_dact(dy, weight, pre, "gelu")[0], 48),
        (lambda pre: OPS.act_bwd(dh, pre, "gelu")[0], 48),
        (lambda pre: OPS.gated_act(pre, "gelu"), 48),
    ):
        near = pre[:, :width].contiguous()
        assert torch.equal(call(far_apart(near, 0, 1 << 26)), call(near))


@HEADS
def test_rotary_and_qk_norm(shape, dim, stride, device):
    table = inputs("integer", 1, 1, shape[1] - 1, 16, dtype=torch.float32, device=device)
    rotary = ops.Rotary(table, table + 1, 1)
    check(lambda x: ops.rotary(x, rotary), [shape] * 2, (0, 1), dim, stride, table.dtype, device)
    norm = ops.Norm(inputs("normal", 16, dtype=torch.float32, device=device, seed=3), kind="rms")

    def both(q, k):
        return torch.cat(ops.qk_norm(q, k, norm, norm, rotary), -1)

    check(both, [shape, shape, (*shape[:-1], 32)], (0, 1), dim, stride, table.dtype, device)


def test_gated_mlp(device):
    """Rows of one weight far apart, so that the two weights have different strides."""

    def mlp(x, gate, value, weight):
        return ops.mlp(x, (gate, value), None, weight, None, activation="swiglu")

    shapes = [(3, 16), (530, 16), (530, 16), (16, 530), (3, 16)]
    for weight in (1, 2):
        check(mlp, shapes, (weight,), 0, 1 << 22, torch.bfloat16, device)
