"""Vision towers of transformers: with RMSNorm, masks, windows, norms of q and k."""

import copy
import importlib
from typing import Any

import pytest
import torch
from library_imports import import_library
from library_models import outcome
from models import accelerate_as_it_was, randomised
from oracle import assert_as_accurate
from torch import Tensor, nn

import fastvit
from benchmarks.coverage import small_transformers
from fastvit.integrations.transformers import layers


def tower(file: str, name: str, **changed: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model, in evaluation, and its inputs."""
    import_library("transformers")
    kind = getattr(importlib.import_module(f"transformers.models.{file}.modeling_{file}"), name)
    options = small_transformers.shrink(kind.config_class().to_dict()) | changed
    torch.manual_seed(0)
    model = randomised(kind(kind.config_class(**options)), 0.05).eval()
    return model, small_transformers.inputs(model)


def run(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens, and every parameter's gradient."""
    model.zero_grad(set_to_none=True)
    out = model(**inputs).last_hidden_state
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out))
    return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


WINDOWS = {"depth": 2, "fullatt_block_indexes": [1]}  # of the first layer
# model -> its file and class, options, and how much of its attention and MLPs is fused
TOWERS: dict[str, tuple[str, str, dict[str, Any], tuple[int, int]]] = {
    "Ovis2": ("ovis2", "Ovis2VisionModel", {}, (2, 2)),
    "SigLIP 2": ("siglip2", "Siglip2VisionModel", {"vision_use_head": False}, (2, 2)),
    "InternVL with RMSNorm": ("internvl", "InternVLVisionModel", {"norm_type": "rms_norm"}, (2, 2)),
    "InternVL with norms of q and k": (
        "internvl", "InternVLVisionModel", {"norm_type": "rms_norm", "use_qk_norm": True}, (2, 2),
    ),
    "Sapiens2": ("sapiens2", "Sapiens2Model", {"layerscale_value": 0.5}, (2, 2)),
    "Sapiens2 without norms of q and k": ("sapiens2", "Sapiens2Model", {"use_qk_norm": False}, (2, 2)),
    "Pixtral": ("pixtral", "PixtralVisionModel", {}, (2, 2)),
    "Qwen2.5-VL": ("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", WINDOWS, (2, 2)),
    "GLM-4V": ("glm4v", "Glm4vVisionModel", {}, (2, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", TOWERS)
def test_outputs_and_gradients(name: str) -> None:
    file, kind, options, fused = TOWERS[name]
    model, inputs = tower(file, kind, **options)
    want, gradients = run(model, inputs)
    double = copy.deepcopy(model).double()
    exact, exact_gradients = run(double, {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()})
    report = fastvit.accelerate(model)
    assert (report.fused("attention")[0], report.fused("MLP")[0]) == fused
    got, own = run(model, inputs)
    assert_as_accurate(got, want, exact, what="output")
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for key, gradient in exact_gradients.items():
        scale = max(float(gradient.abs().max()), 1e-2 * largest)
        assert float((own[key] - gradient).abs().max()) <= 1e-4 * scale, key


def test_the_text_tower_of_aimv2_keeps_its_attention() -> None:
    library = import_library("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96}
    model = library.Aimv2TextModel(library.Aimv2TextConfig(**sizes, vocab_size=9, eos_token_id=1)).eval()
    ids = torch.tensor([[3, 4, 1], [5, 1, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    report = accelerate_as_it_was(model, lambda: model(ids, mask).last_hidden_state)
    causal = "the text tower's attention is causal"
    assert outcome(report, "encoder.layers.0") == outcome(report, "encoder.layers.0.attention") == ("skipped", causal)
    assert report.fused("MLP") == (1, 1)


def test_dropouts_of_internvl() -> None:
    """One behind the projection, one behind the MLP."""
    model, _ = tower("internvl", "InternVLVisionModel", projection_dropout=0.25, hidden_dropout_prob=0.5)
    layer = model.train().encoder.layer[0]
    attention, mlp = layers.read_layer("InternVLVision", layer).block
    assert (attention.branch.proj_drop, mlp.branch.drop1, mlp.branch.drop2) == (0.25, 0.0, 0.5)
    attention, _ = layers.read_layer("InternVLVision", layer.eval()).block
    assert attention.branch.proj_drop == 0.0
    assert attention.layer_scale is layer.lambda_1
