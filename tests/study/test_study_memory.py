"""Planned memory against what allocators record, and against arithmetic."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from study_models import CONFIG, SMALL, TIMM
from torch._subclasses.fake_tensor import FakeTensorMode

from fastvit import ops, study, zoo
from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime import device as devices
from fastvit.study.memory import measurement, traced_step
from fastvit.study.memory import plan as memory_plan
from fastvit.study.memory.allocations import Allocations, as_on
from fastvit.study.memory.block import first_block
from fastvit.study.memory.plan import plan
from fastvit.study.memory.search import Search, _largest
from fastvit.study.memory.step import Setting
from fastvit.study.sources import find

NEEDS_TRITON = pytest.mark.skipif(not backends.HAVE_TRITON, reason="triton is not installed")
KINDS = pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=NEEDS_TRITON)])


def assert_planned_is_measured(found: study.MemoryStudy) -> None:
    for point in found.points:
        assert point.measured == pytest.approx(point.planned.peak, rel=0.05), point


@pytest.mark.parametrize(
    ("model", "sizes", "mode"), [(SMALL, (32, 64), "train"), (SMALL, (32, 64), "infer"), (TIMM, (64, 96), "train")]
)
def test_planned_is_measured(model, sizes, mode, device):
    options = {"mode": mode, "dtype": "float32", "device": device.type, "measured": True}
    found = study.memory(model, image_sizes=sizes, batches=(4,), **options)
    assert len(found.points) == 6
    assert_planned_is_measured(found)


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_scratch_memory_of_convolutions_is_planned(mode, onednn):
    """Copies in oneDNN's layout, or of every window of the input."""
    options = {"mode": mode, "dtype": "float32", "optimizer": "none", "device": "cpu", "measured": True}
    with torch.backends.mkldnn.flags(enabled=onednn):
        found = study.memory("study_models:of_a_neck", image_sizes=(64,), providers=("fastvit",), **options)
    assert_planned_is_measured(found)


@KINDS
def test_a_list_takes_memory_for_its_tokens(kind, device):
    """Twice the images take twice the activations, as many a token as a batch of one size; on a CPU it is measured."""
    options = {"dtype": "float32", "device": kind, "together": True, "measured": kind == device.type}
    found = study.memory(SMALL, image_sizes=(64, 32, (48, 96)), batches=(2, 4), **options)
    assert found.together == ((64, 64), (32, 32), (48, 96))
    few, many = found.points
    assert many.tokens == 2 * few.tokens == 4 * (3 + 256 + 64 + 288)
    assert many.activations == pytest.approx(2 * few.activations, rel=0.02)
    options_alone = {"dtype": "float32", "device": kind, "providers": ("fastvit",)}
    (alone,) = study.memory(SMALL, image_sizes=(64,), batches=(8,), **options_alone).points
    assert many.activations / many.tokens == pytest.approx(alone.activations / (8 * alone.tokens), rel=0.05)
    if options["measured"]:
        assert_planned_is_measured(found)


def test_rotary_positions_are_planned_in_place(device, monkeypatch):
    """Without an observer, ops copy no q, k and v. The plan must not count such copies, which would be the peak."""
    name = "vit_small_patch16_dinov3"
    monkeypatch.setitem(zoo.CONFIGS, name, {**zoo.CONFIGS[name], "depth": 2, "embed_dim": 128, "num_heads": 2})
    options = {"mode": "infer", "dtype": "float32", "device": device.type, "measured": True, "providers": ("fastvit",)}
    assert_planned_is_measured(study.memory(name, image_sizes=(256,), batches=(8,), **options))


def test_planned_is_measured_under_autocast(device, monkeypatch):
    """The model is large enough to hide scratch memory of a CPU, whatever its depth: 0.1 MB of matmuls, 0.7 MB that
    PyTorch's attention packs with AMX, or 2.4 MB without instructions for bfloat16."""
    monkeypatch.setitem(zoo.CONFIGS, SMALL, CONFIG | {"depth": 10})
    options = {"dtype": "amp", "optimizer": "sgd", "device": device.type, "measured": True}
    assert_planned_is_measured(study.memory(SMALL, image_sizes=(64,), batches=(12,), **options))


