"""A small ViT from the zoo learns scikit-learn's handwritten digits, fused and eager from the same weights, in step."""

import copy
import functools
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from oracle import GRADIENT
from torch import Tensor, nn

import fastvit
from fastvit.study.sources.from_zoo import plain_model

MODEL = "vit_cifar_small"
SMALLER = {
    "img_size": 8, "patch_size": (2, 4), "in_chans": 1, "embed_dim": 48, "depth": 2, "mlp_ratio": 2.0,
    "global_pool": "avg", "pos_drop_rate": 0.0, "proj_drop_rate": 0.0, "attn_drop_rate": 0.0,
    "patch_init": "",
}  # fmt: skip
EPOCHS, BATCH, HELD_OUT = 5, 32, 360


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


def train(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Run:
    """AdamW with warm-up and cosine decay; bf16 means autocast over float32 weights."""
    images, classes = (t.to(device) for t in digits())
    autocast = functools.partial(torch.autocast, device.type, torch.bfloat16, enabled=dtype is torch.bfloat16)
    weights = torch.float64 if dtype is torch.float64 else torch.float32
    model, images = model.to(device, weights), images.to(weights)
    # eps: without it Adam divides rounding noise by itself where a gradient is zero, as the key bias's always is
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05, eps=1e-4)
    n = len(images) - HELD_OUT
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=EPOCHS * (n // BATCH), pct_start=0.2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    model.train()
    for _ in range(EPOCHS):
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


def test_training_is_as_close_to_float64_as_the_reference_s(device: torch.device) -> None:
    """Every step's loss, and all final parameters. The largest of so many correlated deviations is one draw from a heavy
    tail and gets the oracle's wider factor."""
    torch.manual_seed(0)
    start, plain = fastvit.create_model(MODEL, **SMALLER), plain_model(MODEL, **SMALLER)
    plain.load_state_dict(start.state_dict())
    exact = train(copy.deepcopy(plain), device, torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        fused, eager = (train(copy.deepcopy(model), device, dtype) for model in (start, plain))
        for name in ("losses", "parameters"):
            ours, theirs = ((getattr(run, name) - getattr(exact, name)).abs() for run in (fused, eager))
            rms, largest = (norm(ours) / norm(theirs) for norm in (torch.linalg.vector_norm, torch.amax))
            assert rms <= 2, f"{dtype} {name}: {rms:.2f} times as far from float64 as the reference"
            assert largest <= GRADIENT, f"{dtype} {name}: at worst {largest:.2f} times as far from float64"
        assert fused.losses[-20:].mean() < 0.3 < fused.losses[0]
        assert fused.accuracy > 0.9
