"""Weights of Hugging Face's transformers, as version 5 has them in memory and as its files and version 4 spell them."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import HF_SMALL, HF_TEXT, SMALL, Run, check, image, with_prefix
from library_imports import import_library
from models import randomised
from torch import Tensor, nn

import fastvit
from fastvit import LayerNorm
from fastvit.checkpoints import CheckpointError

safetensors = pytest.importorskip("safetensors.torch")

# class names begin with these, longer ones first -> our model's name and arguments
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Dinov2WithRegisters": ("vit_base_patch14_reg4_dinov2", {}),
    "ViT": ("vit_base_patch16_224", {"norm_layer": partial(LayerNorm, eps=1e-12)}),
    "DeiT": ("deit_base_distilled_patch16_224", {"norm_layer": partial(LayerNorm, eps=1e-12)}),
    "Dinov2": ("vit_base_patch14_dinov2", {}),
    "CLIPVision": ("vit_base_patch16_clip_quickgelu_224", {}),
    "SiglipVision": ("vit_base_patch16_siglip_gap_224", {"act_layer": "gelu_tanh"}),
}
HF_DINO = {key: value for key, value in HF_SMALL.items() if key != "intermediate_size"}
HF_DINO |= {"mlp_ratio": 2, "attn_implementation": "eager"}


def hf_model(kind: str) -> tuple[nn.Module, Run, str, dict[str, Any]]:
    """A model, its last normalised tokens, and our model's name and arguments."""
    hf = import_library("transformers")
    family = next(name for name in FAMILIES if kind.startswith(name))
    small = HF_DINO if family.startswith("Dinov2") else HF_SMALL
    extra = {"projection_dim": 5} if "Projection" in kind else {"num_labels": 5} if "Classification" in kind else {}
    model = randomised(getattr(hf, kind)(getattr(hf, f"{family}Config")(**small, **extra)))
    resize = {} if family.startswith("Dinov2") else {"interpolate_pos_encoding": True}

    def tokens(x: Tensor) -> Tensor:
        inner = getattr(model, model.base_model_prefix, model)
        out = inner(x, **resize).last_hidden_state
        return inner.post_layernorm(out) if family == "CLIPVision" else out  # there it is of the pooled token only

    name, arguments = FAMILIES[family]
    if kind in ("ViTModel", "DeiTModel", "SiglipVisionModel"):  # with a pooler, and with attention pooling
        arguments = {**arguments, "drop_head": True}
    return model, tokens, name, {**SMALL, **arguments}


KINDS = (
    "ViTModel",
    "ViTForImageClassification",
    "Dinov2Model",
    "Dinov2WithRegistersModel",
    "CLIPVisionModel",
    "CLIPVisionModelWithProjection",
    "SiglipVisionModel",
    "DeiTForImageClassificationWithTeacher",
)
OLD_KEY = {
    **dict.fromkeys(("ViT", "DeiT"), "encoder.layer.0.attention.attention.query.weight"),
    "Dinov2": "attention.attention.query.weight",
}


@pytest.mark.parametrize("kind", KINDS)
def test_hugging_face(kind: str, tmp_path: Path) -> None:
    """In memory, and from files: version 5 writes the names of version 4 for ViT and DINOv2, which wrote the towers'
    prefix too."""
    model, tokens, name, arguments = hf_model(kind)
    for size in ((16, 16), (24, 24), (8, 32)):
        check(fastvit.create_model(name, model.state_dict(), **{**arguments, "img_size": size}), tokens, size)
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
    if "Classification" in kind or "Projection" in kind:
        ours = fastvit.create_model(name, model.state_dict(), **{**arguments, "num_classes": 5}).eval()
        out = model(image())
        expected = out.logits if "Classification" in kind else out.image_embeds
        torch.testing.assert_close(ours(image()), expected, rtol=1e-5, atol=1e-5)


