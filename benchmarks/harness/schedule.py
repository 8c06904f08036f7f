"""Choose the order of the benchmarks, and end a run in time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.harness.families import VIT_B_16
from benchmarks.harness.providers import OPS
from benchmarks.harness.workloads import Workload

# The most important case of each op, on a CPU and on a GPU, and the sizes that an exponent is fitted to.
FIRST = {
    "attention": ("B1 N1025 H12 d64", "B32 N197 H16 d64"),
    "attention_varlen": ("B4 N256 H12 d64", "B32 N1024 H16 d64"),
    "attention_windows": ("B1 grid56 window7 H3 d32 shift3", "B32 grid56 window7 H3 d32 shift3"),
    "rotary": ("B8 N197 H12 d64 halves", "B32 N197 H12 d64 halves"),
    "qk_norm": ("halves layer B8 N197 H12 d64", "halves layer B32 N197 H12 d64"),
    "layer_norm": ("B8 N197 D768", "B256 N197 D768"),
    "add_layer_norm": ("B8 N197 D768", "B256 N197 D768"),
    "linear": ("B1 N197 D768 out3072 gelu", "B32 N197 D768 out3072 gelu"),
    "layer_norm_linear": ("B1 N197 D768 out2304", "B32 N197 D768 out2304"),
    "layer_norm_attention": ("B1 N197 D768 H12", "B32 N197 D768 H12"),
    "mlp": ("B1 N197 D768", "B32 N197 D768"),
    "layer_norm_mlp": ("B1 N197 D768", "B32 N197 D768"),
    "patch_embed": ("B8 px224 patch16 D768", "B32 px224 patch16 D768"),
    "block": ("B1 N1025 D768 H12", "B32 N197 D768 H12"),
    "model": ("vit_small_patch16_224 B1 px224", "vit_base_patch16_224 B32 px224"),
    "accelerate": tuple(f"{library} B{B}" for library in VIT_B_16 for B in (1, 32)),
    "memory, attention": tuple(f"B1 N{N} H12 d64" for N in (4097, 2305, 1025)),
    "memory, block": tuple(f"B1 N{N} D768 H12" for N in (4097, 2305, 1025)),
}


def turns(workloads: Iterable[Workload]) -> dict[str, tuple[int, int]]:
    """Return sort keys by id: the cases FIRST of all ops, then the next case of every op, and so on. Blocks and models,
    which take longest, come last each time."""
    ops = sorted(OPS, key=lambda op: op in ("block", "model", "accelerate"))
    seen = Counter[str]()
    keys = {}
    for workload in workloads:
        other = str(workload) not in FIRST[workload.op]
        seen[workload.op] += other
        keys[workload.id] = (seen[workload.op] if other else 0), ops.index(workload.op)
    return keys


@dataclass
class Schedule:
    """The time of a run: no case begins after the deadline."""

    deadline: float  # of perf_counter()
    case_seconds: float  # of timed rounds, for each case
    total: int = 0
    done: int = 0
    left_out: list[str] = field(default_factory=list)  # ops of the cases

    def left(self) -> float:
        return max(0.0, self.deadline - time.perf_counter())

    def budget(self) -> float:
        """Return the seconds of timed rounds for the next case: half of the time left, spread evenly. The other half
        goes into agreement and memory."""
        return min(self.case_seconds, self.left() / (2 * max(1, self.total - self.done)))
