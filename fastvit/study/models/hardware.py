"""The vendors' peak figures of GPUs, and the least time of a computation by them.

That time is a bound, not a prediction: no kernel reaches both figures, and most reach neither.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Peak figures of one GPU.

    Attributes:
        bandwidth: of its memory, bytes per second.
        flops: FLOPs per second of dense matmuls in `dtype` with float32 sums, without sparsity.
        memory: bytes, as sold (1 GB is 1e9).
        source: the vendor's document.
        dtype: "bfloat16", or "float16" for GPUs older than sm_80, which have no bfloat16 and run none of the kernels.
    """

    name: str
    bandwidth: float
    flops: float
    memory: float
    source: str
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Bound:
    """The least time that a GPU's arithmetic and memory allow.

    Attributes:
        gpu: its name.
        seconds: the larger of the two.
        arithmetic, memory: seconds for the FLOPs alone, and for the bytes alone.
    """

    gpu: str
    arithmetic: float
    memory: float

    @property
    def seconds(self) -> float:
        return max(self.arithmetic, self.memory)

    @property
    def limit(self) -> str:
        """The larger of the two: "FLOPs" or "bytes"."""
        return "FLOPs" if self.arithmetic >= self.memory else "bytes"


def _gpu(name: str, gb_per_second: float, teraflops: float, gb: float, source: str, dtype: str = "bfloat16") -> Gpu:
    return Gpu(name, gb_per_second * 1e9, teraflops * 1e12, gb * 1e9, source, dtype)


# Half of the rate with sparsity if a datasheet gives only that. For consumer GPUs the rate with float32 sums, half of
# that with float16 sums. If a vendor's documents differ, the higher figure, because a bound has to hold.
# T4, V100, A10, RTX A6000 and RTX 3090 come from other listings, and were not yet read in the documents named here.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("T4", 320, 65, 16, "NVIDIA Turing GPU architecture whitepaper, Tesla T4: FP16 with FP32 sums", "float16"),
        _gpu("V100 SXM2", 900, 125, 32, "NVIDIA V100 Tensor Core GPU datasheet, SXM2: FP16", "float16"),
        _gpu("A10", 600, 125, 24, "NVIDIA A10 Tensor Core GPU datasheet"),
        _gpu("RTX A6000", 768, 154.8, 48, "NVIDIA Ampere GA102 GPU architecture whitepaper, RTX A6000"),
        _gpu("RTX 3090", 936, 71, 24, "NVIDIA Ampere GA102 GPU architecture whitepaper, GeForce RTX 3090"),
        _gpu("A100 40GB SXM", 1555, 312, 40, "NVIDIA A100 Tensor Core GPU datasheet, SXM 40GB"),
        _gpu("A100 80GB SXM", 2039, 312, 80, "NVIDIA A100 Tensor Core GPU datasheet, SXM 80GB"),
        _gpu("H100 PCIe", 2000, 756.5, 80, "NVIDIA H100 Tensor Core GPU datasheet, PCIe: 1,513 with sparsity"),
        _gpu("H100 SXM", 3350, 989.5, 80, "NVIDIA H100 Tensor Core GPU datasheet, SXM: 1,979 with sparsity"),
        _gpu("H200", 4800, 989.5, 141, "NVIDIA H200 Tensor Core GPU datasheet, SXM: 1,979 with sparsity"),
        _gpu("B200", 8000, 2250, 180, "NVIDIA DGX B200 and HGX B200 datasheets: 36,000 with sparsity, of eight"),
        _gpu("L4", 300, 121, 24, "NVIDIA L4 Tensor Core GPU datasheet: 242 with sparsity"),
        _gpu("L40S", 864, 362.05, 48, "NVIDIA L40S GPU datasheet"),
        _gpu("RTX 4090", 1008, 165.2, 24, "NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090"),
        _gpu("RTX 5090", 1792, 209.5, 32, "NVIDIA RTX Blackwell GPU architecture whitepaper, GeForce RTX 5090"),
        _gpu("MI300X", 5300, 1307.4, 192, "AMD Instinct MI300X accelerator data sheet"),
    )
}


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that `models` has bounds for."""
    return tuple(GPUS.values())


def gpu(name: str) -> Gpu:
    """Find a GPU by its name, whatever the case and spaces. Some of its words are enough if no other GPU has them, such
    as "A6000" or "V100".

    Raises:
        ValueError: not in the table; names the nearest.
    """
    by_letters = {_letters(known): found for known, found in GPUS.items()}
    words = set(name.lower().split())
    having = [gpu for known, gpu in GPUS.items() if words and words <= set(known.lower().split())]
    if found := by_letters.get(_letters(name), having[0] if len(having) == 1 else None):
        return found
    near = [by_letters[n].name for n in difflib.get_close_matches(_letters(name), by_letters, cutoff=0.4)]
    hint = f"nearest: {', '.join(near)}; " if near else ""
    raise ValueError(f"gpu {name!r} is not in the table; {hint}known: {', '.join(GPUS)}")


def bound(gpu: Gpu, flops: float, least_bytes: float) -> Bound:
    """Return max(flops / rate, bytes / bandwidth): the roofline (Williams et al. 2009, doi:10.1145/1498765.1498785)."""
    return Bound(gpu.name, flops / gpu.flops, least_bytes / gpu.bandwidth)


def _letters(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
