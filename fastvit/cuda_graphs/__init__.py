"""CUDA graphs of a model's calls, in inference and in training: `graphs`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from fastvit._base.output import wrapped
from fastvit.blocks.recompute import recomputes_all
from fastvit.blocks.stand_in import put_on, take_off
from fastvit.cuda_graphs.forward import Graphed, graphed_of, method_of
from fastvit.cuda_graphs.rounding import round_batch, round_tokens
from fastvit.cuda_graphs.version import why_not
from fastvit.modules.arguments import check_integers
from fastvit.modules.features import Backbone
from fastvit.report import NotTheModel

__all__ = ["Graph", "GraphsReport", "graphs"]


@dataclass(frozen=True)
class Graph:
    """The graphs of one kind of call.

    Attributes:
        inputs: shapes and dtypes of its tensors.
        training: whether there is a backward pass.
        replays: forward passes so far.
        bytes: what it added to the memory that the graphs of the model share, and its static inputs.
    """

    inputs: str
    training: bool
    replays: int
    bytes: int


class GraphsReport(NotTheModel):
    """A list of what `graphs` has captured, and of why calls ran as without graphs, as of now. Printed, it is a table.

    Args:
        parts: of the model's instance, what stands for its methods.
    """

    def __init__(self, parts: Sequence[Graphed]) -> None:
        self._parts = parts

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs that are kept, the last used last."""
        return tuple(
            Graph(c.description, bool(c.groups), c.replays, c.bytes)
            for part in self._parts
            for c in list(part.captured)
        )

    @property
    def reasons(self) -> dict[str, int]:
        """Why calls ran as without graphs, and how many. Calls that warm up do not count."""
        return dict(self._parts[0].reasons)

    def __str__(self) -> str:
        rows = [("inputs", "passes", "replays", "MiB")]
        for g in self.graphs:
            passes = "forward, backward" if g.training else "forward"
            rows.append((g.inputs, passes, str(g.replays), f"{g.bytes / 2**20:,.1f}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines = lines if self.graphs else ["nothing is captured yet: the third call of a kind will be"]
        return wrapped([*lines, *(f"{count} without graphs: {reason}" for reason, count in self.reasons.items())])

    __repr__ = __str__

    def _made_by(self) -> str:
        return "graphs"


def graphs(model: nn.Module, *, batches: Sequence[int] | None = None, keep: int = 8) -> GraphsReport:
    """Run the model's forward and backward pass as CUDA graphs, in place.

    A GPU that runs small batches waits for its host, which queues one kernel after the other; a graph queues all of
    them at once. Results and gradients are those without graphs, as new tensors. Dropout draws new numbers in every
    call, for one seed the same ones as without graphs.

        report = fastvit.graphs(model)
        ...
        print(report)

    Calls are of one kind if shapes, dtypes and strides of their tensors, other arguments, autocast, which tensors want
    gradients, and all that the model holds are equal: modes, attributes, what is inside these, and the addresses of
    tensors. Two calls of a kind warm up, in training with their backward passes; the third is captured. Parameters may
    change in place between steps, as optimizers and load_state_dict change them. Loss, GradScaler and optimizer run as
    they are, and so do hooks on parameters and on the model itself. In DistributedDataParallel(model), gradients are
    given out in groups of 25 MiB, so that they travel while others are computed. Shallow copies, and the replicas of
    nn.DataParallel, run without graphs; torch.jit.script needs the model restored.

    Python state outside of the model is as it was at the capture: globals, closures, attributes of functions, of
    tensors and of arguments, tensors and containers that belong to a class, environment variables, PyTorch's backend
    flags. After a change there, `fastvit.restore(model)` and a new call of `graphs` begin again.

    A call runs as without graphs, with one warning for each reason, if a graph could not do the same: hooks on modules
    in the model, tensors on a CPU, a checkpoint around the model, an operation that waits for the GPU, another thread
    that warms up or captures a model at that time, a model that holds what cannot be compared, such as a NumPy array,
    and others. A backward pass that comes a second time, that is differentiated (create_graph), or that reads other
    outputs than before, computes the forward pass again. Where one loss reads several calls, or such other outputs, the
    gradients of a parameter are added in another order than without graphs, and may round otherwise; so may those that
    are differentiated under autocast. Outputs of a replayed
    call are no functions of each other. So a call is not captured if a hook or retain_grad looks at the gradient of one
    with respect to another in the first calls; in a replay, autograd.grad raises for it. torch.compile, torch.export,
    modes such as FLOP counters and an outer capture see the model without graphs.

    The graphs of a model share memory, which they hold until `fastvit.restore(model)`, in addition to that of tensors
    outside; of calls that wait for their backward pass at one time, each has memory of its own. After `restore` a call
    keeps its graphs until its backward pass has come, or its outputs are gone. `fastvit memory --graphs` plans it.

    Args:
        model: any module whose forward takes tensors, for example after `accelerate` or `fit`. Forwards of its
            submodules, and other methods, run as they are.
        batches: batch sizes for inference (in eval mode, without gradients): a call runs as the smallest of them that
            is not less than its own, with zeros added. You promise that the first dimension of every tensor among the
            arguments is the batch, and that no result of a sample depends on other samples. The latter is checked in
            one call of each kind, which runs with zeros and with other values added: where its results change, or it
            fails, calls run as without graphs. Results of another batch size may round otherwise. For lists of images,
            a `VisionTransformer` runs with the tokens of so many images of its own size. Larger calls run as without
            graphs.
        keep: how many kinds of calls keep their graphs; the one not used for the longest time goes first.

    Returns:
        A report that is up to date whenever it is read.

    Raises:
        TypeError: model is not an nn.Module; batches or keep are no integers.
        ValueError: they are less than 1; or the model is graphed or compiled already, is in a wrapper, is a block that
            `fit` lets recompute as a whole, or has sharded parameters (FSDP2). The model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    sizes = () if batches is None else tuple(sorted(batches))
    check_integers(1, keep=keep, **{f"batches[{i}]": size for i, size in enumerate(sizes)})
    _check(model)
    rounded = partial(round_batch, sizes) if sizes else None
    parts = [Graphed(model, "forward", keep, rounded, vars(model).get("forward"))]
    if sizes and isinstance(model, Backbone):
        tokens = math.prod(model.patch_embed.grid_size) + model.num_prefix_tokens
        of_lists = partial(round_tokens, tuple(tokens * size for size in sizes))
        parts.append(Graphed(model, "_blocks_packed", keep, of_lists, None))
    for part in parts:
        part.reasons = parts[0].reasons  # one warning for each
        put_on(model, method_of(part), part.name)
    return GraphsReport(parts)


def graphed_parts(module: nn.Module) -> Iterator[Graphed]:
    """Yield what `graphs` has put on a module."""
    yield from [part for value in vars(module).values() if (part := graphed_of(value)) is not None]


def remove(model: nn.Module) -> None:
    """Undo `graphs` for the model and the modules in it. Does nothing to others."""
    for module in model.modules():
        for part in graphed_parts(module):
            take_off(module, part.name)
            part.forget()


def check_without_graphs(model: nn.Module) -> None:
    """Raise ValueError if `graphs` was called on the model or on a module in it."""
    for name, module in model.named_modules():
        if any(graphed_parts(module)):
            raise ValueError(f"{name or 'model'} has graphs already: fastvit.restore(model) removes them")


def _check(model: nn.Module) -> None:
    check_without_graphs(model)
    for name, module in model.named_modules():
        where = name or "the model itself"
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            raise ValueError(f"model is compiled ({where}): take graphs, or torch.compile(mode='reduce-overhead')")
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ValueError(f"model is in a {type(module).__name__} ({where}): call graphs on its module, before")
    if recomputes_all(model):  # `unfit` would take off the graphs
        raise ValueError("model is a block that fastvit.fit lets recompute: call graphs on the model that it is in")
    if reason := why_not([*model.parameters(), *model.buffers()]):
        raise ValueError(reason)
