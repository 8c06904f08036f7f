"""Fit a file's tensors to a model: names, shapes, positions. `fastvit.checkpoints` exports it."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastvit._base.output import printable
from fastvit.checkpoints.files import CheckpointError, first, locate, one_state_dict, read, unwrapped
from fastvit.checkpoints.names import SOURCES, fronts, recognised, without_wrapping
from fastvit.checkpoints.source import Source
from fastvit.modules.positions import Resize, antialiased, resample_abs_pos_embed
from fastvit.vit import VisionTransformer

Weights = str | os.PathLike[str] | Mapping[str, Any]

CLASSIFIERS = ("head.", "head_dist.")
HEADS = (*CLASSIFIERS, "attn_pool.", "pooler.")  # after the last norm
LISTED = 1000  # keys in an error, at most, of one kind


def load(model: VisionTransformer, weights: Weights, *, drop_head: bool = False) -> None:
    """Copy `weights` of any library that `fastvit.checkpoints` names into the model, in its dtype and on its device.

    Positions of another patch grid are interpolated in the same way as by the library that wrote them. A model with
    fixed positions keeps its own, and takes only files whose positions are that table, of any patch grid. A model
    without a head (num_classes=0) leaves the file's classifier out.

    Args:
        weights: a path or repository as for `read`, or a state_dict; also inside {"state_dict": ...}, {"model": ...} or
            another dict of a training checkpoint, if only one holds tensors; with a prefix that all names have
            (DistributedDataParallel's "module.", Lightning's "model."), and with the names of torch.compile, activation
            checkpointing and FSDP anywhere in a name. Numbers next to the weights are left out, as those of an
            AveragedModel.
        drop_head: leave out the file's weights after the last norm (classifier, pooler, and attention pooling unless
            the model has it too); the model's own keep their values.

    Raises:
        CheckpointError: a ValueError that names the file and, for weights that do not fit, lists every key that is
            missing, unexpected or of another shape, a line for all blocks. The model is unchanged.
        TypeError: weights of another type.
        FileNotFoundError: no such file, nor a repository of the Hugging Face Hub that could be downloaded.
        ImportError: a file of safetensors without that package, a repository without huggingface_hub.
        ValueError: a model on the meta device, or one that was made in inference mode, outside of it.

    Warns:
        UserWarning: the model now has values that are NaN or infinite.
    """
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        raise ValueError("device must not be 'meta' for a model that weights are loaded into")
    if not torch.is_inference_mode_enabled() and any(tensor.is_inference() for tensor in model.state_dict().values()):
        raise ValueError("the model was made in torch.inference_mode(): load weights within it, too")
    where, content = "weights", weights
    if not isinstance(weights, Mapping):
        path = locate(weights)
        where, content = str(path), read(path)
    content, expression = unwrapped(content, where)
    if not (state_dict := one_state_dict(content, where)):  # a shard may have numbers alone
        raise CheckpointError(f"{where} holds no state_dict but numbers")
    names = recognised(state_dict, where)
    if names is None:
        raise _unrecognised(model, state_dict, where, expression, drop_head)
    model.load_state_dict(_fitted(model, *names, where, drop_head))
    _warn_of_values(model, where)


def _warn_of_values(model: VisionTransformer, where: str) -> None:
    """Warn if weights are NaN or infinite, as their minima or maxima then are. Takes 0.3 s for ViT-L on one core."""
    tensors = {name: value for name, value in model.state_dict().items() if value.is_floating_point() and value.numel()}
    wrong = [name for name, value in tensors.items() if not all(map(math.isfinite, map(float, value.aminmax())))]
    if wrong:
        warnings.warn(
            f"{where}: {len(wrong)} of {len(tensors)} weights have values that are NaN or infinite in "
            f"{tensors[wrong[0]].dtype}, the first is {wrong[0]}",
            stacklevel=3,
        )


def _fitted(
    model: VisionTransformer, source: Source, prefix: str, tensors: dict[str, Tensor], where: str, drop_head: bool
) -> dict[str, Tensor]:
    """Return the model's state_dict with the file's values, or raise a CheckpointError that lists all mismatches.
    source, prefix, tensors: as `recognised` returns them."""
    expected = model.state_dict()
    renamed = {key: source.rename(key, prefix) for key in tensors}
    counts = Counter(renamed.values())
    origin = {target: key for key, target in renamed.items() if target}
    ours = {target: tensors[key] for target, key in origin.items()}

    resize = antialiased if "register_tokens" in ours else source.resize
    _unfold_projection(ours, origin)
    _split_pool_qkv(ours, origin, expected)
    pooled = model.attn_pool is not None and any(target.startswith("attn_pool.") for target in ours)
    heads = tuple(head for head in HEADS if head != "attn_pool.") if pooled else HEADS
    for target in list(ours):
        if target.startswith(heads) and (drop_head or (target.startswith(CLASSIFIERS) and not model.num_classes)):
            del ours[target]
    if drop_head:
        ours.update({target: own for target, own in expected.items() if target.startswith(heads)})
    for target in ("cls_token", "pos_embed"):
        while target in ours and ours[target].dim() < 3:  # (D,) and (N, D) in some libraries
            ours[target] = ours[target][None]
    _merge_qkv(ours, origin, expected)
    _as_eva(ours, origin, expected)
    _fold_registers(ours)
    place = _check_fixed_positions if model.fixed_positions else _resize_positions
    problems = place(ours, model, source, resize)

    wrong = {
        "the same weight twice": [key for key, target in renamed.items() if target and counts[target] > 1],
        "missing": [target for target in expected if target not in ours],
        "unexpected": [origin.get(target, target) for target in ours if target not in expected],
        "another shape or type": problems
        + [
            f"{origin.get(target, target)} {_described(value)}, the model's {target} {_described(expected[target])}"
            for target, value in ours.items()
            if target in expected and (value.shape != expected[target].shape or not value.is_floating_point())
        ],
    }
    if any(wrong.values()):
        lines = []
        for what, keys in wrong.items():
            if keys:
                lines += [f"{what} ({len(keys)}):", *(f"  {line}" for line in _by_pattern(keys[:LISTED]))]
            if len(keys) > LISTED:
                lines.append(f"  and {len(keys) - LISTED} more")
        lines = [f"{where} ({source.name}) does not fit the model:", *lines, *_hints(ours, expected)]
        raise CheckpointError("\n  ".join(lines))
    return ours


def _unrecognised(
    model: VisionTransformer, state_dict: dict[str, Tensor], where: str, expression: str, drop_head: bool
) -> CheckpointError:
    """Return the error for a state_dict without known names. If some of its keys have them after a prefix and fit the
    model, its advice takes these."""
    markers = tuple(f".{source.marker}" for source in SOURCES)
    plain = zip(state_dict, without_wrapping(state_dict, where), strict=True)
    marked = [key for key, name in plain if name.endswith(markers)]
    fitting: dict[str, str] = {}
    misfits = []
    for front in dict.fromkeys(front for key in marked[:8] for front in fronts([key])):
        part = {key.removeprefix(front): value for key, value in state_dict.items() if key.startswith(front)}
        names = recognised(part, where)
        if names is None or front.startswith(tuple(fitting)):
            continue
        try:
            _fitted(model, *names, f"{where}, after {front!r}", drop_head)
            fitting[front] = names[0].name
        except CheckpointError as error:
            misfits.append(error)
    if fitting:
        front, name = next(iter(fitting.items()))
        places = " and ".join(map(repr, fitting))
        return CheckpointError(
            f"{where} has the names of {name} after {places}; with state_dict = {expression}, "
            f"pass weights={{k.removeprefix({front!r}): v for k, v in state_dict.items() if k.startswith({front!r})}}"
        )
    known = "".join(f"\n  {source.name}: {source.marker}" for source in SOURCES)
    unknown = f"{where} has no key of a Vision Transformer that is known, but {first(state_dict)}:{known}"
    return misfits[0] if misfits else CheckpointError(unknown)


def _by_pattern(keys: Iterable[str]) -> list[str]:
    """Join keys that differ only in the block's number into one line: blocks.{0-11}.norm1.weight."""
    numbers: dict[str, list[int]] = {}
    for key in keys:
        found = re.search(r"(?<=[._])[0-9]{1,9}(?=\.)", key)
        pattern = key
        if found is not None:
            of_block = re.compile(rf"(?<=[._]){found[0]}(?=\.)")
            pattern = " ".join(of_block.sub("{}", word, count=1) for word in key.split(" "))
        numbers.setdefault(pattern, []).extend([] if found is None else [int(found[0])])
    return [printable(pattern.replace("{}", _ranges(found))) for pattern, found in numbers.items()]


