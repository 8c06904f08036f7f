"""The ops of one transformer block in their order, and what each keeps for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fastvit.modules.arguments import Pair
from fastvit.study.memory.allocations import Allocations
from fastvit.study.memory.plan import trace_step
from fastvit.study.memory.step import DTYPES, Setting, StepSpec
from fastvit.study.sources.find import find
from fastvit.study.sources.model_source import PROVIDERS, blocks, output_of


@dataclass(frozen=True)
class BlockOp:
    """An op that writes memory.

    Attributes:
        name: the registered op, such as "addmm" or "attention_fwd".
        kept: memory that it wrote and the backward pass needs, in token tensors of B * N * D elements.
    """

    name: str
    kept: float


@dataclass(frozen=True)
class BlockCost:
    """The forward pass of a model's first block in training.

    Attributes:
        provider: "eager", "sdpa" or "fastvit".
        tokens: N.
        ops: in their order, without views.
    """

    provider: str
    tokens: int
    ops: tuple[BlockOp, ...]

    @property
    def kept(self) -> float:
        """Token tensors kept for the backward pass, the block's input included."""
        return 1.0 + sum(op.kept for op in self.ops)


class _Steps(Allocations):
    """Also records which op allocated which storages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps: list[tuple[str, range]] = []

    def ran(self, op: Any, args: tuple[Any, ...], keywords: dict[str, Any], out: Any, first: int) -> None:
        if len(self.storages) == first and not op._schema.is_mutable:
            return
        name = op._schema.name.partition("::")[2].removeprefix("native_").removeprefix("_")
        name = name.removesuffix("_for_cpu")  # fake CPU tensors stand for a GPU's
        self.steps.append((name, range(first, len(self.storages))))


def block(
    model: str, *, provider: str = "fastvit", image_size: Pair | None = None, patch_size: Pair | None = None,
    dtype: str = "bfloat16",
) -> BlockCost:  # fmt: skip
    """List the ops of a model's first block in training, and what each keeps, from a run on fake tensors as on a GPU.

    Args:
        model, patch_size: as in `memory`.
        provider: "eager" (N x N scores), "sdpa" or "fastvit".
        image_size: None for the model's default.
        dtype: "float32", "bfloat16" or "float16".

    Raises:
        ValueError: the model has no list of blocks, or what `memory` refuses.
    """
    source = find(model)
    size, patch = source.sizes(image_size, patch_size)
    spec = StepSpec(
        source, size, 2, Setting(dtype=dtype, optimizer="none"), gpu=True, provider=provider, patch_size=patch
    )
    seen, marks, widths, outside = _Steps(gpu=True), list[int](), list[int](), set[int]()

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        marks.append(len(seen.steps))
        widths.append(output_of(out).shape[-1])
        outside.update(seen.see(out))

    def prepare(built: nn.Module) -> None:
        if not (listed := blocks(built)):
            raise ValueError(f"{type(built).__name__} has no list of blocks")
        listed[0].register_forward_pre_hook(lambda *_: marks.append(len(seen.steps)))
        listed[0].register_forward_hook(leave)

    trace = trace_step(spec, seen, prepare)
    kept = trace.kept - trace.groups["weights"] - trace.groups["inputs"] - outside
    token = spec.batch * seen.tokens * widths[0] * DTYPES[dtype].itemsize
    ops = (BlockOp(name, seen.bytes_of(kept & set(made)) / token) for name, made in seen.steps[marks[0] : marks[1]])
    return BlockCost(provider, seen.tokens, tuple(ops))


def draw_blocks(model: str, theme: str, image_size: Pair | None = None, patch_size: Pair | None = None) -> Any:
    """Draw a matplotlib figure of the ops of a block, a column for each provider. Ops that keep memory are filled."""
    from matplotlib import rc_context
    from matplotlib.colors import to_rgba
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    from fastvit.study.memory.plot import COLOURS, NAMES

    costs = [block(model, provider=provider, image_size=image_size, patch_size=patch_size) for provider in PROVIDERS]
    most = max(len(cost.ops) for cost in costs)
    colours = COLOURS[theme]
    with rc_context({"font.family": "DejaVu Sans", "text.color": colours["ink"]}):
        figure = Figure(figsize=(3.1 * len(costs), 0.36 * most + 1.3), layout="constrained")
        for axis, cost in zip(figure.subplots(1, len(costs), squeeze=False)[0], costs, strict=True):
            colour = colours[cost.provider]
            axis.set(xlim=(0, 1), ylim=(-most - 0.1, 0.1))
            axis.axis("off")
            axis.set_title(NAMES[cost.provider], loc="left", fontsize=13, fontweight="bold", color=colour)
            axis.text(1, 0.3, f"{len(cost.ops)} ops, keep {cost.kept:.1f}", fontsize=10, va="bottom", ha="right")
            for i, op in enumerate(cost.ops):
                keeps = op.kept > 0.05  # more than statistics of norms and softmax
                box = FancyBboxPatch(
                    (0.02, -i - 0.86), 0.96, 0.72, boxstyle="round,pad=0,rounding_size=0.03", mutation_aspect=8,
                    facecolor=to_rgba(colour, 0.25 if keeps else 0.0), edgecolor=colour,
                )  # fmt: skip
                axis.add_patch(box)
                axis.text(0.06, -i - 0.5, op.name, fontsize=9, va="center")
                if keeps:
                    axis.text(0.94, -i - 0.5, f"{op.kept:.1f}", fontsize=9, va="center", ha="right", fontweight="bold")
        caption = (
            f"forward pass of a block of {model} in training, {costs[0].tokens} tokens, bfloat16; filled: kept\n"
            "for the backward pass, in token tensors of B x N x D, with the block's input; views are left out"
        )
        figure.supxlabel(caption, fontsize=8.5, color=colours["ink"], alpha=0.75)
        return figure
