"""Planned memory against what allocators record, and against arithmetic."""

import itertools
import random
from typing import Any

import pytest
import torch
from study_models import CONFIG, SMALL, TIMM
from torch._subclasses.fake_tensor import FakeTensorMode

from fastvit import ops, study, zoo
from fastvit.ops.runtime import backend as backends
from fastvit.study.memory import growth, search
from fastvit.study.memory.allocations import Allocations, as_on
from fastvit.study.memory.plan import plan, trace_step
from fastvit.study.memory.scaled_step import ScaledStep
from fastvit.study.memory.search import largest_that_fits
from fastvit.study.memory.step import Setting, StepSpec
from fastvit.study.sources import find

NEEDS_TRITON = pytest.mark.skipif(not backends.HAVE_TRITON, reason="triton is not installed")
KINDS = pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=NEEDS_TRITON)])


ROTARY = "vit_small_patch16_dinov3"
CONFIGS = {
    "depth 10": (SMALL, CONFIG | {"depth": 10}),  # to hide up to 2.4 MB of scratch memory of matmuls and attention
    "rotary": (ROTARY, zoo.CONFIGS[ROTARY] | {"depth": 2, "embed_dim": 128, "num_heads": 2}),
}
MEASURED: dict[str, tuple[str, dict[str, Any]]] = {
    "training": (SMALL, {"image_sizes": (64,)}),

    "autocast": (
        "depth 10",
        {"image_sizes": (64,), "batches": (12,), "dtype": "amp", "optimizer": "sgd", "providers": ("fastvit",)},
    ),
    # ops that nobody observes copy no q, k and v; such copies would be the peak
    "rotary": (
        "rotary", {"image_sizes": (256,), "batches": (8,), "mode": "infer", "providers": ("fastvit",)},
    ),
    "a list": (SMALL, {"image_sizes": (64, 32, (48, 96)), "batches": (2,), "together": True}),
    "convolutions": ("study_models:with_neck", {"image_sizes": (64,), "providers": ("fastvit",)}),
    "convolutions without oneDNN": ("study_models:with_neck", {"image_sizes": (64,), "providers": ("fastvit",)}),
}  # fmt: skip


@pytest.mark.parametrize("row", MEASURED)
def test_planned_is_measured(row, device, monkeypatch):
    model, options = MEASURED[row]
    if model in CONFIGS:
        model, config = CONFIGS[model]
        monkeypatch.setitem(zoo.CONFIGS, model, config)
    if "convolutions" in row:  # on a CPU only: copies in oneDNN's layout, or of every window of the input
        options = options | {"device": "cpu", "optimizer": "none", "batches": (2,)}
    options = {"batches": (4,), "dtype": "float32", "device": device.type, "measured": True} | options
    with torch.backends.mkldnn.flags(enabled=row != "convolutions without oneDNN"):
        study_ = study.memory(model, **options)
    assert study_.points
    for point in study_.points:
        assert point.measured == pytest.approx(point.planned.peak, rel=0.05), point


@pytest.mark.parametrize(("kind", "mode"), [("cpu", "train"), pytest.param("cuda", "infer", marks=NEEDS_TRITON)])
def test_how_memory_grows(kind, mode):
    growth = study.memory(SMALL, image_sizes=(128, 256), batches=(2,), mode=mode, device=kind)
    assert all(p.attention <= p.activations <= p.planned.peak for p in growth.points)
    eager, fused = growth.exponents("eager"), growth.exponents("fastvit")
    assert eager["attention"] == pytest.approx(2.0, abs=0.05)
    assert fused["activations"] == pytest.approx(1.0, abs=0.05)
    assert "attention" not in fused
    assert all(p.attention == p.planned.attention == 0 for p in growth.of("fastvit"))
    one = growth.of("eager")[-1]
    matrix = 2 * 3 * one.tokens**2 * 2  # B, H, N, N in bfloat16
    assert one.tokens == 64 * 64 + 1
    # a block keeps probabilities; two more are there while their gradients, or scores, are computed
    assert one.attention // matrix == (CONFIG["depth"] if mode == "train" else 0) + 2


