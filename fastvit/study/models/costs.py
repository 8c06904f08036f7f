"""Counts tokens, parameters, FLOPs and activations of models. They run on the "meta" device, where tensors have shapes
and no data."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fastvit import zoo
from fastvit.blocks.hooks import without_hooks
from fastvit.modules.arguments import Pair
from fastvit.study.memory.growth import check_batch
from fastvit.study.memory.peak import saved_bytes
from fastvit.study.sources.baselines import NoFusedForm
from fastvit.study.sources.find import find
from fastvit.study.sources.model_source import ModelSource, call, embeds_patches, images_for, one_line_errors

_DTYPE = torch.bfloat16
Sizes = Pair | Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Parameters:
    """A model's parameters by part. They add up to `total`: nothing is counted twice or left out.

    Attributes:
        patch_embedding: the projection of patches; in hierarchical models also the convolutions that merge patches.
        positions: embeddings of positions, and prefix tokens (CLS, registers, masks).
        attention, mlp: their linear layers, with biases.
        norms: norms and scales (LayerScale), in any part.
        head: classifier, pooler, attention pooling.
        other: parameters that fit none of these names.
    """

    patch_embedding: int = 0
    positions: int = 0
    attention: int = 0
    mlp: int = 0
    norms: int = 0
    head: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class ModelCost:
    """One model, at one image size, patch size and batch.

    Attributes:
        name: as it was asked for.
        image_size, patch_size: (height, width). patch_size is None for a model that is no plain ViT, such as a ResNet
            or a Swin, and so is everything that counts tokens.
        batch: images.
        prefix_tokens: CLS, registers, distillation token.
        parameters: by part.
        flops: of a forward pass of the batch, as `torch.utils.flop_counter` counts them: two for a multiply-add of a
            matmul or convolution, none for anything else.
        saved_bytes: bytes that autograd keeps for the backward pass of the batch, in bfloat16, without parameters.
        fused: True if that is with fastvit's ops; False if they replace no block, and the library's own model runs.
    """

    name: str
    image_size: tuple[int, int]
    patch_size: tuple[int, int] | None = field(repr=False)
    batch: int
    prefix_tokens: int | None = field(repr=False)
    parameters: Parameters = field(repr=False)
    flops: int
    saved_bytes: int = field(repr=False)
    fused: bool = field(repr=False)

    @property
    def macs(self) -> int:
        """Multiply-adds of the forward pass: half of `flops`. Papers often call these FLOPs."""
        return self.flops // 2

    @property
    def grid(self) -> tuple[int, int] | None:
        """Patches down and across."""
        if self.patch_size is None:
            return None
        (H, W), (h, w) = self.image_size, self.patch_size
        return H // h, W // w

    @property
    def patches(self) -> int | None:
        return None if self.grid is None else self.grid[0] * self.grid[1]

    @property
    def tokens(self) -> int | None:
        """Patches and prefix."""
        return None if self.patches is None or self.prefix_tokens is None else self.patches + self.prefix_tokens

    @property
    def patch_pairs(self) -> int | None:
        """patches^2: elements of an attention matrix as papers about ViTs count them."""
        return None if self.patches is None else self.patches**2

    @property
    def token_pairs(self) -> int | None:
        """tokens^2: elements of the attention matrix of one head, prefix included."""
        return None if self.tokens is None else self.tokens**2


SORTS: dict[str, Callable[[ModelCost], float | str]] = {
    "name": lambda cost: cost.name,
    "parameters": lambda cost: cost.parameters.total,
    "tokens": lambda cost: cost.tokens or 0,
    "flops": lambda cost: cost.flops,
    "saved": lambda cost: cost.saved_bytes,
}


def models(
    names: str | Sequence[str] = "*", *,
    image_size: Sizes | None = None, patch_size: Sizes | None = None,
    batch: int | Sequence[int] = 1, sort: str = "name",
    step: Callable[[str], None] = lambda name: None, refused: Callable[[str], None] | None = None,
) -> tuple[ModelCost, ...]:  # fmt: skip
    """Count what models cost, without computing anything: about 0.1 s each. `fastvit models --help` says why papers
    have other figures for some of them.

        fastvit.study.models("vit_base_patch16_*", image_size=[(224, 224), (384, 384)])

    Args:
        names: a pattern of names of the zoo, or any model that a study takes; or several. Models without attention, of
            timm or of functions, are allowed for comparison: `models(["vit_base_patch16_224", "resnet50"])`.
        image_size, patch_size: pixels, or (height, width), or several of these; None for the model's defaults. Every
            combination with `batch` is a row.
        batch: images, or several numbers of images.
        sort: "name", or largest first by "parameters", "tokens", "flops", "saved".
        step: called with the name of each model before it is counted.
        refused: called with the reason if a size does not fit a model that matches a pattern; its row is left out. None
            raises instead. A model that is named in full, and a result without rows, always raise.

    Raises:
        ValueError: an unknown name, with the nearest; a size that the patch size does not divide.
    """
    if sort not in SORTS:
        raise ValueError(f"sort must be one of {', '.join(SORTS)}, got {sort!r}")
    asked = matching(names)
    batches = batch if isinstance(batch, Sequence) else [batch]
    for number in batches:
        check_batch(number)
    found, reasons = [], []
    for name, by_pattern in asked:
        step(name)
        source = find(name, without_patches=True)
        for image, patch in itertools.product(_several(image_size), _several(patch_size)):
            try:
                sizes = source.sizes(image, patch)
            except ValueError as error:
                if refused is None or not by_pattern:
                    raise
                reasons.append(str(error))
                continue
            found += [_cost(source, *sizes, b) for b in batches]
    if not found:
        raise ValueError(reasons[0] if reasons else "image_size, patch_size and batch must not be empty")
    for reason in reasons:
        assert refused is not None
        refused(reason)
    return tuple(sorted(found, key=SORTS[sort], reverse=sort != "name"))


def matching(names: str | Sequence[str]) -> list[tuple[str, bool]]:
    """Return every name that fits, and whether it matches a pattern."""
    found: dict[str, bool] = {}
    for name in [names] if isinstance(names, str) else names:
        if any(c in name for c in "*?["):
            matched = fnmatch.filter(zoo.CONFIGS, name)
            if not matched:
                raise ValueError(f"no model of the zoo is called {name!r}; `fastvit models` lists them")
            found.update(dict.fromkeys(sorted(matched), True))
        else:
            found[name] = False
    return list(found.items())


def _several(sizes: Sizes | None) -> Sequence[Pair | None]:
    """Return a list of sizes. A tuple such as (224, 448) is one size."""
    if sizes is None or isinstance(sizes, int) or (isinstance(sizes, tuple) and all(isinstance(s, int) for s in sizes)):
        return [sizes]
    return list(sizes)


def _cost(source: ModelSource, image_size: tuple[int, int], patch_size: tuple[int, int], batch: int) -> ModelCost:
    patch: tuple[int, int] | None = patch_size if source.has_patches else None  # None: the default of build()
    try:
        model, fused = source.on_meta("fastvit", image_size, patch), True
    except NoFusedForm:
        model, fused = source.on_meta("sdpa", image_size, patch), False
    model = model.to(_DTYPE).train()
    with torch.device("meta"), one_line_errors(source.name):
        pixels = images_for(model, batch, image_size, _DTYPE)
    parameters = parameters_by_part(model)
    has_attention = parameters.attention + parameters.other > 0  # unnamed parameters may be attention
    prefix = source.prefix_tokens(model, image_size, patch) if patch is not None and has_attention else None
    with (
        without_hooks(model),
        one_line_errors(source.name),
        FlopCounterMode(display=False) as counter,
        torch.enable_grad(),
    ):
        saved = saved_bytes(lambda: call(model, pixels), list(model.parameters()))
    flops = counter.get_total_flops()
    return ModelCost(
        source.name, image_size, None if prefix is None else patch_size, batch, prefix, parameters, flops, saved,
        fused,
    )  # fmt: skip


# The first pattern found in a parameter's name decides, if its module does not: the names of timm, torchvision,
# transformers, and Meta's DINOv2 and DINOv3
_NAMES = (
    ("norms", r"norm|\bln_|gamma|lambda|layer_?scale|\bls\d"),
    ("head", r"^(attn_pool|heads?(_\w+)?\b|classifier|pooler|fc\b)|\.(head|classifier|pooler)\."),
    ("patch_embedding", r"patch_embed|conv_proj"),
    ("positions", r"pos_|position|token|class_embedding|rope|freqs"),
    ("attention", r"attn|attention"),
    ("mlp", r"mlp|fc\d|intermediate|output\.dense|ffn|\bw\d"),
)


_JOINT_LAYER = re.compile(r"\b(in|out)_proj\.(weight|bias)$")  # one layer for attention and a parallel MLP


def parameters_by_part(model: nn.Module) -> Parameters:
    """Count every parameter once; a shared one belongs to the part of its first name."""
    counts = Counter[str]()
    for name, parameter in model.named_parameters():
        counts.update(_shares(model, name, parameter))
    return Parameters(**counts)


def _shares(model: nn.Module, name: str, parameter: Tensor) -> dict[str, int]:
    """Return how many elements of a parameter belong to each part.

    In a layer that feeds attention and MLP, 3 * D rows belong to q, k and v. In a layer after both, D columns belong to
    attention, and so does the bias.
    """
    part, total = _part(model, name), parameter.numel()
    layer, found = model.get_submodule(name.rpartition(".")[0]), _JOINT_LAYER.search(name)
    if part == "other" and found and isinstance(layer, nn.Linear):
        D = min(layer.in_features, layer.out_features)
        attention = (3 * D if found[1] == "in" else D) * (D if parameter.dim() == 2 else 1)
        if attention <= total:
            return {"attention": attention, "mlp": total - attention}
    return {part: total}


def _part(model: nn.Module, name: str) -> str:
    owner = model.get_submodule(name.rpartition(".")[0])
    kind = type(owner).__name__.lower()
    if "norm" in kind or "layerscale" in kind:
        return "norms"
    if embeds_patches(owner):
        return "patch_embedding"
    in_linear = isinstance(owner, nn.Linear)
    for part, pattern in _NAMES:
        if re.search(pattern, name) and not (in_linear and part == "norms"):
            return part
    return "other"
