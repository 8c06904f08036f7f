"""The programs in benchmarks/examples run with small sizes, as users run them, and learn what they should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pretrained
import pytest
import torch
from library_imports import import_timm

import fastvit

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "benchmarks" / "examples"


def run(name: str, *arguments: str, before: str = "") -> str:
    """Run an example and return what it prints. before: statements to run first."""
    program = f"{before}\nimport runpy\nrunpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(text: str, pattern: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


def test_train() -> None:
    pytest.importorskip("sklearn")
    text = run("train.py", "--dim", "64", "--depth", "2", "--epochs", "4", "--batch", "16", "--lr", "5e-3")
    losses, accuracies = numbers(text, r"loss (\S+)"), numbers(text, r"accuracy (\S+)%")
    assert len(losses) == len(accuracies) == 4
    assert losses[-1] < 0.7 * losses[0]
    assert accuracies[-1] > 40


@pytest.mark.parametrize("arguments", [("--lr", "1e-3"), ("--lr", "1e-2", "--freeze")], ids=["all", "head"])
def test_finetune(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Start from random weights in a file, because training from pretrained ones takes too long here."""
    pytest.importorskip("sklearn")
    file = tmp_path / "weights.pth"
    torch.save(fastvit.create_model("vit_tiny_patch16_224").state_dict(), file)
    sizes = "--model", "vit_tiny_patch16_224", "--img-size", "32", "--steps", "20", "--batch", "16"
    text = run("finetune.py", "--weights", str(file), *sizes, *arguments)
    losses, (before, after) = numbers(text, r"loss (\S+)"), numbers(text, r"accuracy (\S+)%")
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    assert after > before + 15


def test_segment(tmp_path: Path) -> None:
    file = tmp_path / "dinov2_vits14_pretrain.pth"
    torch.save(pretrained.meta_spelling(pretrained.state_dict()), file)
    text = run("segment.py", "--weights", str(file), "--img-size", "112", "--images", "16", "--steps", "50")
    file.unlink()  # 88 MB, which pytest would not delete
    baseline, features = numbers(text, r"mean IoU (\S+)")
    assert features > 0.6 > baseline + 0.2


def test_serve() -> None:
    import_timm()
    load = "from benchmarks.harness import libraries; libraries.load('timm')"  # whatever torchvision is there
    text = run("serve.py", "--model", "vit_tiny_patch16_224", "--rounds", "3", before=load)
    assert "14 modules accelerated, 0 skipped" in text
    rows = re.findall(r"^(timm.*?)\s+(\d+\.\d+)\s+(\d+\.\d+)$", text, re.MULTILINE)
    graphs = ["timm, CUDA graph", "timm, accelerated, CUDA graph"] if torch.cuda.is_available() else []
    assert [name for name, _, _ in rows] == ["timm", "timm, accelerated", *graphs]
    assert all(0 < float(median) <= float(p99) for _, median, p99 in rows)
    assert ("no kernel of fastvit" in text) != torch.cuda.is_available()
