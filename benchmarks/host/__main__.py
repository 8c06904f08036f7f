"""Measure the host's time: for a launch and a block without a GPU, for small ops on a CPU, until calls are queued on a
GPU.

    python -m benchmarks.host benchmarks/results/cpu/host.json               # without a GPU
    python -m benchmarks.host | tee benchmarks/results/nvidia_h200/host.txt  # on a GPU, next to eager and SDPA

`python -m benchmarks.report.results` makes tables of the file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks.harness.columns import make
from benchmarks.harness.provenance import commit, write_json
from benchmarks.harness.record import environment
from benchmarks.host import calls, launch


def render(path: Path) -> list[str]:
    """Return the tables of a result file."""
    results = json.loads(path.read_text())
    where = results["environment"]
    launches = [
        (name, str(row["arguments"]), f"{row['triton']:.1f}", f"{row['direct']:.1f}")
        for name, row in results["launches"].items()
    ]
    steps = [
        (name, *(f"{row[key]:.0f}" for key in ("us", "kernels", "vendor")), f"{row['stand_in']:.1f}")
        for name, row in results["block"].items()
    ]
    ops = [
        (name, *(f"{row[provider]:.1f}" if provider in row else "-" for provider in calls.PROVIDERS))
        for name, row in results["ops"].items()
    ]
    return [
        *make(("kernel", "arguments", "Triton's way\nus", "fastvit's\nus"), launches),
        "",
        *make(("ViT-B/16 block, batch 1", "us", "kernels", "vendor's\ncalls", "one of them\nus"), steps),
        "",
        "Python's part of queueing kernels, with a driver that launches nothing: CUDA's comes on top.",
        "The vendor's matmuls, sums and casts only allocate their result.",
        "",
        *make(("small ops on the CPU, float32, us", "eager", "SDPA", "fastvit"), ops),
        "",
        f"{where['device']}, one thread, the least of the rounds, torch {where['torch']}, triton {where['triton']},"
        f" commit {results['commit'][:10]}",
    ]


def main(arguments: list[str] | None = None, rounds: int = 1000) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="the result file, JSON; without it, a GPU is measured")
    path = parser.parse_args(arguments).file
    if path is None:
        if not torch.cuda.is_available():
            parser.error("give a file, or run it on a GPU")
        columns = ("us of the host, least / median", "", "eager", "SDPA", "fastvit")
        print(*make(columns, list(calls.until_queued(torch.device("cuda"))), left=2), sep="\n")
        print(f"\n{torch.cuda.get_device_name()}, bfloat16, torch {torch.__version__}, commit {commit()[:10]}")
        return
    torch.set_num_threads(1)
    results = {"commit": commit(), "environment": environment(torch.device("cpu"), torch.bfloat16)}
    results |= {"launches": launch.single_launches(rounds), "block": launch.block(rounds)}
    write_json(path, results | {"ops": calls.small_ops(rounds // 20 or 1, calls=10)})
    print(*render(path), sep="\n")


if __name__ == "__main__":
    main()
