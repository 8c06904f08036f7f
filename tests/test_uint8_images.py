"""uint8 images in accelerated models of other libraries: normalised inside the patch embedding, or refused."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from dinov2_layout import PatchEmbed
from library_imports import import_library
from models import Calls, close
from test_report import hugging_face, vit
from torch import Tensor, nn

import fastvit

MEAN, STD = (0.48, 0.45, 0.40), (0.26, 0.27, 0.28)


def torchvision_vit() -> nn.Module:
    vision_transformer = import_library("torchvision").models.VisionTransformer
    return vision_transformer(image_size=32, patch_size=8, num_layers=1, num_heads=2, hidden_dim=32, mlp_dim=64)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "timm": vit,
    "timm's BEiT": lambda: vit("beit_base_patch16_224", depth=1),
    "torchvision": torchvision_vit,
    "DINOv2": lambda: nn.Sequential(PatchEmbed(32, 8, 3, 48)),
}


@pytest.fixture
def pixels() -> Tensor:
    return torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)


def normalised(pixels: Tensor) -> Tensor:
    mean, std = (torch.tensor(t).view(3, 1, 1) for t in (MEAN, STD))
    return (pixels / 255 - mean) / std


@pytest.mark.parametrize("name", MODELS)
def test_as_normalised_by_hand(name: str, pixels: Tensor) -> None:
    model = MODELS[name]().eval()
    image = normalised(pixels)
    weight = next(p for p in model.parameters() if p.dim() == 4)
    want = model(image)
    cotangent = torch.randn_like(want)
    (grad,) = torch.autograd.grad(want, weight, cotangent)
    fastvit.accelerate(model, mean=MEAN, std=STD)
    with Calls() as calls:
        assert close(model(pixels), want)
    assert "fastvit::patch_embed_fwd" in calls.names
    assert "aten::div" not in calls.names
    assert close(torch.autograd.grad(model(pixels), weight, cotangent)[0], grad)
    assert close(model(image), want)  # float images are taken as they are
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert close(compiled(pixels), want)
    with fastvit.accelerated(model, mean=MEAN, std=STD):
        assert close(model(pixels), want)


def test_copies_take_them_too(pixels: Tensor) -> None:
    model = vit().eval()
    fastvit.accelerate(model, mean=MEAN, std=STD)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(pixels), model(pixels))


def test_under_autocast_and_in_bfloat16(pixels: Tensor) -> None:
    model = vit().eval()
    fastvit.accelerate(model, mean=MEAN, std=STD)
    want = model(pixels)
    with torch.autocast("cpu", torch.bfloat16):
        got = model(pixels)
    torch.testing.assert_close(got.float(), model.bfloat16()(pixels).float(), rtol=0.05, atol=0.05)
    torch.testing.assert_close(got.float(), want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("autocast", [False, True])
def test_without_mean_and_std_uint8_is_the_models_own_affair(pixels: Tensor, autocast: bool) -> None:
    model = vit()
    fastvit.accelerate(model)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        pytest.warns(UserWarning, match=r"its input is torch.uint8"),
        pytest.raises(RuntimeError, match=r"type|dtype"),
    ):
        model(pixels)


@pytest.mark.parametrize("name", ["ViTModel", "CLIPVisionModel", "SiglipVisionModel", "Dinov2Model"])
def test_transformers_cast_their_images_and_are_refused(name: str) -> None:
    model = hugging_face(name)
    with pytest.raises(ValueError, match=r"Embeddings casts its image before they could apply: normalise before"):
        fastvit.accelerate(model, mean=MEAN, std=STD)
    assert not any("forward" in m.__dict__ for m in model.modules())


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        (MEAN, None, "mean and std must both be given"),
        (None, STD, "mean and std must both be given"),
        (0.5, 0.5, "mean must be one number .* for each of the 3 channels, got 0.5"),
        ((123.7, 116.3, 103.5), STD, r"mean must be one number in \[0, 1\] .* got \(123.7"),
        (MEAN, (58.4, 57.1, 57.4), r"std must be one number in \(0, 1\]"),
        (MEAN, (0.2, 0.0, 0.2), r"std must be one number in \(0, 1\]"),
        (MEAN, STD[:2], "std must be one number .* for each of the 3 channels"),
        ((0.5,), (0.5,), "mean must have one value for each of the 3 channels, got 1"),
    ],
)
def test_what_does_not_fit_is_refused(mean, std, message: str) -> None:
    model = vit()
    with pytest.raises((TypeError, ValueError), match=message):
        fastvit.accelerate(model, mean=mean, std=std)
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_models_that_pad_or_have_no_patches_are_refused() -> None:
    with pytest.raises(ValueError, match="PatchEmbed pads its image"):
        fastvit.accelerate(vit(dynamic_img_pad=True, dynamic_img_size=True), mean=MEAN, std=STD)
    with pytest.raises(ValueError, match="no patch embedding of this model can be accelerated"):
        fastvit.accelerate(nn.LayerNorm(8), mean=MEAN, std=STD)


def test_integers_elsewhere_are_left_to_the_module() -> None:
    norm = nn.LayerNorm(8)
    fastvit.accelerate(norm)
    x = torch.randint(0, 9, (2, 8))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.warns(UserWarning, match=r"its input is torch.int64"),
        pytest.raises(RuntimeError),
    ):
        norm(x)
