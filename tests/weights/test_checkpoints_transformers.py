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

DINO: dict[str, Any] = {"mlp_ratio": 2, "attn_implementation": "eager"}
DINOV3: dict[str, Any] = {"num_register_tokens": 4}
VIT = {"norm_layer": partial(LayerNorm, eps=1e-12)}
# Class -> options of its configuration, our model's name and arguments. Poolers and attention pooling are dropped
KINDS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "ViTModel": ({}, "vit_base_patch16_224", {**VIT, "drop_head": True}),
    "ViTForImageClassification": ({"num_labels": 5}, "vit_base_patch16_224", VIT),
    "DeiTForImageClassificationWithTeacher": ({"num_labels": 5}, "deit_base_distilled_patch16_224", VIT),
    "Dinov2Model": (DINO, "vit_base_patch14_dinov2", {}),
    "Dinov2WithRegistersModel": (DINO, "vit_base_patch14_reg4_dinov2", {}),
    "DINOv3ViTModel": (DINOV3, "vit_small_patch16_dinov3_qkvb", {}),
    "DINOv3ViTModel, gated": (
        {**DINOV3, "use_gated_mlp": True, "hidden_act": "silu"}, "vit_small_plus_patch16_dinov3_qkvb", {}
    ),
    "CLIPVisionModel": ({}, "vit_base_patch16_clip_quickgelu_224", {}),
    "CLIPVisionModelWithProjection": ({"projection_dim": 5}, "vit_base_patch16_clip_quickgelu_224", {}),
    "SiglipVisionModel": ({}, "vit_base_patch16_siglip_gap_224", {"act_layer": "gelu_tanh", "drop_head": True}),
    "Aimv2VisionModel": ({"use_head": False}, "aimv2_large_patch14_224", {}),
    "Aimv2VisionModel, biases": (
        {"use_head": False, "qkv_bias": True, "mlp_bias": True}, "aimv2_large_patch14_224",
        {"qkv_bias": True, "proj_bias": True},
    ),
}  # fmt: skip


def made(name: str, **options: Any) -> nn.Module:
    """Return a random model of transformers by the name of its class."""
    kind = getattr(import_library("transformers"), name)
    sizes = {key: n for key, n in HF_SMALL.items() if "mlp_ratio" not in options or key != "intermediate_size"}
    return randomised(kind(kind.config_class(**sizes, **options))).eval()


def tokens_of(model: Any) -> Run:
    """Return the function of images that returns the last normalised tokens."""
    kind = type(model).__name__
    inner = model if kind.startswith("DINOv3") else getattr(model, model.base_model_prefix, model)
    resize = {"interpolate_pos_encoding": True} if kind.startswith(("ViT", "DeiT", "CLIP", "Siglip")) else {}

    def tokens(x: Tensor) -> Tensor:
        out = inner(x, **resize).last_hidden_state
        return inner.post_layernorm(out) if kind.startswith("CLIP") else out  # there it is of the pooled token only

    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_hugging_face(kind: str, tmp_path: Path) -> None:
    """In memory, and from files: version 5 writes the names of version 4 for ViT and DINOv2, which wrote the towers'
    prefix too."""
    options, name, arguments = KINDS[kind]
    model, arguments = made(kind.partition(",")[0], **options), {**SMALL, **arguments}
    tokens = tokens_of(model)
    for size in ((16, 16), (24, 24), (8, 32)) if "Aimv2" not in kind else ((16, 16),):
        check(fastvit.create_model(name, model.state_dict(), **{**arguments, "img_size": size}), tokens, size)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    written = safetensors.load_file(path)
    if kind in ("ViTModel", "Dinov2Model"):
        assert any(key.endswith("attention.attention.query.weight") for key in written)
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


@pytest.mark.parametrize("family", ["CLIP", "Aimv2"])
def test_the_text_tower_is_left_out(family: str) -> None:
    hf = import_library("transformers")
    config = getattr(hf, f"{family}Config")(vision_config=HF_SMALL, text_config=HF_TEXT, projection_dim=5)
    model = randomised(getattr(hf, f"{family}Model")(config))
    name = {"CLIP": "vit_base_patch16_clip_quickgelu_224", "Aimv2": "aimv2_large_patch14_224"}[family]
    ours = fastvit.create_model(name, model.state_dict(), drop_head=True, **SMALL)
    norm = getattr(model.vision_model, "post_layernorm", nn.Identity())
    check(ours, lambda x: norm(model.vision_model(x).last_hidden_state), (16, 16))


def test_attention_pooling_of_siglip(tmp_path: Path) -> None:
    """The pooled features, of a tower alone and of one with its text tower; q, k and v are one layer there."""
    hf = import_library("transformers")
    both = randomised(hf.SiglipModel(hf.SiglipConfig(vision_config=HF_SMALL, text_config=HF_TEXT))).eval()
    expected = both.vision_model(image()).pooler_output
    both.save_pretrained(tmp_path)
    alone, name = dict(both.vision_model.state_dict()), "vit_base_patch16_siglip_224"
    for weights in (alone, both.state_dict(), tmp_path / "model.safetensors"):
        ours = fastvit.create_model(name, weights, **SMALL, act_layer="gelu_tanh").eval()
        torch.testing.assert_close(ours(image()), expected, rtol=1e-5, atol=1e-5)
    (packed,) = (key for key in alone if key.endswith("head.attention.in_proj_weight"))
    with pytest.raises(CheckpointError, match=rf"(?s)unexpected .*{packed}.*drop_head=True leaves out"):
        fastvit.create_model("vit_base_patch16_siglip_gap_224", alone, **SMALL)
    for shape in ((), (3,), (95, 32), (96, 31)):
        with pytest.raises(CheckpointError, match=rf"(?s)does not fit.*{packed}"):
            fastvit.create_model(name, {**alone, packed: torch.ones(shape)}, **SMALL)


def test_biases_of_zeros_may_be_left_out_and_no_others() -> None:
    theirs = made("DINOv3ViTModel", **DINOV3)
    with pytest.raises(CheckpointError, match=r"attention\.q_proj\.bias"):
        fastvit.create_model("vit_small_patch16_dinov3", theirs.state_dict(), **SMALL)
    for key, value in theirs.state_dict().items():
        if key.endswith(("q_proj.bias", "v_proj.bias")):
            value.zero_()
    ours = fastvit.create_model("vit_small_patch16_dinov3", theirs.state_dict(), **SMALL)
    check(ours, tokens_of(theirs), (16, 16))


def test_mae(tmp_path: Path) -> None:
    """With the decoder, into models that have its fixed positions and into ones that learn them."""
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
