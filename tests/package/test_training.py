"""benchmarks/examples/train.py: runs that are killed, spread over processes, distilled, compared, and its
data."""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from library_imports import import_timm
from PIL import Image
from safetensors.torch import load_file

from fastvit.cli import terminal

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "benchmarks" / "examples"
PROGRAM = ["-m", "benchmarks.harness.libraries", str(EXAMPLES / "train.py")]
SMALL = ["--batch", "16", "--workers", "0", "--log-every", "1", "--set", "depth=1", "embed_dim=32", "num_heads=1"]
PLAIN = ["--mixup", "0", "--cutmix", "0", "--dropout", "0", "--drop-path", "0", "--rand-augment", "0"]
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
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


def test_a_killed_run_continues_with_the_same_losses(tmp_path):
    settings = [*SMALL, "--steps", "24", "--save-every", "7", "--workers", "1"]
    whole, other = tmp_path / "whole", tmp_path / "other"
    process = start("run", *settings, "--out", other)
    while len(log(other)) < 12:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=300)
    assert 7 <= torch.load(other / "checkpoint.pt", weights_only=True)["at"]["step"] < 24
    with (other / "log.jsonl").open("a") as file:  # as if killed while it wrote
        file.write('{"kind": "torn')

    assert train("resume", other, "--workers", "0") == 0
    assert train("run", *settings, "--workers", "0", "--out", whole) == 0
    assert log(other) == log(whole)
    assert len(losses(whole)) == 24
    assert (other / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.nightly
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_learn_what_one_does(parallel, tmp_path):
    settings = [*SMALL, *PLAIN, "--steps", "8", "--save-every", "5"]
    process = start("run", *settings, "--parallel", parallel, "--out", tmp_path / "two", launcher=TWO)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.count("accuracy") == 2, "one process prints"
    assert train("run", *settings, "--out", tmp_path / "one") == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=2e-6)
    for name, value in load_file(tmp_path / "one" / "model.safetensors").items():
        torch.testing.assert_close(load_file(tmp_path / "two" / "model.safetensors")[name], value, atol=1e-4, rtol=0)
    one, two = (log(tmp_path / name, "epoch")[-1] for name in ("one", "two"))
    assert two["right"] == pytest.approx(one["right"], abs=1)


def test_fused_and_plain_models_have_the_same_losses_and_are_compared(tmp_path, capsys):
    """So have compiled ones, with a worker; autocast changes them a little."""
    settings = [*SMALL, *PLAIN, "--steps", "7", "--warm-up", "0.02", "--lr", "0.01"]
    machine = ["--compile", "eager", "--workers", "1"]
    more = {"fused": [], "plain": ["--plain"], "machine": machine, "amp": ["--amp"]}
    for name, options in more.items():
        assert train("run", *settings, *options, "--out", tmp_path / name) == 0
    fused, plain, compiled, rounded = (losses(tmp_path / name) for name in more)
    assert plain == pytest.approx(fused, abs=1e-5)
    assert compiled == pytest.approx(fused, abs=1e-6)
    assert fused != rounded == pytest.approx(fused, abs=0.05)
    rates = [record["lr"] for record in log(tmp_path / "fused", "train")]
    assert rates.index(max(rates)) == rates.index(0.01) == 2, "0.02 of an epoch of 89 steps"
    capsys.readouterr()
    assert train("compare", tmp_path / "fused", tmp_path / "plain", "--plot", tmp_path / "both.svg") == 0
    assert "fused and plain: training losses of 7 steps differ by at most" in capsys.readouterr().out
    assert all("</svg>" in (tmp_path / name).read_text() for name in ("both.svg", "both_dark.svg"))
    compare = example("training.compare")
    accuracy, _, loss, _ = compare.draw([compare.read(tmp_path / "fused")], "light").axes
    assert loss.lines[0].get_ydata().tolist() == fused, "a point for each logged step"
    assert len(accuracy.lines[0].get_xdata()) == 1
    assert accuracy.lines[0].get_marker() == "o", "a line of one point shows nothing"


def test_mistakes_are_one_line(tmp_path, capsys):
    """A loss that is not finite ends the run; a run is not mixed with another. Earlier lines name what takes time."""
    out, settings = tmp_path / "run", [*SMALL, "--steps", "2", "--lr", "1e30", "--warm-up", "0", "--clip", "0"]
    for message in ("the loss is", f"has a run: `train.py resume {out}` continues it"):
        assert train("run", *settings, "--out", out) == 2
        *stages, line = capsys.readouterr().err.splitlines()
        assert message in line
        assert all(stage.startswith("train.py: ") for stage in stages)
    assert train("run", *SMALL, "--distill", "hard", "--out", tmp_path / "taught") == 2
    assert "--distill needs --teacher RUN" in capsys.readouterr().err


