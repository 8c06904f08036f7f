"""Files of weights, read as data: into one state_dict of dense tensors, or a `CheckpointError`."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import pickle
import re
import zipfile
from collections.abc import Collection, Mapping
from numbers import Number
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastvit._base.output import printable
from fastvit.checkpoints.hub import fetch, is_file_name, is_hub_id

INDEX = ".index.json"  # ends the name of an index of weights in several files
FILES = ("model.safetensors", f"model.safetensors{INDEX}", "pytorch_model.bin", f"pytorch_model.bin{INDEX}")
WRAPPERS = (
    "state_dict", "state_dict_ema", "model", "model_ema", "model_state_dict", "module", "ema", "net", "teacher",
    "student",
)  # fmt: skip
INFLATED = 1 << 30  # bytes that a compressed file may hold, or four times its own size
_OTHERS = {  # how files begin that a download leaves in the place of weights, and what they are
    rb"version https://git-lfs": "a Git LFS pointer: run git lfs pull in its repository",
    rb"\s*<": "a page of HTML or XML",
}


class CheckpointError(ValueError):
    """The file is damaged, is no state_dict, or does not fit the model."""


def locate(weights: str | os.PathLike[str]) -> Path:
    """Return the file that `weights` names, and download it if need be; reads nothing.

    Args:
        weights: as `read` takes it.

    Raises:
        TypeError, CheckpointError, FileNotFoundError, ImportError: as `read`, as far as the path shows it.
    """
    if not isinstance(weights, str | os.PathLike):
        raise TypeError(
            "weights must be a path, a repository of the Hugging Face Hub or a state_dict, "
            f"got {repr(weights).partition(chr(10))[0]:.200}"
        )
    path = Path(weights)
    if path.is_dir():
        folder, names = path, [name for name in FILES if (path / name).is_file()]
        if not names:
            others = sorted(name for name in os.listdir(folder) if is_file_name(name))
            has = f"; it has {first(others)}: weights may name one of them" if others else ""
            raise CheckpointError(f"{folder}: the folder has none of {', '.join(FILES)}{has}")
        path = folder / names[0]
    if not path.exists():
        if is_file_name(path.name):
            raise FileNotFoundError(f"{path}: no such file")
        if isinstance(weights, str) and is_hub_id(weights):
            return _with_shards(fetch(weights, FILES), weights)
        raise CheckpointError(
            f"{path}: weights must be a file of safetensors or torch.save, a folder with {FILES[0]}, a timm name with "
            "its tag (vit_tiny_patch16_224.augreg_in21k), or a repository of the Hugging Face Hub "
            "(facebook/dinov2-small); there is no file or folder of that name"
        )
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty")
    _kind(path)
    return path


def _kind(path: Path) -> str:
    """Return "zip" or "pickle" (torch.save), "safetensors" or "json" (an index of shards), by how a file begins."""
    with path.open("rb") as file:
        head = file.read(512)
    if head[4:9] == b"\0\0\0\0{":  # the length of the header in eight bytes, little-endian, and the header
        return "safetensors"
    if head.startswith(b"PK\x03\x04"):  # torch.load takes only such files for zip files
        return "zip"
    if re.match(rb"\x80[\x02-\x05]", head):  # pickle's protocol; older ones have no mark
        return "pickle"
    if re.match(rb"\s*\{", head):
        return "json"
    begins = f"it begins with {head[:32]!r}"
    what = next((what for start, what in _OTHERS.items() if re.match(start, head)), begins)
    raise CheckpointError(f"{path} is no file of safetensors or torch.save, but {what}")


def read(path: str | os.PathLike[str]) -> Any:
    """Read the content of a file, on the CPU; no code from the file runs.

    Args:
        path: a file of safetensors or torch.save, whatever its name; a folder with `model.safetensors` or
            `pytorch_model.bin`, also in shards (`model.safetensors.index.json`); or a repository of the Hugging Face
            Hub that has these, "owner/name" or "hf-hub:owner/name@revision", which comes from the Hub's cache or is
            downloaded. An existing path goes before a repository of that name.

    Raises:
        CheckpointError, FileNotFoundError, ImportError: as `load`.
    """
    path = locate(path)
    if _kind(path) != "json":
        return _read(path)
    shards = _shards(path)
    return {key: value for shard in shards for key, value in one_state_dict(_read(shard), str(shard)).items()}


def _read(path: Path) -> Any:
    path = locate(path)
    return _read_safetensors(path) if _kind(path) == "safetensors" else _read_pickle(path)


def _shards(index: Path) -> list[Path]:
    """Return the files that an index of shards names; they lie in its folder."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        good = bool(names) and all(Path(name).name == name and Path(name).suffix for name in names)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        good = False
    if not good:
        raise CheckpointError(f"{index} is no index of shards: not a weight_map to names of files in its folder")
    return [index.with_name(name) for name in names]


