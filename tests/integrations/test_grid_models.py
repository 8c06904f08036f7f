"""Accelerated models whose tokens stay on a grid: SAM of timm and transformers, encoders with its code, and VitDet."""

import copy
import importlib
import warnings
from typing import Any

import pytest
import torch
from library_imports import import_library
from library_models import accelerate_and_compare, assert_steps_agree, outcome, step
from models import randomised
from oracle import assert_as_accurate
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fastvit
from fastvit.blocks.recompute import ATTRIBUTE, Recompute
from fastvit.ops.runtime import backend as backends
from fastvit.study.memory.allocations import Allocations, as_on
from fastvit.study.memory.plan import without_data

BLOCK = "layer_norm_linear, attention_windows, linear, layer_norm_mlp"
TIMM: dict[str, dict[str, Any]] = {
    "windows with padding": {"window_size": 3, "use_rel_pos": True},
    "whole grid": {"use_rel_pos": True, "window_size": 0, "init_values": 0.3},
    "norms of q and k": {"window_size": 2, "use_rel_pos": True, "qk_norm": True},
    "rotary": {"window_size": 2, "use_rope": True},
    "no positions": {"window_size": 2},
}


def sam_of_timm(**options: Any) -> nn.Module:
    """A windowed and a global block for 64 x 64 images, with random parameters."""
    sizes = {"img_size": 64, "patch_size": 16, "embed_dim": 64, "depth": 2, "num_heads": 4, "neck_chans": 0}
    kind = import_library("timm").models.vision_transformer_sam.VisionTransformerSAM
    return randomised(kind(**sizes, num_classes=5, global_attn_indexes=(1,), **options).eval())


@pytest.mark.parametrize("options", TIMM.values(), ids=TIMM)
def test_timm(options: dict[str, Any], device: torch.device) -> None:
    model = sam_of_timm(**options).to(device)
    sizes = [(64, 64)] if "use_rope" in options else [(64, 64), (48, 80)]
    for size in sizes:  # relative positions are interpolated for another one
        fastvit.restore(model)
        image = torch.randn(2, 3, *size, device=device)
        report = accelerate_and_compare(model, lambda m, image=image: m(image))
        assert report.fused("attention") == report.fused("MLP") == (2, 2)


def test_what_the_report_says(device: torch.device) -> None:
    report = fastvit.accelerate(sam_of_timm(**TIMM["windows with padding"]).to(device), strict=True)
    assert outcome(report, "blocks.0") == outcome(report, "blocks.1") == ("accelerated", BLOCK)


def test_stochastic_depth_drops_windows_as_timm_does(device: torch.device) -> None:
    """The global block and the MLPs drop samples. Windows reach beyond the grid, and there is a layer scale."""
    model = sam_of_timm(window_size=3, use_rel_pos=True, drop_path_rate=0.6, init_values=0.3).to(device).train()
    image = torch.randn(3, 3, 64, 64, device=device)
    accelerate_and_compare(model, lambda m: m(image))


TRANSFORMERS = {
    "sam.SamVisionModel": ("sdpa", "eager"),
    "sam_hq.SamHQVisionModel": ("sdpa",),
    "deepseek_ocr2.DeepseekOcr2SamVisionEncoder": ("sdpa",),
    "unlimited_ocr.UnlimitedOcrSamVisionEncoder": ("eager",),
    "got_ocr2.GotOcr2VisionEncoder": ("eager",),
    "pp_formulanet.PPFormulaNetVisionModel": ("sdpa",),
    "slanext.SLANeXtVisionEncoder": ("eager",),
    "vitdet.VitDetModel": ("eager",),
}
CASES = [(name, implementation) for name, each in TRANSFORMERS.items() for implementation in each]


def of_transformers(name: str, implementation: str = "eager", **options: Any) -> nn.Module:
    """A windowed and a global layer for 64 x 64 images, with random parameters."""
    import_library("transformers")
    file, _, kind = name.partition(".")
    try:
        module: Any = importlib.import_module(f"transformers.models.{file}.modeling_{file}")
    except ImportError:
        pytest.skip(f"this version of transformers has no {file}")
    sizes: dict[str, Any] = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 64, "patch_size": 16,
        "window_size": 3, "attn_implementation": implementation,
    }  # fmt: skip
    if file == "vitdet":
        sizes |= {"window_block_indices": [0], "use_relative_position_embeddings": True, "mlp_ratio": 2}
    else:
        sizes |= {"global_attn_indexes": [1], "mlp_dim": 96, "output_channels": 256}
    config = getattr(module, kind).__annotations__.get("config") or getattr(module, kind).config_class
    config = getattr(module, config) if isinstance(config, str) else config
    return randomised(getattr(module, kind)(config(**sizes, **options)).eval())


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_transformers(name: str, implementation: str, device: torch.device) -> None:
    model, image = of_transformers(name, implementation).to(device), torch.randn(2, 3, 64, 64, device=device)
    report = accelerate_and_compare(model, lambda m: m(image), strict=True)
    assert report.fused("attention") == report.fused("MLP") == (2, 2)
    details = [entry.detail for entry in report.accelerated if entry.kind.endswith("Layer")]
    assert details == [BLOCK, BLOCK]


