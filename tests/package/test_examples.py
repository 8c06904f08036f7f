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

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "benchmarks" / "examples"


def run(name: str, *arguments: str) -> str:
    """Run an example and return what it prints."""
    import_timm()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "benchmarks.harness.libraries", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(text: str, pattern: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text, re.MULTILINE)]


@pytest.mark.nightly
def test_segment_and_merge_tokens(tmp_path: Path) -> None:
    """When tokens are merged, a trained model's features stay, and less without the sizes of tokens."""
    file = tmp_path / "dinov2_vits14_pretrain.pth"
    model = fastvit.create_model("vit_small_patch14_dinov2", num_classes=0)
    fastvit.checkpoints.load(model, pretrained.state_dict())
    torch.save({**model.state_dict(), "mask_token": torch.zeros(1, 384)}, file)  # the names of Meta's files
    trained = "--weights", str(file), "--image-size", "112"
    text = run("segment.py", *trained, "--images", "16", "--steps", "50")
    baseline, features = numbers(text, r"mean IoU (\S+)")
    assert features > 0.6 > baseline + 0.2
    text = run("merge_tokens.py", *trained, "--rounds", "1")
    file.unlink()  # 88 MB, which pytest would not delete
    proportional, without, another = numbers(text, r"^cosine.* (\d\.\d+)")
    assert proportional > 0.96 > without > another + 0.3
    assert numbers(text, r"(\S+)x the speed of the full model")[0] > 0


def test_serve() -> None:
    text = run("serve.py", "--model", "vit_tiny_patch16_224", "--rounds", "3")
    assert "14 modules accelerated, 0 skipped" in text
    rows = re.findall(r"^(timm.*?)\s+(\d+\.\d+)\s+(\d+\.\d+)$", text, re.MULTILINE)
    assert [name for name, _, _ in rows][:2] == ["timm", "timm, accelerated"]
    assert all(0 < float(median) <= float(p99) for _, median, p99 in rows)
