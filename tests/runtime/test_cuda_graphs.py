"""CUDA graphs: every op is captured and replayed, and so are models by torch.compile.

That nothing here needs the host is seen without a GPU as well: launchers and ops run on meta tensors (test_targets.py)
and on fake ones (tests/ops/promises), which have no values to be read.
"""

from collections.abc import Callable

import pytest
import torch
from cuda_graphs_models import ours
from op_cases import ROWS, function, made, outputs_of, wanted

Tensors = tuple[torch.Tensor, ...]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def captured(step: Callable[[], Tensors]) -> tuple[Callable[[], object], Tensors]:
    """Return a function that runs step() again, and the tensors that it writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and fills what is made once
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return graph.replay, outputs


def refill(tensors: dict[str, torch.Tensor | None]) -> None:
    with torch.no_grad():
        for t in tensors.values():
            if t is not None and t.is_floating_point():
                t.copy_(torch.randn_like(t))


def assert_same(got: Tensors, expected: Tensors) -> None:
    """But for what another algorithm of the vendor's matmul would change: another mask changes all."""
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ROWS)
def test_every_op(name: str, triton_backend: None, device: torch.device) -> None:
    """Forward and all gradients: replays see what its tensors hold then, and draw as a call in their place would."""
    tensors = made(name, 2, 18, device)
    leaves = list(wanted(tensors).values())
    gradients = [torch.randn_like(out) for out in outputs_of(function(name)(**tensors))]

    def step() -> Tensors:
        outputs = outputs_of(function(name)(**tensors))
        return *(out.detach() for out in outputs), *torch.autograd.grad(outputs, leaves, gradients)

    replay, outputs = captured(step)
    for seed in (1, 2):
        refill(tensors)
        torch.manual_seed(seed)
        replay()
        torch.manual_seed(seed)
        assert_same(outputs, step())


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_reduce_overhead(training: bool, triton_backend: None, device: torch.device) -> None:
    """torch.compile's own graphs."""
    torch.compiler.reset()
    vit, image = ours(init_values=0.1).to(device), torch.randn(2, 3, 32, 32, device=device)
    compiled = torch.compile(vit, mode="reduce-overhead", fullgraph=True)
    with torch.set_grad_enabled(training):
        for _ in range(3):
            image.normal_()
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(image).clone()
            torch.testing.assert_close(out, vit(image))
            if training:
                vit.zero_grad()
                compiled(image).square().sum().backward()
                got = [p.grad.clone() for p in vit.parameters()]
                expected = torch.autograd.grad(vit(image).square().sum(), list(vit.parameters()))
                torch.testing.assert_close(got, list(expected))
    torch.compiler.reset()  # it keeps graphs and their memory, which later tests count
