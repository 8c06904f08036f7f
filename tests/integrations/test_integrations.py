"""Outputs and all gradients of models of timm, transformers and torchvision, before `accelerate`, with it, and after
`restore`, against the library's own model and float64."""

import copy
import warnings
from typing import NamedTuple

import pytest
import torch
from library_imports import import_library
from oracle import assert_as_accurate
from torch import Tensor, nn

import fastvit
from benchmarks.harness.families import ARCHITECTURES, Architecture, output
from fastvit.integrations import Report

BATCH = 2
UNKNOWN = {  # cross-attention
    "AttentionPoolLatent",
    "SiglipMultiheadAttentionPoolingHead",
    "MultiheadAttention",
    "Aimv2AttentionPoolingHead",
}


class Model(NamedTuple):
    model: nn.Module
    image: Tensor


def build(architecture: Architecture, device: torch.device) -> Model:
    import_library(architecture.library)
    model = architecture.model()
    return Model(model.to(device), architecture.image(model, BATCH).to(device))


def some(*names: str) -> list[Architecture]:
    return [architecture for architecture in ARCHITECTURES if architecture.name in names]


# One for each class of blocks, and what they read their own way: rotary tables, RMSNorms, norms before projections
BLOCKS = some(
    "vit_tiny_patch16_224", "vit_small_patch16_rope_224", "vit_small_patch16_dinov3", "eva02_base_patch14_224",
    "beit3_base_patch16_224", "aimv2_large_patch14_224", "ViTForImageClassification", "DeiTForImageClassification",
    "Dinov2Model", "Dinov2WithRegistersModel", "DINOv3ViTModel", "CLIPVisionModel", "SiglipVisionModel",
    "Aimv2VisionModel", "InternVLVisionModel", "VJEPA2Model", "vit_b_16",
)  # fmt: skip
LIBRARIES = some("vit_tiny_patch16_224", "ViTForImageClassification", "vit_b_16")


def run(model: nn.Module, image: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output, and the gradients of the image and all parameters for a fixed random cotangent."""
    wanted = {"image": image.detach().clone().requires_grad_()}
    wanted |= {name.removeprefix("_orig_mod."): p for name, p in model.named_parameters() if p.requires_grad}
    out = output(model(wanted["image"]))
    generator = torch.Generator().manual_seed(7)
    cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    gradients = torch.autograd.grad(out, list(wanted.values()), cotangent, allow_unused=True)
    return out.detach(), {n: g for n, g in zip(wanted, gradients, strict=True) if g is not None}


def assert_close(got: Tensor, want: Tensor, what: str, scale: float | None = None) -> None:
    """Check that got is within 1e-4 of the largest |want|, or of `scale`."""
    limit = 1e-4 * (want.abs().max().item() if scale is None else scale)
    difference = (got.double() - want.double()).abs().max().item()
    assert difference <= limit, f"{what}: {difference:.3g} > {limit:.3g}"


def assert_gradients_close(got: dict[str, Tensor], want: dict[str, Tensor], what: str = "") -> None:
    """Check each gradient against its own scale and the largest of all: the key bias's is zero in exact arithmetic."""
    assert got.keys() == want.keys()
    largest = max(gradient.abs().max().item() for gradient in want.values())
    for name, gradient in want.items():
        scale = max(gradient.abs().max().item(), 1e-2 * largest)
        assert_close(got[name], gradient, f"{what} d{name}", scale)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_outputs_and_gradients_in_float32(architecture: Architecture, device: torch.device) -> None:
    model, image = build(architecture, device)
    before, gradients = run(model, image)
    exact, exact_gradients = run(copy.deepcopy(model).double(), image.double())
    report = fastvit.accelerate(model)
    assert_fused_throughout(model, report)
    after, fused_gradients = run(model, image)
    assert_close(after, before, "output against the library's")
    assert_close(after, exact, "output against float64")
    assert fused_gradients.keys() == gradients.keys()
    assert_gradients_close(fused_gradients, exact_gradients)
    fastvit.restore(model)
    again, restored_gradients = run(model, image)
    assert torch.equal(again, before)
    assert all(torch.equal(restored_gradients[name], gradients[name]) for name in gradients)


@pytest.mark.parametrize("architecture", [*BLOCKS, *some("VideoMAEModel")], ids=str)
def test_bfloat16_is_as_close_to_float64_as_the_library(architecture: Architecture, device: torch.device) -> None:
    model, image = build(architecture, device)
    model, image = model.bfloat16(), image.bfloat16()
    with torch.no_grad():
        exact = output(copy.deepcopy(model).double()(image.double()))
        own = output(model(image))
        fastvit.accelerate(model)
        assert_as_accurate(output(model(image)), own, exact, what="output")


def assert_fused_throughout(model: nn.Module, report: Report) -> None:
    """Every block, norm and patch embedding is accelerated."""
    assert {entry.kind for entry in report.skipped} <= UNKNOWN
    kinds = [entry.kind for entry in report.accelerated]
    assert kinds.count("Conv2d") + kinds.count("Conv3d") == 1
    assert [e.detail for e in report.accelerated].count("layer_norm_attention, layer_norm_mlp") == 2
    covered = {e.name for e in report.entries if e.status == "part of"}
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm) or type(module).__name__.lower().endswith("rmsnorm"):
            assert name in covered | {e.name for e in report.accelerated}, name


