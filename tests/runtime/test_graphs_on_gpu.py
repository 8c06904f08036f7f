"""`fastvit.graphs` on a GPU: results, gradients and random numbers are those of a copy without graphs, bit by bit.

`tests/cuda_graphs` has more cases, on a CPU. These need CUDA: captures that fail, generators, streams, memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cuda_graphs_models import (
    DROPOUT,
    SIZES,
    Ends,
    assert_equal,
    assert_passes_agree,
    assert_trains_as_without,
    checkpointed,
    frozen,
    of_gradients,
    ours,
    pair,
    train,
    twice,
    two_views,
    with_validation,
)
from graph_models import FunctionModule
from models import allocated_on_gpu, randomised
from torch import Tensor, nn

from fastvit.cuda_graphs import captured
from fastvit.eva import Eva

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CLOSE = 128 * torch.finfo(torch.float32).eps  # sums of 128 products, the hidden layer's, in another order


def vit(**options: Any) -> nn.Module:
    return randomised(ours(**options)).cuda()


def images(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed)).cuda()


def draws() -> Tensor:
    torch.manual_seed(3)
    return F.dropout(torch.randn(64, device="cuda"), 0.5)


def infer(model: nn.Module, graphed: nn.Module, x: Any) -> None:
    """Call both four times, and compare the results."""
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(graphed(x), model(x))


# ---- inference ----


def test_inference(recwarn: pytest.WarningsRecorder) -> None:
    """Results are copies; captures in inference mode leave others as they are; no mode that is switched on warns."""
    model, graphed, report = pair(vit(), training=False)
    with torch.inference_mode():
        results = [(graphed(x), model(x)) for x in (images(4, seed) for seed in range(6))]
    assert all(torch.equal(got, expected) for got, expected in results)
    infer(model, graphed, images(4))
    assert [(g.training, g.replays, g.bytes > 0) for g in report.graphs] == [(False, 4, True), (False, 2, True)]
    assert not report.reasons
    assert [str(w.message) for w in recwarn if "ynchroniz" in str(w.message)] == []


def uint8() -> tuple[nn.Module, Any]:
    return vit(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.25)), (60 * images(4) + 128).clamp(0, 255).to(torch.uint8)


def rotary() -> tuple[nn.Module, Any]:
    return randomised(Eva(**SIZES, use_rot_pos_emb=True)).cuda(), images(4)


def of_lists() -> tuple[nn.Module, Any]:
    return vit(), [images(1)[0], images(1)[0, :, :24]]


@pytest.mark.parametrize("made", [uint8, rotary, of_lists], ids=lambda f: f.__name__)
def test_a_first_call_that_waits(made: Callable[[], tuple[nn.Module, Any]]) -> None:
    """It puts tables onto the GPU, which later calls find there."""
    model, x = made()
    model, graphed, report = pair(model, training=False)
    infer(model, graphed, x)
    assert [g.replays for g in report.graphs] == [2]
    assert not report.reasons


def test_batch_sizes_in_between() -> None:
    model, graphed, report = pair(vit(), training=False, batches=(1, 2, 4, 8))
    with torch.no_grad():
        for size in (1, 2, 3, 4, 5, 6, 7, 8) * 4:
            got, expected = graphed(images(size)), model(images(size))
            assert got.shape == expected.shape
            assert (got - expected).abs().max() <= CLOSE * expected.abs().max()
    infer(model, graphed, images(8))
    assert len(report.graphs) == 4
    assert not report.reasons


def test_lists_of_images() -> None:
    model, graphed, report = pair(vit(), training=False, batches=(1, 2, 4))
    several = [images(1)[0], images(1, 1)[0, :, :16], images(1, 2)[0, :, :24, :16]]
    with torch.no_grad():
        for i in range(6):
            mixed = [*several[i % 3 :], *several[: i % 3]]
            got, expected = graphed(mixed), model(mixed)
            assert (got - expected).abs().max() <= CLOSE * expected.abs().max()
    assert [g.replays > 2 for g in report.graphs] == [True]
    assert not report.reasons


def test_streams() -> None:
    """A replay waits for the one before it on another stream."""
    model, graphed, report = pair(vit(), training=False)
    streams = torch.cuda.current_stream(), torch.cuda.Stream()
    batches, got = [images(64, seed) for seed in range(20)], []
    torch.cuda.synchronize()
    for i, x in enumerate(batches):
        with torch.cuda.stream(streams[i % 2]), torch.no_grad():
            got.append(graphed(x))
    torch.cuda.synchronize()
    with torch.no_grad():
        assert all(torch.equal(out, model(x)) for out, x in zip(got, batches, strict=True))
    assert [g.replays for g in report.graphs] == [18]


# ---- training ----


@pytest.mark.parametrize("loop", [{}, {"amp": True}, {"set_to_none": False}], ids=lambda loop: [*loop, "plain"][0])
@pytest.mark.parametrize(
    "make",
    [partial(vit, **DROPOUT), lambda: frozen(vit()), lambda: checkpointed(vit())],
    ids=["dropout", "frozen", "checkpoints"],
)
def test_training(make: Callable[[], nn.Module], loop: dict[str, Any]) -> None:
    report = assert_trains_as_without(make(), **loop)
    assert [(g.training, g.replays, g.bytes > 0) for g in report.graphs] == [(True, 6, True)]
    assert not report.reasons


def test_checkpoints_that_draw() -> None:
    with pytest.warns(UserWarning, match="has checkpoints"):
        report = assert_trains_as_without(checkpointed(vit(**DROPOUT)))
    assert not report.graphs


def plain() -> nn.Module:
    """Modules of PyTorch only, whose gradients have gradients."""
    layers = {"body": nn.Linear(3072, 16), "head": nn.Linear(16, 5)}
    return FunctionModule(lambda m, x: m.head(F.gelu(m.body(x.flatten(1)))), **layers)


@pytest.mark.parametrize(
    ("make", "backward"),
    [(partial(vit, **DROPOUT), f) for f in (two_views, with_validation, twice)]
    + [(plain, twice), (plain, of_gradients)],
)
def test_backward_passes(make: Callable[[], nn.Module], backward: Callable[..., Any]) -> None:
    assert_passes_agree(make().cuda(), backward)


def test_distributed_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients come in groups, while the process group reduces those before."""
    monkeypatch.setattr(captured, "_GROUP_BYTES", 20_000)
    backend = "nccl" if dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, graphed, report = pair(vit(**DROPOUT))
        losses = train(nn.parallel.DistributedDataParallel(graphed))
    finally:
        dist.destroy_process_group()
    assert all(map(torch.equal, losses, train(model)))
    assert_equal(model, graphed)
    (kind,) = report._parts[0].captured
    assert len(kind.groups) > 2
    assert not report.reasons