@KINDS
def test_the_parts_of_a_step(kind, monkeypatch):
    name, depth = "vit_tiny_patch16_224", 4
    monkeypatch.setitem(zoo.CONFIGS, name, zoo.CONFIGS[name] | {"depth": depth})
    source = find.find(name)
    parameters = list(source.build("fastvit").parameters())
    weights = sum(2 * p.numel() for p in parameters)
    rounded = 512 * len(parameters) if kind == "cuda" else 0

    def parts(**setting: object) -> study.Parts:
        return plan(StepSpec(source, (224, 224), B, Setting(**setting), gpu=kind == "cuda")).planned

    B = 16  # at fewer the peak is the optimizer's step
    step = parts()
    assert weights <= step.weights <= weights + rounded
    assert 2 * step.weights <= step.optimizer <= 2 * step.weights + 512 * len(parameters)
    assert step.inputs == B * 3 * 224 * 224 * 2
    tokens = B * 197 * 192 * 2
    statistics = depth * (2 * 2 * 4 + 3 * 4) * 197 * B  # two norms' mean and rstd, and an LSE a head
    assert depth * 10 * tokens < step.saved < depth * 10 * tokens + statistics + 4 * tokens
    assert step.peak == sum(vars(step).values())
    assert step.weights <= parts(optimizer="sgd").optimizer <= step.weights + 512 * len(parameters)
    assert parts(optimizer="none").optimizer == 0
    inference = parts(mode="infer", optimizer="none")
    assert inference.saved == inference.gradients == inference.optimizer == 0
    checkpointed, kept = parts(checkpointing=True, optimizer="none"), parts(optimizer="none")
    assert kept.peak - checkpointed.peak > depth / 2 * 10 * tokens  # of all; by then there are gradients


