"""benchmarks/examples/train.py: runs that are killed, spread over processes, distilled, compared, and its data."""

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
from library_imports import import_library, import_timm
from PIL import Image
from safetensors.torch import load_file

from fastvit.cli import terminal

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "benchmarks" / "examples"
PROGRAM = ["-m", "benchmarks.harness.libraries", str(EXAMPLES / "train.py")]
SMALL = ["--batch", "64", "--workers", "0", "--log-every", "1", "--set", "depth=1", "embed_dim=32", "num_heads=1"]
PLAIN = ["--mixup", "0", "--cutmix", "0", "--dropout", "0", "--drop-path", "0", "--rand-augment", "0", "--crop", "1"]
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
        return terminal.guarded(lambda: program.main([str(argument) for argument in arguments]), name="train.py")
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


def stop(process: subprocess.Popen[str], out: Path, number: int) -> None:
    """Send a signal to a run in its second epoch, of 22 steps each, and wait until it has ended."""
    while len(log(out)) < 30:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.killpg(process.pid, number)
    process.communicate(timeout=300)
    assert 1 <= torch.load(out / "checkpoint.pt", weights_only=True)["epoch"] < 4


def test_a_killed_run_continues_with_the_same_losses(tmp_path):
    settings = [*SMALL, "--epochs", "4", "--workers", "1"]
    whole, other = tmp_path / "whole", tmp_path / "other"
    stop(start("run", *settings, "--out", other), other, signal.SIGKILL)
    with (other / "log.jsonl").open("a") as file:  # as if killed while it wrote
        file.write('{"kind": "torn')
    assert train("resume", other) == 0
    assert train("run", *settings, "--out", whole) == 0
    assert log(other) == log(whole)
    assert len(losses(whole)) == 88
    assert (other / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.nightly
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_learn_what_one_does(parallel, tmp_path):
    """They are stopped after an epoch, and resumed."""
    settings, one, two = [*SMALL, *PLAIN, "--epochs", "4"], tmp_path / "one", tmp_path / "two"
    stop(start("run", *settings, "--parallel", parallel, "--out", two, launcher=TWO), two, signal.SIGTERM)
    process = start("resume", two, launcher=TWO)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert err.count("loading") == out.count("epoch 4/4") == 1, "one process prints"
    assert train("run", *settings, "--out", one) == 0
    assert losses(two) == pytest.approx(losses(one), abs=2e-5)
    expected = load_file(one / "model.safetensors")
    del expected["blocks.0.attn.qkv.bias"]  # the keys' has no gradient but rounding, which Adam scales up
    for name, value in expected.items():
        torch.testing.assert_close(load_file(two / "model.safetensors")[name], value, atol=1e-4, rtol=0)
    assert [r["right"] for r in log(two, "epoch")] == pytest.approx([r["right"] for r in log(one, "epoch")], abs=1)


def test_fused_and_plain_models_have_the_same_losses_and_are_compared(tmp_path, capsys):
    """So have compiled ones, with a worker; autocast changes them a little."""
    settings = [*SMALL, *PLAIN, "--epochs", "1", "--warm-up", "0.1", "--lr", "0.01"]
    machine = ["--compile", "eager", "--workers", "1"]
    more = {"fused": [], "plain": ["--plain"], "machine": machine, "amp": ["--amp"]}
    for name, options in more.items():
        assert train("run", *settings, *options, "--out", tmp_path / name) == 0
    fused, plain, compiled, rounded = (losses(tmp_path / name) for name in more)
    assert plain == pytest.approx(fused, abs=1e-5)
    assert compiled == pytest.approx(fused, abs=1e-6)
    assert fused != rounded == pytest.approx(fused, abs=0.05)
    rates = [record["lr"] for record in log(tmp_path / "fused", "train")]
    assert rates.index(max(rates)) == 3, "0.1 of an epoch of 22 steps"
    assert 0.009 < rates[3] <= 0.01
    assert rates[-1] < 0.001
    capsys.readouterr()
    assert train("compare", tmp_path / "fused", tmp_path / "plain", "--plot", tmp_path / "both.svg") == 0
    assert "fused and plain: training losses of 22 steps differ by at most" in capsys.readouterr().out
    assert all("</svg>" in (tmp_path / name).read_text() for name in ("both.svg", "both_dark.svg"))
    program = example("train")
    accuracy, _, loss, _ = program.draw({"fused": program.read_run(tmp_path / "fused")}, "light").axes
    assert loss.lines[0].get_ydata().tolist() == fused, "a point for each logged step"
    assert loss.lines[0].get_xdata()[-1] == len(accuracy.lines[0].get_xdata()) == 1
    assert accuracy.lines[0].get_marker() == "o", "a line of one point shows nothing"


def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch):
    """A loss that is not finite ends the run; a run is not mixed with another."""
    out, settings = tmp_path / "run", [*SMALL, "--epochs", "1", "--lr", "1e30", "--warm-up", "0", "--clip", "0"]
    broken = image_folder(tmp_path / "broken")
    (broken / "train" / "dark" / "0.jpg").write_bytes(b"no picture")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    datasets = import_library("torchvision").datasets
    monkeypatch.setattr(datasets.FashionMNIST, "download", lambda self: (_ for _ in ()).throw(OSError("no\nnetwork")))
    for options, message in {
        tuple(settings): "the loss is",
        ("--epochs", "2"): f"has a run: `train.py resume {out}` continues it",
        ("--data", str(broken), "--batch", "8", "--workers", "1", "--model", "vit_tiny_patch16_224"): "0.jpg is no pic",
        ("--data", str(image_folder(tmp_path / "empty", count=0))): "no valid file for the classes bright, dark",
        ("--data", str(tmp_path / "none")): "none cannot be read",
        (
            "--data",
            "fashion-mnist",
        ): f"mnist cannot be read: no network (benchmarks/examples/README.md says which files belong into {tmp_path}",
        ("--batch", "7"): "an even number of images",
        ("--set", "dept=2"): "dept",
    }.items():
        where = out if "lr" in str(options) or options == ("--epochs", "2") else tmp_path / message[:4]
        assert train("run", *options, "--out", where) == 2
        *stages, line = capsys.readouterr().err.splitlines()
        assert message in line
        assert stages == ["train.py: loading torch and timm"]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert train("run", "--out", tmp_path / "other") == 2
    assert capsys.readouterr().err.endswith('not installed: matplotlib. Run pip install ".[train]" in the clone\n')