def _ranges(numbers: list[int]) -> str:
    """Write numbers as {0-5,7}, or one as 7."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    text = ",".join("-".join(map(str, run)) for run in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"


def _unfold_projection(ours: dict[str, Tensor], origin: dict[str, str]) -> None:
    """Turn CLIP's projection, (K, D) or transposed (D, K) without a bias, into a head with a bias of zeros."""
    for key, transposed in (("head.projection", False), ("head.projection_t", True)):
        if key in ours and ours[key].dim() == 2:
            weight = ours.pop(key)
            ours["head.weight"] = weight.T if transposed else weight
            ours["head.bias"] = weight.new_zeros(ours["head.weight"].shape[0])
            origin["head.weight"] = origin.pop(key)


def _split_pool_qkv(ours: dict[str, Tensor], origin: dict[str, str], expected: Mapping[str, Tensor]) -> None:
    """Split qkv of an attention pooling into q and kv, if the model has them and the shapes are right."""
    for kind in ("weight", "bias"):
        key, q, kv = (f"attn_pool.{name}.{kind}" for name in ("qkv", "q", "kv"))
        if key in ours and q in expected and ours[key].dim() and ours[key].shape[0] == 3 * expected[q].shape[0]:
            packed, source = ours.pop(key), origin.pop(key)
            ours[q], ours[kv] = packed.tensor_split([expected[q].shape[0]])
            origin[q] = origin[kv] = source


