"""Initial values: timm's, from the constructor and from `init_weights` in memory that held something else."""

from typing import Any

import pytest
import torch
from library_imports import import_timm
from torch import Tensor

import fastvit
from fastvit import VisionTransformer, reference
from fastvit.modules.pooling import AttentionPoolLatent

SMALL: dict[str, Any] = {"embed_dim": 256, "depth": 1, "num_heads": 4, "num_classes": 400}
MODELS: dict[str, dict[str, Any]] = {
    "vit_small_patch16_224": {"init_values": 1e-5, "reg_tokens": 4},
    "vit_large_patch16_224": {"mlp_layer": "GluMlp"},  # the gate's bias is 1, and its weights are tiny
    "vit_base_patch16_siglip_224": {"mlp_layer": "SwiGLU"},
    "deit_base_distilled_patch16_224": {"norm_layer": "rmsnorm"},
    "eva02_base_patch14_448": {"img_size": 224},
}


def assert_same_statistics(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Check mean and deviation of the halves of each tensor: a gate and a value may be in one layer."""
    assert got.keys() == want.keys()
    for key, expected in want.items():
        for ours, theirs in zip(got[key].chunk(2), expected.chunk(2), strict=True):
            error, std = 6 / theirs.numel() ** 0.5, theirs.std(correction=0).item()
            assert ours.std(correction=0).item() == pytest.approx(std, rel=error + 0.02, abs=1e-12), key
            assert ours.mean().item() == pytest.approx(theirs.mean().item(), abs=error * std + 1e-12), key


@pytest.mark.parametrize("name", MODELS)
def test_as_timms(name: str) -> None:
    timm = import_timm()

    def make(library: Any, **where: Any) -> Any:
        arguments = {**SMALL, **MODELS[name]}
        if "mlp_layer" in arguments:
            arguments["mlp_layer"] = getattr(library.layers, arguments["mlp_layer"])
        return library.create_model(name, **arguments, **where)

    want = make(timm).state_dict()
    assert_same_statistics(make(fastvit).state_dict(), want)
    model = make(fastvit, device="meta").to_empty(device="cpu")
    for value in model.state_dict().values():
        value.fill_(torch.nan)
    model.init_weights()
    assert_same_statistics(model.state_dict(), want)


def test_a_latent_is_cut_off_at_twice_its_deviation() -> None:
    latent = AttentionPoolLatent(1024).latent
    assert latent.std().item() == pytest.approx(0.88 / 32, rel=0.1)
    assert latent.abs().max() <= 2 / 32


def test_init_weights_of_tokens_alone() -> None:
    """The linear layers are PyTorch's with needs_reset, and stay as they are without."""
    model = VisionTransformer(16, 4, embed_dim=32, depth=2, num_heads=2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.init_weights("skip", needs_reset=False)
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {"cls_token", "pos_embed"}
    model.init_weights("reset")
    assert model.blocks[0].mlp.fc1.bias.any()
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("kind", [VisionTransformer, reference.VisionTransformer])
def test_a_kaiming_patch_embedding(kind: Any) -> None:
    """The constructor and `init_weights` give the values of He et al.: normal, with deviation sqrt(2 / fan_in)."""
    model = kind(32, 4, embed_dim=256, depth=1, num_heads=4, patch_init="kaiming")
    for change in (lambda: None, model.init_weights):
        change()
        weight, bias = model.patch_embed.proj.weight, model.patch_embed.proj.bias
        assert weight.std().item() == pytest.approx((2 / 48) ** 0.5, rel=0.03)
        assert weight.abs().max() > 3 * weight.std()  # normal, not uniform
        assert not bias.any()
        torch.nn.init.ones_(bias), torch.nn.init.ones_(weight)
