"""VideoMAE and V-JEPA 2: weights of transformers in our models, which compute the same as transformers' own."""

import copy
from typing import Any

import pytest
import torch
from library_imports import import_library
from models import close, randomised
from oracle import inputs
from torch import Tensor, nn

import fastvit
from fastvit import checkpoints

FRAMES = 6
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
OURS: dict[str, Any] = {
    "embed_dim": 64, "depth": 2, "num_heads": 2, "num_frames": FRAMES, "img_size": 32, "patch_size": 8
}  # fmt: skip
VIDEOMAE, VJEPA2 = "videomae_base_patch16_224", "vjepa2_large_patch16_256"


def videomae(kind: str = "VideoMAEModel", **options: Any) -> Any:
    transformers = import_library("transformers")
    sizes = {**SIZES, "intermediate_size": 256, "image_size": 32, "patch_size": 8, "num_frames": FRAMES}
    options = {"use_mean_pooling": False, "layer_norm_eps": 1e-6, **options}
    return randomised(getattr(transformers, kind)(transformers.VideoMAEConfig(**sizes, **options))).eval()


def vjepa2(kind: str = "VJEPA2Model", **options: Any) -> Any:
    transformers = import_library("transformers")
    few = {"pred_hidden_size": 32, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1, "num_pooler_layers": 1}
    sizes = {**SIZES, "crop_size": 32, "patch_size": 8, "frames_per_clip": FRAMES, **options}
    return randomised(getattr(transformers, kind)(transformers.VJEPA2Config(**sizes, **few))).eval()


def ours(name: str, weights: Any, **more: Any) -> Any:
    return fastvit.create_model(name, weights=weights, **{**OURS, **more}).eval()


def clip() -> Tensor:
    """A video as transformers' models take it, (B, T, C, H, W)."""
    return inputs("normal", 2, FRAMES, 3, 32, 32, dtype=torch.float32, device="cpu", seed=1)


def step(out: Tensor, video: Tensor, model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the gradients of the video, and of the parameters by name."""
    dout = inputs("normal", *out.shape, dtype=out.dtype, device="cpu", seed=5)
    named = dict(model.named_parameters())
    of_video, *found = torch.autograd.grad(out, [video, *named.values()], dout, allow_unused=True)
    return of_video, {name: g for name, g in zip(named, found, strict=True) if g is not None}


@pytest.mark.parametrize("name", [VIDEOMAE, VJEPA2, "vjepa2, heads of 80"])
def test_tokens_and_gradients_are_transformers(name: str) -> None:
    """Heads of 80 elements have parts of an odd number of frequencies, so that some partners are of two lists."""
    size: dict[str, Any] = {}
    if name == VIDEOMAE:
        theirs = videomae()
    else:
        width = 160 if "80" in name else 64
        theirs, size, name = vjepa2(hidden_size=width), {"embed_dim": width}, VJEPA2
    model = ours(name, theirs.state_dict(), **size)
    video, same = (clip().requires_grad_() for _ in range(2))
    out = model.forward_features(video.transpose(1, 2))
    want = theirs(same, **{} if name == VIDEOMAE else {"skip_predictor": True}).last_hidden_state
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)

    (of_video, got), (of_same, expected) = step(out, video, model), step(want, same, theirs)
    torch.testing.assert_close(of_video, of_same, rtol=1e-4, atol=1e-4)
    renamed = copy.deepcopy(model)
    checkpoints.load(renamed, expected)  # gradients under our names
    for key, parameter in renamed.named_parameters():
        scale = max(parameter.abs().max().item(), 1.0)  # the bias of k has a gradient of zeros, but for rounding
        torch.testing.assert_close(got[key] / scale, parameter.detach() / scale, rtol=0, atol=1e-5, msg=key)


def test_a_video_of_another_number_of_frames() -> None:
    """V-JEPA 2's positions are counted: its weights take any."""
    theirs = vjepa2()
    model = ours(VJEPA2, theirs.state_dict(), num_frames=16)
    video = clip()[:, :4]
    want = theirs(video, skip_predictor=True).last_hidden_state
    assert close(model.forward_features(video.transpose(1, 2)), want)
    _, (features,) = model.forward_intermediates(video.transpose(1, 2), indices=1, norm=True)
    assert close(features, want.transpose(1, 2).unflatten(2, (2, 4, 4)))


def test_a_fine_tuned_videomae() -> None:
    """In the names of files too. transformers' fc_norm has another eps than the norms of the blocks."""
    theirs = videomae("VideoMAEForVideoClassification", use_mean_pooling=True, num_labels=5, layer_norm_eps=1e-5)
    weights = {
        key.replace("query.bias", "q_bias").replace("value.bias", "v_bias"): value
        for key, value in theirs.state_dict().items()
    }
    assert any("q_bias" in key for key in weights)
    assert any(key.startswith("fc_norm") for key in weights)
    model = ours(VIDEOMAE, weights, fc_norm=True, num_classes=5, norm_layer=lambda *a, **k: nn.LayerNorm(*a, eps=1e-5))
    assert close(model(clip().transpose(1, 2)), theirs(clip()).logits)


def test_other_files_of_the_same_encoders() -> None:
    """Pretraining with its decoder, a classifier, and Meta's encoder, which has timm's names."""
    for kind in ("VideoMAEForPreTraining", "VideoMAEForVideoClassification"):
        theirs = videomae(kind)
        model = ours(VIDEOMAE, theirs.state_dict())
        assert close(model.forward_features(clip().transpose(1, 2)), theirs.videomae(clip()).last_hidden_state)
    theirs = vjepa2("VJEPA2ForVideoClassification")
    model = ours(VJEPA2, theirs.state_dict(), drop_head=True)
    want = theirs.vjepa2(clip(), skip_predictor=True).last_hidden_state
    assert close(model.forward_features(clip().transpose(1, 2)), want)
    again = ours(VJEPA2, {f"module.backbone.{key}": value for key, value in model.state_dict().items()})
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())


def test_learnt_positions_come_back() -> None:
    """Though their number, 4 x 8 x 8, is that of a square grid of patches."""
    small = {**OURS, "num_frames": 8, "img_size": 64, "pos_embed": "learn"}
    model = ours(VIDEOMAE, None, **small)
    again = ours(VIDEOMAE, model.state_dict(), **small)
    assert torch.equal(again.pos_embed, model.pos_embed)


def test_k_without_its_bias_is_no_other_library_s() -> None:
    """Zeros stand for k's bias only if no block has one, and positions may be missing in VideoMAE's files only."""
    model = ours(VIDEOMAE, None)
    weights = model.state_dict()
    del weights["pos_embed"]
    with pytest.raises(checkpoints.CheckpointError, match=r"missing.*\n.*pos_embed"):
        ours(VIDEOMAE, weights)
    theirs = vjepa2().state_dict()
    del theirs["encoder.layer.0.attention.key.bias"]
    with pytest.raises(checkpoints.CheckpointError, match=r"blocks\.0\.attn\.qkv\.bias"):
        ours(VJEPA2, theirs)
