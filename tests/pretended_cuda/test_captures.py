"""`fastvit.graphs`: whatever ends a capture, memory and modes are as before, and the next call is captured."""

import gc
import itertools
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cuda_graphs_models import IMAGE, Ends, ours, replays
from device_trace import counts, problems, recorded
from torch import Tensor, nn

import fastvit


@pytest.fixture
def x() -> Tensor:
    return IMAGE.cuda()


def train(model: nn.Module, x: Tensor, calls: int = 4) -> None:
    for _ in range(calls):
        model(x).square().sum().backward()
        model.zero_grad()


def held() -> tuple[list[Any], int, int]:
    """Return pools of memory that belong to graphs, how many graphs there are, and how many captures go on."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    pools = {tuple(s["segment_pool_id"]) for s in torch.cuda.memory_snapshot()} - {(0, 0)}
    return sorted(pools), counts()["graphs"], counts()["captures"]


NOTHING: tuple[list[Any], int, int] = [], 0, 0


def forks(x: Tensor) -> None:
    """Let a stream wait for the captured one, and do not join them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x + 1


def waits_for_an_event(_: Tensor) -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


def fails(_: Tensor) -> None:
    raise KeyError("in Python")


def is_interrupted(_: Tensor) -> None:
    raise KeyboardInterrupt


WAYS: dict[str, Callable[[Tensor], object]] = {
    "stream": lambda _: torch.cuda.current_stream().synchronize(),
    "device": lambda _: torch.cuda.synchronize(),
    "event": waits_for_an_event,
    "value": lambda x: x.sum().item(),
    "host memory": lambda _: torch.ones(4).to("cuda"),
    "no memory": lambda _: torch.empty(1 << 42, dtype=torch.uint8, device="cuda"),
    "forks": forks,
    "error": fails,
    "interrupt": is_interrupted,
}


@pytest.mark.filterwarnings("ignore:.*runs as without fastvit.graphs")
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("way", WAYS)
def test_a_capture_that_ends(way: str, where: str, x: Tensor) -> None:
    assert held() == NOTHING
    model = Ends(WAYS[way], where).cuda()
    report = fastvit.graphs(model)
    if way == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            train(model, x)
    else:
        train(model, x)
        assert "its capture failed" in " ".join(report.reasons)
    assert not report.graphs
    fastvit.restore(model)
    del model, report
    assert held() == NOTHING
    later = ours().cuda()
    report = fastvit.graphs(later)
    train(later, x)
    assert replays(report) == [2]
    fastvit.restore(later)
    assert held() == NOTHING


def test_an_interrupt_before_the_backward_pass(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks on tensors hold nothing that the forward pass has saved."""
    model, register, count = ours().cuda(), Tensor.register_hook, itertools.count()
    fastvit.graphs(model)

    def register_one(t: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        if torch.cuda.is_current_stream_capturing() and next(count):
            raise KeyboardInterrupt
        return register(t, hook)

    monkeypatch.setattr(Tensor, "register_hook", register_one)
    with pytest.raises(KeyboardInterrupt):
        train(model, x)
    fastvit.restore(model)
    del model
    assert held() == NOTHING


def test_an_arena_whose_graphs_are_gone(x: Tensor) -> None:
    """PyTorch refuses a memory pool that all graphs have left."""
    model = ours().cuda()
    report = fastvit.graphs(model, keep=1)
    train(model, x)
    train(model.half(), x.half())
    train(model.float(), x)
    for calls in (x, x.clone()), (x[:1], x):  # two wait for their backward pass, of one kind and of two
        for _ in range(3):
            sum(model(each).sum() for each in calls).backward()
    train(model, x[:1])
    assert not report.reasons
    assert replays(report)[0] >= 2


def test_outputs_that_are_kept_hold_no_graphs(x: Tensor) -> None:
    """After their backward pass; before, only what it needs."""
    model = ours().cuda().train()
    fastvit.graphs(model)
    train(model, x)
    kept = [model(x)]
    kept[0].sum().backward(retain_graph=True)
    kept.append(model(x))
    fastvit.restore(model)
    assert held()[1] == 2, "forward and backward of the call that waits"
    with recorded() as events:
        kept[1].sum().backward()
    assert [e["e"] for e in events].count("graph_launch") == 1
    assert not problems(events)
    assert held() == NOTHING
    with pytest.raises(RuntimeError, match="the model has changed"):  # a second backward pass needs the model as it was
        kept[0].sum().backward()


def test_parameters_that_are_freed_before_the_backward_pass(x: Tensor) -> None:
    model = ours().cuda()
    fastvit.graphs(model)
    train(model, x)
    out = model(x)
    model.half()
    with pytest.raises(RuntimeError, match="the model has changed"):
        out.sum().backward()


def test_an_allocator_without_pools(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    model = ours().cuda()
    report = fastvit.graphs(model)
    train(model, x)
    assert not report.graphs
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in str(report)


@pytest.mark.parametrize("mode", ["warn", "error"])
def test_a_mode_that_forbids_waits(mode: str, x: Tensor) -> None:
    """It is for the model's own waits."""
    model, rounded = ours().cuda().train(), ours().cuda()
    reports = fastvit.graphs(model), fastvit.graphs(rounded, batches=[4])
    torch.cuda.set_sync_debug_mode(mode)
    try:
        train(model, x)
        with torch.no_grad():
            for _ in range(4):
                rounded(x)
        assert torch.cuda.get_sync_debug_mode() == ("default", "warn", "error").index(mode)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [replays(report) for report in reports] == [[2], [2]]
    assert not reports[0].reasons | reports[1].reasons


def test_waits_of_other_threads(x: Tensor) -> None:
    model = ours().cuda()
    report = fastvit.graphs(model)

    def wait(*_: Any) -> None:
        thread = threading.Thread(target=torch.zeros(8, device="cuda").cpu)
        thread.start()
        thread.join()

    model.blocks[0].norm1.weight.register_hook(wait)  # in the backward pass
    whole = model.head.forward
    model.head.forward = lambda x: (wait(), whole(x))[1]
    train(model, x)
    assert not report.reasons


def test_two_threads_that_warm_up(x: Tensor) -> None:
    """One does, and the other's call runs as without graphs."""
    models, both, show = [ours().cuda() for _ in range(2)], threading.Barrier(2), warnings.showwarning
    reports = [fastvit.graphs(model) for model in models]
    for model in models:
        whole = model.head.forward
        model.head.forward = lambda x, whole=whole: (next(meets, int)(), whole(x))[1]
    meets = iter([lambda: both.wait(60)] * 2)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(train, models, [x, x], [1, 1]))
    assert (torch.cuda.get_sync_debug_mode(), warnings.showwarning) == (0, show)
    assert sorted(sum(report.reasons.values()) for report in reports) == [0, 1]
    for model, report in zip(models, reports, strict=True):
        train(model, x, 5)
        assert replays(report)[0] >= 3