def test_an_interrupted_run_says_what_is_saved(tmp_path, capsys, monkeypatch):
    trainer, out = example("training").Trainer, tmp_path / "run"
    real = trainer._train

    def interrupted(self, advance):  # no signal: a process that a shell starts in the background ignores SIGINT
        if self.epoch:
            raise KeyboardInterrupt
        real(self, advance)

    monkeypatch.setattr(trainer, "_train", interrupted)
    assert train("run", *SMALL, "--epochs", "2", "--out", out) == 130
    kept = f"interrupted; `train.py resume {out}` goes on after the last whole epoch"
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
    assert (
        train("run", *data, *model, "--teacher", tmp_path / "vit", "--epochs", "1", "--out", tmp_path / "taught") == 0
    )
    assert train("run", *data, *model, "--epochs", "1", "--out", tmp_path / "alone") == 0
    first = [load_file(tmp_path / name / "model.safetensors") for name in ("taught", "alone")]
    assert not torch.equal(first[0]["head_dist.weight"], first[1]["head_dist.weight"])


def test_loss_of_distillation():
    """Equation 3 of Touvron et al. 2021."""
    loss_of = example("training").loss_of
    cls, dist, taught = torch.randn(3, 5, 4).unbind()
    targets = torch.softmax(torch.randn(5, 4), 1)
    truth = -(targets * cls.log_softmax(1)).sum(1).mean()
    hard = -dist.log_softmax(1)[torch.arange(5), taught.argmax(1)].mean()
    torch.testing.assert_close(loss_of((cls, dist), targets, taught), (truth + hard) / 2)
    torch.testing.assert_close(loss_of(cls, targets, None), truth)


def test_folders_of_images(tmp_path):
    read = example("training").read
    train, test, classes, _ = read(str(image_folder(tmp_path / "split")))
    assert classes == ["bright", "dark"]
    test.transform = train.transform = np.asarray
    assert [(test[i][0].mean() > 128, test[i][1]) for i in (0, -1)] == [(True, 0), (False, 1)]
    train, test, *_ = read(str(image_folder(tmp_path / "whole", splits=())))
    assert (len(train), len(test)) == (13, 3)
    assert not {*train.indices} & {*test.indices}