# ---- what cannot be captured ----


def reads(m: Any, x: Tensor) -> Tensor:
    """Wait for the GPU."""
    x = F.dropout(m.body(x.flatten(1)))
    return x if x.sum().item() > 0 else -x


def test_an_operation_that_waits() -> None:
    before = draws()
    with pytest.warns(UserWarning, match=r"test_graphs_on_gpu\.py:\d+ waits for the GPU"):
        report = assert_trains_as_without(FunctionModule(reads, body=nn.Linear(3072, 8)).cuda())
    assert not report.graphs
    assert torch.equal(draws(), before)


def waits(_: Tensor) -> None:
    """Wait for the GPU, which CUDA does not allow in a capture."""
    torch.cuda.current_stream().synchronize()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_capture_that_fails(where: str) -> None:
    """Random numbers, graphs that were there before, and later captures go on as if it had not been tried."""
    before = draws()
    earlier = pair(vit(**DROPOUT))
    train(earlier[0], 2), train(earlier[1], 2)
    model, graphed, report = pair(Ends(waits, where).cuda())
    with pytest.warns(UserWarning, match="its capture failed at"):
        losses = train(graphed)
    assert all(map(torch.equal, losses, train(model)))
    assert_equal(model, graphed)
    assert not report.graphs
    assert torch.equal(draws(), before)
    for plain, other, of in (earlier, pair(vit(**DROPOUT))):
        assert all(map(torch.equal, train(other), train(plain)))
        assert_equal(plain, other)
        assert len(of.graphs) == 1
    if where == "backward":
        infer(model.eval(), graphed.eval(), images(4))
        assert [g.replays for g in report.graphs] == [2]


# ---- memory ----


def test_replays_keep_no_memory() -> None:
    _, graphed, report = pair(vit(**DROPOUT))

    def run(steps: int) -> int:
        for seed in range(steps):
            graphed(images(4, seed)).square().sum().backward()
            graphed.zero_grad()
        return allocated_on_gpu()

    before = run(5)
    assert run(100) <= before
    assert [g.replays for g in report.graphs] == [103]
