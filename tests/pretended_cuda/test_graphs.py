"""`fastvit.graphs`: what is captured is what runs without graphs, what is replayed is what was captured, and neither
writes to anything that the caller holds."""

import copy
from typing import Any

import pytest
import torch
from cuda_graphs_models import DROPOUT, IMAGE, ours, replays
from device_trace import OPS, Event, canonical, pointers, problems, recorded, stubs
from torch import Tensor, nn

import fastvit


@pytest.fixture(autouse=True)
def _nothing_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # captures have no fills


def named(model: nn.Module, **more: Tensor) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **more}


def captures_in(events: list[Event]) -> list[list[Event]]:
    """Return what happened between the beginning and the end of each capture."""
    kinds = [e["e"] for e in events]
    begins, ends = ([i for i, kind in enumerate(kinds) if kind == f"capture_{what}"] for what in ("begin", "end"))
    return [events[begin:end] for begin, end in zip(begins, ends, strict=True)]


def launched(events: list[Event], known: dict[str, Tensor]) -> list[Any]:
    return [op[:-1] for op in canonical(events, known)]  # without the stream


def as_launched(events: list[Event]) -> list[Any]:
    """Return ops with their addresses, to compare a capture with its replay."""
    names = ("e", "name", "grid", "args", "dst", "src", "n")
    return [[e.get(name) for name in names] for e in events if e["e"] in OPS]


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("options", [{}, DROPOUT], ids=["plain", "dropout"])
def test_captured_as_it_runs_and_replayed_as_captured(options: dict[str, Any], amp: bool) -> None:
    plain = ours(**options).cuda().train()
    model = copy.deepcopy(plain)
    report = fastvit.graphs(model)
    x, gradient = IMAGE.cuda(), torch.zeros(2, 5, device="cuda", dtype=torch.bfloat16 if amp else None)

    def step(model: nn.Module) -> tuple[list[Event], list[Event]]:
        for p in model.parameters():
            p.grad = None
        with recorded() as forward, torch.autocast("cuda", torch.bfloat16, enabled=amp):
            out = model(x)
        with recorded() as backward:
            out.backward(gradient)
        assert not problems(forward + backward)
        assert not stubs(forward + backward)
        return forward, backward

    without = [step(plain) for _ in range(3)][-1]
    of_model = [step(model) for _ in range(4)]
    (captured,) = report._parts[0].captured
    forward, backward = captures_in(of_model[2][0])
    known = named(model, x=captured.inputs[0], gradient=captured.out_gradients[0])
    expected = launched(without[0] + without[1], named(plain, x=x, gradient=gradient))
    assert launched(forward + backward, known) == expected
    for events, of in zip(of_model[3], (forward, backward), strict=True):
        assert as_launched([e for e in events if e.get("exec")]) == as_launched(of)
        outside = [e.get("name", "copy") for e in events if e["e"] in OPS and not e["exec"]]
        others = [name for name in outside if "copy" not in name.lower()]
        assert all("FillFunctor<long>" in name for name in others), "the generator's seed and offset"
    assert replays(report) == [2]


def test_a_loop() -> None:
    """Micro batches of two sizes, an optimizer, evaluation in between; all results and gradients are kept."""
    model = ours(**DROPOUT).cuda()
    report = fastvit.graphs(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    held: list[tuple[int, int]] = []
    kept: list[Tensor] = []

    def check(events: list[Event]) -> None:
        assert not problems(events)
        touched = {p for e in events if e["e"] in OPS for p in pointers(e)}
        assert not any(start <= p < start + size for p in touched for start, size in held)

    def keep(*tensors: Tensor) -> None:
        kept.extend(tensors)
        held.extend((t.data_ptr(), t.nbytes) for t in tensors)

    for step in range(8):
        with recorded() as events:
            model.train()
            outs = [model(IMAGE[: 1 + half].cuda()) for half in (step % 2, 1)]  # two calls wait
            sum(out.square().mean() for out in outs).backward()  # type: ignore[union-attr]
            optimizer.step()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            optimizer.zero_grad()
            with torch.no_grad():
                scores = model.eval()(IMAGE.cuda())
        check(events)
        keep(*(out.detach() for out in outs), scores, *gradients)
    assert not report.reasons
    assert len(report.graphs) >= 3
    assert {graph.training for graph in report.graphs} == {False, True}
