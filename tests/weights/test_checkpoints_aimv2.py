"""Weights of AIMv2 as Apple and transformers write them; timm's are in test_checkpoints.py."""

from typing import Any

import pytest
import torch
from checkpoint_models import HF_SMALL, HF_TEXT, SMALL, check, renamed, with_prefix
from library_imports import import_library, import_timm
from models import randomised
from torch import Tensor

import fastvit
from fastvit.checkpoints import CheckpointError

NAME = "aimv2_large_patch14_224"
POOLING = {"cls_token": (1, 1, 32), "k.weight": (32, 32), "v.weight": (32, 32), "linear.bias": (32,)}


def apple(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """timm's state_dict under the names of apple/ml-aim, which timm itself reads."""
    names = {"norm1.": "norm_1.", "norm2.": "norm_2.", "fc1_g.": "fc1.", "fc1_x.": "fc3."}
    state = renamed(state, names | {"patch_embed.": "patchifier."})
    fronts = {"norm": "trunk.post_trunk_", "blocks": "trunk."}
    return {fronts.get(key.partition(".")[0], "preprocessor.") + key: value for key, value in state.items()}


def test_apple() -> None:
    """Interpolated, and next to a text tower, which has attention pooling, that our model has not."""
    timm = import_timm()
    written = randomised(timm.create_model(NAME, **SMALL)).eval()
    state, wide = apple(written.state_dict()), {**SMALL, "img_size": (8, 24)}
    oracle = timm.create_model(NAME, **wide).eval()
    oracle.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(dict(state), oracle))
    check(fastvit.create_model(NAME, state, **wide), oracle.forward_features, (8, 24))

    state = with_prefix(state, "image_encoder.")
    state |= {f"image_encoder.head.{name}": torch.ones(shape) for name, shape in POOLING.items()}
    state |= {"image_projector.weight": torch.ones(5, 32), "log_logit_scale": torch.ones(())}
    state |= {"text_encoder.trunk.blocks.0.norm_1.weight": torch.ones(8), "text_projector.weight": torch.ones(5, 8)}
    check(fastvit.create_model(NAME, state, drop_head=True, **SMALL), written.forward_features, (16, 16))
    with pytest.raises(CheckpointError, match=r"(?s)Apple's AIMv2.*head\.cls_token.*drop_head=True leaves out"):
        fastvit.create_model(NAME, state, **{**SMALL, "num_classes": 5})


@pytest.mark.parametrize("bias", [False, True])
def test_transformers(bias: bool) -> None:
    """Alone with biases or without, and next to a text tower."""
    library: Any = import_library("transformers")
    vision = library.Aimv2VisionConfig(**HF_SMALL, use_head=False, qkv_bias=bias, mlp_bias=bias)
    alone = randomised(library.Aimv2VisionModel(vision)).eval()
    options = {**SMALL, "qkv_bias": bias, "proj_bias": bias}
    ours = fastvit.create_model(NAME, alone.state_dict(), **options)
    check(ours, lambda x: alone(x).last_hidden_state, (16, 16))
    if not bias:
        config = library.Aimv2Config(vision_config=HF_SMALL, text_config=HF_TEXT, projection_dim=5)
        both = randomised(library.Aimv2Model(config)).eval()
        ours = fastvit.create_model(NAME, both.state_dict(), drop_head=True, **SMALL)
        check(ours, lambda x: both.vision_model(x).last_hidden_state, (16, 16))
