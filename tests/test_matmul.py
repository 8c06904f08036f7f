"""Which matmuls of the CPU path are oneDNN's: as accurate as PyTorch's, and no observer sees them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_as_accurate
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from fastvit import ops
from fastvit.ops import _matmul
from fastvit.ops._matmul import input_gradient, linear

pytestmark = pytest.mark.skipif(_matmul._linear_pointwise is None, reason="a CPU or a PyTorch without oneDNN")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the inputs that oneDNN gets, whatever the amount of work."""
    shapes = []
    plain: Any = _matmul._linear_pointwise

    def record(x: Tensor, *args: Any) -> Any:
        shapes.append(tuple(x.shape))
        return plain(x, *args)

    monkeypatch.setattr(_matmul, "_linear_pointwise", record)
    monkeypatch.setattr(_matmul, "_LEAST", 0)
    return shapes


def operands(M: int = 17, K: int = 24, N: int = 40, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(M, K, **options), torch.randn(N, K, **options), torch.randn(N, **options)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 7, 5), (17, 24, 40), (197, 588, 65), (50, 192, 768)], ids=str)
def test_as_accurate_as_eager(shape: tuple[int, int, int], calls: list[Any]) -> None:
    x, weight, bias = operands(*shape)
    for b in (bias, None):
        exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
        assert_as_accurate(linear(x, weight, b), F.linear(x, weight, b), exact)
    dy = torch.randn(shape[0], shape[2])
    assert_as_accurate(input_gradient(dy, weight), dy @ weight, dy.double() @ weight.double(), factor=3.0)
    assert len(calls) == 3


def test_nan_stays_in_its_row(calls: list[Any]) -> None:
    x, weight, bias = operands()
    x[3, 5] = torch.nan
    for out in (linear(x, weight, bias), input_gradient(x, weight.t().contiguous())):
        assert out.isnan().any(1).nonzero().flatten().tolist() == [3]
    assert len(calls) == 2


class Logged(Tensor):
    pass


REFUSED: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "bfloat16": lambda x, w: (x.bfloat16(), w.bfloat16()),
    "float64": lambda x, w: (x.double(), w.double()),
    "strided input": lambda x, w: (x.repeat(1, 2)[:, : x.shape[1]], w),
    "strided weight": lambda x, w: (x, w.repeat(1, 2)[:, : w.shape[1]]),
    "subclass": lambda x, w: (x, w.as_subclass(Logged)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_left_to_pytorch(what: str, calls: list[Any]) -> None:
    x, weight, _ = operands()
    x, weight = REFUSED[what](x, weight)
    torch.testing.assert_close(linear(x, weight, None), F.linear(x, weight), rtol=0, atol=0)
    assert not calls


def test_switched_off_with_mkldnn(calls: list[Any]) -> None:
    x, weight, bias = operands()
    with torch.backends.mkldnn.flags(enabled=False):
        linear(x, weight, bias)
    assert not calls
    linear(x, weight, bias)
    assert len(calls) == 1


def test_little_work_is_left_to_pytorch() -> None:
    x, weight, _ = operands(17, 64, 256)
    assert not _matmul.by_onednn(x, weight)
    x, weight, _ = operands(17, 768, 768)
    assert _matmul.by_onednn(x, weight)


def test_observers_see_a_linear_layer(calls: list[Any]) -> None:
    x, weight, bias = operands()
    with FlopCounterMode(display=False) as counter:
        linear(x, weight, bias)
        input_gradient(torch.randn(17, 40), weight)
    assert counter.get_total_flops() == 2 * 2 * 17 * 24 * 40
    traced = make_fx(linear)(x, weight, bias)
    assert "mkldnn" not in traced.code
    compiled = torch.compile(linear, backend="eager", fullgraph=True)(x, weight, bias)
    mapped = torch.func.vmap(lambda row: linear(row[None], weight, bias)[0])(x)
    assert not calls
    for out in (compiled, mapped, traced(x, weight, bias)):
        torch.testing.assert_close(out, linear(x, weight, bias))


def test_ops_run_on_it(calls: list[Any]) -> None:
    """Forward passes and gradients of inputs; those of weights, where it gains nothing, stay with PyTorch."""
    x, weight, bias = operands(17, 24, 24)
    norm, shift = torch.ones(24), torch.zeros(24)
    fc1, fc1_bias, fc2 = torch.randn(96, 24), torch.randn(96), torch.randn(24, 96)
    layers: dict[str, tuple[Callable[[Tensor], Tensor], list[tuple[int, ...]]]] = {
        "linear": (lambda x: ops.linear(x, weight, bias), [(17, 24)] * 2),
        "linear gelu": (lambda x: ops.linear(x, weight, bias, activation="gelu"), [(17, 24)] * 2),
        "mlp": (lambda x: ops.mlp(x, fc1, fc1_bias, fc2, bias), [(17, 24), (17, 96)] * 2),
        "layer_norm_linear": (lambda x: ops.layer_norm_linear(x, norm, shift, weight, bias), [(17, 24)] * 2),
        # the gradients of q, k and v are columns of one buffer: only PyTorch takes them
        "three": (lambda x: ops.layer_norm_linear(x, norm, shift, [weight] * 3, [bias] * 3), [(17, 24)] * 3),
        "layer_norm_mlp": (
            lambda x: ops.layer_norm_mlp(x, norm, shift, fc1, fc1_bias, fc2, bias), [(17, 24), (17, 96)] * 2,
        ),
    }  # fmt: skip
    for name, (op, expected) in layers.items():
        calls.clear()
        leaf = x.clone().requires_grad_()
        op(leaf).sum().backward()
        assert calls == expected, name
