"""Names of weights without what training puts in front of them or into them, and the library that they are of."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping

from torch import Tensor

from fastvit.weights.files import CheckpointError, first
from fastvit.weights.names import SOURCES
from fastvit.weights.source import Source

# modules that torch.compile, activation checkpointing and FSDP put around others; they may be anywhere in a name
_WRAPPING = re.compile(r"(?<![^.])(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|_fpw_module)\.")


def without_wrapping(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return the tensors under their names without the modules of torch.compile, FSDP and activation checkpointing."""
    plain = {_WRAPPING.sub("", name): value for name, value in tensors.items()}
    if len(plain) < len(tensors):
        twice = [name for name in tensors if _WRAPPING.search(name) and _WRAPPING.sub("", name) in tensors]
        raise CheckpointError(f"{where} has the same weight twice, with and without a wrapper's name: {first(twice)}")
    return plain


def fronts(names: Collection[str]) -> list[str]:
    """Return the first prefixes that all names have and that end in a dot, after "": "module.", "module.model."."""
    low, high = min(names), max(names)
    prefixes = (low[: dot.end()] for dot in itertools.islice(re.finditer(r"\.", low), 8))
    return ["", *(prefix for prefix in prefixes if high.startswith(prefix))]


def recognised(state_dict: Mapping[str, Tensor], where: str) -> tuple[Source, str, dict[str, Tensor]] | None:
    """Return the library whose names these keys are, the prefix of the vision model's keys, and the tensors without
    wrappers' names and without a prefix that all keys have. Returns None if no library has such names."""
    tensors = without_wrapping(state_dict, where)
    for front in fronts(tensors):
        for source in SOURCES:
            for prefix in source.prefixes:
                if source.wrote(tensors, front + prefix):
                    return source, prefix, {key.removeprefix(front): value for key, value in tensors.items()}
    return None
