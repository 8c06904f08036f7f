"""Writes keys and choices of launch tables in words."""

from __future__ import annotations

from collections.abc import Sequence

from fastvit.kernels import _tuned

_HEADS = {
    "attention_fwd": "attention forward",
    "attention_bwd_dq": "attention backward dq",
    "attention_bwd_dkdv": "attention backward dk, dv",
    "attention_bwd_short": "attention backward",
}


def key_in_words(table: str, key: Sequence[int]) -> str:
    """Write ("attention_fwd", (197, 64, 2, 0, 0)) as "attention forward N=197 d=64". M: rows, in powers of two."""
    fields = dict(zip(_tuned.KEY[table], key, strict=True))
    float32 = ", float32" if fields.get("itemsize", 2) > 2 else ""
    if table in _HEADS:
        options = ", dropout" * bool(fields["has_dropout"]) + (", tf32" if fields["tf32"] else float32)
        return f"{_HEADS[table]} N={fields['n']} d={fields['head_dim']}{options}"
    if table == "layer_norm":
        return f"norm {'backward' if fields['backward'] else 'forward'} D={fields['dim']}"
    if table == "column_sum":
        return f"sum of rows D={fields['dim']} M<{1 << fields['rows']}"
    if table == "activation_backward":
        return f"activation backward D={fields['n']}{float32}"
    if table == "patch_embed":
        if fields["split"]:
            return f"patch embedding backward {fields['m']}x{fields['n']} M<{1 << fields['k']}{float32}"
        return f"patch embedding {fields['k']}->{fields['n']} M<{1 << fields['m']}{float32}"
    direction, which = " backward" * bool(fields.get("backward")), ", Triton or cuBLAS" * (table == "use_triton_gemm")
    return f"linear{direction} {fields['k']}->{fields['n']} M<{1 << fields['rows']}{float32}{which}"


def choice_in_words(table: str, choice: Sequence[int]) -> str:
    """Write a choice such as "128x64, 8 warps, 3 stages"."""
    fields = dict(zip(_tuned.FIELDS[table], choice, strict=True))
    if table == "use_triton_gemm":
        return "Triton" if fields["use"] else "cuBLAS"
    if table == "attention_bwd_short" and not fields["short"]:
        return "two kernels"
    parts = ["x".join(str(value) for name, value in fields.items() if name.startswith("block_"))]
    words = {"num_warps": "warps", "num_stages": "stages", "group_m": "tiles a group", "steps": "steps"}
    words |= {"programs_per_sm": "programs an SM", "max_registers": "registers"}
    parts += [f"{fields[name]} {word}" for name, word in words.items() if fields.get(name)]
    return ", ".join(filter(None, parts))
