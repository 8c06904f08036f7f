"""Launch choices measured on one model of GPU, in files tuned_<gpu>.json: shipped ones next to this file, from
benchmarks/gpu/tune.py, and the user's in a folder that the caller names, from its --out.

    {"format": 2, "gpu": "NVIDIA H100 80GB HBM3", "arch": "sm_90", "tables": {"attention_fwd": {"197,64,2,0,0":
     {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 3}}}, ...}

A file holds choices only, by table and arguments. Everything that follows from a choice (tails, splits, parts of the
head dimension) is computed by _configs.py and _attention_configs.py as for their own tables. What kernels rely on is
checked here: a file can make a kernel slow or impossible to launch, never wrong.
"""

import functools
import hashlib
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

FORMAT = 2  # 1 also chose between two forward kernels of attention
FOLDER = Path(__file__).parent

_TILE = ("block_m", "block_n", "num_warps", "num_stages")
FIELDS: dict[str, tuple[str, ...]] = {
    "layer_norm": ("block_rows", "num_warps", "programs_per_sm", "num_stages"),
    "column_sum": ("block_rows", "block_dim", "num_warps"),
    "activation_backward": ("block_m", "block_n", "steps", "num_warps"),
    "gemm": ("block_m", "block_n", "block_k", "group_m", "num_warps", "num_stages", "max_registers", "programs_per_sm"),
    "use_triton_gemm": ("use",),
    "attention_fwd": _TILE,
    "attention_bwd_dq": _TILE,
    "attention_bwd_dkdv": _TILE,
    "attention_bwd_short": ("short", *_TILE),  # 0: the split kernels instead
    "patch_embed": ("block_m", "block_n", "block_k", "num_warps", "num_stages"),
}
KEY = {  # the integers that a choice is looked up by; `rows` is a bucket
    "layer_norm": ("dim", "backward"),
    "column_sum": ("rows", "dim"),
    "activation_backward": ("n", "itemsize"),
    "gemm": ("rows", "n", "k", "itemsize"),
    "use_triton_gemm": ("rows", "n", "k", "itemsize", "backward"),
    "attention_fwd": ("n", "head_dim", "itemsize", "has_dropout", "tf32"),
    "attention_bwd_dq": ("n", "head_dim", "itemsize", "has_dropout", "tf32"),
    "attention_bwd_dkdv": ("n", "head_dim", "itemsize", "has_dropout", "tf32"),
    "attention_bwd_short": ("n", "head_dim", "itemsize", "has_dropout", "tf32"),
    "patch_embed": ("m", "n", "k", "itemsize", "loaded", "split"),  # m, or k of a split sum, is a bucket
}
LONGEST_SHORT = 384  # queries and keys that attention's backward kernel for short sequences takes

_Tables = dict[tuple[int | str, ...], tuple[int, ...]]  # (table, *key) -> values in the order of FIELDS
_tables: dict[str, _Tables] = {}  # by arch
_loaded: set[str] = set()  # archs for which the files of a GPU have been read
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


def file_name(gpu: str) -> str:
    """Return the name of a GPU's file: lower case, with underscores for everything but letters and digits."""
    return f"tuned_{re.sub(r'[^a-z0-9]+', '_', gpu.lower()).strip('_')}.json"


def choice(arch: str, table: str, *key: int) -> tuple[int, ...] | None:
    """Return the measured choice in the order of FIELDS[table], or None."""
    tables = _tables.get(arch)
    return tables.get((table, *key)) if tables else None


class Table(NamedTuple):
    """A GPU's file as it was read."""

    path: Path
    choices: _Tables  # empty if the file is ignored
    ignored: str  # why, or ""


def load(arch: str, gpu: str, user: Path | None = None) -> None:
    """Load the shipped choices for this GPU, then the user's, which replace shipped ones key by key. Warn once of each
    file that is ignored. Only the first GPU of an arch counts: a second model of the same arch uses its choices.

    Args:
        arch: "sm_90" and the like.
        gpu: the GPU's name.
        user: the user's folder, which need not exist.
    """
    if arch in _loaded:
        return
    _loaded.add(arch)
    found: _Tables = {}
    for table in (shipped(arch, gpu), users(arch, gpu, user)):
        if table is not None and table.ignored:
            warnings.warn(f"{table.path} is ignored: {table.ignored}", stacklevel=2)
        elif table is not None:
            found |= table.choices
    if found:
        _tables[arch] = found
    clear_caches()


