"""`fastvit.graphs` on a GPU: results, gradients and random numbers are those of a copy without graphs, bit by bit.

`tests/cuda_graphs` has more cases, on a CPU. These need CUDA: captures that fail, generators, streams, memory.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cuda_graphs_models import assert_equal
from models import randomised
from torch import Tensor, nn

import fastvit
from fastvit.cuda_graphs import captured
from fastvit.eva import Eva

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZES: dict[str, Any] = {
    "img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 5
}  # fmt: skip
DROPOUT: dict[str, Any] = {
    "pos_drop_rate": 0.1, "proj_drop_rate": 0.2, "attn_drop_rate": 0.2, "drop_path_rate": 0.5
}  # fmt: skip
CLOSE = 256 * torch.finfo(torch.float32).eps  # sums of 256 products, the hidden layer's, in another order


def vit(**options: Any) -> nn.Module:
    return randomised(fastvit.VisionTransformer(**SIZES, **options))


def frozen() -> nn.Module:
    model = vit()
    model.patch_embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


def checkpointed(**options: Any) -> nn.Module:
    model = vit(**options)
    model.set_grad_checkpointing()
    return model


def pair(model: nn.Module, device: torch.device, **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """A model, a copy of it with graphs, and their report."""
    model.to(device)
    graphed = copy.deepcopy(model)
    return model, graphed, fastvit.graphs(graphed, **options)


def images(count: int, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed)).to(device)


def draws(device: torch.device) -> Tensor:
    torch.manual_seed(3)
    return F.dropout(torch.randn(64, device=device), 0.5)


def infer(model: nn.Module, graphed: nn.Module, x: Any) -> None:
    """Call both four times, and compare the results."""
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(graphed(x), model(x))


def train(
    model: nn.Module, device: torch.device, steps: int = 4, amp: bool = False, set_to_none: bool = True
) -> list[Tensor]:
    """Take steps of two micro batches. Return the losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    scaler, losses = torch.amp.GradScaler(device.type, enabled=amp), []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad(set_to_none=set_to_none)
        for half in range(2):
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                out = model(images(4, device, seed=2 * step + half))
            loss = out.float().square().mean()
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.step(optimizer)
        scaler.update()
    return losses


# ---- inference ----


def test_inference(device: torch.device, recwarn: pytest.WarningsRecorder) -> None:
    """Results are copies; captures in inference mode leave others as they are; no mode that is switched on warns."""
    model, graphed, report = pair(vit().eval(), device)
    with torch.inference_mode():
        results = [(graphed(x), model(x)) for x in (images(4, device, seed) for seed in range(6))]
    assert all(torch.equal(got, expected) for got, expected in results)
    infer(model, graphed, images(4, device))
    assert [(g.training, g.replays, g.bytes > 0) for g in report.graphs] == [(False, 4, True), (False, 2, True)]
    assert not report.reasons
    assert [str(w.message) for w in recwarn if "ynchroniz" in str(w.message)] == []


def uint8(device: torch.device) -> tuple[nn.Module, Any]:
    return vit(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.25)), (60 * images(4, device) + 128).clamp(0, 255).to(torch.uint8)


def rotary(device: torch.device) -> tuple[nn.Module, Any]:
    return randomised(Eva(**SIZES, use_rot_pos_emb=True)), images(4, device)


def of_lists(device: torch.device) -> tuple[nn.Module, Any]:
    return vit(), [images(1, device)[0], images(1, device)[0, :, :24]]


@pytest.mark.parametrize("made", [uint8, rotary, of_lists], ids=lambda f: f.__name__)
def test_a_first_call_that_waits(made: Callable[..., tuple[nn.Module, Any]], device: torch.device) -> None:
    """It puts tables onto the GPU, which later calls find there."""
    model, x = made(device)
    model, graphed, report = pair(model.eval(), device)
    infer(model, graphed, x)
    assert [g.replays for g in report.graphs] == [2]
    assert not report.reasons


