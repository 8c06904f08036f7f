"""Models for the tests of `fastvit.graphs`, and what is compared of them."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fastvit
from fastvit.cuda_graphs import graphed_parts

IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))


def ours(**options: Any) -> fastvit.VisionTransformer:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    return fastvit.VisionTransformer(**sizes, **options).eval()  # type: ignore[arg-type]


class Reads(nn.Module):
    """Computes with what it holds: a function of its input and of that object."""

    def __init__(self, held: Any, read: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.linear, self.held, self.read = nn.Linear(4, 4), held, read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.linear(x), self.held)


def check(model: nn.Module, plain: nn.Module, *args: Any, calls: int = 4, **kwargs: Any) -> None:
    """Every call has the results of the model without graphs."""
    for _ in range(calls):
        torch.testing.assert_close(model(*args, **kwargs), plain(*args, **kwargs), rtol=0, atol=0)


def replays(report: Any) -> list[int]:
    return [graph.replays for graph in report.graphs]


def runs_plainly(model: nn.Module, call: Callable[[], Any], reason: str, calls: int = 5) -> None:
    """With one warning for all calls."""
    report = fastvit.graphs(model) if not any(graphed_parts(model)) else None
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(calls):
            call()
    messages = [str(w.message) for w in seen if "fastvit.graphs" in str(w.message)]
    assert len(messages) == 1
    assert reason in messages[0]
    assert report is None or (not report.graphs and reason in " ".join(str(report).split()))


def assert_equal(model: nn.Module, graphed: nn.Module) -> None:
    """Parameters, buffers and gradients."""
    state, other = model.state_dict(), graphed.state_dict()
    assert [name for name, t in state.items() if not torch.equal(t, other[name])] == []
    for (name, p), q in zip(model.named_parameters(), graphed.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name
