"""What a launch costs, for profilers: Proton, for one, shows a kernel under this name with its FLOPs and bytes.

FLOPs are those of the matmuls that the kernel does, what it recomputes included and padding not; bytes are those of all
tensors, read or written once. Each function here makes a kernel's `launch_metadata`.
"""

from collections.abc import Callable
from typing import Any

Arguments = dict[str, Any]  # a launch's, by the parameters' names
Sizes = dict[str, int]


def _metadata(operand: str, sizes_of: Callable[[Arguments], Sizes], flops_of: Callable[[Sizes], int]) -> Any:
    """operand: the parameter whose dtype the matmuls have."""

    def launch_metadata(grid: tuple[int, ...], metadata: Any, arguments: Arguments) -> dict[str, Any]:
        sizes, operand_dtype = sizes_of(arguments), arguments[operand].dtype
        words = [metadata.name, *(f"{name}{size}" for name, size in sizes.items()), str(operand_dtype).split(".")[-1]]
        return {
            "name": " ".join(words),
            f"flops{8 * arguments[operand].element_size()}": flops_of(sizes),
            "bytes": sum(a.numel() * a.element_size() for a in arguments.values() if hasattr(a, "element_size")),
        }

    return launch_metadata


def of_attention(matmuls: int) -> Any:
    """matmuls: of N x N x d, per head. Where sequences lie one behind the other, N is the number of all tokens, and the
    FLOPs are those of sequences of the longest one's length."""

    def sizes(a: Arguments) -> Sizes:
        found = dict(zip("BNHd", a["q_ptr"].shape, strict=True))
        return found if a["N"] == found["N"] else {**found, "longest": a["N"]}

    return _metadata(
        "q_ptr", sizes, lambda s: 2 * matmuls * s["B"] * s["H"] * s["N"] * s.get("longest", s["N"]) * s["d"]
    )


def of_matmul(operand: str, matmuls: int = 1) -> Any:
    """[M, K] x [K, N], so many times"""

    def flops(s: Sizes) -> int:
        return 2 * matmuls * s["M"] * s["N"] * s["K"]

    return _metadata(operand, lambda a: {name: a[name] for name in "MNK"}, flops)


def of_patches(operand: str) -> Any:
    """[patches, K] x [K, D] in either order, K pixels a patch; prefix tokens have none."""

    def sizes(a: Arguments) -> Sizes:
        return {"patches": a["M"] // a["N"] * (a["N"] - a["P"]), "D": a["D"], "K": a["C"] * a["PH"] * a["PW"]}

    return _metadata(operand, sizes, lambda s: 2 * s["patches"] * s["D"] * s["K"])


def of_rows(operand: str, rows: str = "M", columns: str = "D") -> Any:
    """A pass over [rows, columns] without a matmul."""
    return _metadata(operand, lambda a: {name: a[name] for name in (rows, columns)}, lambda s: 0)
