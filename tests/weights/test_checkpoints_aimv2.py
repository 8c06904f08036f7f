"""Weights of AIMv2 as Apple and transformers write them; timm's are in test_checkpoints.py."""

from typing import Any

import pytest
import torch
from checkpoint_models import HF_SMALL, HF_TEXT, SIZES, SMALL, check, image, renamed, with_prefix
from library_imports import import_library, import_timm
from models import randomised
from torch import Tensor

import fastvit
from fastvit.checkpoints import CheckpointError

NAME = "aimv2_large_patch14_224"
POOLING = {"cls_token": (1, 1, 32), "k.weight": (32, 32), "v.weight": (32, 32), "linear.bias": (32,)}


def of_apple(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """timm's state_dict under the names of apple/ml-aim, which timm itself reads."""
    names = {"norm1.": "norm_1.", "norm2.": "norm_2.", "fc1_g.": "fc1.", "fc1_x.": "fc3."}
    state = renamed(state, names | {"patch_embed.": "patchifier."})
    fronts = {"norm": "trunk.post_trunk_", "blocks": "trunk."}
    return {fronts.get(key.partition(".")[0], "preprocessor.") + key: value for key, value in state.items()}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_apple(size: tuple[int, int]) -> None:
    timm = import_timm()
    state = of_apple(randomised(timm.create_model(NAME, **SMALL)).state_dict())
    arguments = {**SMALL, "img_size": size}
    oracle = timm.create_model(NAME, **arguments).eval()
    oracle.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(dict(state), oracle))
    check(fastvit.create_model(NAME, state, **arguments), oracle.forward_features, size)


def test_apple_beside_a_text_tower() -> None:
    """Which has attention pooling, that our model has not."""
    written = randomised(import_timm().create_model(NAME, **SMALL)).eval()
    state = with_prefix(of_apple(written.state_dict()), "image_encoder.")
    state |= {f"image_encoder.head.{name}": torch.ones(shape) for name, shape in POOLING.items()}
    state |= {"image_projector.weight": torch.ones(5, 32), "log_logit_scale": torch.ones(())}
    state |= {"text_encoder.trunk.blocks.0.norm_1.weight": torch.ones(8), "text_projector.weight": torch.ones(5, 8)}
    check(fastvit.create_model(NAME, state, drop_head=True, **SMALL), written.forward_features, (16, 16))
    with pytest.raises(CheckpointError, match=r"(?s)Apple's AIMv2.*head\.cls_token.*drop_head=True leaves out"):
        fastvit.create_model(NAME, state, **{**SMALL, "num_classes": 5})


def of_transformers(**options: Any) -> Any:
    library = import_library("transformers")
    return randomised(library.Aimv2VisionModel(library.Aimv2VisionConfig(**HF_SMALL, **options))).eval()


@pytest.mark.parametrize("bias", [False, True])
def test_hugging_face(bias: bool) -> None:
    model = of_transformers(use_head=False, qkv_bias=bias, mlp_bias=bias)
    options = {"qkv_bias": bias, "proj_bias": bias}
    for prefix in ("", "vision_model."):
        ours = fastvit.create_model(NAME, with_prefix(model.state_dict(), prefix), **SMALL, **options)
        check(ours, lambda x: model(x).last_hidden_state, (16, 16))
    x = image()
    torch.testing.assert_close(ours(x), model(x).last_hidden_state.mean(1), rtol=1e-5, atol=1e-5)


def test_hugging_face_beside_a_text_tower() -> None:
    library = import_library("transformers")
    config = library.Aimv2Config(vision_config=HF_SMALL, text_config=HF_TEXT, projection_dim=5)
    both = randomised(library.Aimv2Model(config)).eval()
    ours = fastvit.create_model(NAME, both.state_dict(), drop_head=True, **SMALL)
    check(ours, lambda x: both.vision_model(x).last_hidden_state, (16, 16))
    with pytest.raises(CheckpointError, match=r"(?s)Hugging Face AIMv2.*head\.cls_token.*drop_head=True leaves out"):
        fastvit.create_model(NAME, both.state_dict(), **{**SMALL, "num_classes": 5})