@KINDS
def test_dropout_saves_its_seed(kind, monkeypatch):
    saved = []
    for rate in (0.0, 0.1):
        monkeypatch.setitem(zoo.CONFIGS, SMALL, CONFIG | {"proj_drop_rate": rate, "attn_drop_rate": rate})
        found = study.memory(SMALL, image_sizes=(64,), batches=(4,), device=kind, providers=("fastvit",))
        saved.append(found.points[0].planned.saved)
    assert saved[1] - saved[0] <= 2 * 4 * 512


@pytest.mark.parametrize(("kind", "mode"), [("cpu", "train"), pytest.param("cuda", "infer", marks=NEEDS_TRITON)])
def test_how_memory_grows(kind, mode):
    found = study.memory(SMALL, image_sizes=(32, 64, 128, 256), batches=(2,), mode=mode, device=kind)
    assert all(p.attention <= p.activations <= p.planned.peak for p in found.points)
    eager, fused = found.exponents("eager"), found.exponents("fastvit")
    assert eager["attention"] == pytest.approx(2.0, abs=0.05)
    assert fused["activations"] == pytest.approx(1.0, abs=0.05)
    assert "attention" not in fused
    assert all(p.attention == p.planned.attention == 0 for p in found.of("fastvit"))
    one = found.of("eager")[-1]
    matrix = 2 * 3 * one.tokens**2 * 2  # B, H, N, N in bfloat16
    assert one.tokens == 64 * 64 + 1
    # a block keeps probabilities; two more are there while their gradients, or scores, are computed
    assert one.attention // matrix == (CONFIG["depth"] if mode == "train" else 0) + 2


@KINDS
def test_the_parts_of_a_step(kind):
    source = find.find("vit_tiny_patch16_224")
    parameters = list(source.build("fastvit").parameters())
    weights = sum(2 * p.numel() for p in parameters)
    rounded = 512 * len(parameters) if kind == "cuda" else 0

    def parts(**setting: object) -> study.Parts:
        return plan(source, "fastvit", (224, 224), B, Setting(**setting), gpu=kind == "cuda").parts

    B = 8  # at fewer the peak is the optimizer's step
    step = parts()
    assert weights <= step.weights <= weights + rounded
    assert 2 * step.weights <= step.optimizer <= 2 * step.weights + 512 * len(parameters)
    assert step.inputs == B * 3 * 224 * 224 * 2
    tokens = B * 197 * 192 * 2
    statistics = 12 * (2 * 2 * 4 + 3 * 4) * 197 * B  # two norms' mean and rstd, and an LSE a head
    assert 12 * 10 * tokens < step.saved < 12 * 10 * tokens + statistics + 4 * tokens
    assert step.peak == sum(vars(step).values())
    assert step.weights <= parts(optimizer="sgd").optimizer <= step.weights + 512 * len(parameters)
    assert parts(optimizer="none").optimizer == 0
    inference = parts(mode="infer", optimizer="none")
    assert inference.saved == inference.gradients == inference.optimizer == 0
    checkpointed, kept = parts(checkpointing=True, optimizer="none"), parts(optimizer="none")
    assert kept.peak - checkpointed.peak > 6 * 10 * tokens  # of 12 blocks; by then there are gradients, which is more


def test_autocast_on_a_gpu_has_scores_in_float32():
    """Fake CPU tensors stand for a GPU's, but a CPU's autocast leaves scores in bfloat16."""
    pytest.importorskip("triton")
    source = find.find(SMALL)
    matrices = [plan(source, "eager", (64, 64), 2, Setting(dtype="amp"), gpu=gpu).attention for gpu in (False, True)]
    assert matrices[1] > 1.3 * matrices[0]