def test_what_is_missing_is_named_with_what_to_do(tmp_path, capsys, monkeypatch):
    datasets, pictures = pytest.importorskip("torchvision.datasets"), image_folder(tmp_path / "data", count=0)

    def offline(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(datasets.FashionMNIST, "download", offline)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    named = {
        "fashion-mnist": [
            "train-images-idx3-ubyte.gz, ",
            "t10k-labels",
            str(tmp_path / "torch/datasets/FashionMNIST/raw"),
        ],
        pictures: ["no valid file for the classes", f"{pictures / 'train'}/CLASS/"],
    }
    for data, words in named.items():
        assert train("run", "--data", data, "--out", tmp_path / "run") == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert [word for word in words if word not in line] == []
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert train("run", "--out", tmp_path / "run") == 2
    assert capsys.readouterr().err.endswith('not installed: matplotlib. Run pip install ".[train]" in the clone\n')


def test_an_interrupted_run_says_what_is_saved(tmp_path, capsys, monkeypatch):
    trainer, out = example("training.loop").Trainer, tmp_path / "run"
    monkeypatch.setattr(trainer, "_epoch", lambda self, step: signal.raise_signal(signal.SIGINT))
    assert train("run", *SMALL, "--steps", "7", "--save-every", "3", "--out", out) == 130
    kept = f"interrupted: {out} has the run up to step 6; `train.py resume {out}` goes on from there"
    assert capsys.readouterr().err.endswith(f"train.py: {kept}\n")


def test_learning_from_scratch_from_weights_and_from_a_teacher(tmp_path):
    folder = image_folder(tmp_path / "data")
    data = ["--data", folder, "--image-size", "32", "--batch", "8", "--workers", "0", "--clip", "0"]
    sizes = ["--model", "vit_tiny_patch16_224", "--set", "depth=2", "embed_dim=32", "num_heads=1"]
    assert train("run", *data, *sizes, "--epochs", "12", "--lr", "3e-3", "--out", tmp_path / "vit") == 0
    assert log(tmp_path / "vit", "epoch")[-1]["accuracy"] == 1.0

    weights = load_file(tmp_path / "vit" / "model.safetensors")
    tuned = ["--weights", tmp_path / "vit" / "model.safetensors", "--layer-decay", "0.5", "--lr", "1e-6"]
    assert train("run", *data, *sizes, *tuned, "--epochs", "1", "--out", tmp_path / "tuned") == 0
    after = load_file(tmp_path / "tuned" / "model.safetensors")
    torch.testing.assert_close(after["blocks.1.mlp.fc1.weight"], weights["blocks.1.mlp.fc1.weight"], atol=1e-5, rtol=0)
    assert not torch.allclose(after["head.weight"], weights["head.weight"], atol=1e-3), "a new head"

    model = ["--model", "deit_tiny_distilled_patch16_224", "--set", "depth=1", "embed_dim=32", "num_heads=1"]
    for kind in ("hard", "soft"):
        taught = [*model, "--teacher", tmp_path / "vit", "--distill", kind, "--epochs", "1"]
        assert train("run", *data, *taught, "--out", tmp_path / kind) == 0
    first = {kind: load_file(tmp_path / kind / "model.safetensors") for kind in ("hard", "soft")}
    assert not torch.equal(first["hard"]["head_dist.weight"], first["soft"]["head_dist.weight"])


def test_losses_of_distillation():
    """Equations 2 and 3 of Touvron et al. 2021, with a weight of 1/2."""
    loss_of = example("training.recipe").loss_of
    cls, dist, taught = torch.randn(3, 5, 4).unbind()
    targets = torch.softmax(torch.randn(5, 4), 1)
    p, q, r = cls.softmax(1), (dist / 3).softmax(1), (taught / 3).softmax(1)
    truth = -(targets * p.log()).sum(1).mean()
    soft = 9 * (r * (r / q).log()).sum(1).mean()
    hard = -dist.softmax(1)[torch.arange(5), taught.argmax(1)].log().mean()
    for kind, expected in {"soft": soft, "hard": hard}.items():
        args = argparse.Namespace(distill=kind, temperature=3.0)
        torch.testing.assert_close(loss_of(args, (cls, dist), targets, taught), (truth + expected) / 2)
    torch.testing.assert_close(loss_of(args, cls, targets, None), truth)


def test_folders_of_images(tmp_path):
    read, folder = example("training.data").read, image_folder(tmp_path / "split")
    data = read(str(folder))
    assert data.classes == ["bright", "dark"]
    assert [np.asarray(data.test.load(i)).mean() > 128 for i in (0, -1)] == [True, False]
    whole = read(str(image_folder(tmp_path / "whole", splits=())))
    assert (len(whole.train.labels), len(whole.test.labels)) == (13, 3)
    assert not {*whole.train.pictures} & {*whole.test.pictures}


def test_a_batch_depends_on_its_number_alone():
    data, torchvision = example("training.data"), pytest.importorskip("torchvision.transforms")
    digits = data.read("digits")
    transform = torchvision.Compose([torchvision.RandomResizedCrop(8), torchvision.PILToTensor()])

    def collate(samples):
        return torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])

    def batches(rank: int, world: int):
        return data.TrainBatches(digits.train, transform, collate, 32, 0, rank, world)

    whole = batches(0, 1)
    steps = whole.steps
    assert steps == len(digits.train.labels) // 32
    images, labels = whole[steps + 3]  # of the second epoch
    assert torch.equal(images, whole[steps + 3][0])
    assert not torch.equal(images, whole[3][0])
    parts = [batches(rank, 2)[steps + 3] for rank in range(2)]
    assert torch.equal(torch.cat([part for part, _ in parts]), images)
    assert torch.equal(torch.cat([part for _, part in parts]), labels)
    with data.batches(whole, range(steps + 3, steps + 4), 1, torch.device("cpu")) as feed:
        assert torch.equal(next(feed)[0], images)

    sets = [data.TestBatches(digits.test, transform, 179, rank, 2) for rank in range(2)]
    assert [len(one) for one in sets] == [2, 2], "359 images: processes that call a sharded model do so equally often"
    seen = torch.cat([one[n][1] for one in sets for n in range(2)])
    assert sorted(seen.tolist()) == [-1, *sorted(digits.test.labels.tolist())]
