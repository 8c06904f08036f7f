"""Memory of a step against the number of tokens: planned on fake tensors, or measured on the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.utils._pytree import tree_iter

from fastvit._base.units import MOST_BYTES, MOST_IMAGES, read_bytes
from fastvit.modules.arguments import Pair
from fastvit.study.memory.peak import exponent, peak_bytes
from fastvit.study.memory.plan import MemoryPoint, plan
from fastvit.study.memory.step import DTYPES, Setting, Step, StepSpec, Together
from fastvit.study.sources.find import find
from fastvit.study.sources.model_source import PROVIDERS

DEVICES = ("cpu", "cuda")
Progress = Callable[[str], None]


def silent(_: str) -> None:
    """Report no progress."""


@dataclass(frozen=True)
class MemoryStudy:
    """The result of `memory`.

    Attributes:
        model, device, patch_size, setting: as asked for.
        points: by image size, batch and provider.
        together: the sizes of the images of a list, or () if each size has a step of its own.
    """

    model: str
    device: str
    patch_size: tuple[int, int]
    setting: Setting
    points: tuple[MemoryPoint, ...] = field(repr=False)
    together: Together = ()

    def of(self, provider: str) -> list[MemoryPoint]:
        """Return the points of a provider."""
        return [p for p in self.points if p.provider == provider]

    def exponents(self, provider: str) -> dict[str, float]:
        """Fit bytes = c * N**p over a provider's image sizes at the first batch. Return p of "activations" and
        "attention". A key is missing if there is one size only, or a size with no bytes."""
        points = self.of(provider)
        points = [p for p in points if p.batch == points[0].batch]
        tokens = [p.tokens for p in points]
        values = {name: [getattr(p, name) for p in points] for name in ("activations", "attention")}
        return {name: exponent(tokens, v) for name, v in values.items() if len(set(tokens)) > 1 and all(v)}


def memory(
    model: str, *, image_sizes: Sequence[Pair] = (224, 384, 512, 768, 1024), batches: Sequence[int] = (8,),
    patch_size: Pair | None = None, mode: str = "train", dtype: str = "bfloat16", optimizer: str = "adamw",
    checkpointing: bool = False, providers: Sequence[str] | None = None, device: str | None = None,
    measured: bool = False, together: bool = False, graphs: bool = False, progress: Progress = silent,
) -> MemoryStudy:  # fmt: skip
    """Plan, and on request measure, the peak memory of a model's step, for every provider, image size and batch.

    For planned figures the model runs on fake tensors, and every allocation and release is followed, those of the fused
    ops included: nothing is allocated, and no GPU is needed. Workspaces of vendor libraries, and memory that a
    caching allocator keeps or fragments, are not planned, except the usual copies of convolutions on a CPU
    (within the limits that `study/memory/convolutions.py` gives).

        study = fastvit.study.memory("vit_large_patch16_224", image_sizes=(224, 1024), device="cuda")
        print(study.of("fastvit")[0].planned.peak, study.exponents("eager"))
        crops = fastvit.study.memory("vit_small_patch14_dinov2", image_sizes=(518, 224, 224), together=True)

    Args:
        model: one of `fastvit.list_models()`, of timm's, a `config.json` of transformers, or "module:function", where
            function([image_size=]) returns the model.
        image_sizes: each an integer or (height, width), a multiple of the patch size.
        batches: numbers of images.
        patch_size: None for the model's.
        mode: "train" (forward, backward, and an optimizer's step that finds its state), or "infer".
        dtype: "float32", "bfloat16", "float16", or "amp": float32 parameters under autocast to bfloat16.
        optimizer: "adamw", "sgd" (with momentum), or "none".
        checkpointing: recompute every block in the backward pass.
        providers: some of "eager" (N x N scores), "sdpa" and "fastvit". None for all; with `together` "fastvit", which
            alone takes lists.
        device: "cuda" or "cpu"; None for a GPU if there is one. Planning for "cuda" needs no GPU.
        measured: run the steps too, on `device`, and read its allocator.
        together: one step with images of all sizes, as a list that has a batch of each, instead of a step for each
            size. The model is one of `fastvit.list_models()`; its positions are for its default size.
        graphs: plan the step as `fastvit.graphs` runs it on a GPU: its passes are one captured CUDA graph, which keeps
            its memory during the optimizer's step.
        progress: called with a text before every point.

    Raises:
        ValueError: an unknown model, an image size that the patch does not divide, measured=True without a GPU,
            graphs=True for a CPU or with measured=True, and other wrong arguments.
        FileNotFoundError: no such configuration.
        ImportError: a library that the model needs, or triton for device="cuda", is not installed.
    """
    setting = Setting(mode, dtype, optimizer if mode == "train" else "none", checkpointing, graphs)
    source = find(model)
    kind = checked_device(device)
    if providers is None:
        providers = ("fastvit",) if together else PROVIDERS
    if together and set(providers) != {"fastvit"}:
        raise ValueError(f"providers must be ('fastvit',) with together=True, got {tuple(providers)}")
    for provider in providers:
        if provider not in PROVIDERS:
            raise ValueError(f"providers must be of {PROVIDERS}, got {provider!r}")
    if graphs and measured:
        raise ValueError("graphs=True is planned only: measured=True runs steps without it")
    if measured and kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("measured=True on 'cuda' needs a GPU; without one, figures are planned only")
    for batch in batches:
        check_batch(batch)
    sizes = [source.sizes(size, patch_size) for size in image_sizes]
    mix = tuple(size for size, _ in sizes) if together else ()
    points = []
    for (size, patch), batch, provider in itertools.product(sizes[:1] if together else sizes, batches, providers):
        progress(f"{provider}, {size[0]}x{size[1]}{f' and {len(mix) - 1} more' if mix else ''}, batch {batch}")
        of_model = source.image_size if mix else size
        spec = StepSpec(source, of_model, batch, setting, kind == "cuda", provider, patch, mix)
        points.append(_point(spec, measured))
    patch = sizes[0][1] if sizes else source.patch_size
    return MemoryStudy(model, kind, patch, setting, tuple(points), mix)


def image_size(model: str) -> tuple[int, int]:
    """Return a model's default image size, (height, width). model: as in `memory`."""
    return find(model).image_size


def check_batch(batch: object) -> None:
    """Raise ValueError unless a batch is a positive integer that is planned."""
    if not isinstance(batch, int) or isinstance(batch, bool) or not 1 <= batch <= MOST_IMAGES:
        raise ValueError(f"batch must be a positive integer, at most {MOST_IMAGES}, got {batch!r}")


def checked_budget(budget: object) -> int:
    """Return bytes for a number of bytes, or for text such as "24GiB" or "500 MB".

    Raises:
        ValueError: not an amount of memory that is planned, or text without a unit.
    """
    if isinstance(budget, str):
        try:
            return read_bytes(budget)
        except ValueError as error:
            raise ValueError(f"budget {error}") from None
    if not isinstance(budget, int) or isinstance(budget, bool) or not 1 <= budget <= MOST_BYTES:
        raise ValueError(f"budget must be bytes from 1 to {MOST_BYTES}, or text such as 24GiB, got {budget!r}")
    return budget


def checked_device(device: str | None) -> str:
    """Return "cpu" or "cuda". None: a GPU if there is one."""
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in DEVICES:
        raise ValueError(f"device must be one of {DEVICES}, got {device!r}")
    return device


def _point(spec: StepSpec, measured: bool) -> MemoryPoint:
    found = plan(spec)
    if measured:
        try:
            found = replace(found, measured=measure(spec))
        except RuntimeError as error:  # a CPU's allocator has no error of its own
            if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)):
                raise
            if spec.gpu:
                torch.cuda.empty_cache()
    return found


def measure(spec: StepSpec) -> int:
    """Run a step and return its peak in bytes: what exists before the step, and the most that it allocates on top."""
    device = torch.device("cuda" if spec.gpu else "cpu")
    with device:
        model = spec.source.build(spec.provider, spec.image_size, spec.patch_size).to(DTYPES[spec.setting.dtype])
        pixels = spec.images(model)
    step = Step(model, pixels, spec.setting, spec.gpu)
    with torch.enable_grad():
        step.make_state()
        step.run()  # caches and lazy initialisation do not count
        for p in step.parameters:
            p.grad = None
        before = (*model.parameters(), *model.buffers(), *step.state(), *tree_iter(pixels))
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in before}
        return sum(held.values()) + peak_bytes(step.run, device)