def test_batch_sizes_in_between(device: torch.device) -> None:
    model, graphed, report = pair(vit().eval(), device, batches=(1, 2, 4, 8))
    with torch.no_grad():
        for size in (1, 2, 3, 4, 5, 6, 7, 8) * 4:
            got, expected = graphed(images(size, device)), model(images(size, device))
            assert got.shape == expected.shape
            assert (got - expected).abs().max() <= CLOSE * expected.abs().max()
    infer(model, graphed, images(8, device))
    assert len(report.graphs) == 4
    assert not report.reasons


def test_lists_of_images(device: torch.device) -> None:
    model, graphed, report = pair(vit().eval(), device, batches=(1, 2, 4))
    several = [images(1, device)[0], images(1, device, 1)[0, :, :16], images(1, device, 2)[0, :, :24, :16]]
    with torch.no_grad():
        for i in range(6):
            mixed = [*several[i % 3 :], *several[: i % 3]]
            got, expected = graphed(mixed), model(mixed)
            assert (got - expected).abs().max() <= CLOSE * expected.abs().max()
    assert [g.replays > 2 for g in report.graphs] == [True]
    assert not report.reasons


def test_streams(device: torch.device) -> None:
    """A replay waits for the one before it on another stream."""
    model, graphed, report = pair(vit().eval(), device)
    streams = torch.cuda.current_stream(), torch.cuda.Stream()
    batches, got = [images(64, device, seed) for seed in range(20)], []
    torch.cuda.synchronize()
    for i, x in enumerate(batches):
        with torch.cuda.stream(streams[i % 2]), torch.no_grad():
            got.append(graphed(x))
    torch.cuda.synchronize()
    with torch.no_grad():
        assert all(torch.equal(out, model(x)) for out, x in zip(got, batches, strict=True))
    assert [g.replays for g in report.graphs] == [18]


def test_a_model_that_moves(device: torch.device) -> None:
    model, graphed, report = pair(vit().eval(), device)
    infer(model, graphed, images(4, device))
    model.half(), graphed.half()
    infer(model, graphed, images(4, device).half())
    state = {name: 1.5 * t for name, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True), graphed.load_state_dict(copy.deepcopy(state), assign=True)
    infer(model, graphed, images(4, device).half())
    assert [g.replays for g in report.graphs] == [2], "those of the present parameters are kept"
    assert not report.reasons


# ---- training ----


@pytest.mark.parametrize("loop", [{}, {"amp": True}, {"set_to_none": False}], ids=lambda loop: [*loop, "plain"][0])
@pytest.mark.parametrize(
    "make", [lambda: vit(**DROPOUT), frozen, checkpointed], ids=["dropout", "frozen", "checkpoints"]
)
def test_training(make: Callable[[], nn.Module], loop: dict[str, Any], device: torch.device) -> None:
    model, graphed, report = pair(make(), device)
    assert all(map(torch.equal, train(graphed, device, **loop), train(model, device, **loop)))
    assert_equal(model, graphed)
    assert [(g.training, g.replays, g.bytes > 0) for g in report.graphs] == [(True, 6, True)]
    assert not report.reasons


def test_checkpoints_that_draw(device: torch.device) -> None:
    model, graphed, report = pair(checkpointed(**DROPOUT), device)
    with pytest.warns(UserWarning, match="has checkpoints"):
        losses = train(graphed, device)
    assert all(map(torch.equal, losses, train(model, device)))
    assert_equal(model, graphed)
    assert not report.graphs


