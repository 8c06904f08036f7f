"""Calls launch the same in Python, recorded, and replayed in C; on the current stream; and write to nothing else."""

import functools
import gc
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from device_trace import OPS, canonical, pointers, problems, recorded, stubs
from known_models import MODELS, built
from library_models import output_of
from models import allocated_on_gpu
from op_cases import ROWS, function, made, outputs_of, wanted
from replaying import in_python, replays
from torch import Tensor

import fastvit
from fastvit.kernels import _attention_hopper_configs, _configs
from fastvit.modules import positions
from fastvit.ops import use_backend
from fastvit.ops.attention import hopper
from fastvit.ops.runtime import call


class Calls:
    """Runs calls, and compares what they launch with the first."""

    def __init__(self) -> None:
        self.in_order = True
        self.first: list[Any] | None = None
        self.held: list[Tensor] = []  # results of earlier calls

    def run(self, function: Any, known: dict[str, Tensor | None]) -> None:
        """function: returns results. known: tensors from before, by name."""
        stream = torch.cuda.current_stream()
        known = {name: t for name, t in known.items() if t is not None}
        with recorded() as events:
            results = function()
        assert not problems(events)
        assert not stubs(events)
        ops = [e for e in events if e["e"] in OPS]
        touched = {p for e in ops for p in pointers(e)}
        ranges = [(t.data_ptr(), t.nbytes) for t in self.held]
        assert not any(start <= p < start + size for p in touched for start, size in ranges)
        number = {e["s"] for e in ops}
        assert len(number) == 1
        assert (number == {0}) == (stream == torch.cuda.default_stream())
        launched: list[Any] = [op[:-1] for op in canonical(events, known)]  # without the stream
        if not self.in_order:
            launched = sorted(re.sub(r"#\d+", "#", str(op)) for op in launched)
        self.first = self.first or launched
        assert launched == self.first
        self.held += [t.detach() for t in results if t is not None]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # fills count as launches
    with call.forgotten():
        yield Calls()


@pytest.fixture(scope="module")
def side() -> torch.cuda.Stream:
    """A stream that has its workspaces of cuBLAS and cuBLASLt, as the current one, in this thread and in autograd's."""

    def multiply(a: Tensor) -> Tensor:
        return torch.addmm(a[0], a, a) + a @ a  # cuBLASLt, of which torch 2.11 has workspaces apart, and cuBLAS

    side = torch.cuda.Stream()
    for stream, dtype in itertools.product((torch.cuda.current_stream(), side), (torch.float32, torch.bfloat16)):
        with torch.cuda.stream(stream):
            a = torch.zeros(8, 8, device="cuda", dtype=dtype, requires_grad=True)
            product = multiply(a)
            product.register_hook(lambda g, a=a: multiply(a))
            product.sum().backward()
    return side


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "both passes"])
@pytest.mark.parametrize("name", ROWS)
def test_ops(name: str, gradients: bool, calls: Calls, side: torch.cuda.Stream) -> None:
    check_op(name, gradients, calls, side, torch.float32)


def check_op(
    name: str, gradients: bool, calls: Calls, side: torch.cuda.Stream, dtype: torch.dtype, N: int = 18, d: int = 16
) -> None:
    device, op = torch.device("cuda"), function(name)
    sets = [made(name, 2, N, device, dtype, d=d) for _ in range(2)]
    with use_backend("triton", strict=True), torch.set_grad_enabled(gradients):
        douts = [torch.zeros_like(t) for t in outputs_of(op(**sets[0]))]  # a first call may make tables

        def results(tensors: dict[str, Any]) -> list[Tensor]:
            outputs = outputs_of(op(**tensors))
            return (
                [*outputs, *torch.autograd.grad(outputs, [*wanted(tensors).values()], douts)] if gradients else outputs
            )

        gc.collect()
        memory = allocated_on_gpu()
        streams = [torch.cuda.current_stream()] * 3 + [side] * 2
        with in_python():
            calls.run(lambda: results(sets[0]), sets[0])
        with replays() as replayed:
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    calls.run(lambda i=i: results(sets[i % 2]), sets[i % 2])
        assert all(replayed)
        assert len(replayed) == (4 + 4 * gradients)
        calls.held.clear()
        assert allocated_on_gpu() == memory


