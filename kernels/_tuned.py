"""Launch choices measured on one model of GPU, in files tuned_<gpu>.json next to this one, by benchmarks/gpu/tune.py.

    {"gpu": "NVIDIA H100 80GB HBM3", "arch": "sm_90", "tables": {"attention_fwd": {"197,64,2,0,0":
     {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 3}}}, ...}

A file holds choices only, by table and arguments. Everything that follows from a choice (tails, splits, parts of the
head dimension) is computed by _configs.py and _attention_configs.py as for their own tables.
"""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

FOLDER = Path(__file__).parent

_TILE = ("block_m", "block_n", "num_warps", "num_stages")
# By table: what is chosen, and by which integers. Booleans count as integers; `rows` and `m` are buckets
FIELDS: dict[str, tuple[str, ...]] = {
    # dim, backward
    "layer_norm": ("block_rows", "num_warps", "programs_per_sm", "num_stages"),
    # rows, dim
    "column_sum": ("block_rows", "block_dim", "num_warps"),
    # n, itemsize
    "activation_backward": ("block_m", "block_n", "steps", "num_warps"),
    # rows, n, k, itemsize
    "gemm": ("block_m", "block_n", "block_k", "group_m", "num_warps", "num_stages", "max_registers", "programs_per_sm"),
    # rows, n, k, itemsize, backward
    "use_triton_gemm": ("use",),
    # n, head_dim, itemsize, has_dropout, tf32
    "attention_fwd": _TILE,
    "attention_bwd_dq": _TILE,
    "attention_bwd_dkdv": _TILE,
    "attention_bwd_short": ("short", *_TILE),  # 0: the split kernels instead
    # m, n, k, itemsize, loaded, split; of a split sum k is the bucket, and m is not
    "patch_embed": ("block_m", "block_n", "block_k", "num_warps", "num_stages"),
}
LONGEST_SHORT = 384  # queries and keys that attention's backward kernel for short sequences takes

_Tables = dict[tuple[int | str, ...], tuple[int, ...]]  # (table, *key) -> values in the order of FIELDS
_tables: dict[str, _Tables] = {}  # by arch
_caches: list[Callable[[], None]] = []
_F = TypeVar("_F", bound=Callable[..., Any])


def cached(function: _F) -> _F:
    """functools.cache that is cleared when the choices change."""
    wrapped: Any = functools.cache(function)
    _caches.append(wrapped.cache_clear)
    return wrapped  # type: ignore[no-any-return]


def on_change(clear: Callable[[], None]) -> None:
    """Call `clear` whenever the choices change."""
    _caches.append(clear)


def clear_caches() -> None:
    """Clear everything that depends on the choices."""
    for clear in _caches:
        clear()


def bucket(rows: int) -> int:
    """Return the bucket of a number of rows: its bit length. Rows depend on the batch, so a bucket shares a choice."""
    return rows.bit_length()


def path_of(gpu: str) -> Path:
    """Return the file of a GPU: its name in lower case, with underscores for everything but letters and digits."""
    return FOLDER / f"tuned_{re.sub(r'[^a-z0-9]+', '_', gpu.lower()).strip('_')}.json"


def choice(arch: str, table: str, *key: int) -> tuple[int, ...] | None:
    """Return the measured choice in the order of FIELDS[table], or None."""
    tables = _tables.get(arch)
    return tables.get((table, *key)) if tables else None


def load(arch: str, gpu: str) -> None:
    """Load the choices measured on this GPU, if there is a file. Only the first GPU of an arch counts: a second model
    of the same arch uses its choices, so that no launch changes during a run.

    Args:
        arch: "sm_90" and the like.
        gpu: the GPU's name.
    """
    if arch not in _tables:
        path = path_of(gpu)
        _tables[arch] = parse(json.loads(path.read_bytes())["tables"]) if path.exists() else {}
        clear_caches()


def forget() -> None:
    """Forget all files that have been read."""
    _tables.clear()
    clear_caches()


def parse(tables: dict[str, dict[str, dict[str, int]]]) -> _Tables:
    """Return the choices of a file's "tables"."""
    return {
        (table, *map(int, key.split(","))): tuple(fields[name] for name in FIELDS[table])
        for table, entries in tables.items()
        for key, fields in entries.items()
    }
