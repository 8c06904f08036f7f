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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastvit._output import printable
from fastvit.weights.hub import fetch, is_hub_id

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
INDEX = ".index.json"  # ends the name of an index of weights in several files
FILES = ("model.safetensors", f"model.safetensors{INDEX}", "pytorch_model.bin", f"pytorch_model.bin{INDEX}")
WRAPPERS = ("state_dict", "state_dict_ema", "model", "model_ema", "teacher", "student")
INFLATED = 1 << 30  # bytes that a compressed file may hold, or four times its own size
PARALLEL = ("module.", "_orig_mod.")  # DistributedDataParallel's and torch.compile's


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
            f"weights must be a path, a repository of the Hugging Face Hub or a state_dict, got {weights!r:.200}"
        )
    path = Path(weights)
    if path.is_dir() and path.suffix not in SUFFIXES:
        path = next((path / name for name in FILES if (path / name).exists()), path)
    elif isinstance(weights, str) and not path.exists() and path.suffix not in SUFFIXES and is_hub_id(weights):
        return _with_shards(fetch(weights, FILES), weights)
    if path.suffix not in SUFFIXES and not path.name.endswith(INDEX):
        if path.is_dir():
            raise CheckpointError(f"{path}: the folder has none of {', '.join(FILES)}; weights may name its file")
        absent = "" if path.exists() else "; there is no file or folder of that name"
        raise CheckpointError(
            f"{path}: weights must be a {', '.join(SUFFIXES)} file, a folder with {FILES[0]}, a timm name with its tag "
            "(vit_tiny_patch16_224.augreg_in21k), or a repository of the Hugging Face Hub (facebook/dinov2-small)"
            f"{absent}"
        )
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty")
    return path


def read(path: str | os.PathLike[str]) -> Any:
    """Read the content of a file, on the CPU; no code from the file runs.

    Args:
        path: a `.safetensors`, `.pth`, `.pt` or `.bin` file; a folder with `model.safetensors` or `pytorch_model.bin`,
            also in shards (`model.safetensors.index.json`); or a repository of the Hugging Face Hub that has these,
            "owner/name" or "hf-hub:owner/name@revision", which comes from the Hub's cache or is downloaded. An
            existing path goes before a repository of that name.

    Raises:
        CheckpointError, FileNotFoundError, ImportError: as `load`.
    """
    path = locate(path)
    if path.name.endswith(INDEX):
        return {key: value for shard in _shards(path) for key, value in one_state_dict(read(shard), str(shard)).items()}
    return _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)


def _shards(index: Path) -> list[Path]:
    """Return the files that an index of shards names; they lie in its folder."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        good = bool(names) and all(Path(name).name == name and Path(name).suffix in SUFFIXES for name in names)
    except (ValueError, LookupError, TypeError, AttributeError):
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
    _check_inflated(path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # timm's training checkpoints carry their options
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"asks for {printable(named[1])}" if named else "is damaged, or holds more than tensors"
        raise CheckpointError(f"{path} {what}; only tensors are read, and no code is run") from None
    except Exception as error:  # a damaged file makes the unpickler and the zip reader raise anything
        if "TorchScript" in str(error):
            raise CheckpointError(
                f"{path} is a TorchScript program, not a state_dict; if you trust it, "
                f"pass weights=torch.jit.load(path, map_location='cpu').state_dict()"
            ) from error
        raise _damaged(path, error) from None


def _check_inflated(path: Path) -> None:
    """Refuse a zip file whose entries are far larger than itself, before any is inflated. torch.save deflates none."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":  # torch.load takes only such files for zip files, and inflates nothing else
            return
    try:
        with zipfile.ZipFile(path) as archive:
            held = sum(entry.file_size for entry in archive.infolist())
    except Exception as error:  # a damaged file makes the zip reader raise anything
        raise _damaged(path, error) from None
    limit = max(INFLATED, 4 * path.stat().st_size)
    if held > limit:
        raise CheckpointError(
            f"{path} would inflate to {held:,} bytes, and at most {limit:,} are inflated: {INFLATED >> 30} GiB, or "
            "four times the file. If you trust it, save it uncompressed, as torch.save does"
        )


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or is no file of torch.save: {error!r:.200}")


def one_state_dict(content: Any, where: str) -> dict[str, Tensor]:
    """Return the one state_dict in a file's content, without the prefixes of parallel training."""
    if isinstance(content, Mapping):
        inside = [key for key in WRAPPERS if isinstance(content.get(key), Mapping)]
        if len(inside) > 1:
            raise CheckpointError(
                f"{where} holds several state_dicts, {inside}: choose with weights=fastvit.checkpoints.read(path)[...]"
            )
        if inside:
            content = content[inside[0]]
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{where} holds no state_dict but a {type(content).__name__}")
    wrong = [f"{key!r}: {type(value).__name__}" for key, value in content.items() if not _is_plain(key, value)]
    if wrong:
        raise CheckpointError(f"{where} is no state_dict: not a name with a dense tensor: {first(wrong)}")
    tensors = dict(content)
    while prefix := next((p for p in PARALLEL if all(key.startswith(p) for key in tensors)), None):
        tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    return tensors


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
