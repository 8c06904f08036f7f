"""The promises of `fastvit.accelerate` for every family that it knows: the table of tests/helpers/known_models.py."""

import copy
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from known_models import MODELS, SINCE, TOWERS, Built, built, version_of_transformers
from library_models import accelerate_and_compare, assert_steps_agree, assert_steps_equal, fused_only, output_of, step
from models import Calls
from oracle import assert_as_accurate

import fastvit
from fastvit.blocks.recompute import ATTRIBUTE, Recompute
from fastvit.blocks.submodules import qualified_name
from fastvit.integrations.decide import EMBEDDINGS, HANDLERS
from fastvit.study.memory.peak import saved_bytes


@pytest.fixture
def known(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Built]:
    """The model of a row, restored afterwards."""
    yield built(request.param, device)
    fastvit.restore(built(request.param, device).model)


def rows(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("known", names, indirect=True)


@rows(*MODELS)
def test_steps_agree_everything_is_fused_and_restore_undoes_it(known: Built) -> None:
    model, row = known.model, known.known
    keys, parameters = [*model.state_dict()], dict(model.named_parameters())
    report = accelerate_and_compare(model, known.call, known.own, strict=not row.left)
    assert all(entry.kind.endswith(row.left) for entry in report.skipped), str(report)
    assert report.fused("attention")[0] == row.count
    assert report.fused("MLP")[0] == (row.count if row.mlps is None else row.mlps)
    blocks = [entry for entry in report.accelerated if entry.kind.endswith(("Block", "Layer"))]
    assert {entry.detail for entry in blocks} == {*row.blocks}
    assert sum(entry.detail == "patch_embed" for entry in report.accelerated) == row.patches
    with Calls() as calls:
        known.call(model)
    assert sum(name.startswith("fastvit::attention") for name in calls.names) == max(row.count, len(row.blocks))
    assert [*model.state_dict()] == keys
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    fastvit.restore(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(output_of(known.call(model)), known.own.output)


@rows(*[name for name, row in MODELS.items() if row.blocks and name != "parallel"])
def test_blocks_of_unknown_classes_have_their_parts_fused(known: Built) -> None:
    """Such a block calls its parts as its library does: by position, or by the names of their arguments."""
    model, row = copy.deepcopy(known.model), known.known
    for entry in fastvit.accelerate(model).accelerated:
        if entry.detail in row.blocks:
            block = model.get_submodule(entry.name)
            block.__class__ = type(f"My{entry.kind}", (type(block),), {})
    report = fastvit.accelerate(model)
    assert report.fused("attention")[0] == (row.count if row.alone is None else row.alone)
    assert report.fused("MLP")[0] == (row.count if row.mlps is None else row.mlps)
    want = known.own.output
    with fused_only(), torch.no_grad():
        got = output_of(known.call(model))
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


# One for each reader, and for what reads dtypes: tables of rotary positions, RMSNorms, masks
@rows(
    "ViT, norms everywhere", "GluMlp, value first", "NaFlex, masked", "rotary, learnt, norms", "rotary, halves",
    "rotary, interleaved", "three layers, a norm in SwiGLU", "RMSNorms", "SAM, windows with padding", "Swin, padded",
    "ViT of transformers", "Dinov2", "DINOv3", "Sapiens2", "AIMv2", "InternVL, norms", "VideoMAE", "V-JEPA 2",
    "Swin of transformers, padded", "Qwen2.5-VL", "torchvision", "sam3.Sam3ViTModel",
)  # fmt: skip
@torch.no_grad()
def test_bfloat16_is_as_close_to_float64_as_the_library(known: Built) -> None:
    model = copy.deepcopy(known.model).bfloat16()
    inputs = {name: t.bfloat16() if t.is_floating_point() else t for name, t in known.inputs.items()}
    doubled = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    exact = output_of(known.call(copy.deepcopy(model).double(), doubled))
    own = output_of(known.call(model, inputs))
    fastvit.accelerate(model)
    with fused_only():
        assert_as_accurate(output_of(known.call(model, inputs)), own, exact, what="output")


@rows(
    "ViT", "rotary, halves", "SAM, windows with padding", "Dinov2", "CLIP of transformers", "torchvision", "open_clip"
)
def test_autocast(known: Built, device: torch.device) -> None:
    model = known.model
    doubled = {name: t.double() if t.is_floating_point() else t for name, t in known.inputs.items()}
    exact = output_of(known.call(copy.deepcopy(model).double(), doubled))
    with torch.autocast(device.type, torch.bfloat16):
        own = step(model, known.call)
        fastvit.accelerate(model)
        with fused_only():
            fused = step(model, known.call)
    assert_as_accurate(fused.output, own.output, exact, what="output")
    assert {n: g.dtype for n, g in fused.gradients.items()} == {n: g.dtype for n, g in own.gradients.items()}


NIGHTLY = (
    "rotary, halves", "SAM, windows with padding", "Dinov2", "Swin of transformers", "torchvision",
    "donut.donut_swin.DonutSwinModel",
)  # fmt: skip


@rows("ViT", "rotary, learnt", "Swin", *[pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY])
def test_compiled_without_a_break(known: Built) -> None:
    fastvit.accelerate(known.model)
    torch._dynamo.reset()
    backend = "aot_eager" if known.known is MODELS["ViT"] else "eager"
    assert_steps_agree(step(torch.compile(known.model, backend=backend, fullgraph=True), known.call), known.own)


# One for each function that runs blocks
@rows(
    "ViT", "rotary, halves", "SAM, windows with padding", "Swin", "ViT of transformers", "DINOv3", "V-JEPA 2",
    "VitDet", "Swin of transformers", "torchvision", "DINOv3's repository",
)  # fmt: skip
def test_recomputed_blocks_have_the_same_gradients_and_save_less(known: Built) -> None:
    model = copy.deepcopy(known.model)
    fastvit.accelerate(model)
    handlers = {m: m.forward.args[0] for m in model.modules() if isinstance(m.__dict__.get("forward"), partial)}
    blocks = [module for module, handler in handlers.items() if handler.takes_recompute]
    want, parameters = step(model, known.call), list(model.parameters())
    saved = [saved_bytes(lambda: known.call(model), parameters)]
    for recompute in (Recompute("all", "activation"), Recompute("all", "all")):
        for block in blocks:
            setattr(block, ATTRIBUTE, recompute)
        assert_steps_equal(step(model, known.call), want)
        saved.append(saved_bytes(lambda: known.call(model), parameters))
    assert saved[0] > saved[1] > saved[2]


# Before a model's classes are found to be copies of these
KNOWN = {name for name in {*HANDLERS, *EMBEDDINGS} if isinstance(name, str) and not name.startswith("fastvit.")}
# Tested by themselves, of earlier versions, or attention of models that do not support it yet
NO_ROWS = {
    "dinov2.layers.attention.Attention",
    "dinov2.layers.block.Block",
    "timm.models.vision_transformer.Attention",
}


def test_every_known_class_is_in_a_row(device: torch.device) -> None:
    if version_of_transformers() < max(SINCE.values()):
        pytest.skip("this version of transformers does not have all of them")
    classes = {qualified_name(module) for name in MODELS for module in built(name, device).model.modules()}
    assert KNOWN - classes == NO_ROWS


@rows("Dinov2", *[pytest.param(name, marks=pytest.mark.nightly) for name in ("rotary, halves", "Swin", *TOWERS)])
def test_the_triton_kernels(known: Built, triton_backend: None) -> None:
    fastvit.accelerate(known.model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        got = step(known.model, known.call)
    assert_steps_agree(got, known.own)
    names = {event.name.partition("fastvit::attention")[2] for event in profile.events()}
    assert any("fwd" in name for name in names)
    assert any("bwd" in name for name in names)