@pytest.mark.parametrize("name", ["sam.SamVisionModel", "vitdet.VitDetModel"])
def test_checkpointed_layers(name: str, device: torch.device) -> None:
    model, image = of_transformers(name).to(device).train(), torch.randn(2, 3, 64, 64, device=device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    accelerate_and_compare(model, lambda m: m(image))


def of_subclassed_blocks(model: nn.Module, name: str) -> nn.Module:
    """Give the blocks of that class another one, which inherits everything."""
    for block in model.modules():
        if type(block).__name__ == name:
            block.__class__ = type(f"My{name}", (type(block),), {})
    return model


@pytest.mark.parametrize("name", ["timm", "sam.SamVisionModel", "vitdet.VitDetModel"])
def test_parts_of_unknown_blocks(name: str, device: torch.device) -> None:
    if name == "timm":
        model = of_subclassed_blocks(sam_of_timm(window_size=3, use_rel_pos=True), "Block")
    else:
        model = of_transformers(name, "sdpa" if name.startswith("sam") else "eager")
        model = of_subclassed_blocks(model, "SamVisionLayer" if name.startswith("sam") else "VitDetLayer")
    image = torch.randn(2, 3, 64, 64, device=device)
    report = accelerate_and_compare(model.to(device), lambda m: m(image))
    assert report.fused("attention") == report.fused("MLP") == (2, 2)


def test_compiled(device: torch.device) -> None:
    model = sam_of_timm(window_size=3, use_rel_pos=True, init_values=0.3).to(device)
    image = torch.randn(2, 3, 64, 64, device=device)
    want = step(model, lambda m: m(image))
    fastvit.accelerate(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_steps_agree(step(compiled, lambda m: m(image)), want)


def test_a_global_block_of_any_size_is_few_graphs(device: torch.device) -> None:
    """One for the grid of its tables, and one or two for all others, for which they are interpolated."""
    block = sam_of_timm(window_size=3, use_rel_pos=True).blocks[1].to(device)
    fastvit.accelerate(block)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(block, backend=backend, dynamic=True)
    for size in ((4, 4), (5, 7), (6, 9), (8, 5), (7, 10)):
        x = torch.randn(2, *size, 64, device=device)
        torch.testing.assert_close(compiled(x), block(x))
    assert len(graphs) <= 3


@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_16_bits(how: str, device: torch.device) -> None:
    model, image = sam_of_timm(window_size=3, use_rel_pos=True).to(device), torch.randn(2, 3, 64, 64, device=device)
    model, image = (model.bfloat16(), image.bfloat16()) if how == "bfloat16" else (model, image)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=how == "autocast"):
        with torch.autocast(device.type, enabled=False):
            exact = copy.deepcopy(model).double()(image.double())
        own = model(image)
        fastvit.accelerate(model)
        assert_as_accurate(model(image), own, exact, what="logits")


@pytest.mark.parametrize("recompute", [Recompute("all", "activation"), Recompute("none", "all")], ids=str)
def test_recomputed_halves(recompute: Recompute, device: torch.device) -> None:
    """`fastvit.fit` chooses what each half computes again."""
    model = sam_of_timm(window_size=3, use_rel_pos=True).to(device)
    image = torch.randn(2, 3, 64, 64, device=device)
    fastvit.accelerate(model)
    want = step(model, lambda m: m(image))
    for block in model.blocks:
        setattr(block, ATTRIBUTE, recompute)
    assert_steps_agree(step(model, lambda m: m(image)), want)


def _reason(model: nn.Module, image: Tensor, **options: Any) -> str:
    """Return why the modules of an accelerated model run their own forward in a call."""
    fastvit.accelerate(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(image, **options)
    return "; ".join(str(warning.message) for warning in caught)


def test_what_no_op_has(device: torch.device) -> None:
    """The modules run their own forward, and their parts are fused where they can be."""
    image = torch.randn(2, 3, 64, 64, device=device)
    drops = sam_of_timm(window_size=3, use_rel_pos=True, attn_drop_rate=0.2).to(device).train()
    reasons = {entry.detail for entry in fastvit.accelerate(drops).skipped}
    assert "dropout of attention with relative positions" in reasons
    convolutions = of_transformers("vitdet.VitDetModel", residual_block_indices=[1]).to(device)
    report = accelerate_and_compare(convolutions, lambda m: m(image))
    assert outcome(report, "encoder.layer.1") == ("skipped", "convolutions after its MLP")
    assert report.fused("attention") == report.fused("MLP") == (2, 2)
    weights = of_transformers("vitdet.VitDetModel").to(device)
    assert "the argument output_attentions" in _reason(weights, image, output_attentions=True)


@pytest.mark.skipif(not backends.HAVE_TRITON, reason="triton is not installed")
@pytest.mark.parametrize(("window", "dense", "ours"), [(0, 2390, 172), (16, 240, 162)])
def test_planned_memory_of_a_block_of_sam(window: int, dense: int, ours: int) -> None:
    """SAM-B's, at 64 x 64 tokens in bfloat16, forward and backward on a GPU, in MiB. Of the global block the library's
    bias alone takes 384 MiB, its gradient as much, and SDPA keeps float32 scores if the mask wants a gradient. With
    copies into windows the other would take 173."""
    kind = import_library("timm").models.vision_transformer_sam.Block
    peaks = []
    for fused in (False, True):
        with torch.device("meta"):
            size = (window, window) if window else (64, 64)
            block = kind(768, 12, use_rel_pos=True, window_size=window, input_size=size).bfloat16()
        if fused:
            fastvit.accelerate(block)
        fakes, seen = FakeTensorMode(allow_non_fake_inputs=True), Allocations(gpu=True)
        without_data(block, fakes)
        seen.see(list(block.parameters()))
        with fakes, as_on(True), seen:
            x = torch.empty(1, 64, 64, 768, dtype=torch.bfloat16, requires_grad=True)
            block(x).sum().backward()
        peaks.append(seen.bytes_of(seen.held(0)) / 2**20)
    assert peaks[0] >= dense
    assert peaks[1] <= ours
