"""The workloads of attention: of one length, with masks or shared keys, causal, between two lengths, with relative
positions, and in windows. `workloads.py` lists them with the others and explains the uses."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from benchmarks.harness.workload import Workload
from benchmarks.harness.workload import rows as _rows


def attention() -> Iterator[Workload]:
    """Yield the workloads of every attention op; first those of plain attention."""
    rows = functools.partial(_rows, "attention")
    yield from rows("quick", B=1, N=50, H=3, d=64)
    for B, N, use in ((1, 197, "cpu"), (64, 197, "long"), (1, 577, "cpu"), (1, 1025, "cpu"), (8, 1025, "long")):
        yield from rows(use, B=B, N=N, H=12, d=64)
    yield from rows("cpu", B=1, N=257, H=16, d=80)
    yield from rows("cpu", B=1, N=197, H=12, d=64, separate=True)
    batches = {197: [1, 32, 256], 257: [1, 128], 577: [1, 64], 1025: [1, 32], 1370: [1, 16], 4097: [1, 8]}
    for N, several in {**batches, 16385: [1, 2]}.items():
        yield from rows("gpu", B=several, N=N, H=16, d=64)
        yield from rows("tune", B=max(50_000 // N, 1), N=N, H=16, d=64)
    for d in (72, 80, 88, 96, 128):
        for N, B in ((257, 128), (1025, 32)):
            yield from rows("gpu", B=B, N=N, H=16, d=d)
            yield from rows("tune", B=50_000 // N, N=N, H=16, d=d)
    yield from rows("rehearse", B=1, N=20, H=1, d=16)
    for N, H, d in ((50, 3, 64), (197, 3, 64), (257, 2, 64), (257, 2, 80), (577, 1, 64), (1025, 1, 64)):
        yield from rows("traffic", B=1, N=N, H=H, d=d)
    for N, d, p in ((50, 64, 0.0), (197, 64, 0.0), (300, 64, 0.0), (130, 80, 0.0), (70, 64, 0.1)):
        yield from rows("sanitize", B=2, N=N, H=2, d=d, dropout_p=p)
    yield from rows("sanitize", B=2, N=[70, 300], H=2, d=[32, 96])
    for N, several in {197: [1, 32, 256], 1025: [1, 32], 4097: [1, 8]}.items():
        yield from rows("headline", B=several, N=N, H=12, d=64)
    for N in (17, 65, 128, 197, 256, 257, 577, 1024, 1025, 1370, 4097):
        few = {128: "kernels", 197: "second kernels", 1024: "kernels", 1025: "second kernels"}.get(N, "")
        yield from rows(f"compile {few}", B=64, N=N, H=12, d=64)
    for d in (16, 32, 64, 72, 80, 88, 96, 104, 128, 256):  # one part; two: 64 + 8 to 64 + 32; one again; the largest
        few = {32: "second", 72: "second kernels", 96: "second", 128: "second", 256: "second"}.get(d, "")
        yield from rows(f"compile {few}", B=64, N=[197, 1370], H=8, d=d, separate=True)
    # the last tile of keys is as wide as the loop's
    yield from rows("compile", B=64, N=1024, H=8, d=[72, 80, 96, 128, 256], separate=[False, True])
    yield from rows("compile", B=64, N=197, H=12, d=64, dropout_p=0.1)
    yield from rows("compile second kernels", B=64, N=577, H=12, d=64, dropout_p=0.1)
    yield from _masked_attention()
    yield from _causal_and_cross_attention()
    yield from _relative_attention()
    yield from _attention_in_windows()


def _masked_attention() -> Iterator[Workload]:
    """With a mask, heads that share keys, or sequences of several lengths."""
    rows, varlen = functools.partial(_rows, "attention"), functools.partial(_rows, "attention_varlen")
    masks = ["padding", "positions"]
    yield from varlen("quick", B=3, N=50, H=3, d=64)
    yield from rows("quick", B=2, N=50, H=3, d=64, mask="positions")
    for kinds in ({"mask": masks}, {"kv_heads": 2}):
        yield from rows("cpu", B=2, N=197, H=12, d=64, **kinds)
        yield from rows("gpu", B=[1, 32, 256], N=197, H=12, d=64, **kinds)
        yield from rows("gpu", B=8, N=1025, H=16, d=64, **kinds)
        yield from rows("traffic", B=2, N=[197, 257], H=4, d=64, **kinds)
        for d in (16, 32, 64, 72, 80, 96, 128):
            few = {64: "second kernels", 72: "second"}.get(d, "")
            yield from rows(f"compile {few}", B=64, N=[197, 577], H=8, d=d, **kinds)
        yield from rows("compile", B=64, N=577, H=8, d=64, dropout_p=0.1, **kinds)
    yield from varlen("cpu", B=4, N=256, H=12, d=64)
    yield from varlen("gpu", B=[4, 32], N=[256, 1024], H=16, d=[64, 80])
    yield from varlen("traffic", B=4, N=256, H=4, d=64)
    yield from rows("sanitize", B=2, N=133, H=2, d=72, mask=masks)
    yield from rows("sanitize", B=1, N=133, H=2, d=72, kv_heads=1)
    yield from varlen("sanitize", B=3, N=133, H=2, d=72, kv_heads=[0, 1])
    for d in (16, 32, 64, 72, 80, 96, 128):
        few = {64: "second kernels", 72: "second"}.get(d, "")
        yield from varlen(f"compile {few}", B=32, N=1024, H=8, d=d)


def _causal_and_cross_attention() -> Iterator[Workload]:
    """Queries that see the keys up to their own, and more or fewer keys than queries."""
    rows, varlen = functools.partial(_rows, "attention"), functools.partial(_rows, "attention_varlen")
    yield from rows("quick", B=1, N=50, H=3, d=64, causal=True)
    yield from rows("quick", B=2, N=9, H=3, d=64, keys=50)
    yield from varlen("quick", B=3, N=50, H=3, d=64, queries=1)
    yield from rows("cpu", B=1, N=1025, H=12, d=64, causal=True)
    yield from rows("gpu", B=[1, 32], N=1025, H=16, d=64, causal=True)
    for N, keys in ((1, 197), (64, 1025), (577, 77)):  # pooling, queries of a resampler, text
        yield from rows("cpu", B=4, N=N, H=12, d=64, keys=keys)
        yield from rows("gpu", B=[1, 64], N=N, H=16, d=64, keys=keys)
    yield from rows("sanitize", B=2, N=133, H=2, d=72, causal=True, mask=["", "padding"])
    yield from rows("sanitize", B=2, N=133, H=2, d=72, keys=70, mask=["", "positions"])
    yield from varlen("sanitize", B=3, N=133, H=2, d=72, queries=5)
    for d in (16, 32, 64, 72, 80, 96, 128):
        few = {64: "second kernels", 72: "second"}.get(d, "")
        yield from rows(f"compile {few}", B=64, N=577, H=8, d=d, causal=True)
        yield from rows(f"compile {few}", B=64, N=577, H=8, d=d, keys=77)
        if d > 16:
            yield from rows("compile", B=64, N=1, H=8, d=d, keys=1025)
        yield from rows("compile", B=64, N=577, H=8, d=d, causal=True, kv_heads=2)
        yield from rows("compile", B=64, N=577, H=8, d=d, causal=True, mask=["padding", "positions"])
    yield from rows("compile", B=64, N=577, H=8, d=64, keys=1025, mask=["padding", "positions"])
    yield from rows("compile", B=64, N=577, H=8, d=[64, 80], causal=True, dropout_p=0.1)
    yield from varlen("compile second kernels", B=32, N=1024, H=8, d=[64, 80], queries=1)


def _relative_attention() -> Iterator[Workload]:
    """With decomposed relative positions: windows as samples, and SAM's global layers."""
    rows = functools.partial(_rows, "attention", mask="relative")
    yield from rows("quick", B=1, N=49, H=3, d=64)
    yield from rows("cpu", B=25, N=196, H=12, d=64)
    yield from rows("cpu", B=1, N=4096, H=2, d=64)
    yield from rows("gpu headline", B=[25, 200], N=196, H=12, d=64)
    yield from rows("gpu headline", B=[1, 8], N=4096, H=12, d=64)
    yield from rows("gpu", B=8, N=4096, H=16, d=80)
    yield from rows("traffic", B=1, N=[196, 1024], H=2, d=64)
    yield from rows("sanitize", B=2, N=[49, 144, 400], H=2, d=[32, 72])
    for d in (32, 64, 72, 80, 128):
        few = {64: "second kernels", 72: "second"}.get(d, "")
        yield from rows(f"compile {few}", B=64, N=196, H=8, d=d)
        yield from rows(f"compile {few}", B=1, N=4096, H=8, d=d)
    yield from rows("compile", B=1, N=1600, H=8, d=64)


