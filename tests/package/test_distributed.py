"""Accelerated and compiled models under DDP and FSDP2, in two processes on gloo: gradients are those of one process on
the whole batch."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from host_recorder import HostRecorder
from library_imports import import_library
from torch import Tensor, nn

import fastvit
from fastvit.cuda_graphs import captured, recorder
from fastvit.study.fitting.choices import BLOCK, Choice, put_on

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
BATCH = 4
KINDS = (
    "ddp",
    "ddp, accelerated",
    "ddp, fitted",
    "fsdp2",
    "fsdp2, fitted",
    "ddp, compiled",
    "fsdp2, compiled",
    "ddp, graphs",
)


def build() -> tuple[nn.Module, Tensor]:
    timm = import_library("timm")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, init_values=0.3, num_classes=10)
    return model, torch.randn(BATCH, 3, 32, 32)


def loss(model: nn.Module, image: Tensor) -> Tensor:
    return model(image).square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        name = name.removeprefix("_orig_mod.").removeprefix("module.")
        whole[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return whole


def worker(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for kind in KINDS:
        model, image = build()
        if kind == "ddp, accelerated":
            model = nn.parallel.DistributedDataParallel(model)
        if "compiled" not in kind:
            report = fastvit.accelerate(model)
            assert len(report.accelerated) == 4
        if "fitted" in kind:
            put_on(model.blocks[0], Choice("all", "all"))
            put_on(model.blocks[1], BLOCK)
        if kind == "ddp, graphs":
            recorder.Recorder, captured._GROUP_BYTES = HostRecorder, 100_000  # type: ignore[misc]
            graphs = fastvit.graphs(model)
        if kind in ("ddp", "ddp, fitted", "ddp, compiled", "ddp, graphs"):
            model = nn.parallel.DistributedDataParallel(model)
        elif "fsdp2" in kind:
            from torch.distributed.fsdp import fully_shard

            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
            with pytest.raises(ValueError, match="a DTensor: fully_shard"):
                fastvit.graphs(model)
        if "compiled" in kind:
            torch._dynamo.reset()
            model = fastvit.compile(model, inner="aot_eager")
            loss(model, image.chunk(2)[rank]).backward()  # compiles, which must not count in the profile
            model.zero_grad()
        for _ in range(3 * (kind == "ddp, graphs")):  # the third is captured
            loss(model, image.chunk(2)[rank]).backward()
            model.zero_grad()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss(model, image.chunk(2)[rank]).backward()
        names = [event.name for event in profile.events()]
        calls = 2 + 2 * ("fitted" in kind)  # each block runs its attention once more in the backward pass
        assert names.count("fastvit::attention_fwd") == calls, f"{kind}: the blocks did not run fused"
        if kind == "ddp, graphs":
            assert [graph.replays for graph in graphs.graphs] == [2]
            assert HostRecorder.made[0].replays > 4, "several groups of gradients"
        whole = gradients(model)  # a collective: every rank takes part
        if rank == 0:
            torch.save(whole, Path(folder) / f"{kind}.pt")
    dist.barrier()
    dist.destroy_process_group()
    # torch's threads sometimes abort a process that ends: "terminate called without an active exception"
    os._exit(0)


@pytest.mark.nightly
def test_ddp_and_fsdp2_in_two_processes(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(worker, (port, str(tmp_path)), nprocs=2)
    model, image = build()
    loss(model, image).backward()
    for kind in KINDS:
        got = torch.load(tmp_path / f"{kind}.pt", weights_only=True)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                got[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=f"{kind} {name}": f"{n}: {m}"
            )
