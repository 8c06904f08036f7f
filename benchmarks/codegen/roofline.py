"""Which pipe bounds a kernel's hot loop: cycles of one pass of one warp on a scheduler (a quarter of an SM), by pipe.

A model for comparing versions of a kernel, not a prediction of its time: it knows throughput, no latency, no stalls.
With one warp per scheduler nothing overlaps and times add up; several resident programs approach the maximum.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from benchmarks.codegen.aot import Compiled
from benchmarks.codegen.sass import Region


@dataclass(frozen=True)
class Rates:
    """Per clock and SM. Tensor cores: dense 16-bit multiply-adds. Memory: bytes, of HBM and of L2."""

    tensor: float
    alu: float
    hbm: float
    l2: float


# Multiply-adds and ALU lanes: from peak figures and throughput tables of NVIDIA; bytes: bandwidth / SMs / boost clock
# of A100, H200, B200 and RTX PRO 6000. Float32 lanes: 128, special functions: 16 on all of them.
RATES = {
    "sm_80": Rates(1024, 64, 2.0e12 / 108 / 1.41e9, 47),
    "sm_90": Rates(2048, 64, 4.3e12 / 132 / 1.755e9, 39),
    "sm_100": Rates(4096, 64, 7.2e12 / 148 / 1.9e9, 64),
    "sm_120": Rates(512, 128, 1.6e12 / 188 / 2.4e9, 24),
}
_FP32_LANES = 128
_SFU_LANES = 16


@dataclass(frozen=True)
class Bound:
    cycles: dict[str, float]  # by pipe: issue, tensor, sfu, fma, alu, global

    @property
    def pipe(self) -> str:
        return max(self.cycles, key=lambda pipe: self.cycles[pipe])

    def share(self, pipe: str) -> float:
        """Of the limiting pipe's time; for "tensor" the most that the tensor cores can be busy."""
        return self.cycles[pipe] / max(self.cycles.values())


def bound(compiled: Compiled) -> Bound | None:
    """Of the hot loop, or of all of a kernel without loops; None for AMD targets, whose issue rules are others."""
    rates = RATES.get(compiled.target)
    if rates is None:
        return None
    region = compiled.hot_loop
    pipes = region.pipes
    macs = region.macs_per_thread * (2 if any(".TF32" in opcode for opcode in region.opcodes) else 1)
    bandwidth = rates.l2 if pipes["tensor"] else rates.hbm  # a matmul's loop reads what other programs read too
    wide_integer = region.count("IMAD")  # half the float32 rate
    return Bound(
        {
            "issue": float(region.slots),
            "tensor": macs * 32 * 4 / rates.tensor,
            "sfu": pipes["sfu"] * 32 * 4 / _SFU_LANES,
            "fma": (pipes["fma"] + wide_integer) * 32 * 4 / _FP32_LANES,
            "alu": pipes["alu"] * 32 * 4 / rates.alu,
            "global": global_bytes(region) * 32 * 4 / bandwidth,
        }
    )


def global_bytes(region: Region) -> int:
    """Bytes that a thread moves from and to global memory in one pass."""
    total = 0
    for opcode, count in region.opcodes.items():
        if opcode.split(".")[0] in ("LDG", "STG", "LDGSTS"):
            width = re.search(r"\.(?:[US](8|16)|(64|128|256)|ENL2\.(256))(?:\.|$)", opcode)
            total += count * (int(next(g for g in width.groups() if g)) if width else 32) // 8
    return total


# Tensor-core multiply-adds per score in units of the (padded) head dimension, by kernel.
_MATMULS = {
    "attention_fwd_kernel": 2,
    "attention_short_fwd_kernel": 2,
    "attention_bwd_dq_kernel": 3,
    "attention_bwd_dkdv_kernel": 4,
    "attention_bwd_short_kernel": 5,
}


_PER_LANE = {"dropout_kernel": 4}  # elements per index of the tile


def elements(compiled: Compiled, constexprs: dict[str, Any]) -> tuple[float, str] | None:
    """What a thread owns in one pass of the hot loop, and what it is: scores, outputs of a GEMM tile or elements of
    a row; None where the kernel has no such unit."""
    threads = compiled.num_warps * (64 if compiled.target == "gfx942" else 32)
    if compiled.name in _MATMULS:
        depth = _MATMULS[compiled.name] * (constexprs["D0"] + constexprs["D1"])
        macs = compiled.hot_loop.macs_per_thread
        if macs:
            return macs / depth, "score"
        keys = sum(value for name, value in constexprs.items() if name == "BLOCK_N" or name.startswith("KEYS_"))
        return constexprs["BLOCK_M"] * keys / threads, "score"
    blocks = [value for name, value in constexprs.items() if name.startswith("BLOCK") and name != "BLOCK_K"]
    if not blocks:
        return None
    unrolled = 1 if compiled.listing.loops else constexprs.get("STEPS", 1)
    count = math.prod(blocks) * unrolled * _PER_LANE.get(compiled.name, 1) / threads
    return count, "output" if "BLOCK_K" in constexprs else "element"