def _with_shards(path: Path, hub_id: str) -> Path:
    """Return path. If it is an index, first download the shards that are missing, from the same commit."""
    if path.name.endswith(INDEX):
        for shard in _shards(path):
            if not shard.exists():
                fetch(f"{hub_id.partition('@')[0]}@{path.parent.name}", [shard.name])
    return path


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError(f"{path}: reading it needs safetensors: pip install 'fastvit[weights]'")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path, device="cpu")
    except (SafetensorError, ValueError, KeyError) as error:  # KeyError: a dtype that this torch does not have
        raise CheckpointError(f"{path} is damaged or is no safetensors file: {error!r}") from None


def _read_pickle(path: Path) -> Any:
    if _kind(path) == "zip":
        _check_zip(path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # timm's training checkpoints carry their options
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"asks for {printable(named[1])}" if named else "is damaged, or holds more than tensors"
        harmless = named and named[1].startswith(("numpy.", "pathlib."))  # a score or a path next to the weights
        advice = ". If you trust it, pass, in Python, weights=torch.load(path, map_location='cpu', weights_only=False)"
        raise CheckpointError(
            f"{path} {what}; only tensors are read, and no code is run{advice if harmless else ''}"
        ) from None
    except Exception as error:  # a damaged file makes the unpickler and the zip reader raise anything
        if "TorchScript" in str(error):
            raise CheckpointError(
                f"{path} is a TorchScript program, not a state_dict; if you trust it, "
                f"pass weights=torch.jit.load(path, map_location='cpu').state_dict()"
            ) from error
        raise _damaged(path, error) from None


def _check_zip(path: Path) -> None:
    """Refuse a zip file whose entries are too large, before any is inflated. torch.save deflates none."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except Exception as error:  # a damaged file makes the zip reader raise anything
        raise _damaged(path, error) from None
    held, limit = sum(entry.file_size for entry in entries), max(INFLATED, 4 * path.stat().st_size)
    if held > limit:
        raise CheckpointError(
            f"{path} would inflate to {held:,} bytes, and at most {limit:,} are inflated: {INFLATED >> 30} GiB, or "
            "four times the file. If you trust it, save it uncompressed, as torch.save does"
        )


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or is no file of torch.save: {error!r:.200}")


def _has(content: Mapping[Any, Any], kind: Any) -> bool:
    return any(isinstance(value, kind) for value in content.values())


def unwrapped(content: Any, where: str) -> tuple[Any, str]:
    """Return the state_dict in the content of a training checkpoint, and the expression of Python for it: under one of
    the names in WRAPPERS, or else in the one dict that holds tensors."""
    expression = where if where == "weights" else f"fastvit.checkpoints.read({where!r})"
    for _ in range(3):  # not for ever: a pickled dict may hold itself
        nested = {k: v for k, v in content.items() if isinstance(v, Mapping)} if isinstance(content, Mapping) else {}
        with_tensors = [key for key, value in nested.items() if _has(value, Tensor)]
        inside = [key for key in WRAPPERS if _has(nested.get(key, {}), Tensor | Mapping)] or with_tensors
        if len(inside) > 1:  # others may be configurations
            inside = [key for key in inside if key in with_tensors]
        if len(inside) > 1:
            choice = f"{expression}[{inside[0]!r}]"
            raise CheckpointError(
                f"{where} holds several state_dicts, {inside}: choose with weights={choice}, or save one in a file"
            )
        if inside:
            content, expression = content[inside[0]], f"{expression}[{inside[0]!r}]"
    return content, expression


def one_state_dict(content: Any, where: str) -> dict[str, Tensor]:
    """Return the one state_dict in a file's content, with the names that it has there, and without numbers such as an
    epoch, or the `n_averaged` of torch.optim.swa_utils.AveragedModel."""
    content, _ = unwrapped(content, where)
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{where} holds no state_dict but a {type(content).__name__}")
    weights = {key: value for key, value in content.items() if not _is_number(key, value)}
    wrong = [f"{key!r}: {type(value).__name__}" for key, value in weights.items() if not _is_plain(key, value)]
    if wrong:
        raise CheckpointError(f"{where} is no state_dict: not a name with a dense tensor: {first(wrong)}")
    return weights


def _is_number(key: Any, value: Any) -> bool:
    """Return whether this is no weight but a number, which no model has outside of its modules."""
    return isinstance(value, Number) or (isinstance(value, Tensor) and value.dim() == 0 and "." not in str(key))


def _is_plain(key: Any, value: Any) -> bool:
    """Return whether this is a name with a dense tensor all of whose values are in memory. An expanded tensor of a few
    bytes may claim any size."""
    return (
        isinstance(key, str)
        and type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_meta)
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    )


def first(items: Collection[str], count: int = 8) -> str:
    more = f" and {len(items) - count} more" if len(items) > count else ""
    return printable(", ".join(itertools.islice(items, count))) + more
