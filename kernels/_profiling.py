"""FLOPs and bytes of launches, for profilers such as Proton, which shows a kernel under the name made here.

FLOPs are those of the kernel's matmuls, including recomputation and without padding. Bytes are those of all tensors,
each read or written once. Each public function returns a kernel's `launch_metadata`.
"""

from collections.abc import Callable
from typing import Any

Arguments = dict[str, Any]  # of a launch, by parameter name
Sizes = dict[str, int]


def _metadata(operand: str, sizes_of: Callable[[Arguments], Sizes], flops_of: Callable[[Sizes], int]) -> Any:
    """Return a `launch_metadata`. operand: the parameter whose dtype is that of the matmuls."""

    def launch_metadata(grid: tuple[int, ...], metadata: Any, arguments: Arguments) -> dict[str, Any]:
        arguments = {name: getattr(a, "base", a) for name, a in arguments.items()}  # the tensors of descriptors
        tensors = {id(a): a for a in arguments.values() if hasattr(a, "element_size")}  # some have several descriptors
        sizes, operand_dtype = sizes_of(arguments), arguments[operand].dtype
        words = [metadata.name, *(f"{name}{size}" for name, size in sizes.items()), str(operand_dtype).split(".")[-1]]
        return {
            "name": " ".join(words),
            f"flops{8 * arguments[operand].element_size()}": flops_of(sizes),
            "bytes": sum(a.numel() * a.element_size() for a in tensors.values()),
        }

    return launch_metadata


def attention(matmuls: int, operand: str = "q_ptr") -> Any:
    """Count `matmuls` products of N x keys x d per head. For packed sequences N is the number of all queries, and every
    sequence counts as long as the longest. Causal attention counts in full. operand: the parameter of q."""

    def sizes(a: Arguments) -> Sizes:
        shape = dict(zip("BNHd", a[operand].shape, strict=True))
        if "height" in a:  # of a grid of keys
            return {**shape, "keys": a["height"] * a["width"]}
        keys = a["N"] if a.get("N_k") is None else a["N_k"]
        return shape if keys == shape["N"] else {**shape, "keys": keys}

    return _metadata(operand, sizes, lambda s: 2 * matmuls * s["B"] * s["H"] * s["N"] * s.get("keys", s["N"]) * s["d"])


def matmul(operand: str, matmuls: int = 1) -> Any:
    """Count `matmuls` products of [M, K] x [K, N]."""

    def flops(s: Sizes) -> int:
        return 2 * matmuls * s["M"] * s["N"] * s["K"]

    return _metadata(operand, lambda a: {name: a[name] for name in "MNK"}, flops)


def patches(operand: str) -> Any:
    """Count a product of [patches, K] x [K, D], in any order, with K pixels per patch. Prefix tokens have no pixels."""

    def sizes(a: Arguments) -> Sizes:
        return {"patches": a["M"] // a["N"] * (a["N"] - a["P"]), "D": a["D"], "K": a["C"] * a["PH"] * a["PW"]}

    return _metadata(operand, sizes, lambda s: 2 * s["patches"] * s["D"] * s["K"])


def rows(operand: str, rows: str = "M", columns: str = "D") -> Any:
    """Count a pass over [rows, columns] without a matmul. rows, columns: parameters of the kernel."""
    return _metadata(operand, lambda a: {name: a[name] for name in (rows, columns)}, lambda s: 0)