def _keys_and_shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {key: value.shape for key, value in model.state_dict().items()}


@pytest.mark.parametrize("architecture", LIBRARIES, ids=str)
def test_parameters_keys_and_repr_stay(architecture: Architecture, device: torch.device) -> None:
    model, _ = build(architecture, device)
    before, keys, text = dict(model.named_parameters()), _keys_and_shapes(model), repr(model)
    types = [type(m) for m in model.modules()]
    fastvit.accelerate(model)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is p for name, p in before.items())
    assert _keys_and_shapes(model) == keys
    assert repr(model) == text
    assert [type(m) for m in model.modules()] == types
    fastvit.restore(model)
    assert not any("forward" in m.__dict__ for m in model.modules())


@pytest.mark.parametrize("context", ["compile", "autocast"])
@pytest.mark.parametrize(
    "architecture", some("vit_small_patch14_reg4_dinov2", "Dinov2Model", "CLIPVisionModel", "vit_b_16"), ids=str
)
def test_under(context: str, architecture: Architecture, device: torch.device) -> None:
    model, image = build(architecture, device)
    if context == "autocast":
        exact, _ = run(copy.deepcopy(model).double(), image.double())
        with torch.autocast(device.type, torch.bfloat16):
            own, gradients = run(model, image)
            fastvit.accelerate(model)
            fused, fused_gradients = run(model, image)
        assert_as_accurate(fused, own, exact, what="output")
        assert {n: g.dtype for n, g in fused_gradients.items()} == {n: g.dtype for n, g in gradients.items()}
        return
    want, gradients = run(model, image)
    fastvit.accelerate(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got, compiled_gradients = run(compiled, image)
    assert_close(got, want, "compiled")
    assert_gradients_close(compiled_gradients, gradients, "compiled")


@pytest.mark.parametrize("scale_by_keep", [True, False])
def test_stochastic_depth_draws_as_timm_does(scale_by_keep: bool, device: torch.device) -> None:
    timm = import_library("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4, drop_path_rate=0.5).to(device).train()
    for module in model.modules():
        if hasattr(module, "scale_by_keep"):
            module.scale_by_keep = scale_by_keep
    image = torch.randn(8, 3, 64, 64, device=device)
    torch.manual_seed(3)
    want = model(image)
    fastvit.accelerate(model)
    torch.manual_seed(3)
    assert_close(model(image), want, "training output")
    torch.manual_seed(4)
    assert not torch.allclose(model(image), want, atol=1e-3)


def test_accelerated_models_run_the_triton_kernels(triton_backend: None, device: torch.device) -> None:
    (architecture,) = some("Dinov2Model")
    import_library(architecture.library)
    model = architecture.model().to(device)
    image = architecture.image(model, 1).to(device)
    want, gradients = run(model, image)
    fastvit.accelerate(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        got, fused_gradients = run(model, image)
    assert_close(got, want, "output")
    assert_gradients_close(fused_gradients, gradients)
    names = {event.name for event in profile.events()}
    assert {"fastvit::attention_qkvpacked_fwd", "fastvit::attention_qkvpacked_bwd", "fastvit::layer_norm_fwd"} <= names


@pytest.mark.parametrize("architecture", BLOCKS, ids=str)
def test_blocks_of_unknown_classes_have_their_parts_fused(architecture: Architecture, device: torch.device) -> None:
    """Such a block calls its parts as its library does: by position, or by the names of their arguments."""
    model, image = build(architecture, device)
    want = output(model(image)).detach()
    for entry in fastvit.accelerate(model).accelerated:
        block = model.get_submodule(entry.name)
        if entry.detail.startswith("layer_norm_attention"):
            block.__class__ = type(f"My{entry.kind}", (type(block),), {})
    report = fastvit.accelerate(model)
    assert report.fused("MLP") != (0, 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs its own forward instead of fastvit's")
        assert_close(output(model(image)).detach(), want, "output")