def test_checkpointing_under_autocast_on_a_gpu():
    """Scores are float32 when they are computed again, too; torch.utils.checkpoint compares."""
    pytest.importorskip("triton")
    setting = Setting(dtype="amp", checkpointing=True)
    assert plan(find.find(SMALL), "eager", (64, 64), 2, setting, gpu=True).attention > 0


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
    with_dropout, without = (
        study.memory(name, image_sizes=(64,), device="cuda", providers=("sdpa",)).points[0]
        for name in ("study_models:of_timm_with_dropout", TIMM)
    )
    assert with_dropout.tokens == 65
    assert with_dropout.attention == 0
    assert with_dropout.planned.peak == pytest.approx(without.planned.peak, rel=0.01)
    on_cpu = study.memory("study_models:of_timm_with_dropout", image_sizes=(64,), device="cpu", providers=("sdpa",))
    assert on_cpu.points[0].tokens == 65
    assert on_cpu.points[0].attention > 0


@pytest.mark.parametrize("provider", ["sdpa", "fastvit"])
def test_a_function_that_reads_values_while_it_makes_the_model(provider):
    got, want = (
        study.memory(name, image_sizes=(32,), device="cpu", mode="infer", providers=(provider,)).points[0]
        for name in ("study_models:of_values", TIMM)
    )
    assert got.planned == want.planned


def test_gradients_are_planned_where_they_are_off_outside():
    pytest.importorskip("triton")
    want = study.memory(SMALL, image_sizes=(32,), device="cpu"), study.block("vit_tiny_patch16_224")
    with torch.no_grad():
        assert (study.memory(SMALL, image_sizes=(32,), device="cpu"), study.block("vit_tiny_patch16_224")) == want


def test_a_model_without_attention():
    with pytest.raises(ValueError, match="no attention is seen in study_models:of_a_convolution"):
        study.memory("study_models:of_a_convolution", image_sizes=(32,), providers=("sdpa",), device="cpu")


def test_a_cpu_without_memory(monkeypatch):
    """Like CUDA's own error, it leaves the point unmeasured; any other error is raised."""

    def measure(*_: object, **__: object) -> int:
        raise RuntimeError(message)

    monkeypatch.setattr(measurement, "measure", measure)
    options = {"image_sizes": (32,), "device": "cpu", "providers": ("fastvit",), "mode": "infer", "measured": True}
    message = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
    assert study.memory(SMALL, **options).points[0].measured is None
    message = "another"
    with pytest.raises(RuntimeError, match="another"):
        study.memory(SMALL, **options)


def test_planning_leaves_no_trace():
    """Afterwards launchers launch, and the interpreter interprets."""
    pytest.importorskip("triton")
    from fastvit.ops.runtime import launch

    before = launch._instead, backends.INTERPRET, devices.without_gpu
    study.memory(SMALL, image_sizes=(32,), batches=(1,), device="cuda")
    assert (launch._instead, backends.INTERPRET, devices.without_gpu) == before
    x = torch.randn(3, 32)
    with ops.use_backend("auto"):
        got = ops.layer_norm(x, torch.ones(32), torch.zeros(32), 1e-6)
    torch.testing.assert_close(got, torch.nn.functional.layer_norm(x, (32,), eps=1e-6))


