"""Fine-tune a pretrained Vision Transformer on scikit-learn's handwritten digits.

    python benchmarks/examples/finetune.py --weights dinov2_vits14_pretrain.pth
    python benchmarks/examples/finetune.py --weights dinov2_vits14_pretrain.pth --freeze --lr 3e-3

Every block learns more slowly than the next one, by the factor --layer-decay; with --freeze the head alone learns.
Images stay uint8 until the patch embedding, which normalises them.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

import fastvit

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
HELD_OUT = 360


def digits(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """1797 images (n, 3, size, size) uint8 and their classes (n,), shuffled."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order, None] * (255 / 16)
    images = F.interpolate(images, (size, size), mode="bilinear").round().to(torch.uint8)
    return images.expand(-1, 3, -1, -1).to(device), torch.tensor(data.target)[order].to(device)


def parameter_groups(model: fastvit.VisionTransformer, lr: float, layer_decay: float) -> list[dict[str, Any]]:
    """The head at lr, what is n layers before it at lr * layer_decay ** n; no weight decay of vectors and tokens."""
    last = len(model.blocks) + 1
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        layer = 0
        if name.startswith("blocks."):
            layer = int(name.split(".")[1]) + 1
        elif name.startswith(("norm.", "fc_norm.", "head.")):
            layer = last
        decays = parameter.dim() > 1 and name not in model.no_weight_decay()
        settings = {"lr": lr * layer_decay ** (last - layer), "weight_decay": 0.05 if decays else 0.0}
        groups.setdefault((layer, decays), {"params": [], **settings})["params"].append(parameter)
    return list(groups.values())


@torch.inference_mode()
def accuracy(model: fastvit.VisionTransformer, images: Tensor, classes: Tensor) -> float:
    model.eval()
    logits = torch.cat([model(batch) for batch in images.split(64)])
    return (logits.argmax(-1) == classes).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch14_dinov2", help="one of fastvit.list_models()")
    parser.add_argument("--weights", help="a checkpoint of timm, transformers, torchvision, Meta, OpenAI or open_clip")
    parser.add_argument("--freeze", action="store_true", help="train the head alone")
    parser.add_argument("--img-size", type=int, default=56)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-4, help="of the head, the largest")
    parser.add_argument("--layer-decay", type=float, default=0.75)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    model = fastvit.create_model(
        args.model, args.weights, drop_head=args.weights is not None, num_classes=10, img_size=args.img_size,
        mean=MEAN, std=STD, drop_path_rate=0.0 if args.freeze else 0.1, device=device,
    )  # fmt: skip
    if args.weights is None:
        print("no --weights: the model starts from random ones")
    if args.freeze:
        model.requires_grad_(False)
        model.head.requires_grad_(True)

    images, classes = digits(args.img_size, device)
    n = len(images) - HELD_OUT
    groups = parameter_groups(model, args.lr, args.layer_decay)
    optimizer = torch.optim.AdamW(groups)
    rates = [group["lr"] for group in groups]
    schedule = OneCycleLR(optimizer, rates, args.steps, pct_start=0.1, cycle_momentum=False)  # warm-up, then cosine
    print(f"accuracy {accuracy(model, images[n:], classes[n:]):.1%} before")
    model.train()
    for step in range(args.steps):
        batch = torch.randint(n, (args.batch,), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = F.cross_entropy(model(images[batch]), classes[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % max(args.steps // 10, 1) == 0 or step == args.steps - 1:
            print(f"step {step}  loss {loss.item():.3f}")
    print(f"accuracy {accuracy(model, images[n:], classes[n:]):.1%} after")


if __name__ == "__main__":
    main()
