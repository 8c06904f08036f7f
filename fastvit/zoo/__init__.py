"""Models by name, under timm's names and with timm's defaults. `vit.py` and `eva.py` list the names."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from fastvit import checkpoints
from fastvit.checkpoints.files import locate, one_state_dict
from fastvit.checkpoints.hub import repository_of_tag
from fastvit.checkpoints.loading import Weights
from fastvit.distilled import VisionTransformerDistilled
from fastvit.eva import Eva
from fastvit.modules.arguments import check_arguments
from fastvit.vit import VisionTransformer
from fastvit.zoo import eva, vit
from fastvit.zoo.vit import Config

CONFIGS: dict[str, Config] = {**vit.CONFIGS, **vit.DISTILLED, **eva.CONFIGS}


def config(name: str) -> Config:
    """Return the constructor arguments of a model's name, as a new dict.

    Raises:
        TypeError: a name that is no string.
        ValueError: an unknown name; the message has the nearest ones.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be the name of a model, got {repr(name).partition(chr(10))[0]}")
    if name not in CONFIGS:
        near = nearest(name.rpartition("/")[2], CONFIGS)
        hint = f"; nearest: {', '.join(near)}" if near else "; list_models() has them all"
        hint += "; timm's other models: fastvit.accelerate(timm.create_model(name))"
        hint += ". A repository of the Hugging Face Hub goes into weights" if "/" in name else ""
        raise ValueError(f"name is not a known model, got {name!r}{hint}")
    return dict(CONFIGS[name])


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return three names at most: those that have `name` in them, or else those that look like it."""
    return [other for other in names if name in other][:3] or difflib.get_close_matches(name, names)


def model_class(name: str) -> type[VisionTransformer]:
    """Return the class of the model of a known name."""
    if name in eva.CONFIGS:
        return Eva
    return VisionTransformerDistilled if name in vit.DISTILLED else VisionTransformer


def create_model(
    name: str, weights: Weights | bool | None = None, *, drop_head: bool = False, **overrides: Any
) -> VisionTransformer:
    """Make the model of that name, with random weights or with trained ones.

        create_model("vit_base_patch16_224", img_size=384, num_classes=10, drop_path_rate=0.1)
        create_model("vit_base_patch16_224", weights="model.safetensors", num_classes=10, drop_head=True)
        create_model("vit_small_patch14_dinov2", weights="facebook/dinov2-small", img_size=224)
        create_model("vit_tiny_patch16_224.augreg_in21k", weights=True)

    Args:
        name: one of `list_models()`, or that with a tag of timm's, for weights=True.
        weights: a file of safetensors or torch.save, a folder as Hugging Face saves it, or a state_dict, of
            timm, Hugging Face transformers, Meta's DINOv2, DINOv3, MAE and Perception Encoder, OpenAI's CLIP or
            open_clip; positions are interpolated to `img_size`. No code from a file is run. If there is no such path, a
            repository of the Hugging Face Hub, "owner/name" or "hf-hub:owner/name@revision", or a timm name with its
            tag, which stands for the repository "timm/<that name>": taken from the Hub's cache, or else downloaded by
            huggingface_hub. True: the weights of the name's tag; num_classes is then the file's, unless it is given.
        drop_head: leave out the file's head (classifier, pooler, attention pooling unless the model has it too); the
            model's own head stays untrained.
        overrides: any argument of `VisionTransformer`, of `VisionTransformerDistilled` for names with "_distilled", or
            of `fastvit.eva.Eva` for the names of EVA's, DINOv3's, Perception Encoder's and ROPE-ViT's models. A file
            does not contain the activation and the norms' eps: if the weights need others than the name's, give them
            here (see `fastvit.checkpoints`).

    Raises:
        ValueError: an unknown name; the message has the nearest ones. A tag without weights, or weights=True without
            a tag.
        TypeError: an override that the model does not take; a wrong type of name or weights.
        CheckpointError: a ValueError: a damaged file, or one that does not fit, with a list of what does not fit.
        FileNotFoundError: no such file, or nothing to download; the message has the reason and the command to run.
        ImportError: a file of safetensors without that package, a repository without huggingface_hub.
    """
    bare, _, tag = name.partition(".") if isinstance(name, str) else (name, "", "")
    arguments = config(bare)
    kind = model_class(bare)
    check_arguments(overrides, kind, f"create_model({bare!r})")
    if weights is None:
        if drop_head:
            raise ValueError("drop_head=True needs weights")
        if tag:
            raise ValueError(f"name {name!r} has a tag: weights=True loads its weights, {bare!r} has random ones")
    elif weights is True:
        if not tag:
            example = "such as 'vit_tiny_patch16_224.augreg_in21k'; timm.list_pretrained lists them"
            raise ValueError(f"weights=True needs a name with a tag of timm's, {example}; got {name!r}")
        repository = repository_of_tag(name, CONFIGS)
        weights = one_state_dict(checkpoints.read(repository), repository)
        if not drop_head:
            overrides.setdefault("num_classes", len(weights["head.weight"]) if "head.weight" in weights else 0)
    elif not isinstance(weights, Mapping):
        weights = locate(repository_of_tag(weights, CONFIGS))
    model = kind(**{**arguments, **overrides})
    if weights is not None:
        checkpoints.load(model, weights, drop_head=drop_head)
    return model


def list_models(filter: str = "*") -> list[str]:
    """Return the names of models, sorted.

    Args:
        filter: a shell-style pattern, such as "deit3_*_384".
    """
    return sorted(fnmatch.filter(CONFIGS, filter))
