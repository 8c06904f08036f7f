"""The memory of a step against the number of tokens: planned on fake tensors, measured on the device at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fastvit.modules.arguments import Pair, checked_pair
from fastvit.study.memory import measurement
from fastvit.study.memory.peak import exponent
from fastvit.study.memory.plan import Parts, Setting, plan
from fastvit.study.memory.scaled_plan import ScaledPlan, traced_at
from fastvit.study.models.costs import prefix_tokens
from fastvit.study.sources.find import find
from fastvit.study.sources.model_source import PROVIDERS, Subject

DEVICES = ("cpu", "cuda")
Progress = Callable[[str], None]


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True)
class MemoryPoint:
    """One step of one provider.

    Attributes:
        provider: "eager", "sdpa", "fused", or "compile" (SDPA under torch.compile).
        image_size: (height, width) in pixels.
        tokens: N, prefix tokens included; 0 where nothing was planned.
        batch: images.
        planned: parts of the peak in bytes, or None for "compile", whose kernels only a run tells.
        activations, attention: planned bytes of all that is neither weight, gradient, optimizer state nor image, and of
            the (B, H, N, N) matrices among it, each at its own most, before the optimizer's step.
        measured: the peak in bytes, or None where nothing was measured, or the device had too little memory.
    """

    provider: str
    image_size: tuple[int, int]
    tokens: int
    batch: int
    planned: Parts | None
    activations: int
    attention: int
    measured: int | None = None


@dataclass(frozen=True)
class MemoryStudy:
    """What `memory` found.

    Attributes:
        model, device, patch_size, setting: as asked for.
        points: by image size, batch and provider.
    """

    model: str
    device: str
    patch_size: tuple[int, int]
    setting: Setting
    points: tuple[MemoryPoint, ...] = field(repr=False)

    def of(self, provider: str) -> list[MemoryPoint]:
        """The points of a provider that are planned."""
        return [p for p in self.points if p.provider == provider and p.planned is not None]

    def exponents(self, provider: str) -> dict[str, float]:
        """p of the least-squares fit bytes = c * N**p over a provider's image sizes, at the first batch: of
        "activations" and "attention". Of what has no bytes, and of one size, there is none."""
        points = self.of(provider)
        points = [p for p in points if p.batch == points[0].batch]
        tokens = [p.tokens for p in points]
        values = {name: [getattr(p, name) for p in points] for name in ("activations", "attention")}
        return {name: exponent(tokens, v) for name, v in values.items() if len(set(tokens)) > 1 and all(v)}


def memory(
    model: str, *, image_sizes: Sequence[Pair] = (224, 384, 512, 768, 1024), batches: Sequence[int] = (8,),
    patch_size: Pair | None = None, mode: str = "train", dtype: str = "bfloat16", optimizer: str = "adamw",
    checkpointing: bool = False, providers: Sequence[str] = PROVIDERS, device: str | None = None,
    measured: bool = False, progress: Progress = _silent,
) -> MemoryStudy:  # fmt: skip
    """What a step of a model holds at its most, for every provider, image size and batch.

    The planned figures come from the model itself, run on fake tensors, of which every allocation and release is
    followed, the fused ops' own included: nothing is allocated, and no GPU is needed. What a vendor's library takes as
    its workspace, and what a caching allocator keeps or breaks into pieces, is in none of them.

        study = fastvit.study.memory("vit_large_patch16_224", image_sizes=(224, 1024), device="cuda")
        print(study.of("fused")[0].planned.peak, study.exponents("eager"))

    Args:
        model: one of `fastvit.list_models()`, of timm's, a `config.json` of transformers, or "module:function", where
            function([image_size=]) makes the model.
        image_sizes: each an integer or (height, width), a multiple of the patch size.
        batches: numbers of images.
        patch_size: another than the model's.
        mode: "train" (forward, backward, and the step of an optimizer that has its state), or "infer".
        dtype: "float32", "bfloat16", "float16", or "amp": float32 parameters under autocast to bfloat16.
        optimizer: "adamw", "sgd" (with momentum), or "none".
        checkpointing: activation checkpointing of every block.
        providers: of "eager" (N x N scores), "sdpa", "fused", and, measured only, "compile" (SDPA under torch.compile).
        device: "cuda" or "cpu", whose way through every op is planned; None for the one at hand. A GPU needs not be
            there to be planned for.
        measured: run the steps too, on `device`, and take what its allocator has recorded.
        progress: called with a text before every point.

    Raises:
        ValueError: an unknown model, a size that the patch does not divide, measured=True on a GPU that is not there,
            and other wrong arguments.
        FileNotFoundError: no such configuration.
        ImportError: a library that the model wants, or triton for device="cuda", is not installed.
    """
    setting = Setting(mode, dtype, optimizer if mode == "train" else "none", checkpointing)
    subject = find(model)
    kind = checked_device(device)
    for provider in providers:
        if provider not in (*PROVIDERS, "compile"):
            raise ValueError(f"providers must be of {(*PROVIDERS, 'compile')}, got {provider!r}")
    if "compile" in providers and not measured:
        raise ValueError("the provider 'compile' has no planned figures, and needs measured=True")
    if measured and kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("measured=True on 'cuda' needs a GPU; without one, figures are planned only")
    for batch in batches:
        _check_batch(batch)
    sizes = [subject.sizes(size, patch_size) for size in image_sizes]
    points = []
    for size, patch in sizes:
        for batch in batches:
            for provider in providers:
                progress(f"{provider}, {size[0]}x{size[1]}, batch {batch}")
                points.append(_point(subject, provider, size, patch, batch, setting, kind, measured))
    patch = sizes[0][1] if sizes else subject.patch_size
    return MemoryStudy(model, kind, patch, setting, tuple(points))


def largest_batch(
    model: str, budget: int, *, image_size: Pair | None = None, patch_size: Pair | None = None,
    provider: str = "fused", device: str | None = None, **setting: object,
) -> int:  # fmt: skip
    """The largest number of images whose planned peak is at most `budget` bytes; 0 where not even one fits.

    Args:
        model, patch_size, device: of `memory`.
        image_size: None for the model's own.
        provider: "eager", "sdpa" or "fused".
        setting: mode, dtype, optimizer, checkpointing of `memory`.

    Raises:
        ValueError, FileNotFoundError, ImportError: as `memory`.
    """
    search = Search(model, patch_size=patch_size, provider=provider, device=device, **setting)
    return search.largest_batch(budget, image_size)


def largest_image(
    model: str, budget: int, *, batch: int = 8, patch_size: Pair | None = None, provider: str = "fused",
    device: str | None = None, **setting: object,
) -> int:  # fmt: skip
    """The largest height and width of square images, in pixels, at which the planned peak of a batch is at most
    `budget` bytes; 0 where not even images of one patch fit.

    Args:
        model, patch_size, device: of `memory`; the patches are square.
        batch: images.
        provider: "eager", "sdpa" or "fused".
        setting: mode, dtype, optimizer, checkpointing of `memory`.
    """
    search = Search(model, patch_size=patch_size, provider=provider, device=device, **setting)
    return search.largest_image(budget, batch)


class Search:
    """`largest_batch` and `largest_image` of one model, provider and setting, by one scaled plan for all of them. What
    it finds is planned once more by itself; where the two differ, so is every number that is tried."""

    def __init__(
        self, model: str, *, patch_size: Pair | None = None, provider: str = "fused", device: str | None = None,
        **setting: object,
    ) -> None:  # fmt: skip
        self.subject, self.setting, self.provider = find(model), _setting(**setting), provider
        self.patch = self.subject.patch_size if patch_size is None else checked_pair("patch_size", patch_size)
        self.gpu = checked_device(device) == "cuda"
        self._traced: dict[bool, ScaledPlan | None] = {}

    def largest_batch(self, budget: int, image_size: Pair | None = None) -> int:
        size, _ = self.subject.sizes(image_size, self.patch)
        return self._largest(lambda n: (size, n), self._scaled(one=False) if size[0] == size[1] else None, budget)

    def largest_image(self, budget: int, batch: int = 8) -> int:
        _check_batch(batch)
        side, width = self.patch
        if side != width:
            raise ValueError(f"the patches of {self.subject.name} must be square, got {self.patch}")
        return side * self._largest(lambda n: ((n * side, n * side), batch), self._scaled(one=batch == 1), budget)

    def _largest(
        self, step: Callable[[int], tuple[tuple[int, int], int]], scaled: ScaledPlan | None, budget: int
    ) -> int:
        """The largest n whose step(n), image size and batch, is within the budget."""

        def peak(n: int) -> int:
            size, batch = step(n)
            options: dict[str, Any] = {"gpu": self.gpu, "patch_size": self.patch}
            return plan(self.subject, self.provider, size, batch, self.setting, **options).parts.peak

        def likely(n: int) -> int:
            (size, _), batch = step(n)
            assert scaled is not None
            return scaled.parts(size, self.patch[0], batch).peak

        if scaled is not None:
            found = _largest(likely, budget)
            if found > 1 and peak(found) == likely(found):
                return found
        return _largest(peak, budget)

    def _scaled(self, one: bool) -> ScaledPlan | None:
        """The plan of one image, or of several; None for a model that cannot be traced at the size that this takes."""
        if one not in self._traced:
            self._traced[one] = self._trace(one)
        return self._traced[one]

    def _trace(self, one: bool) -> ScaledPlan | None:
        if self.patch[0] != self.patch[1]:
            return None
        try:
            model = self.subject.on_meta(self.provider, patch_size=self.patch)
            prefix = prefix_tokens(self.subject, model, self.subject.image_size, self.patch)
            if prefix is None:
                return None
            at = traced_at(model, prefix, self.patch[0])
            at = at._replace(batch=1) if one else at
            return ScaledPlan(self.subject, self.provider, self.setting, at, gpu=self.gpu)
        except ValueError:
            return None


def image_size(model: str) -> tuple[int, int]:
    """(height, width) of the images that a model takes if nobody asks for others. model: of `memory`."""
    return find(model).image_size


def _check_batch(batch: object) -> None:
    if not isinstance(batch, int) or batch < 1:
        raise ValueError(f"a batch must be a positive integer, got {batch!r}")


def _setting(**setting: object) -> Setting:
    try:
        return Setting(**setting)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(str(error).replace("Setting.__init__()", "the setting")) from None


def _largest(peak: Callable[[int], int], budget: int) -> int:
    """The largest n >= 1 with peak(n) <= budget, or 0. peak grows; where it does so evenly, few n are asked for."""
    known = {1: peak(1)}
    if known[1] > budget:
        return 0
    low, high, n, halve = 1, 0, 2, False  # high: the smallest that is known not to fit, or 0
    while True:
        known[n] = peak(n)
        low, high = (n, high) if known[n] <= budget else (low, n)
        if high - low == 1:
            return low
        # where the straight line through two known points meets the budget; every other time halfway, if it bends
        other = high or max(k for k in known if k < low)
        slope = max((known[other] - known[low]) / (other - low), 1.0)
        n = low + int((budget - known[low]) / slope)
        if high:
            n = (low + high) // 2 if halve else min(n, high - 1)
            halve = not halve
        n = min(max(n, low + 1), 8 * low)  # a square of sides bends away from the line


def checked_device(device: str | None) -> str:
    """ "cpu" or "cuda"; None for the one at hand."""
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in DEVICES:
        raise ValueError(f"device must be one of {DEVICES}, got {device!r}")
    return device


def _point(
    subject: Subject, provider: str, size: tuple[int, int], patch: tuple[int, int], batch: int, setting: Setting,
    kind: str, measured: bool,
) -> MemoryPoint:  # fmt: skip
    planned, found = None, None
    if provider != "compile":
        planned = plan(subject, provider, size, batch, setting, gpu=kind == "cuda", patch_size=patch)
    if measured:
        try:
            found = measurement.measure(subject, provider, size, batch, setting, torch.device(kind), patch)
        except RuntimeError as error:  # a CPU's allocator has no error of its own
            if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)):
                raise
            if kind == "cuda":
                torch.cuda.empty_cache()
    if planned is None:
        return MemoryPoint(provider, size, 0, batch, None, 0, 0, found)
    return MemoryPoint(
        provider, size, planned.tokens, batch, planned.parts, planned.activations, planned.attention, found
    )
