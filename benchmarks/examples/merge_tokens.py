"""Merge half of the patches half-way through a Vision Transformer, as Token Merging does (Bolya et al. 2023,
arXiv:2210.09461), and measure the time that it saves and what it changes.

    python benchmarks/examples/merge_tokens.py --weights facebook/dinov2-small

The weights come from the Hugging Face Hub, or from a file. Without --weights they are random, and only the time says
something. The images are photographs of scikit-image.

Every other patch joins the most similar of the rest; the later blocks have half as many. A token made of s patches
must weigh as much as s keys, so log(s) is added to its scores (proportional attention). The paper merges fewer patches
in every block and compares keys; here all is done at once and tokens are compared, which is shorter.
"""

import argparse
import sys
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.benchmark import Timer

import fastvit
from fastvit.cli import options, terminal

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket")


def photographs(size: int) -> Tensor:
    """The squares in the middle of four photographs that scikit-image ships, (4, 3, size, size) uint8."""
    from skimage import data

    images = [np.asarray(ImageOps.fit(Image.fromarray(getattr(data, name)()), (size, size))) for name in PHOTOGRAPHS]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


def merged(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Merge each patch of the even places into the most similar one of the odd places: (B, n, D) -> the means
    (B, n // 2, D), and how many patches each is made of (B, n // 2)."""
    movers, targets = patches[:, ::2], patches[:, 1::2]
    similarity = F.normalize(movers, dim=-1) @ F.normalize(targets, dim=-1).transpose(1, 2)
    joins = F.one_hot(similarity.argmax(dim=-1), targets.shape[1]).to(patches.dtype)  # (B, movers, targets)
    sizes = 1 + joins.sum(dim=1)
    return (targets + joins.transpose(1, 2) @ movers) / sizes[..., None], sizes


@torch.inference_mode()
def forward_merged(model: fastvit.VisionTransformer, images: Tensor, proportional: bool = True) -> Tensor:
    """Run the model with half of the patches in the second half of its blocks."""
    half = len(model.blocks) // 2
    ((patches, prefix),) = model.forward_intermediates(
        images, [half - 1], True, stop_early=True, output_fmt="NLC", intermediates_only=True
    )
    patches, sizes = merged(patches)
    x = torch.cat([prefix, patches], dim=1)
    bias = F.pad(sizes.log(), (prefix.shape[1], 0))[:, None, None, :]  # log(1) = 0 for CLS and registers
    for block in list(model.blocks)[half:]:
        x = block(x, attn_mask=bias if proportional else None)
    return model.forward_head(model.norm(x))


def seconds(call: Callable[[], Tensor], rounds: int) -> float:
    call()
    return Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads()).timeit(rounds).mean


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch14_dinov2", help="one of fastvit.list_models() with CLS")
    parser.add_argument("--weights", help="a checkpoint of timm, transformers, torchvision, Meta, OpenAI or open_clip")
    parser.add_argument("--image-size", type=options.count, default=518)
    parser.add_argument("--rounds", type=options.count, default=10)
    args = parser.parse_args()
    torch.manual_seed(0)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    sizes = {"num_classes": 0, "img_size": args.image_size, "mean": MEAN, "std": STD}
    model = fastvit.create_model(args.model, args.weights, **sizes).to(device, dtype).eval().requires_grad_(False)
    images = photographs(args.image_size).to(device)
    if args.weights is None:
        print("no --weights: the features are those of random ones")

    full, proportional, plain = model(images), forward_merged(model, images), forward_merged(model, images, False)
    among = F.cosine_similarity(full[:, None], full[None], dim=-1)[~torch.eye(len(full), dtype=torch.bool)]
    for name, features in {"with log(size)": proportional, "without it": plain}.items():
        print(f"cosine of features to the full model's {F.cosine_similarity(features, full).mean():.4f}  {name}")
    print(f"cosine of features to another image's  {among.mean():.4f}")
    own, less = (seconds(call, args.rounds) for call in (lambda: model(images), lambda: forward_merged(model, images)))
    print(
        f"{own / less:.2f}x the speed of the full model, which takes {1e3 * own:.1f} ms (means of {args.rounds} calls)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(terminal.guarded(main))
