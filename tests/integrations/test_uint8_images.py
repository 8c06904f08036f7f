"""uint8 images in accelerated models of other libraries are normalised inside the patch embedding, or refused."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dinov2_layout import PatchEmbed
from library_imports import import_library
from library_models import SIZES, hugging_face, torchvision_vit, vit
from models import Calls, close
from torch import Tensor, nn

import fastvit

MEAN, STD = (0.48, 0.45, 0.40), (0.26, 0.27, 0.28)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "timm": vit,
    "timm's BEiT": lambda: vit("beit_base_patch16_224", depth=1),
    "torchvision": torchvision_vit,
    "DINOv2": lambda: nn.Sequential(PatchEmbed(32, 8, 3, 48)),
}


@pytest.fixture
def pixels() -> Tensor:
    return torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)


def normalised(pixels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    mean, std = (torch.tensor(t, dtype=dtype).view(3, 1, 1) for t in (MEAN, STD))
    return (pixels.to(dtype) / 255 - mean) / std


def accelerate_and_check(
    model: nn.Module, call: Callable[[Tensor], Tensor], pixels: Tensor, image: Tensor, compiled: bool
) -> list[str]:
    """Accelerated, a model gives for uint8 pixels what it gave for the image, which it takes as before. compiled:
    compare the compiled model, too. Return the operators that ran."""
    weight = next(p for p in model.parameters() if p.dim() == 4)
    want = call(image)
    cotangent = torch.randn_like(want)
    (grad,) = torch.autograd.grad(want, weight, cotangent)
    fastvit.accelerate(model, mean=MEAN, std=STD)
    with Calls() as calls:
        got = call(pixels)
    assert close(got, want)
    assert close(torch.autograd.grad(got, weight, cotangent)[0], grad)
    assert close(call(image), want)
    if compiled:
        torch._dynamo.reset()
        assert close(torch.compile(call, backend="aot_eager", fullgraph=True)(pixels), want)
    return calls.names


@pytest.mark.parametrize("name", MODELS)
def test_as_normalised_by_hand(name: str, pixels: Tensor) -> None:
    model = MODELS[name]().eval()
    ran = accelerate_and_check(model, lambda image: model(image), pixels, normalised(pixels), name == "timm")
    assert "fastvit::patch_embed_fwd" in ran
    assert "aten::div" not in ran
    want = model(pixels)
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


def clip() -> nn.Module:
    """Return CLIP with both its towers."""
    library = import_library("transformers")
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return library.CLIPModel(library.CLIPConfig(text_config=text, vision_config=SIZES, projection_dim=32)).eval()


TRANSFORMERS = [
    "ViTModel", "ViTForImageClassification", "DeiTModel", "Dinov2Model", "Dinov2WithRegistersModel",
    "CLIPVisionModel", "SiglipVisionModel",
]  # fmt: skip


@pytest.mark.parametrize(("name", "by_name"), [*((name, False) for name in TRANSFORMERS), ("ViTModel", True)])
def test_transformers_cast_images_that_are_normalised_before(name: str, by_name: bool, pixels: Tensor) -> None:
    model = hugging_face(name).double()

    def run(image: Tensor) -> Tensor:
        return (model(pixel_values=image) if by_name else model(image))[0]

    ran = accelerate_and_check(model, run, pixels, normalised(pixels, torch.float64), by_name)
    assert ran.count("fastvit::patch_embed_fwd") == 1
    want = run(pixels)
    fastvit.restore(model)
    assert not any(m._forward_pre_hooks or m._forward_pre_hooks_with_kwargs for m in model.modules())
    assert not close(run(pixels), want)


def test_every_entrance_of_a_model_of_transformers(pixels: Tensor) -> None:
    """Its towers may be called directly."""
    model = clip()
    words, want = torch.zeros(1, 2, dtype=torch.long), normalised(pixels)
    calls: list[Callable[[Tensor], Any]] = [
        lambda image: model(words, image).image_embeds,
        lambda image: model(input_ids=words, pixel_values=image).image_embeds,
        lambda image: model.get_image_features(image).pooler_output,
        lambda image: model.vision_model(image).pooler_output,
        lambda image: model.vision_model.embeddings(image),
    ]
    before = [call(want) for call in calls]
    fastvit.accelerate(model, mean=MEAN, std=STD)
    for call, expected in zip(calls, before, strict=True):
        assert close(call(pixels), expected)


def test_hooks_of_others_stay_and_ours_come_once(pixels: Tensor) -> None:
    model, seen = hugging_face("ViTModel"), []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    for _ in range(2):
        fastvit.accelerate(model, mean=MEAN, std=STD)
        assert len(model._forward_pre_hooks) == 2
    model(pixels)
    fastvit.restore(model)
    assert len(model._forward_pre_hooks) == 1
    assert seen == [torch.uint8]


def test_copies_of_transformers_models_and_their_dtype(pixels: Tensor) -> None:
    model = hugging_face("ViTModel")
    fastvit.accelerate(model, mean=MEAN, std=STD)
    want = model(pixels)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(pixels)[0], want)
        got = other.double()(pixels)[0]  # of the copy's weights, not of the model's
        assert got.dtype is torch.float64
        assert close(got, model.double()(normalised(pixels, torch.float64))[0])
        model.float()
    got = model.bfloat16()(pixels)[0]
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=0.05, atol=0.05)


def test_several_crops_are_left_to_the_modules_inside() -> None:
    """Some models around a vision tower take (B, n, C, H, W)."""

    class Crops(nn.Module):
        def __init__(self, tower: nn.Module) -> None:
            super().__init__()
            self.tower = tower

        def forward(self, pixel_values: Tensor) -> Tensor:
            return self.tower(pixel_values.flatten(0, 1))[0]

    model, crops = Crops(hugging_face("CLIPVisionModel")), torch.randint(0, 256, (2, 5, 3, 32, 32), dtype=torch.uint8)
    want = model(normalised(crops))
    fastvit.accelerate(model, mean=MEAN, std=STD)
    assert close(model(crops), want)


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        (MEAN, None, "mean and std must both be given"),
        (0.5, 0.5, "mean must be one number .* for each of the 3 channels, got 0.5"),
        (MEAN, (0.2, 0.0, 0.2), r"std must be one number in \(0, 1\]"),
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
