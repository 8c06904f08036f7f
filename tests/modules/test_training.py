"""A small ViT from the zoo learns scikit-learn's handwritten digits, fused and eager from the same weights, in step."""

import copy
import functools
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from library_imports import import_timm
from oracle import GRADIENT
from torch import Tensor, nn

import fastvit
from fastvit import reference, zoo

MODEL = "vit_cifar_small"
SMALLER = {
    "img_size": 8, "patch_size": (2, 4), "in_chans": 1, "embed_dim": 48, "depth": 2, "mlp_ratio": 2.0,
    "global_pool": "avg", "pos_drop_rate": 0.0, "proj_drop_rate": 0.0, "attn_drop_rate": 0.0,
    "patch_init": "",
}  # fmt: skip
EPOCHS, BATCH, HELD_OUT = 12, 32, 360


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """1797 images (n, 1, 8, 8) of mean 0 and spread 1, and their classes, shuffled."""
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    data = datasets.load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None]
    return (images - images.mean()) / images.std(), torch.tensor(data.target)[order]


class Run(NamedTuple):
    losses: Tensor  # (steps,) float64
    parameters: Tensor  # all of them, flat, float64
    accuracy: float  # on the held-out digits


def train(model: nn.Module, device: torch.device, dtype: torch.dtype, epochs: int = EPOCHS) -> Run:
    """AdamW with warm-up and cosine decay; bf16 means autocast over float32 weights."""
    images, classes = (t.to(device) for t in digits())
    autocast = functools.partial(torch.autocast, device.type, torch.bfloat16, enabled=dtype is torch.bfloat16)
    weights = torch.float64 if dtype is torch.float64 else torch.float32
    model, images = model.to(device, weights), images.to(weights)
    # eps: without it Adam divides rounding noise by itself where a gradient is zero, as the key bias's always is
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05, eps=1e-4)
    n = len(images) - HELD_OUT
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=epochs * (n // BATCH), pct_start=0.2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(n, generator=generator)[: n // BATCH * BATCH].view(-1, BATCH):
            with autocast():
                logits = model(images[batch])
            loss = F.cross_entropy(logits.to(weights), classes[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    model.eval()
    with torch.inference_mode(), autocast():
        accuracy = (model(images[n:]).argmax(-1) == classes[n:]).double().mean().item()
    parameters = torch.cat([p.detach().double().flatten().cpu() for p in model.parameters()])
    return Run(torch.tensor(losses, dtype=torch.float64), parameters, accuracy)


class Trained(NamedTuple):
    start: nn.Module
    eager: dict[torch.dtype, Run]


@pytest.fixture(scope="module")
def trained() -> Trained:
    """The reference, trained in float64, float32 and bf16 from the same weights."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    start = fastvit.create_model(MODEL, **SMALLER)
    runs = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = reference.VisionTransformer(**{**zoo.config(MODEL), **SMALLER})
        model.load_state_dict(start.state_dict())
        runs[dtype] = train(model, device, dtype)
    return Trained(start, runs)


def test_float32_training_is_the_reference_step_by_step(trained: Trained, device: torch.device) -> None:
    fused, eager = train(copy.deepcopy(trained.start), device, torch.float32), trained.eager[torch.float32]
    torch.testing.assert_close(fused.losses, eager.losses, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(fused.parameters, eager.parameters, rtol=1e-3, atol=1e-4)
    assert fused.losses[-20:].mean() < 0.05 < fused.losses[0]
    assert fused.accuracy > 0.95
    assert eager.accuracy > 0.95


def test_bf16_training_is_as_close_to_float64_as_the_references(trained: Trained, device: torch.device) -> None:
    """Every step's loss, and all final parameters; rounding differs, so no step can be equal. The largest of so many
    correlated deviations is one draw from a heavy tail and gets the oracle's wider factor."""
    fused = train(copy.deepcopy(trained.start), device, torch.bfloat16)
    eager, exact = trained.eager[torch.bfloat16], trained.eager[torch.float64]
    for name in ("losses", "parameters"):
        ours, theirs = ((getattr(run, name) - getattr(exact, name)).abs() for run in (fused, eager))
        rms, largest = (norm(ours) / norm(theirs) for norm in (torch.linalg.vector_norm, torch.amax))
        assert rms <= 2, f"{name}: {rms:.2f} times as far from float64 as the reference"
        assert largest <= GRADIENT, f"{name}: at worst {largest:.2f} times as far from float64 as the reference"
    assert fused.accuracy > 0.95


def test_an_accelerated_timm_model_trains_as_untouched(device: torch.device) -> None:
    timm = import_timm()
    torch.manual_seed(0)
    start = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=(2, 4), in_chans=1, embed_dim=48, depth=2, mlp_ratio=2.0,
        global_pool="avg", num_classes=10,
    )  # fmt: skip
    own = train(copy.deepcopy(start), device, torch.float32, epochs=1)
    assert not fastvit.accelerate(start, strict=True).skipped
    accelerated = train(start, device, torch.float32, epochs=1)
    torch.testing.assert_close(accelerated.losses, own.losses, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(accelerated.parameters, own.parameters, rtol=1e-3, atol=1e-4)
    assert own.losses[-5:].mean() < 0.8 * own.losses[0]
