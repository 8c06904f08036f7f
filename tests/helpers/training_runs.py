"""Runs of benchmarks/examples/train.py, in this process and in others, and data sets in the real formats."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from library_imports import import_timm
from PIL import Image

from fastvit.cli import terminal

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "benchmarks" / "examples"
PROGRAM = ["-m", "benchmarks.harness.libraries", str(EXAMPLES / "train.py")]
SMALL = ["--batch", "16", "--workers", "0", "--log-every", "1", "--set", "depth=1", "embed_dim=32", "num_heads=1"]
PLAIN = ["--mixup", "0", "--cutmix", "0", "--dropout", "0", "--drop-path", "0", "--rand-augment", "0"]
Record = dict[str, Any]


def example(name: str) -> Any:
    """Import a module of the training example."""
    import_timm()
    pytest.importorskip("sklearn")
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def train(*arguments: object) -> int:
    """Call the program in this process, with one thread, as in others. Returns its status."""
    program, threads = example("train"), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return int(terminal.guarded(lambda: program.main([str(argument) for argument in arguments])))
    finally:
        torch.set_num_threads(threads)


def start(*arguments: object, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start the program in a process of its own, or with a launcher such as torchrun in several. They are a group."""
    import_timm()
    pytest.importorskip("sklearn")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, *PROGRAM, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def log(run: Path, kind: str = "") -> list[Record]:
    """Return the records of a run, without what depends on the machine's speed."""
    path = run / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    varying = ("seconds", "images_per_second", "peak_bytes")
    return [{k: v for k, v in r.items() if k not in varying} for r in records if kind in r["kind"]]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in log(run, "train")]


def image_folder(folder: Path, *, splits: tuple[str, ...] = ("train", "val"), count: int = 8) -> Path:
    """Write images of two classes, dark and bright."""
    numbers = np.random.default_rng(0)
    for split in splits or ("",):
        for name, level in (("bright", 190), ("dark", 60)):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = numbers.integers(level - 40, level + 40, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{i}.{'png' if i % 2 else 'jpg'}")
    return folder
