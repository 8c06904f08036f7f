"""Semantic segmentation by a linear head on the dense features of a frozen Vision Transformer.

    python benchmarks/examples/segment.py --weights facebook/dinov2-small

The weights come from the Hugging Face Hub, or from a file. Without --weights they are random.
The images are mosaics of three textures that scikit-image ships: brick, grass and gravel. Those of the left halves of
the photographs train the head, those of the right halves test it. The baseline is the same head on each patch's pixels.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastvit
from fastvit.cli import options, terminal

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
TEXTURES = ("brick", "grass", "gravel")


def mosaics(count: int, size: int, *, right: bool) -> tuple[Tensor, Tensor]:
    """Images (count, 3, size, size) uint8 and the texture of every pixel (count, size, size): that of the nearest of
    four random points. Textures have one brightness and contrast, so that only their structure tells them apart."""
    from skimage import data

    generator = torch.Generator().manual_seed(int(right))
    photographs = [torch.tensor(getattr(data, name)(), dtype=torch.float32) for name in TEXTURES]
    halves = [photo.chunk(2, dim=1)[right] for photo in photographs]
    halves = [((half - half.mean()) / half.std() * 50 + 128).clamp(0, 255) for half in halves]
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    pixels = torch.stack([rows, columns], dim=-1).view(-1, 2).float()
    images, labels = [], []
    for _ in range(count):
        points = torch.rand(4, 2, generator=generator) * size
        textures = torch.randint(len(TEXTURES), (4,), generator=generator)
        label = textures[torch.cdist(pixels, points).argmin(dim=1)].view(size, size)
        crops = []
        for half in halves:
            top, left = (int(torch.randint(side - size + 1, (), generator=generator)) for side in half.shape)
            crops.append(half[top : top + size, left : left + size])
        images.append(torch.stack(crops).gather(0, label[None]).expand(3, -1, -1))
        labels.append(label)
    return torch.stack(images).round().to(torch.uint8), torch.stack(labels)


@torch.inference_mode()
def dense_features(model: fastvit.VisionTransformer, images: Tensor) -> Tensor:
    """(n, 3, H, W) -> (n, D, h, w): the patch tokens after the last norm, on their grid."""
    return torch.cat([model.get_intermediate_layers(batch, reshape=True)[0] for batch in images.split(16)])


def mean_iou(train: Tensor, labels: Tensor, test: Tensor, test_labels: Tensor, steps: int) -> float:
    """Trains a linear head on features (n, D, h, w) and pixel labels (n, H, W); its mean intersection over union."""
    head = nn.Sequential(nn.BatchNorm2d(train.shape[1]), nn.Conv2d(train.shape[1], len(TEXTURES), 1)).to(train.device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(steps):
        logits = F.interpolate(head(train), labels.shape[1:], mode="bilinear")
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.inference_mode():
        classes = F.interpolate(head.eval()(test), test_labels.shape[1:], mode="bilinear").argmax(dim=1)
    ious = [((classes == k) & (test_labels == k)).sum() / ((classes == k) | (test_labels == k)).sum() for k in range(3)]
    return torch.stack(ious).mean().item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch14_dinov2", help="one of fastvit.list_models()")
    parser.add_argument("--weights", help="a checkpoint of timm, transformers, torchvision, Meta, OpenAI or open_clip")
    parser.add_argument("--image-size", type=options.count, default=224, help="at most 256")
    parser.add_argument("--images", type=options.count, default=64, help="to train with; half as many test")
    parser.add_argument("--steps", type=options.count, default=100)
    args = parser.parse_args()
    if args.image_size > 256:
        raise ValueError(f"--image-size must be at most 256, got {args.image_size}")
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    model = fastvit.create_model(
        args.model, args.weights, num_classes=0, img_size=args.image_size, mean=MEAN, std=STD, device=device
    ).eval()
    if args.weights is None:
        print("no --weights: the features are those of random ones")
    train, labels = (t.to(device) for t in mosaics(args.images, args.image_size, right=False))
    test, test_labels = (t.to(device) for t in mosaics(args.images // 2, args.image_size, right=True))

    pixels = [F.pixel_unshuffle(images[:, :1].float(), model.patch_embed.patch_size[0]) for images in (train, test)]
    features = [dense_features(model, images).clone() for images in (train, test)]
    for name, (x, y) in {"pixels of a patch": pixels, f"features of {args.model}": features}.items():
        print(f"mean IoU {mean_iou(x, labels, y, test_labels, args.steps):.3f}  linear head on {name}")
    return 0


if __name__ == "__main__":
    sys.exit(terminal.guarded(main))