@pytest.mark.parametrize(
    ("name", "N", "kernel"),
    [
        ("linear gelu", 18, "linear_fwd"),
        ("linear residual", 18, "linear_fwd"),
        ("mlp gelu", 18, "linear_fwd"),
        ("layer_norm_attention qk_norm", 100, "attention_bwd"),
        ("layer_norm_attention qk_norm", 150, "attention_fwd_short"),
        ("layer_norm_attention qk_norm", 1000, "attention_fwd_long"),
    ],
)
def test_ops_in_gluon(
    name: str, N: int, kernel: str, calls: Calls, side: torch.cuda.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their descriptors hold the addresses of each call; a graph's those of its capture."""
    kernel = f"{kernel}_hopper_kernel"
    monkeypatch.setattr(_configs, "takes_turns", lambda *_: True)
    for choice in ("attention_hopper", "attention_bwd_hopper"):
        config = functools.partial(getattr(_attention_hopper_configs, choice), heads_per_sm=1e6)
        monkeypatch.setattr(hopper, choice, lambda n, d, _, config=config: config(n, d))
    check_op(name, True, calls, side, torch.bfloat16, N, 64)
    assert re.search(kernel + ".*linear_dact_hopper_kernel" * ("mlp" in name), str(calls.first))
    tensors, graph = made(name, 2, N, torch.device("cuda"), torch.bfloat16, d=64), torch.cuda.CUDAGraph()

    def step() -> None:
        outputs = outputs_of(function(name)(**tensors))
        torch.autograd.grad(outputs, [*wanted(tensors).values()], [torch.zeros_like(o) for o in outputs])

    step()  # compiles
    with recorded() as captured, torch.cuda.graph(graph):
        step()
    with recorded() as replayed:
        graph.replay()
    assert not problems(captured + replayed)
    counts = [[e.get("name") for e in events].count(kernel) for events in (captured, replayed)]
    assert counts[0] == counts[1] > 0


# With other inputs than images, shapes depend on numbers that a kernel computes
@pytest.mark.parametrize("name", [name for name, row in MODELS.items() if row.inputs is None and name != "V-JEPA 2"])
def test_accelerated_models(name: str, calls: Calls) -> None:
    """A step under autocast, in Python and replayed. Where it is recorded, autograd adds gradients out of place; casts
    of gradients come in another order."""
    calls.in_order = False
    known = built(name, torch.device("cuda"))
    model, parameters = known.model, dict(known.model.named_parameters())

    def step() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            out = output_of(known.call(model))
        gradients = torch.autograd.grad(out, [*parameters.values()], torch.zeros_like(out), allow_unused=True)
        return [out, *(g for g in gradients if g is not None)]

    fastvit.accelerate(model)
    try:
        step()  # makes tables
        with in_python():
            calls.run(step, parameters | known.inputs)
        with replays() as replayed:
            step(), step()
            for _ in range(3):
                calls.run(step, parameters | known.inputs)
        assert replayed
        assert all(replayed)
    finally:
        fastvit.restore(model)


def test_memory_of_a_forgotten_table_waits_for_its_readers() -> None:
    made: dict[Any, Tensor] = {}

    def table(i: int) -> Tensor:
        return positions.remembered(i, torch.device("cuda", 0), lambda: torch.zeros(1000, device="cuda"), made)

    first, *_ = [table(i).data_ptr() for i in range(positions._MOST)]
    torch.cuda._sleep(int(2e9))
    table(0) * 2  # the first one
    others = [table(1000 + i) for i in range(positions._MOST + 2)]
    assert not torch.cuda.current_stream().query(), "the table is still read"
    assert first not in [t.data_ptr() for t in others]
    torch.cuda.synchronize()