class Plain(nn.Module):
    """Modules of PyTorch only, whose gradients have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3072, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.body(x.flatten(1))))


def two_views(model: nn.Module, x: Tensor, y: Tensor) -> None:
    (model(x) - model(y)).square().sum().backward()


def with_validation(model: nn.Module, x: Tensor, y: Tensor) -> None:
    loss = model(x).square().sum()
    with torch.no_grad():
        model(y)
    loss.backward()


def twice(model: nn.Module, x: Tensor, y: Tensor) -> None:
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def of_gradients(model: nn.Module, x: Tensor, y: Tensor) -> None:
    x.requires_grad_()
    (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    dx.square().sum().backward()


@pytest.mark.parametrize(
    ("make", "backward"),
    [(lambda: vit(**DROPOUT), f) for f in (two_views, with_validation, twice)]
    + [(Plain, twice), (Plain, of_gradients)],
)
def test_backward_passes(make: Any, backward: Callable[..., None], device: torch.device) -> None:
    """The kind of call is captured before, and its other uses as often as they are captured, too."""
    model, graphed, report = pair(make(), device)
    train(model, device, 2), train(graphed, device, 2)
    for step in range(5):
        for each in (model, graphed):
            each.zero_grad()
            torch.manual_seed(step)
            backward(each, images(4, device, 1), images(4, device, 2))
        assert_equal(model, graphed)
    assert report.graphs


def test_distributed_data_parallel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients come in groups, while the process group reduces those before."""
    monkeypatch.setattr(captured, "_GROUP_BYTES", 50_000)
    backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, graphed, report = pair(vit(**DROPOUT), device)
        losses = train(nn.parallel.DistributedDataParallel(graphed), device)
    finally:
        dist.destroy_process_group()
    assert all(map(torch.equal, losses, train(model, device)))
    assert_equal(model, graphed)
    (kind,) = report._parts[0].captured
    assert len(kind.groups) > 2
    assert not report.reasons


# ---- what cannot be captured ----


class Reads(nn.Module):
    """Waits for the GPU in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3072, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.body(x.flatten(1)))
        return x if x.sum().item() > 0 else -x


def test_an_operation_that_waits(device: torch.device) -> None:
    before = draws(device)
    model, graphed, report = pair(Reads(), device)
    with pytest.warns(UserWarning, match=r"test_graphs_on_gpu\.py:\d+ waits for the GPU"):
        losses = train(graphed, device)
    assert all(map(torch.equal, losses, train(model, device)))
    assert_equal(model, graphed)
    assert not report.graphs
    assert torch.equal(draws(device), before)


def wait_if_captured(*_: Any) -> None:
    """Wait for the GPU, which CUDA does not allow in a capture, where no call before the capture has waited."""
    if torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().synchronize()


class WaitsWhenCaptured(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.body, self.where = nn.Linear(3072, 8), where

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.body(x.flatten(1)), training=self.training)
        if self.where == "forward":
            wait_if_captured()
        elif x.requires_grad:
            x.register_hook(wait_if_captured)
        return 2 * x


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_capture_that_fails(where: str, device: torch.device) -> None:
    """Random numbers, graphs that were there before, and later captures go on as if it had not been tried."""
    before = draws(device)
    earlier = pair(vit(**DROPOUT), device)
    train(earlier[0], device, 2), train(earlier[1], device, 2)
    model, graphed, report = pair(WaitsWhenCaptured(where), device)
    with pytest.warns(UserWarning, match="its capture failed at"):
        losses = train(graphed, device)
    assert all(map(torch.equal, losses, train(model, device)))
    assert_equal(model, graphed)
    assert not report.graphs
    assert torch.equal(draws(device), before)
    for plain, other, of in (earlier, pair(vit(**DROPOUT), device)):
        assert all(map(torch.equal, train(other, device), train(plain, device)))
        assert_equal(plain, other)
        assert len(of.graphs) == 1
    if where == "backward":
        infer(model.eval(), graphed.eval(), images(4, device))
        assert [g.replays for g in report.graphs] == [2]


# ---- memory ----


def test_replays_keep_no_memory(device: torch.device) -> None:
    _, graphed, report = pair(vit(**DROPOUT), device)

    def run(steps: int) -> int:
        for seed in range(steps):
            graphed(images(4, device, seed)).square().sum().backward()
            graphed.zero_grad()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before = run(5)
    assert run(100) <= before
    assert [g.replays for g in report.graphs] == [103]
