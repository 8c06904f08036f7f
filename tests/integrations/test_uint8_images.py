"""uint8 images in accelerated models of other libraries are normalised inside the patch embedding, or refused."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from known_models import built
from library_imports import import_library
from library_models import SIZES, hugging_face, output_of, vit
from models import Calls, close
from torch import Tensor, nn

import fastvit

MEAN, STD = (0.48, 0.45, 0.40), (0.26, 0.27, 0.28)


@pytest.fixture
def pixels(device: torch.device) -> Tensor:
    return torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, device=device)


def normalised(pixels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    mean, std = (torch.tensor(t, dtype=dtype, device=pixels.device).view(3, 1, 1) for t in (MEAN, STD))
    return (pixels.to(dtype) / 255 - mean) / std


# Models of transformers cast images before the convolution could normalise them
@pytest.mark.parametrize(
    "name",
    [
        "ViT", "torchvision", "DINOv2's repository", "ViT of transformers", "DeiT", "Dinov2", "Dinov2WithRegisters",
        "CLIP of transformers", "SigLIP of transformers", "VideoMAE", "V-JEPA 2",
    ],
)  # fmt: skip
def test_as_normalised_by_hand(name: str, device: torch.device) -> None:
    known = built(name, device)
    model = copy.deepcopy(known.model)
    weight = next(p for p in model.parameters() if p.dim() > 3)
    pixels = torch.randint(0, 256, (2, *known.known.image), dtype=torch.uint8, device=device)
    image = normalised(pixels, weight.dtype)
    want = output_of(model(image))
    cotangent = torch.randn_like(want)
    (gradient,) = torch.autograd.grad(want, weight, cotangent)
    fastvit.accelerate(model, mean=MEAN, std=STD)
    with Calls() as calls:
        got = output_of(model(pixels))
    assert calls.names.count("fastvit::patch_embed_fwd") == 1
    assert close(torch.autograd.grad(got, weight, cotangent)[0], gradient)
    assert close(got, want)
    assert close(output_of(model(image)), want)
    assert torch.equal(output_of(copy.deepcopy(model)(pixels)), got)
    if "repository" not in name:  # classes of a module that cannot be imported
        assert torch.equal(output_of(pickle.loads(pickle.dumps(model))(pixels)), got)
    fastvit.restore(model)
    assert not any(m._forward_pre_hooks or m._forward_pre_hooks_with_kwargs for m in model.modules())


def test_compiled_and_in_16_bits(pixels: Tensor) -> None:
    model = vit(depth=1).to(pixels.device)
    fastvit.accelerate(model, mean=MEAN, std=STD)
    want = model(pixels)
    torch._dynamo.reset()
    assert close(torch.compile(model, backend="eager", fullgraph=True)(pixels), want)
    with torch.autocast(pixels.device.type, torch.bfloat16):
        got = model(pixels)
    torch.testing.assert_close(got.float(), model.bfloat16()(pixels).float(), rtol=0.05, atol=0.05)
    torch.testing.assert_close(got.float(), want, rtol=0.05, atol=0.05)


def test_without_mean_and_std_uint8_is_the_models_own_affair(pixels: Tensor) -> None:
    model = vit(depth=1).to(pixels.device)
    fastvit.accelerate(model)
    x = torch.randint(0, 9, (2, 64), device=pixels.device)
    for module, argument, kind in ((model, pixels, "uint8"), (model.norm, x, "int64")):
        with (
            torch.autocast(pixels.device.type, torch.bfloat16),
            pytest.warns(UserWarning, match=rf"its input is torch.{kind}"),
            pytest.raises(RuntimeError),
        ):
            module(argument)


def test_every_entrance_of_a_model_of_transformers(pixels: Tensor) -> None:
    """By position and by name; its towers may be called directly."""
    library = import_library("transformers")
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = library.CLIPConfig(text_config=text, vision_config=SIZES, projection_dim=32)
    model = library.CLIPModel(config).to(pixels.device).eval()
    words, want = torch.zeros(1, 2, dtype=torch.long, device=pixels.device), normalised(pixels)
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


def test_hooks_of_others_stay_ours_come_once_and_copies_have_their_own_dtype(pixels: Tensor) -> None:
    model, dtypes = hugging_face("ViTModel").to(pixels.device), []
    model.register_forward_pre_hook(lambda module, args: dtypes.append(args[0].dtype))
    for _ in range(2):
        fastvit.accelerate(model, mean=MEAN, std=STD)
        assert len(model._forward_pre_hooks) == 2
    double = copy.deepcopy(model).double()  # normalised for the copy's weights, not for the model's
    want = double(normalised(pixels, torch.float64))[0]
    torch.testing.assert_close(double(pixels)[0], want, rtol=1e-10, atol=1e-12)
    assert close(model(pixels)[0], want.float())
    fastvit.restore(model)
    assert len(model._forward_pre_hooks) == 1
    assert dtypes == [torch.float64, torch.uint8, torch.uint8]


PADDED = {"dynamic_img_pad": True, "dynamic_img_size": True}


@pytest.mark.parametrize(
    ("options", "mean", "std", "message"),
    [
        ({}, MEAN, None, "mean and std must both be given"),
        ({}, 0.5, 0.5, "mean must be one number .* for each of the 3 channels, got 0.5"),
        ({}, MEAN, (0.2, 0.0, 0.2), r"std must be one number in \(0, 1\]"),
        ({}, (0.5,), (0.5,), "mean must have one value for each of the 3 channels, got 1"),
        (PADDED, MEAN, STD, "PatchEmbed pads its image"),
        (None, MEAN, STD, "no patch embedding of this model can be accelerated"),
    ],
)
def test_what_does_not_fit_is_refused(options, mean, std, message: str) -> None:
    model = nn.LayerNorm(8) if options is None else vit(**options)
    with pytest.raises((TypeError, ValueError), match=message):
        fastvit.accelerate(model, mean=mean, std=std)
    assert not any("forward" in m.__dict__ for m in model.modules())
