"""Weights from the Hugging Face Hub, by huggingface_hub and in its cache."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from fastvit._base.output import printable

_ID = re.compile(r"(?:(?P<prefix>hf[-_]hub:)?)(?P<repo>\w[\w.-]*/[\w.-]+)(?:@(?P<revision>.+))?")


def is_hub_id(weights: str) -> bool:
    """Return whether this has the form of a repository's name: owner/name, or hf-hub:owner/name@revision as in timm."""
    return _ID.fullmatch(weights) is not None


def is_file_name(name: str) -> bool:
    """Return whether this is how files of weights are called, so that it is no repository or tag."""
    return name.lower().endswith((".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar", ".index.json"))


def repository_of_tag(weights: Any, names: Container[str]) -> Any:
    """Return the repository of one of these names followed by timm's tag. Weights that exist as a path, have a file's
    name or are no such name are returned as they are."""
    name, dot, tag = weights.partition(".") if isinstance(weights, str) else ("", "", "")
    if name not in names or not tag or is_file_name(dot + tag) or os.path.exists(weights):
        return weights
    return f"timm/{weights.replace('_clip_quickgelu_', '_clip_')}"  # timm has one repository for both


def fetch(hub_id: str, files: Sequence[str]) -> Path:
    """Return the first of `files` that a repository has: from the cache without asking the network, or else downloaded.

    Args:
        hub_id: for which `is_hub_id` is true.

    Raises:
        ImportError: huggingface_hub is not installed.
        FileNotFoundError: no such repository, revision or file, no access to it, or no network; the message says which,
            and the command to run.
    """
    parts = _ID.fullmatch(hub_id)
    assert parts is not None
    repo, revision = parts["repo"], parts["revision"]
    what = f"weights {hub_id!r} are no file or folder here"
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ImportError(f"{what}; to fetch {repo} from the Hugging Face Hub: pip install huggingface_hub")
    from huggingface_hub import constants, errors, hf_hub_download

    def path_of(file: str, **options: Any) -> Path | None:
        try:
            return Path(hf_hub_download(repo, file, revision=revision, **options))
        except errors.LocalEntryNotFoundError:
            if not options:
                raise
        except errors.EntryNotFoundError:
            pass
        return None

    command = f"hf download {repo} {files[0]}" + (f" --revision {revision}" if revision else "")
    try:
        for options in ({"local_files_only": True}, {}):
            for file in files:
                path = path_of(file, **options)
                if path is not None:
                    return path
        reason = f"the Hugging Face Hub's {repo} has none of {', '.join(files)}: download another file by hf download"
    except (OSError, errors.HFValidationError) as error:  # no network, no access, no such repository, revision or name
        text = " ".join(str(error).split())
        reason = (
            f"nor is {repo} in {constants.HF_HUB_CACHE}. The Hub did not give it: {type(error).__name__}: {text:.400}. "
            f"Where it can be had, run: {command} --local-dir FOLDER; then pass weights='FOLDER'"
        )
    raise FileNotFoundError(printable(f"{what}; {reason}")) from None