def test_attention_pooling_of_siglip(tmp_path: Path) -> None:
    """The pooled features, of a tower alone and of one with its text tower; q, k and v are one layer there."""
    hf = import_library("transformers")
    config = hf.SiglipConfig(vision_config=HF_SMALL, text_config=HF_TEXT)
    both = randomised(hf.SiglipModel(config)).eval()
    tower = both.vision_model
    expected = tower(image()).pooler_output
    arguments = {**SMALL, "act_layer": "gelu_tanh"}
    both.save_pretrained(tmp_path)
    alone = tower.state_dict()
    for weights in (alone, both.state_dict(), tmp_path / "model.safetensors"):
        ours = fastvit.create_model("vit_base_patch16_siglip_224", weights, **arguments).eval()
        torch.testing.assert_close(ours(image()), expected, rtol=1e-5, atol=1e-5)
    arguments["num_classes"] = 3
    probe = fastvit.create_model("vit_base_patch16_siglip_224", alone, drop_head=True, **arguments).eval()
    pooled = probe.forward_head(probe.forward_features(image()), pre_logits=True)
    torch.testing.assert_close(pooled, expected, rtol=1e-5, atol=1e-5)


def test_attention_pooling_of_siglip_that_does_not_fit() -> None:
    """Reported by the names of the file; a misshapen one never breaks the conversion."""
    hf = import_library("transformers")
    model = hf.SiglipVisionModel(hf.SiglipVisionConfig(**HF_SMALL))
    packed, name = "head.attention.in_proj_weight", "vit_base_patch16_siglip_224"
    state = dict(model.state_dict())
    (key,) = (k for k in state if k.endswith(packed))
    with pytest.raises(CheckpointError, match=rf"(?s)unexpected .*{packed}.*drop_head=True leaves out"):
        fastvit.create_model("vit_base_patch16_siglip_gap_224", state, **SMALL)
    for shape in ((), (0,), (3,), (95, 32), (96, 31), (96, 32, 1)):
        with pytest.raises(CheckpointError, match=rf"(?s)does not fit.*{packed}"):
            fastvit.create_model(name, {**state, key: torch.ones(shape)}, **SMALL)


def test_the_text_tower_of_clip_is_left_out() -> None:
    hf = import_library("transformers")
    model = randomised(hf.CLIPModel(hf.CLIPConfig(vision_config=HF_SMALL, text_config=HF_TEXT, projection_dim=5)))
    name, tower = "vit_base_patch16_clip_quickgelu_224", model.vision_model
    ours = fastvit.create_model(name, model.state_dict(), drop_head=True, **SMALL)
    check(ours, lambda x: tower.post_layernorm(tower(x).last_hidden_state), (16, 16))


def test_mae(tmp_path: Path) -> None:
    """transformers', with the decoder, into models that have its fixed positions and into ones that learn them."""
    hf = import_library("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    decoder = {f"decoder_{name}": n for name, n in small.items()}
    mae = hf.ViTMAEForPreTraining(hf.ViTMAEConfig(image_size=56, patch_size=4, **small, **decoder, mask_ratio=0.0))
    table = fastvit.VisionTransformer(**{**SMALL, "img_size": 56}, pos_embed="sincos2d").pos_embed
    randomised(mae).eval().vit.embeddings.position_embeddings.data = table
    mae.save_pretrained(tmp_path)
    pixels = image((56, 56))
    want = mae.vit(pixels).last_hidden_state[:, 0]  # without a mask the patches are in a random order
    for pos_embed, weights in (("sincos2d", mae.state_dict()), ("learn", tmp_path)):
        options = {**SMALL, "img_size": 56, "pos_embed": pos_embed}
        model = fastvit.create_model("vit_base_patch16_224", weights, **options).eval()
        torch.testing.assert_close(model(pixels), want, rtol=1e-4, atol=1e-4)
    wide = {**SMALL, "img_size": (24, 40)}
    learnt = fastvit.create_model("vit_base_patch16_224", tmp_path, **wide).pos_embed
    fixed = fastvit.create_model("vit_base_patch16_224", tmp_path, **wide, pos_embed="sincos2d").pos_embed
    assert torch.equal(fixed, fastvit.VisionTransformer(**wide, pos_embed="sincos2d").pos_embed)
    assert (learnt - fixed).abs().max() > 0.1
