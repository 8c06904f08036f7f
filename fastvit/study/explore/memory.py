"""Plans a model's memory at every stop of the page's sliders."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import astuple, fields
from typing import Any

from fastvit.ops.runtime import backend as backends
from fastvit.study.explore.document import Progress
from fastvit.study.fitting.costs import costs_of
from fastvit.study.fitting.report import in_words
from fastvit.study.memory.plan import Parts, plan
from fastvit.study.memory.scaled_step import ScaledStep
from fastvit.study.memory.step import Setting, StepSpec
from fastvit.study.sources.model_source import PROVIDERS, ModelSource

MODES = ("train", "infer")
DTYPES = ("bfloat16", "float32")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BUDGETS = (2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192)  # GiB
_SIZES = (224, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048)
_START = 8  # images
NAMES = {"eager": "eager attention", "sdpa": "SDPA", "fastvit": "fastvit's ops"}


def collect(
    source: ModelSource, size: tuple[int, int], patch: tuple[int, int], prefix: int, progress: Progress
) -> dict[str, Any]:
    """Return {"plan": {provider: {mode: {dtype: {"IMAGExPATCH": {batch: bytes of parts}}}}}}, "fit" of
    `recomputation`, and the sliders' stops. If nothing can be planned, "plan" is None, and "note" says why; "fit" is
    None by itself too.

    Memory is planned for a GPU if triton is installed, else for a CPU.

    Args:
        size, patch: the model's, (height, width).
        prefix: tokens before the patches.
    """
    if patch[0] != patch[1] or size[0] != size[1]:
        return {"plan": None, "note": "Memory is planned for square images and patches only."}
    providers, refused = _providers(source)
    if not providers:
        return {"plan": None, "note": f"No memory is planned: {'; '.join(refused)}."}
    patches = patch_stops(source, size[0], patch[0])
    sizes = size_stops(size[0], patches)
    gpu = backends.HAVE_TRITON
    plans: dict[str, Any] = {p: {m: {d: {} for d in DTYPES} for m in MODES} for p in providers}
    steps = list(itertools.product(providers, MODES, DTYPES))
    with progress(len(steps) + 1, "memory") as step:
        for provider, mode, dtype in steps:
            step(f"{provider}, {mode}, {dtype}")
            try:
                one, more = (
                    ScaledStep(source, provider, Setting(mode, dtype), prefix, patches, one_image=alone, gpu=gpu)
                    for alone in (True, False)
                )
            except ValueError as error:
                return {"plan": None, "note": f"No memory is planned: {error}."}
            for s, p in itertools.product(sizes, patches):
                parts = {b: astuple((one if b == 1 else more).parts(s, p, b))[:-1] for b in BATCHES}
                plans[provider][mode][dtype][f"{s}x{p}"] = parts
        step("recomputation")
        start, fit = f"{size[0]}x{patch[0]}", None
        if "fastvit" in plans:
            trained = plans["fastvit"]["train"]
            peaks = {d: {b: sum(trained[d][start][b]) for b in BATCHES if b > 1} for d in DTYPES}
            try:
                fit = recomputation(source, size, gpu, peaks, BUDGETS)
            except ValueError as error:
                refused.append(f"what blocks recompute: {error}")
    # check the last provider, usually the fused ops, whose launches depend most on sizes
    last = providers[-1]
    right = plan(StepSpec(source, size, _START, Setting("train", "bfloat16"), gpu, last)).planned.peak
    off = abs(sum(plans[last]["train"]["bfloat16"][start][_START]) / right - 1)
    return {
        "parts": [f.name for f in fields(Parts)][:-1], "providers": providers, "modes": MODES, "dtypes": DTYPES,
        "sizes": sizes, "patches": patches, "batches": BATCHES, "plan": plans,
        "budgets": BUDGETS, "fit": fit,
        "tokens": {f"{s}x{p}": (s // p) ** 2 + prefix for s in sizes for p in patches},
        "start": {"size": size[0], "patch": patch[0], "batch": _START},
        "device": "cuda" if gpu else "cpu", "note": _note(gpu, last, off, size[0], bool(fit), refused),
    }  # fmt: skip


def recomputation(
    source: ModelSource, size: tuple[int, int], gpu: bool, peaks: dict[str, dict[int, int]], budgets: Sequence[float]
) -> dict[str, Any]:
    """Return {dtype: {batch: {budget: the cheapest choice that fits, or None}}} for budgets that are below the peak.

    Costs grow with the batch on a straight line: two steps are traced for each dtype, of the least and of the largest
    batch.

    Args:
        size: the model's, (height, width).
        gpu: plan for a GPU; else for a CPU.
        peaks: {dtype: {batch: bytes of the fused step in training, as blocks are by default}}, for two batches or more,
            all above 1.
        budgets: in GiB.

    Raises:
        ValueError: the model has no list of blocks.
    """
    found: dict[str, Any] = {}
    for dtype, by_batch in peaks.items():
        least, most = min(by_batch), max(by_batch)
        first, last = (costs_of(StepSpec(source, size, b, Setting("train", dtype), gpu)) for b in (least, most))
        found[dtype] = {}
        for batch, peak in by_batch.items():
            costs = first.towards(last, (batch - least) / (most - least))
            found[dtype][batch] = {}
            for gib in budgets:
                if (budget := int(gib * 2**30)) < peak:
                    choices = costs.cheapest(budget)
                    found[dtype][batch][gib] = choices and {
                        "words": in_words(choices),
                        "peak": costs.peak(choices),
                        "recomputed": round(costs.recomputed(choices) / costs.flops, 4),
                    }
    return found


def patch_stops(source: ModelSource, size: int, patch: int) -> list[int]:
    """Return half, once and twice the model's patch, if they divide the image and the model takes another patch."""
    if source.origin == "function":
        return [patch]
    halves = [patch // 2] if patch % 2 == 0 and patch >= 8 else []
    return [p for p in (*halves, patch, 2 * patch) if p == patch or (size % p == 0 and 2 * p <= size)]


def size_stops(size: int, patches: list[int]) -> list[int]:
    """Return the usual sizes, scaled down for small images and rounded to multiples of every patch, and the model's."""
    base = math.lcm(*patches)
    usual = [s * size // _SIZES[0] for s in _SIZES] if size < _SIZES[0] // 2 else _SIZES
    return sorted({max(1, round(s / base)) * base for s in usual} | {size})


def _providers(source: ModelSource) -> tuple[list[str], list[str]]:
    """Return the model's providers, and why others are missing."""
    found, refused = [], []
    for provider in PROVIDERS:
        try:
            source.on_meta(provider)
        except ValueError as error:
            refused.append(f"{provider}: {error}")
        else:
            found.append(provider)
    return found, refused


def _note(gpu: bool, provider: str, off: float, size: int, fit: bool, refused: list[str]) -> str:
    where = "as on a GPU" if gpu else "as on a CPU, since triton is not installed"
    differs = f"differs by less than {math.floor(1000 * off + 1) / 10:g} %" if off else "is the same"
    lines = [
        f"Planned {where}, with AdamW in training: of every provider, step and type two steps of one image and"
        " two of several are traced on tensors without data, and their allocations are scaled to the other sizes. The"
        f" command plans each size by itself: its peak at {size} px and a batch of {_START}, of {NAMES[provider]} in"
        f" training in bfloat16, {differs}. The workspace of a vendor's libraries is in neither.",
    ]
    if fit:
        lines.append(f"What blocks recompute is planned at {size} px from steps of 2 and of {BATCHES[-1]} images.")
    return " ".join([*lines, *(f"Not shown: {reason}." for reason in refused)])
