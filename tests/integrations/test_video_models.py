"""transformers' VideoMAE and V-JEPA 2, accelerated: what models of images do not have. Outputs and gradients of the
encoders: test_integrations.py."""

import warnings
from typing import Any

import pytest
import torch
from library_imports import import_library
from models import close, randomised
from torch import Tensor, nn

import fastvit

SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "patch_size": 8}


def vjepa2(device: torch.device, **options: Any) -> Any:
    transformers = import_library("transformers")
    predictor = {"pred_hidden_size": 64, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 2}
    config = transformers.VJEPA2Config(**SIZES, crop_size=16, frames_per_clip=4, **predictor, **options)
    return randomised(transformers.VJEPA2Model(config)).to(device).eval()


def videomae(device: torch.device) -> Any:
    transformers = import_library("transformers")
    config = transformers.VideoMAEConfig(**SIZES, intermediate_size=96, image_size=16, num_frames=4)
    return randomised(transformers.VideoMAEModel(config)).to(device).eval()


def clip(device: torch.device) -> Tensor:
    return torch.randn(2, 4, 3, 16, 16, generator=torch.Generator().manual_seed(1)).to(device)


class Predicted(nn.Module):
    """V-JEPA 2 from some tubelets to others: their places differ from sample to sample."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        context, target = torch.tensor([[0, 3, 5], [7, 1, 2]]), torch.tensor([[1, 6], [4, 0]])
        device = next(model.parameters()).device
        self.masks = {"context_mask": [context.to(device)], "target_mask": [target.to(device)]}

    def forward(self, video: Tensor) -> Tensor:
        return self.model(video, **self.masks).predictor_output.last_hidden_state


@pytest.mark.parametrize("checkpointing", [False, True])
def test_tubelets_at_any_places(checkpointing: bool, device: torch.device) -> None:
    model = vjepa2(device)
    model.predictor.embeddings.mask_tokens.requires_grad_(False)  # there are more than the model takes
    if checkpointing:
        model.train().gradient_checkpointing_enable()
    predicted, x = Predicted(model), clip(device)
    want = trained(predicted, x)
    report = fastvit.accelerate(model, strict=True)
    assert {entry.kind for entry in report.accelerated} == {"Conv3d", "VJEPA2Layer", "LayerNorm"}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs its own forward instead of fastvit's")
        got = trained(predicted, x)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def trained(model: nn.Module, video: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of the video and of the parameters."""
    x = video.clone().requires_grad_()
    out = model(x)
    wanted = {"video": x, **{name: p for name, p in model.named_parameters() if p.requires_grad}}
    found = torch.autograd.grad(out, list(wanted.values()), torch.linspace(-1, 1, out.numel()).view(out.shape).to(out))
    return {"output": out.detach(), **dict(zip(wanted, found, strict=True))}


@pytest.mark.parametrize("make", [videomae, vjepa2], ids=lambda make: make.__name__)
def test_uint8_videos(make: Any, device: torch.device) -> None:
    """transformers casts V-JEPA 2's videos before the convolution could normalise them."""
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)
    model = make(device)
    pixels = torch.randint(0, 256, (2, 4, 3, 16, 16), dtype=torch.uint8, device=device)
    m, s = (torch.tensor(t, device=device).view(3, 1, 1) for t in (mean, std))
    video = (pixels / 255 - m) / s
    want = model(video).last_hidden_state
    fastvit.accelerate(model, mean=mean, std=std)
    assert close(model(pixels).last_hidden_state, want)
    assert close(model(video).last_hidden_state, want)


def test_a_layer_returns_what_its_own_forward_returns(device: torch.device) -> None:
    """The weights of its attention, next to the tokens: with eager attention it is left alone."""
    model, x = vjepa2(device), torch.randn(2, 8, 48, device=device)
    layer = model.encoder.layer[0]
    want = layer(x)
    fastvit.accelerate(model)
    tokens, weights = layer(x)
    assert close(tokens, want[0])
    assert weights is want[1] is None
    torch._dynamo.reset()
    assert close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x)[0], tokens)
    fastvit.restore(model)
    model.set_attn_implementation("eager")
    reasons = {entry.detail for entry in fastvit.accelerate(model).skipped}
    assert reasons == {"eager attention returns its weights as well"}
    assert layer(x)[1].shape == (2, 3, 8, 8)


def test_a_video_that_tubelets_do_not_cover(device: torch.device) -> None:
    """The convolution leaves out its last frame, as without fastvit."""
    model, x = vjepa2(device), clip(device)[:, :3]
    want = model(x, skip_predictor=True).last_hidden_state
    fastvit.accelerate(model)
    with pytest.warns(UserWarning, match="an image of 3 x 16 x 16, which patches of 2 x 8 x 8 do not cover"):
        assert close(model(x, skip_predictor=True).last_hidden_state, want)