def _merge_qkv(ours: dict[str, Tensor], origin: dict[str, str], expected: Mapping[str, Tensor]) -> None:
    """Join q, k and v of a block to qkv, if all three are there and of the right shape."""
    for key in [key for key in expected if ".attn.qkv." in key]:
        parts = [key.replace(".qkv.", f".{name}.") for name in "qkv"]
        shape = (expected[key].shape[0] // 3, *expected[key].shape[1:])
        if all(part in ours and ours[part].shape == shape for part in parts):
            ours[key] = torch.cat([ours.pop(part) for part in parts])
            origin[key] = " + ".join(origin[part] for part in parts)


def _as_eva(ours: dict[str, Tensor], origin: dict[str, str], expected: Mapping[str, Tensor]) -> None:
    """Rename LayerScale, a gated MLP and the biases of q and v to the names of EVA's blocks, whose k has no bias.
    Biases of zeros are left out if the model has none."""

    def move(old: str, new: str) -> None:
        ours[new], origin[new] = ours.pop(old), origin[old]

    for key in list(ours):
        block, _, name = key.rpartition(".ls")
        if name in ("1.gamma", "2.gamma") and f"{block}.gamma_{name[0]}" in expected:
            move(key, f"{block}.gamma_{name[0]}")
        block, _, name = key.rpartition(".mlp.up.")
        if block:
            gated = f"{block}.mlp.fc1_x.{name}"
            move(key, gated if gated in expected else f"{block}.mlp.fc1.{name}")
    for key in [key for key in ours if key.endswith((".attn.q.bias", ".attn.v.bias", ".attn.qkv.bias"))]:
        block, _, name = key.rpartition(".attn.")
        if key in expected or f"{block}.norm1.weight" not in expected or f"{block}.gamma_1" not in expected:
            continue
        if name == "qkv.bias":
            mask = ours.pop(f"{key}_mask", None)  # Meta's: zeros for k
            q, k, v = (ours[key] if mask is None else ours[key] * mask).chunk(3)
            if k.any():
                continue
            del ours[key]
            parts = {"q_bias": q, "v_bias": v}
        else:
            parts = {name[0] + "_bias": ours.pop(key)}
        for part, bias in parts.items():
            target = f"{block}.attn.{part}"
            if target in expected or bias.any():
                ours[target], origin[target] = bias, origin[key]


def _fold_registers(ours: dict[str, Tensor]) -> None:
    """Convert DINOv2 with registers: add CLS's position to CLS, so that only patches have positions, as in timm."""
    cls, positions = ours.get("cls_token"), ours.get("pos_embed")
    if "register_tokens" not in ours or cls is None or positions is None:
        return
    if positions.dim() == 3 and cls.shape == (1, 1, positions.shape[2]) and positions.shape[0] == 1:
        ours["reg_token"] = ours.pop("register_tokens")
        ours["cls_token"] = cls + positions[:, :1]
        ours["pos_embed"] = positions[:, 1:]


def _resize_positions(ours: dict[str, Tensor], model: VisionTransformer, source: Source, resize: Resize) -> list[str]:
    """Interpolate pos_embed (1, P + n, D) to the model's patch grid, or leave it for the check of shapes.

    Returns a list of problems: a number of positions that fits both the model's grid and a square one."""
    positions, grid = ours.get("pos_embed"), model.patch_embed.grid_size
    if positions is None or positions.dim() != 3 or positions.shape[0] != 1 or positions.shape[2] != model.embed_dim:
        return []
    P = 0 if model.no_embed_class else model.num_prefix_tokens
    n = positions.shape[1] - P
    side = math.isqrt(max(n, 0))
    if n < 1 or side * side != n or grid == (side, side):
        return []
    if n == grid[0] * grid[1] and not source.square:
        choices = f"{side} x {side} or {grid[0]} x {grid[1]} patches"
        return [f"pos_embed may be of {choices}: model.load_state_dict takes it for the latter, img_size of the former"]
    ours["pos_embed"] = resample_abs_pos_embed(positions, grid, (side, side), P, resize)
    return []


def _check_fixed_positions(ours: dict[str, Tensor], model: VisionTransformer, *_: Any) -> list[str]:
    """Replace pos_embed (1, P + n, D) by the model's fixed table if it is that table, of any patch grid. Returns a list
    of problems: other positions, which the model would lose."""
    positions = ours.get("pos_embed")
    if positions is None or not positions.is_floating_point():
        return []
    ours["pos_embed"] = model.fixed_table(model.patch_embed.grid_size)
    P = 0 if model.no_embed_class else model.num_prefix_tokens
    n = positions.shape[1] - P if positions.dim() == 3 else 0
    for h in (h for h in range(1, n + 1) if n % h == 0):
        table = model.fixed_table((h, n // h)).to(positions)
        # a table may have been computed in float32, and is rounded to the dtype of the file
        atol = max(1e-4, torch.finfo(positions.dtype).eps)
        if table.shape == positions.shape and torch.allclose(table, positions, rtol=0, atol=atol):
            return []
    fixed = f"of no patch grid the table of pos_embed={model.fixed_positions!r}"
    return [f"pos_embed {_described(positions)} is {fixed}"]


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)}{'' if tensor.is_floating_point() else f' {tensor.dtype}'}"


def _hints(ours: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return the arguments that resolve a mismatch of heads and pooling, or the class that has the file's tokens."""
    if ("dist_token" in ours) != ("dist_token" in expected):
        distilled = "a distillation token, which VisionTransformerDistilled and names with '_distilled' have"
        return [f"the file has {distilled}" if "dist_token" in ours else f"the file lacks {distilled}"]
    hints = []
    theirs = ours.get("head.weight")
    own = expected.get("head.weight")
    if own is not None and (theirs is None or theirs.shape[:1] != own.shape[:1]):
        same = f"num_classes={theirs.shape[0]} is" if theirs is not None and theirs.dim() else "num_classes=0 is"
        hints.append(f"{same} the file's; drop_head=True leaves its head out and keeps the model's, untrained")
    elif "head_dist.weight" in expected and "head_dist.weight" not in ours:
        hints.append("drop_head=True leaves out the file's one head and keeps the model's two, untrained")
    if any(target.startswith(HEADS) and target not in expected for target in ours):
        hints.append("drop_head=True leaves out what the file has after the last norm")
    if "attn_pool.latent" in expected and not any(target.startswith("attn_pool.") for target in ours):
        hints.append("global_pool='avg' is without attention pooling; drop_head=True keeps the model's, untrained")
    if "fc_norm.weight" in expected and "norm.weight" in ours:
        hints.append("fc_norm=False, use_fc_norm=False of an Eva model, keeps the norm before the pooling")
    return hints