def shipped(arch: str, gpu: str) -> Table | None:
    """Return the table of this GPU that came with the package, or None."""
    return _read(arch, gpu, FOLDER)


def users(arch: str, gpu: str, folder: Path | None) -> Table | None:
    """Return the user's table of this GPU, or None without one. A table measured with other kernels is ignored."""
    return None if folder is None else _read(arch, gpu, folder, sources())


def _read(arch: str, gpu: str, folder: Path, expected: str | None = None) -> Table | None:
    path = folder / file_name(gpu)
    try:
        text = path.read_bytes()
    except OSError:  # no such file, or no permission
        return None
    try:
        data = json.loads(text)
        choices = parse(data, arch, gpu)
        if expected is not None and data.get("measured", {}).get("sources") != expected:
            return Table(path, {}, "it was measured with other kernels than these")
    except (ValueError, RecursionError, AttributeError) as error:
        return Table(path, {}, str(error))
    return Table(path, choices, "")


@functools.cache
def sources() -> str:
    """Return a digest of the kernels and their launch configurations. Choices were measured with this code, and stay
    valid in releases that do not change it."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def forget() -> None:
    """Forget all files that have been read."""
    _tables.clear()
    _loaded.clear()
    clear_caches()


def parse(data: Any, arch: str, gpu: str) -> _Tables:
    """Return the choices of a file. Raises ValueError for anything that is not a valid table of this GPU."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"not of format {FORMAT}")
    if (data.get("arch"), data.get("gpu")) != (arch, gpu):
        raise ValueError(f"made on {data.get('gpu')!r}, {data.get('arch')!r}, not on {gpu!r}, {arch!r}")
    found: _Tables = {}
    for table, entries in _dictionary(data.get("tables"), "tables").items():
        if table not in FIELDS:
            raise ValueError(f"unknown table {table!r}")
        for text, values in _dictionary(entries, table).items():
            key = tuple(int(part) for part in text.split(","))
            fields = _dictionary(values, f"{table}[{text}]")
            if len(key) != len(KEY[table]) or set(fields) != set(FIELDS[table]):
                raise ValueError(f"{table}[{text}] has a key or fields that {table} does not have")
            check(table, key, fields)
            found[table, *key] = tuple(fields[name] for name in FIELDS[table])
    return found


def _dictionary(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not an object")
    return value


def check(table: str, key: tuple[int, ...], fields: dict[str, Any]) -> None:
    """Raise ValueError for a choice that a kernel could not run with, or not correctly."""
    where = f"{table}[{','.join(map(str, key))}]"
    for name, value in fields.items():
        if type(value) is not int or not 0 <= value <= 1024:
            raise ValueError(f"{where}: {name} is {value!r}, not an integer from 0 to 1024")
        if name in ("short", "use") and value > 1:
            raise ValueError(f"{where}: {name} is {value}, not 0 or 1")
        if name.startswith(("block_", "num_warps", "group_m", "steps")) and value.bit_count() != 1:
            raise ValueError(f"{where}: {name} is {value}, not a power of two")
        none = (table, name, value) == ("gemm", "programs_per_sm", 0)  # no persistent grid
        if name in ("num_stages", "num_warps", "programs_per_sm") and not (1 <= value <= 32 or none):
            raise ValueError(f"{where}: {name} is {value}, not from 1 to 32")
        rows = name == "block_rows" or table == "activation_backward"  # not an operand of a matmul
        least = 1 if rows else 64 if (table, name) == ("gemm", "block_n") else 16
        if name.startswith("block_") and value < least:
            raise ValueError(f"{where}: {name} is {value}, less than {least}")
    if table == "attention_bwd_short" and fields["short"] and key[0] > LONGEST_SHORT:
        raise ValueError(f"{where}: the short kernel takes no more than {LONGEST_SHORT} keys")
    if table == "attention_bwd_short" and fields["short"] and fields["block_m"] < key[0]:
        raise ValueError(f"{where}: block_m is {fields['block_m']}, less than the {key[0]} queries")
