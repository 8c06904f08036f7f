"""Compile a kernel for a GPU that is not there, and read its registers, spills, memory and instructions.

Needs triton and a process without TRITON_INTERPRET=1. Launches to compile come from benchmarks/codegen/launches.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from benchmarks.codegen import sass
from benchmarks.codegen.accesses import early_arrivals, global_accesses, narrow, tile_bytes
from benchmarks.codegen.wrong_sums import wrong_sums
from fastvit.warmup import Launch, gpu_target

if os.environ.get("TRITON_INTERPRET", "0") == "1":
    raise RuntimeError("benchmarks.codegen.aot compiles kernels: unset TRITON_INTERPRET before triton is imported")


@dataclass(frozen=True)
class Target:
    """The limits of a GPU that decide occupancy. Memory in bytes."""

    gpu: GPUTarget
    shared_per_program: int
    shared_per_sm: int
    registers_per_sm: int = 65536
    threads_per_sm: int = 2048

    @property
    def nvidia(self) -> bool:
        return self.gpu.backend == "cuda"


_KB = 1024
_TENSOR_MEMORY = 512  # columns per SM
TARGETS = {
    "sm_80": Target(gpu_target("sm_80"), 163 * _KB, 164 * _KB),
    "sm_90": Target(gpu_target("sm_90"), 227 * _KB, 228 * _KB),
    "sm_100": Target(gpu_target("sm_100"), 227 * _KB, 228 * _KB),
    "sm_120": Target(gpu_target("sm_120"), 99 * _KB, 100 * _KB, threads_per_sm=1536),
    # registers: 4 SIMDs of 512 x 64 lanes, architectural and accumulation registers together
    "gfx942": Target(gpu_target("gfx942"), 64 * _KB, 64 * _KB, registers_per_sm=4 * 512 * 64),
}

FIRST_TIER = ("sm_80", "sm_90")
SPILLS_ALLOWED = 64  # bytes per thread, in the second tier
# In the first tier, one instruction of a loop in so many may be a spill: where ptxas spills 8 bytes, tiles that spill
# none take 8 to 56 % more issue slots (NOTES.md). Triton 3.9 takes more registers: on sm_90 for the addresses of each
# wgmma's operands, on sm_80 for fragments that it no longer keeps in shared memory.
SPILLS_IN_LOOPS = 1 / 10 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 1 / 30


@dataclass
class Compiled:
    name: str
    target: str
    num_warps: int
    shared: int  # bytes of one program, static and dynamic
    registers: int  # per thread
    spill_bytes: int  # of local memory per thread
    tensor_memory: int  # columns of Blackwell's tensor memory, 0 elsewhere
    tensor_dots: int  # matmuls in the source that tensor cores can run: 16-bit, or float32 as tf32
    tiles: dict[str, int] = field(repr=False)  # bytes of the tiles that the source loads and stores, by place
    assembly: str = field(repr=False)
    ptx: str = field(repr=False)  # has the source line of every access; empty for AMD
    granule: int = 16  # bytes that are contiguous and aligned in the tensors; less than 16 for some patch sizes
    dtype: str = "bf16"  # of the workload: a key of launches.DTYPES
    is_gluon: bool = False  # TMA moves its tiles, and its warps meet at barriers in the source

    @cached_property
    def listing(self) -> sass.Listing:
        return sass.parse(self.assembly)

    @property
    def programs_per_sm(self) -> int:
        """Resident programs per SM that registers, shared memory and threads allow."""
        t = TARGETS[self.target]
        lanes = t.gpu.warp_size
        per_warp = -(-max(self.registers, 16) // 8) * 8 * lanes
        limits = [
            t.registers_per_sm // 4 // per_warp * 4 // self.num_warps,
            t.threads_per_sm // (self.num_warps * lanes),
            t.shared_per_sm // (self.shared + 1024 if t.nvidia else self.shared) if self.shared else 32,
            32,
        ]
        return min(limits)

    @property
    def first_tier(self) -> bool:
        """Whether the kernel has to be fast, not only correct: 16-bit types on targets that kernels are tuned for."""
        return self.target in FIRST_TIER and self.dtype in ("bf16", "fp16")

    @property
    def problems(self) -> list[str]:
        """Reasons not to ship this binary. In the second tier, kernels may spill a little and load in any width."""
        limit, whole = TARGETS[self.target].shared_per_program, self.listing.whole
        found = []
        if self.spill_bytes > (0 if self.first_tier else SPILLS_ALLOWED):
            loops = self.listing.hot_loops or (self.listing.hot_loop,)
            spilled = max(loop.spilled / loop.slots for loop in loops)
            if not (self.first_tier and spilled <= SPILLS_IN_LOOPS):
                found.append(f"{self.spill_bytes} bytes of spills per thread")
        if self.shared > limit:
            found.append(f"{self.shared} bytes of shared memory, limit {limit}")
        if not _STORE.search(self.assembly):
            found.append("nothing is stored: the compiler found the kernel's work impossible")
        if self.tensor_memory > _TENSOR_MEMORY:
            found.append(f"{self.tensor_memory} columns of tensor memory, limit {_TENSOR_MEMORY}")
        if self.tensor_dots and not whole.tensor:
            found.append("a matmul without tensor-core instructions")
        if whole.tensor and not self.tensor_dots and TARGETS[self.target].nvidia:
            found.append("float32 multiplied in TF32, unasked")
        if wrong := wrong_sums(whole.instructions):
            found.append(f"{wrong} addresses whose halves ptxas adds from one register (wrong_sums.py)")
        if not self.first_tier:
            return found
        if self.target == "sm_90" and any(not op.startswith("HGMMA") for op in whole.tensor):
            found.append("HMMA instead of wgmma")
        if self.listing.hot_loop.one_by_one:
            found.append("wgmma one by one")
        if any(loop.loads_in_flight == 0 for loop in self.listing.hot_loops):
            found.append("a loop that waits for the loads which it has just issued")
        if self.is_gluon:
            early = early_arrivals(self.ptx)
            return found + [f"{early} arrivals at a barrier by warps that have not met after a wait"] * bool(early)
        threads = self.num_warps * TARGETS[self.target].gpu.warp_size
        return found + [str(access) for access in narrow(global_accesses(self.ptx), self.tiles, threads, self.granule)]


def compile_launch(launch: Launch, granule: int, dtype: str) -> Compiled:
    """Compile a launch. granule, dtype: as in `Compiled`."""
    binary = launch.build()
    is_gluon = launch.kernel.is_gluon()
    ir = binary.asm["ttgir" if is_gluon else "ttir"]
    read = _read_cubin if TARGETS[launch.target].nvidia else _read_amdgcn
    return Compiled(
        name=launch.name,
        target=launch.target,
        granule=granule,
        dtype=dtype,
        is_gluon=is_gluon,
        num_warps=binary.metadata.num_warps,
        shared=binary.metadata.shared,
        tensor_memory=getattr(binary.metadata, "tmem_size", None) or 0,
        tiles={} if is_gluon else tile_bytes(ir),
        tensor_dots=len((_GLUON_DOT if is_gluon else _TENSOR_DOT).findall(ir)),
        **read(binary),
    )


_GLUON_DOT = re.compile(r"ttng\.warp_group_dot ")
_STORE = re.compile(r"\b(?:STG|UTMASTG)\b|\b(?:global|buffer)_store_")
_TENSOR_DOT = re.compile(r"tt\.dot .*(?:inputPrecision = tf32|: tensor<\d+x\d+x(?:bf16|f16)>)")


def _read_cubin(binary: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary.asm["cubin"])
        usage = _run_tool("cuobjdump", "--dump-resource-usage", str(path))
        assembly = _run_tool("nvdisasm", "-c", "--no-dataflow", str(path))
    used = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    spills = used["STACK"] + used["LOCAL"]
    return {"registers": used["REG"], "spill_bytes": spills, "assembly": assembly, "ptx": binary.asm["ptx"]}


def _run_tool(name: str, *arguments: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(tool), *arguments], check=True, capture_output=True, text=True).stdout


def _read_amdgcn(binary: Any) -> dict[str, Any]:
    text = binary.asm["amdgcn"]
    used = {key: int(value) for key, value in re.findall(r"^\s+\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
    spills = max(used["private_segment_fixed_size"], 4 * used["vgpr_spill_count"])
    return {"registers": used["vgpr_count"], "spill_bytes": spills, "assembly": text, "ptx": ""}
