"""Writes a user's table of launch choices."""

import json
from pathlib import Path
from typing import Any

from fastvit.kernels import _tuned

ARCH, GPU = "sm_90", "Test GPU 80GB"
FILE = _tuned.file_name(GPU)
WIDE = {"block_m": 128, "block_n": 128, "num_warps": 8, "num_stages": 3}  # of attention_fwd
SQUARE = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}


def write(folder: Path, fields: dict[str, int], key: str = "197,64,2,0,0", **changes: Any) -> Path:
    """Write the table into a folder. fields: of attention_fwd at the key. changes: of the document."""
    folder.mkdir(exist_ok=True)
    document = {
        "format": _tuned.FORMAT,
        "gpu": GPU,
        "arch": ARCH,
        "measured": {"sources": _tuned.sources(), "triton": "3.7.1"},
        "tables": {"attention_fwd": {key: fields}},
    } | changes
    (folder / FILE).write_text(json.dumps(document))
    return folder / FILE
