"""Train a small Vision Transformer from scratch on scikit-learn's handwritten digits.

    python benchmarks/examples/train.py
    python benchmarks/examples/train.py --compile  # torch.compile, which on a CPU needs a C++ compiler

The recipe is a usual one for ViTs: AdamW, warm-up and cosine decay, stochastic depth, clipped gradients, bf16 autocast
on a GPU. An exponential moving average of the weights is evaluated.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fastvit

HELD_OUT = 360


def digits(device: torch.device) -> tuple[Tensor, Tensor]:
    """1797 images (n, 1, 8, 8) of mean 0 and deviation 1 and their classes (n,), shuffled."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None]
    images = (images - images.mean()) / images.std()
    return images.to(device), torch.tensor(data.target)[order].to(device)


@torch.inference_mode()
def accuracy(model: nn.Module, images: Tensor, classes: Tensor) -> float:
    model.eval()
    return (model(images).argmax(-1) == classes).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--dim", type=int, default=96, help="a multiple of 32")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    model = fastvit.VisionTransformer(
        img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=args.dim, depth=args.depth,
        num_heads=args.dim // 32, class_token=False, global_pool="avg", drop_path_rate=0.1, device=device,
    )  # fmt: skip
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    run = torch.compile(model) if args.compile else model

    images, classes = digits(device)
    n = len(images) - HELD_OUT
    steps = n // args.batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    schedule = OneCycleLR(optimizer, args.lr, steps * args.epochs, pct_start=0.1, cycle_momentum=False)  # cosine
    for epoch in range(args.epochs):
        model.train()
        total = torch.zeros((), device=device)
        for batch in torch.randperm(n, device=device)[: steps * args.batch].view(steps, args.batch):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = F.cross_entropy(run(images[batch]), classes[batch])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
            total += loss.detach()
        print(
            f"epoch {epoch}  loss {total.item() / steps:.3f}  accuracy {accuracy(average, images[n:], classes[n:]):.1%}"
        )


if __name__ == "__main__":
    main()