def _attention_in_windows() -> Iterator[Workload]:
    """Stages of Swin-T and Swin-B at 224 and 384 px, SAM's and ViTDet's padded grid at 1024 px, windows of other sizes,
    and grids that are no multiples."""
    rows = functools.partial(_rows, "attention_windows")
    yield from rows("quick", B=1, grid=14, window=7, H=3, d=32, shift=3)
    yield from rows("quick", B=1, grid=14, window=7, H=3, d=64, added="relative")
    for grid, H in ((56, 3), (28, 6), (14, 12)):
        yield from rows("cpu", B=1, grid=grid, window=7, H=H, d=32, shift=[0, 3])
        yield from rows("gpu", B=[1, 32, 256], grid=grid, window=7, H=H, d=32, shift=[0, 3])
    yield from rows("cpu", B=8, grid=14, window=7, H=12, d=32, shift=3)
    yield from rows("gpu", B=[1, 32], grid=48, window=12, H=8, d=32, shift=[0, 6])
    yield from rows("cpu", B=1, grid=70, window=14, H=12, d=64, added=["nothing", "relative"])
    yield from rows("gpu", B=[1, 8], grid=70, window=14, H=12, d=64, added=["nothing", "relative"])
    yield from rows("gpu", B=8, grid=70, window=14, H=16, d=80, added="relative")
    yield from rows("traffic", B=2, grid=28, window=7, H=3, d=32, shift=[0, 3])
    yield from rows("traffic", B=1, grid=28, window=14, H=2, d=64, added="relative")
    yield from rows("sanitize", B=1, grid=8, window=5, H=2, d=72, shift=2, added=["bias", "nothing"])
    yield from rows("sanitize", B=2, grid=8, window=4, H=1, d=32, shift=2, added="biases")
    yield from rows("sanitize", B=1, grid=18, window=9, H=1, d=[32, 72], added="relative")
    yield from rows("sanitize", B=1, grid=14, window=7, H=1, d=32, shift=3, dropout_p=0.1)
    for d in (32, 64):
        for window, shift in ((7, 3), (8, 4), (12, 6), (14, 7), (16, 8)):
            few = "second kernels" if (d, window) == (32, 7) else ""
            yield from rows(f"compile {few}", B=64, grid=4 * window, window=window, H=8, d=d, shift=[0, shift])
            yield from rows("compile", B=64, grid=64, window=window, H=8, d=d, added="nothing")
    for d in (32, 64, 72, 80, 128):
        few = "second kernels" if d == 64 else "second" if d == 72 else ""
        yield from rows(f"compile {few}", B=64, grid=70, window=14, H=8, d=d, added="relative")
    yield from rows("compile", B=64, grid=64, window=[8, 16], H=8, d=64, added="relative")
    yield from rows("compile", B=64, grid=56, window=7, H=8, d=32, added="biases")
    yield from rows("compile second", B=64, grid=64, window=12, H=8, d=[72, 80, 128], shift=6)
    yield from rows("compile", B=64, grid=56, window=[7, 12], H=8, d=32, shift=3, dropout_p=0.1)
