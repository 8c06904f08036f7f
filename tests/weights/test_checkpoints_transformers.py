"""Weights of Hugging Face's transformers, as version 5 has them in memory and as its files and version 4 spell them."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import SMALL, SQUARE_SIZES, Run, check, image, with_prefix
from library_imports import import_timm
from models import randomised
from torch import Tensor, nn

import fastvit
from fastvit import LayerNorm
from fastvit.checkpoints import CheckpointError

safetensors = pytest.importorskip("safetensors.torch")

HF_SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
HF_DINO = {
    **{k: v for k, v in HF_SMALL.items() if k != "intermediate_size"},
    "mlp_ratio": 2,
    "attn_implementation": "eager",
}
TEXT = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 9,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip


def transformers() -> Any:
    pytest.importorskip("transformers")
    import_timm()  # transformers imports torchvision, which needs the same help
    import transformers

    return transformers


def hf_model(kind: str) -> tuple[nn.Module, Run, str, dict[str, Any]]:
    """A model, its last normalised tokens, and our model's name and arguments."""
    hf = transformers()
    config = {"ViT": hf.ViTConfig, "Dinov2": hf.Dinov2Config, "CLIPVision": hf.CLIPVisionConfig}
    config |= {"Dinov2WithRegisters": hf.Dinov2WithRegistersConfig, "SiglipVision": hf.SiglipVisionConfig}
    family = next(
        f for f in ("Dinov2WithRegisters", "Dinov2", "CLIPVision", "SiglipVision", "ViT") if kind.startswith(f)
    )
    small = HF_DINO if family.startswith("Dinov2") else HF_SMALL
    extra = {"projection_dim": 5} if "Projection" in kind else {"num_labels": 5} if "Classification" in kind else {}
    model = randomised(getattr(hf, kind)(config[family](**small, **extra)))
    resize = {} if family.startswith("Dinov2") else {"interpolate_pos_encoding": True}

    def tokens(x: Tensor) -> Tensor:
        inner = getattr(model, model.base_model_prefix, model)
        out = inner(x, **resize).last_hidden_state
        return inner.post_layernorm(out) if family == "CLIPVision" else out  # there it is of the pooled token only

    name, arguments = {
        "ViT": ("vit_base_patch16_224", {"norm_layer": partial(LayerNorm, eps=1e-12)}),
        "Dinov2": ("vit_base_patch14_dinov2", {}),
        "Dinov2WithRegisters": ("vit_base_patch14_reg4_dinov2", {}),
        "CLIPVision": ("vit_base_patch16_clip_quickgelu_224", {}),
        "SiglipVision": ("vit_base_patch16_siglip_gap_224", {"act_layer": "gelu_tanh"}),
    }[family]
    if kind in ("ViTModel", "SiglipVisionModel"):  # with a pooler, and with attention pooling
        arguments = {**arguments, "drop_head": True}
    return model, tokens, name, {**SMALL, **arguments}


KINDS = (
    "ViTModel", "ViTForImageClassification", "Dinov2Model", "Dinov2ForImageClassification", "Dinov2WithRegistersModel",
    "CLIPVisionModel", "CLIPVisionModelWithProjection", "SiglipVisionModel",
)  # fmt: skip
OLD_KEY = {"ViT": "encoder.layer.0.attention.attention.query.weight", "Dinov2": "attention.attention.query.weight"}