@pytest.mark.parametrize(
    ("mode", "optimizer", "px"), [("train", "adamw", 8), ("train", "none", 64), ("infer", "none", 64)]
)
def test_a_captured_graph_holds_the_passes(mode, optimizer, px):
    """Gradients and a copy of the images are in it. Outside it are the gradients' copies and AdamW's square roots, one
    for each weight; at 8 px these are more than the activations."""
    pytest.importorskip("triton")
    options = {"image_sizes": (px,), "batches": (4,), "mode": mode, "optimizer": optimizer, "providers": ("eager",)}
    (point,) = study.memory(SMALL, **options, device="cuda", graphs=True).points
    source, setting = find.find(SMALL), Setting(mode, optimizer=optimizer)
    seen, begin, last, _, groups = trace_step(StepSpec(source, (px, px), 4, setting, gpu=True, provider="eager"))
    given = set().union(*(groups[name] for name in ("weights", "optimizer", "inputs")))
    changes = [seen.storages[n].nbytes * (1 if came else -1) for n, came in seen.events[begin:last] if n not in given]
    images, parts = 4 * 3 * px**2 * 2, point.planned
    weights = sum(-(-2 * p.numel() // 512) * 512 for p in source.build("eager", (px, px)).parameters())
    assert parts.graph == max(itertools.accumulate(changes)) + images > point.activations
    assert parts.gradients == (weights if mode == "train" else 0)
    assert parts.temporaries == (weights if optimizer == "adamw" else 0)
    assert (parts.saved, parts.attention, parts.inputs) == (0, 0, images)
    assert parts.peak == parts.weights + parts.gradients + parts.optimizer + images + parts.temporaries + parts.graph


def test_autocast_on_a_gpu_has_scores_in_float32():
    """Fake CPU tensors stand for a GPU's, but a CPU's autocast leaves scores in bfloat16. They are float32 when they
    are computed again, too; torch.utils.checkpoint compares."""
    pytest.importorskip("triton")
    spec = StepSpec(find.find(SMALL), (64, 64), 2, Setting(dtype="amp"), gpu=True, provider="eager")
    assert plan(spec).attention > 1.3 * plan(spec._replace(gpu=False)).attention
    assert plan(spec._replace(setting=Setting(dtype="amp", checkpointing=True))).attention > 0


def test_what_an_op_allocates_by_itself_is_seen():
    """The gradient of a LayerNorm's weight has partial sums: a row for each program of 132 multiprocessors."""
    pytest.importorskip("triton")
    with FakeTensorMode(), as_on(gpu=True):
        x, weight, bias = (torch.empty(*shape, requires_grad=True) for shape in ((65536, 64), (64,), (64,)))
        with Allocations(gpu=True) as seen:
            ops.layer_norm(x, weight, bias).sum().backward()
    (partial,) = [storage for storage in seen.storages if len(storage.shape) == 3]
    count, programs, D = partial.shape
    assert (count, D) == (2, 64)
    assert programs % 132 == 0
    assert partial.nbytes == 2 * programs * 64 * 4


def test_a_gpus_attention_drops_out_in_its_kernel():
    """On a CPU SDPA with dropout computes N x N matrices."""
    pytest.importorskip("triton")
    options = {"image_sizes": (64,), "providers": ("sdpa",)}
    gpu, cpu = (study.memory("study_models:with_dropout", device=d, **options) for d in ("cuda", "cpu"))
    (without,) = study.memory(TIMM, device="cuda", **options).points
    assert gpu.points[0].attention == 0 < cpu.points[0].attention
    assert gpu.points[0].planned.peak == pytest.approx(without.planned.peak, rel=0.01)


def test_a_function_that_reads_values_while_it_makes_the_model():
    """Gradients are planned where they are off outside, too."""
    options = {"image_sizes": (32,), "device": "cpu", "providers": ("fastvit",)}
    (want,) = study.memory(TIMM, **options).points
    with torch.no_grad():
        (got,) = study.memory("study_models:reads_values", **options).points
    assert got.planned == want.planned


def test_a_cpu_without_memory(monkeypatch):
    """Like CUDA's own error, it leaves the point unmeasured; any other error is raised."""

    def measure(*_: object, **__: object) -> int:
        raise RuntimeError(message)

    monkeypatch.setattr(growth, "measure", measure)
    options = {"image_sizes": (32,), "device": "cpu", "providers": ("fastvit",), "mode": "infer", "measured": True}
    message = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
    assert study.memory(SMALL, **options).points[0].measured is None
    message = "another"
    with pytest.raises(RuntimeError, match="another"):
        study.memory(SMALL, **options)


@pytest.mark.parametrize("power", [1.0, 4.0])
@pytest.mark.parametrize("step", [1, 97])
def test_the_largest_that_fits(power, step):
    """It is found whether a peak grows linearly, faster, or in steps. Nothing above `most` is tried."""
    draw = random.Random(0)
    for _ in range(50):
        start, slope, budget = draw.randrange(10**6), draw.randrange(1, 10**4), draw.randrange(1, 10**9)
        most, expected = draw.choice((1, 2, 1000, 2**40)), draw.choice((1, 2))

        def peak(n: int, start: int = start, slope: int = slope, most: int = most) -> int:
            assert n <= most + 1
            return start + slope * int((n // step * step + 1) ** power)

        largest = largest_that_fits(peak, budget, most, expected)
        assert largest <= most
        assert not largest or peak(largest) <= budget
        assert largest == most or peak(largest + 1) > budget


def test_a_search_plans_few_steps(monkeypatch):
    """For the batch, and for the side of an image with eager attention, whose memory grows with its fourth power."""
    planned = []
    monkeypatch.setattr(search, "plan", lambda spec: planned.append(spec) or plan(spec))
    budget, size = 64 << 20, (64, 64)
    spec = StepSpec(find.find(SMALL), size, 2, Setting(optimizer="none"), gpu=False, provider="eager")
    options = {"provider": "eager", "device": "cpu", "optimizer": "none"}
    batch = study.largest_batch(SMALL, budget, image_size=size, **options)
    side = study.largest_image(SMALL, "64MiB", batch=2, **options)
    assert batch > 8 < side // 4
    assert len(planned) <= 20
    for more, fits in ((0, True), (1, False)):
        for px, images in ((size, batch + more), ((side + 4 * more,) * 2, 2)):
            peak = plan(spec._replace(image_size=px, batch=images)).planned.peak
            assert (peak <= budget) is fits
    with pytest.raises(ValueError, match="takes no image_size"):
        study.largest_image("study_models:one_size", 64 << 20, device="cpu")


SCALED = {
    "fused": (SMALL, 1, "fastvit", Setting(), True),
    "rotary, gated": ("vit_small_plus_patch16_dinov3", 5, "fastvit", Setting(), True),
    "registers without positions": ("study_models:with_registers", 3, "sdpa", Setting(), True),
    "relative positions": ("study_models:relative_positions", 1, "fastvit", Setting(), True),
}


@pytest.mark.parametrize("row", SCALED)
def test_a_plan_scaled_from_two_traces_is_the_plan(row, monkeypatch):
    """To the byte, for any number of images; one image has traces of its own."""
    pytest.importorskip("triton")
    name, prefix, provider, setting, gpu = SCALED[row]
    if name in zoo.CONFIGS:
        monkeypatch.setitem(zoo.CONFIGS, name, zoo.config(name) | {"depth": 2})
    source = find.find(name)
    (p, _) = source.patch_size
    patches = (p,) if source.origin == "function" else (p // 2, p, 2 * p)
    one, more = (
        ScaledStep(source, provider, setting, prefix, patches, one_image=alone, gpu=gpu) for alone in (True, False)
    )
    for grid, patch, batch, scaled in [(14, patches[0], 8, more), (32, p, 3, more), (14, patches[-1], 1, one)]:
        right = plan(StepSpec(source, (grid * patch,) * 2, batch, setting, gpu, provider, (patch, patch)))
        assert scaled.parts(grid * patch, patch, batch) == right.planned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "training"}, "mode must be one of train, infer, got 'training'"),
        ({"providers": ("flash",)}, "providers must be of .*got 'flash'"),
        ({"device": "cuda", "measured": True}, "needs a GPU"),
        ({"graphs": True}, "graphs=True is planned for device='cuda' only"),
        ({"graphs": True, "measured": True}, "graphs=True is planned only"),
        ({"batches": (2**63,)}, f"batch must be a positive integer, at most 1048576, got {2**63}"),
        ({"image_sizes": (2**63,)}, f"image_size must have sides of at most 65536 pixels, got {2**63}"),
        ({"together": True, "providers": ("fastvit", "sdpa")}, "providers must be .'fastvit',. with together=True"),
        ({"together": True, "model": TIMM}, "timm_vit: AttributeError: 'list' object has no attribute"),
        ({"model": "study_models:convolution", "providers": ("sdpa",)}, "no attention is seen in study_models:conv"),
    ],
)
def test_what_it_refuses(arguments, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = {"model": SMALL, "image_sizes": (32,), "device": "cpu"} | arguments
    with pytest.raises(ValueError, match=message):
        study.memory(**arguments)


@pytest.mark.parametrize(
    ("provider", "kept", "ops"),
    [("eager", 16 + 197 / 64, 17), ("sdpa", 16, 10), ("fastvit", 10, 7)],
)
def test_what_a_block_keeps(provider, kept, ops):
    """In token tensors, for ViTs whose heads are of 64: eager also keeps H * N^2 probabilities."""
    pytest.importorskip("triton")
    with torch.no_grad():
        cost = study.block("vit_tiny_patch16_224", provider=provider)
    assert cost.tokens == 197
    assert cost.kept == pytest.approx(kept, abs=0.2)
    assert len(cost.ops) == ops
    assert ("softmax" in [op.name for op in cost.ops]) == (provider == "eager")
