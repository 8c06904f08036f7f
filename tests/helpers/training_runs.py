"""Runs of benchmarks/examples/train.py, in this process and in others, and data sets in the real formats."""

import importlib
import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, ClassVar

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
PLAIN = ["--mixup", "0", "--cutmix", "0", "--dropout", "0", "--drop-path", "0", "--rand-augment", "0", "--crop", "1"]
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


class OldPickler(pickle._Pickler):
    """Writes what Python 2 wrote, in which CIFAR's files were made: bytes as strings, and numpy's old module names."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_old_string(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + len(value).to_bytes(4, "little", signed=True) + value)

    def save_old_global(self, value: Any, name: str | None = None) -> None:
        module = value.__module__.replace("numpy._core", "numpy.core")
        self.write(pickle.GLOBAL + f"{module}\n{name or value.__qualname__}\n".encode())

    dispatch[bytes] = save_old_string
    save_global = save_old_global  # type: ignore[assignment]


def pickled(value: object, pickler: Any = OldPickler) -> bytes:
    file = io.BytesIO()
    pickler(file, 2).dump(value)
    return file.getvalue()


def cifar_files(classes: int, form: str, images: np.ndarray, labels: np.ndarray) -> dict[str, bytes]:
    """Return the files of an archive by name. images: (6, n, 3072) uint8, the last n for the test; labels: (6, n)."""
    names = [f"class{i}" for i in range(classes)]
    files = {}
    if classes == 10:
        parts = dict(zip([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"], range(6), strict=True))
        of_part = {name: (images[i], labels[i]) for name, i in parts.items()}
    else:
        of_part = {"train": (images[:5].reshape(-1, 3072), labels[:5].reshape(-1)), "test": (images[5], labels[5])}
    for name, (pixels, numbers) in of_part.items():
        if form == "binary":
            coarse = [numbers[:, None] // 5] * (classes == 100)
            files[f"{name}.bin"] = (
                np.concatenate([*coarse, numbers[:, None], pixels], axis=1).astype(np.uint8).tobytes()
            )
        else:
            key = b"labels" if classes == 10 else b"fine_labels"
            files[name] = pickled({b"batch_label": b"a batch", key: numbers.tolist(), b"data": pixels})
    if form == "binary":
        files["batches.meta.txt" if classes == 10 else "fine_label_names.txt"] = "\n".join([*names, ""]).encode()
    else:
        key = b"label_names" if classes == 10 else b"fine_label_names"
        files["batches.meta" if classes == 10 else "meta"] = pickled({key: [name.encode() for name in names]})
    return files


def packed(files: dict[str, bytes], path: Path) -> Path:
    """Write a .tar.gz as the archives are."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


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
