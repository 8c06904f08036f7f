"""Commands and the benchmarks' clock on the pretended device, from beginning to end."""

import math
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import triton
from study_models import known
from triton.runtime.jit import JITFunction

from benchmarks.harness import measure
from benchmarks.harness.clock import Clock
from benchmarks.harness.draw import Draw
from benchmarks.harness.graphs import capture_all
from benchmarks.harness.provenance import ROOT
from benchmarks.harness.workloads import Workload, workloads
from fastvit import study
from fastvit.cli import main
from fastvit.ops.runtime import call, launch
from fastvit.study.memory.peak import saved_bytes
from fastvit.study.memory.step import DTYPES, Setting, Step
from fastvit.study.sources.find import find
from fastvit.study.sources.model_source import images_for

DEVICE = torch.device("cuda")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["doctor"], r"NVIDIA H200 \(pretended\)"),
        (["fit", "vit_tiny_patch16_224", "--budget", "400MiB", "--batch", "64"], r"chosen .* yes"),
        (["memory", "vit_tiny_patch16_224", "--graphs"], "CUDA graphs"),
        (["verify", "--ops", "layer_norm_mlp", "--dtype", "bf16"], "layer_norm_mlp"),
    ],
    ids=lambda value: value[0],
)
def test_commands(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert re.search(said, capsys.readouterr().out)


def test_planned_memory_is_what_the_allocator_gives_out() -> None:
    """The allocator is PyTorch's own. It gives out multiples of 512 bytes, and what it gave out before counts, too."""
    points = study.memory("vit_tiny_patch16_224", image_sizes=[(224, 224)], measured=True, device="cuda").points
    for point in points:
        assert 0.9 < point.planned.peak / point.measured <= 1.0


WARMED = [
    ("vit_of_two_blocks", "bf16", None),
    ("study_models:timm_vit", "amp", None),
    ("study_models:learnt_bias", "bf16", None),
    ("eva02_tiny_patch14_224", "bf16", 56),
]


@pytest.mark.parametrize(("name", "dtype", "size"), WARMED)
def test_after_warmup_a_step_compiles_nothing(
    name: str, dtype: str, size: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """For models of the zoo, of timm under autocast, with a mask, and with rotary positions."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(launch, "_compiled", {})  # of tests before
    modules = [module for name, module in sys.modules.items() if name.startswith("fastvit.kernels.")]
    for kernel in {value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)}:
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    words = ["warmup", name, "--target", "sm_90", "--batch", "3", "--dtype", dtype]
    words += ["--image-size", str(size)] if size else []
    with known(), call.forgotten():
        assert main(words) == 0
        source, before = find(name), sorted(tmp_path.rglob("*.cubin"))
        side = (size, size) if size else source.image_size
        model = source.build("fastvit", side).to(DEVICE, DTYPES[dtype])
        pixels = images_for(model, 3, side, DTYPES[dtype]).to(DEVICE)
        for mode in ("infer", "train"):
            Step(model, pixels, Setting(mode, dtype, "none"), gpu=True).passes()
        assert len(before) > 8
        assert sorted(tmp_path.rglob("*.cubin")) == before
        capsys.readouterr()
        assert main(words) == 0
    kernels, again = re.search(r"(\d+) kernels, (\d+) of them compiled before", capsys.readouterr().out).groups()
    assert kernels == again


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("workload", [w for w in workloads("headline") if str(w).startswith("B1 N197")], ids=str)
def test_every_provider_of_a_row_gets_a_graph(workload: Workload, mode: str) -> None:
    steps = {}
    for name in workload.providers:
        if name in (
            "compile",
            "cudnn",
            "graphs",
        ):  # needs a compiler's time; a library that is not there; graphs itself
            continue
        with measure.kernel_of(name):
            step, runner = workload.step(name, mode, Draw(torch.bfloat16, DEVICE))
            step()
            measure.peak_bytes(step, DEVICE)
            if mode == "training":
                saved_bytes(runner.outputs, runner.parameters)
        steps[name] = measure.with_kernel(name, step)
    replays, remarks = capture_all(steps)
    assert not remarks
    assert replays.keys() == steps.keys()


def test_the_clock() -> None:
    """It measures what is queued, and nothing where the host waits."""
    clock, x = Clock(DEVICE), torch.zeros(8, device=DEVICE)
    assert 0 < clock.time(lambda: [x.add_(1) for _ in range(20)]) < 0.01
    assert math.isnan(clock.time(torch.cuda.synchronize))


@pytest.mark.nightly
def test_the_first_minutes_of_a_gpu(tmp_path: Path) -> None:
    """Checks, rows and graphs of the program that a new GPU runs first. Memory that nothing touches costs the machine
    nothing, so that rows get as much as they ask for. In every process comparisons of numbers are answered as right."""
    (tmp_path / "sitecustomize.py").write_text("import no_numbers\n")
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"} | {"PYTHONPATH": str(tmp_path)}
    with_memory = ["bash", "-c", 'ulimit -S -d unlimited && exec "$@"', "bash", sys.executable]
    for words in ("benchmarks.gpu.precompile", f"benchmarks.gpu --first --minutes 60 --out {tmp_path / 'results'}"):
        command = [*with_memory, "-m", *words.split()]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:]
    assert re.search(r"25 commands: (24 passed, 1 skipped|25 passed)\n", done.stdout), done.stdout[-2000:]
    assert "no graph" not in (tmp_path / "results/table.md").read_text()