@pytest.mark.parametrize("size", SQUARE_SIZES.values(), ids=SQUARE_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_hugging_face_in_memory(kind: str, size: tuple[int, int]) -> None:
    model, tokens, name, arguments = hf_model(kind)
    check(fastvit.create_model(name, model.state_dict(), **{**arguments, "img_size": size}), tokens, size)


@pytest.mark.parametrize("kind", KINDS)
def test_hugging_face_files(kind: str, tmp_path: Path) -> None:
    """transformers 5 writes the names of version 4 for ViT and DINOv2; version 4 wrote the towers' prefix too."""
    model, tokens, name, arguments = hf_model(kind)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    written = safetensors.load_file(path)
    for family, key in OLD_KEY.items():
        assert not kind.startswith(family) or any(k.endswith(key) for k in written)
    check(fastvit.create_model(name, path, **arguments), tokens, (16, 16))
    if kind in ("CLIPVisionModel", "SiglipVisionModel"):
        written = with_prefix(written, "vision_model.")
        written["vision_model.embeddings.position_ids"] = torch.arange(17)[None]
        check(fastvit.create_model(name, written, **arguments), tokens, (16, 16))


def test_hugging_face_heads() -> None:
    for kind in ("ViTForImageClassification", "CLIPVisionModelWithProjection"):
        model, _, name, arguments = hf_model(kind)
        ours = fastvit.create_model(name, model.state_dict(), **{**arguments, "num_classes": 5}).eval()
        out = model(image())
        expected = out.logits if "Classification" in kind else out.image_embeds
        torch.testing.assert_close(ours(image()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prefix", ["", "vision_model."])
def test_attention_pooling_of_siglip(prefix: str, tmp_path: Path) -> None:
    """The pooled features, of a tower alone and of one with its text tower; q, k and v are one layer there."""
    hf = transformers()
    config = hf.SiglipConfig(vision_config=HF_SMALL, text_config=TEXT)
    both = randomised(hf.SiglipModel(config)).eval()
    tower = both.vision_model
    expected = tower(image()).pooler_output
    arguments = {**SMALL, "act_layer": "gelu_tanh"}
    both.save_pretrained(tmp_path)
    alone = with_prefix({k.removeprefix("vision_model."): v for k, v in tower.state_dict().items()}, prefix)
    for weights in (alone, both.state_dict(), tmp_path / "model.safetensors"):
        ours = fastvit.create_model("vit_base_patch16_siglip_224", weights, **arguments).eval()
        torch.testing.assert_close(ours(image()), expected, rtol=1e-5, atol=1e-5)
    probe = fastvit.create_model(
        "vit_base_patch16_siglip_224", alone, drop_head=True, **{**arguments, "num_classes": 3}
    ).eval()
    pooled = probe.forward_head(probe.forward_features(image()), pre_logits=True)
    torch.testing.assert_close(pooled, expected, rtol=1e-5, atol=1e-5)


def test_attention_pooling_of_siglip_that_does_not_fit() -> None:
    """Reported by the names of the file; a misshapen one never breaks the conversion."""
    model = transformers().SiglipVisionModel(transformers().SiglipVisionConfig(**HF_SMALL))
    packed, name = "head.attention.in_proj_weight", "vit_base_patch16_siglip_224"
    state = dict(model.state_dict())
    (key,) = (k for k in state if k.endswith(packed))
    with pytest.raises(CheckpointError, match=rf"(?s)unexpected .*{packed}.*drop_head=True leaves out"):
        fastvit.create_model("vit_base_patch16_siglip_gap_224", state, **SMALL)
    for shape in ((), (0,), (3,), (95, 32), (96, 31), (96, 32, 1)):
        with pytest.raises(CheckpointError, match=rf"(?s)does not fit.*{packed}"):
            fastvit.create_model(name, {**state, key: torch.ones(shape)}, **SMALL)


def test_hugging_face_text_towers_are_left_out() -> None:
    hf = transformers()
    for family, name in (
        ("CLIP", "vit_base_patch16_clip_quickgelu_224"),
        ("Siglip", "vit_base_patch16_siglip_gap_224"),
    ):
        projection = {"projection_dim": 5} if family == "CLIP" else {}
        config = getattr(hf, f"{family}Config")(vision_config=HF_SMALL, text_config=TEXT, **projection)
        model = randomised(getattr(hf, f"{family}Model")(config))
        act = {"act_layer": "gelu_tanh"} if family == "Siglip" else {}
        ours = fastvit.create_model(name, model.state_dict(), drop_head=True, **SMALL, **act).eval()
        tower = model.vision_model
        expected = tower(image()).last_hidden_state
        expected = tower.post_layernorm(expected) if family == "CLIP" else expected
        torch.testing.assert_close(ours.forward_features(image()), expected, rtol=1e-5, atol=1e-5)