@given(
    st.integers(0, 10**6),
    st.integers(1, 10**4),
    st.sampled_from([1.0, 2.0, 4.0]),
    st.integers(1, 10**9),
    st.integers(1, 97),
    st.sampled_from([1, 2, 1000, 2**40]),
)
@settings(max_examples=200, deadline=None)
def test_the_largest_that_fits(start, slope, power, budget, step, most):
    """It is found whether a peak grows linearly, faster, or in steps. Nothing above `most` is tried."""

    def peak(n: int) -> int:
        assert n <= most + 1
        return start + slope * int((n // step * step + 1) ** power)

    found = _largest(peak, budget, most)
    assert found <= most
    assert not found or peak(found) <= budget
    assert found == most or peak(found + 1) > budget


@pytest.mark.parametrize(("name", "batch"), [(SMALL, 1), (TIMM, 2), ("study_models:of_registers", 2)])
def test_a_search_traces_few_steps(name, batch, monkeypatch):
    """It traces once for all searches, once more for each result, and once for batches of one."""
    traced = []

    def counted(*args, **options):
        traced.append(args)
        return trace(*args, **options)

    trace = memory_plan.trace_step
    monkeypatch.setattr(memory_plan, "trace_step", counted)
    monkeypatch.setattr(traced_step, "trace_step", counted)
    budget, size = 512 << 20, 64
    search = Search(name, provider="eager", device="cpu")
    found = tuple(search.largest_batch(budget, px) for px in (size, 2 * size))
    found = *found, search.largest_image(budget, batch)
    assert found[0] > found[1] > 1
    assert len(traced) == 4 + (batch == 1)
    more = found[0] + 1, found[1] + 1, found[2] + find.find(name).patch_size[0]
    for (first, second, px), fits in ((found, True), (more, False)):
        for side, images in ((size, first), (2 * size, second), (px, batch)):
            peak = plan(find.find(name), "eager", (side, side), images, Setting(), gpu=False).parts.peak
            assert (peak <= budget) is fits


def test_a_search_that_cannot_scale(monkeypatch):
    """The model has one size only, or its plan differs from the traced step's."""
    options = {"provider": "fastvit", "device": "cpu"}
    batch = study.largest_batch("study_models:of_one_size", 64 << 20, **options)
    assert batch == study.largest_batch(TIMM, 64 << 20, **options) > 1
    with pytest.raises(ValueError, match="takes no image_size"):
        study.largest_image("study_models:of_one_size", 64 << 20, **options)
    parts = traced_step.TracedStep.parts
    monkeypatch.setattr(traced_step.TracedStep, "parts", lambda self, *sizes: parts(self, *sizes[:2], 2 * sizes[2]))
    assert study.largest_batch(TIMM, 64 << 20, **options) == batch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "training"}, "mode must be one of train, infer, got 'training'"),
        ({"dtype": "int8"}, "dtype must be one of .*got 'int8'"),
        ({"optimizer": "lion"}, "optimizer must be one of"),
        ({"providers": ("flash",)}, "providers must be of .*got 'flash'"),
        ({"providers": ("compile",)}, "'compile' has no planned figures"),
        ({"device": "tpu"}, "device must be one of"),
        ({"batches": (0,)}, "batch must be a positive integer, at most 1048576, got 0"),
        ({"batches": (2**63,)}, f"batch must be a positive integer, at most 1048576, got {2**63}"),
        ({"image_sizes": (2**63,)}, f"image_size must have sides of at most 65536 pixels, got {2**63}"),
        ({"patch_size": (4, 2**63)}, "patch_size must have sides of at most 65536 pixels"),
        ({"together": True, "providers": ("fastvit", "sdpa")}, "providers must be .'fastvit',. with together=True"),
        ({"together": True, "model": TIMM}, "of_timm: AttributeError: 'list' object has no attribute"),
    ],
)
def test_what_it_refuses(arguments, message):
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
    cost = study.block("vit_tiny_patch16_224", provider=provider)
    assert cost.tokens == 197
    assert cost.kept == pytest.approx(kept, abs=0.2)
    assert len(cost.ops) == ops
    assert ("softmax" in [op.name for op in cost.ops]) == (provider == "eager")


def test_a_block_of_timm_and_of_rotary_positions():
    pytest.importorskip("triton")
    eva = study.block("eva02_tiny_patch14_336")  # whose MLP has a norm of its own, wider than the tokens
    (attention,) = [op.kept for op in eva.ops if op.name == "attention_qkvpacked_fwd"]
    assert attention == pytest.approx(1.03, abs=0.02)
    kept = study.block(TIMM, image_size=64).kept
    assert 10 < kept < 11  # with statistics, which are not negligible at 48 channels
    names = [op.name for op in study.block("vit_small_patch16_dinov3").ops]
    assert "rotary" in " ".join(names)


def test_a_model_without_blocks():
    with pytest.raises(ValueError, match="Conv2d has no list of blocks"):
        first_block(torch.nn.Conv2d(3, 8, 4))


def test_measuring_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a GPU"):
        study.memory(SMALL, image_sizes=(32,), device="cuda", measured=True)


def test_compile_is_measured_only(device, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda model: compiled.append(model))
    found = study.memory(
        TIMM, image_sizes=(32,), batches=(1,), mode="infer", providers=("compile",), device=device.type, measured=True
    )
    assert len(compiled) == 1
    assert found.points[0].planned is None
    assert found.points[0].measured > 0
