"""A graph of torch functions from Dynamo, before autograd, and the only class that changes it."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from fastvit.blocks.submodules import CannotFuse
from fastvit.compiler.match.calls import first, name_of, words
from fastvit.compiler.match.layout import known_equal, outermost_first, same_shape, same_strides
from fastvit.compiler.match.values import VIEWS, evaluate, fake, mutated, storages, value_of
from fastvit.report import Entry, Kind, Status

# After one of these the fake values that Dynamo recorded before are wrong
_RESHAPED_IN_PLACE = frozenset(
    ("squeeze_", "unsqueeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "resize_", "resize_as_", "set_")
)
_REGIONS = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode")
_COPIED = ("stack_trace", "nn_module_stack", "source_fn_stack")


class GraphRewriter:
    """One graph, while it is rewritten.

    Positions and regions are those of the nodes that Dynamo wrote; a new node has those of the node that it replaces.
    A region is a stretch of the graph in which autocast and grad mode do not change.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.graph = gm.graph
        self.entries: dict[Node, Entry] = {}  # by the node that Dynamo wrote
        self.position: dict[Node, int] = {}
        self._region: dict[Node, int] = {}
        self._autocast: list[tuple[Any, ...]] = [()]  # of each region, the autocasts entered in the graph
        self._mutations: dict[Node, set[StorageWeakRef]] = {}
        self._restrided: list[tuple[Node, Any]] = []  # new nodes with other strides, and the value that each replaced
        values = [value for value in map(value_of, self.graph.nodes) if isinstance(value, Tensor)]
        self.refusal = self._refusal(values)  # why the whole graph is left, or ""
        self.fakes: Any = None if self.refusal or not values else values[0].fake_mode  # type: ignore[attr-defined]
        if not self.fakes:
            return
        for position, node in enumerate(self.graph.nodes):
            self.position[node] = position
            self._enter_region(node)
            self._region[node] = len(self._autocast) - 1
            if written := mutated(node):
                self._mutations[node] = written

    def _enter_region(self, node: Node) -> None:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name not in _REGIONS:
            return
        entered = self._autocast[-1]
        if name == "_enter_autocast":
            entered = (*entered, node)
        elif name == "_exit_autocast":
            entered = tuple(other for other in entered if other is not node.args[0])
        self._autocast.append(entered)

    def _refusal(self, values: list[Tensor]) -> str:
        # functorch's transforms trace with tensors that have no storage, and differentiate as the ops may not
        if not all(hasattr(value, "fake_mode") for value in values):
            return "a transform of functorch"
        reshaped = next((node for node in self.graph.nodes if name_of(node) in _RESHAPED_IN_PLACE), None)
        return f"{name_of(reshaped)} reshapes a tensor in place" if reshaped else ""

    # ---- the report ----

    def note(self, node: Node, kind: Kind, detail: str, status: Status = "accelerated") -> None:
        """Record the outcome at a site. The last note counts, but never turns a fused site into a skipped one, nor into
        another kind: the projection of an nn.MultiheadAttention has the same site as its attention."""
        site = node.meta.get("fastvit_site", node)
        before = self.entries.get(site)
        if before is None or not before.fused or (status == "accelerated" and before.kind == kind):
            self.entries[site] = Entry(_module_of(site), kind, status, detail, kind, _line_of(site))

    @contextlib.contextmanager
    def noting_refusals(self, node: Node, kind: Kind) -> Iterator[None]:
        """Record a CannotFuse within the context as the reason why the site is left."""
        try:
            yield
        except CannotFuse as reason:
            self.note(node, kind, str(reason), "skipped")

    # ---- changes ----

    def replace(self, root: Node, matched: Collection[Node], build: Callable[[Emitter], Node], site: Node) -> Node:
        """Replace root by the node that `build` emits, and erase root and the other matched nodes, which nothing else
        may use. Raises CannotFuse if that could change what the model computes."""
        return self.replace_all([root], matched, lambda emit: [build(emit)], site)[0]

    def replace_all(
        self, roots: Sequence[Node], matched: Collection[Node], build: Callable[[Emitter], list[Node]], site: Node
    ) -> list[Node]:
        """Replace several roots, given in order; all are computed at the place of the first."""
        self._check(roots, {*matched, *roots})
        emitter = Emitter(self, roots[0], site.meta.get("fastvit_site", site))
        try:
            new = [emitter.in_place_of(root, node) for root, node in zip(roots, build(emitter), strict=True)]
            if any(node in matched for written in emitter.written for node in written.all_input_nodes):
                raise CannotFuse("what it computes on the way is used by its end, too")
        except (TypeError, ValueError, RuntimeError) as error:  # the ops' own checks
            emitter.undo()
            raise CannotFuse((str(error) or repr(error)).splitlines()[0]) from None
        except CannotFuse:
            emitter.undo()
            raise
        for root, node in zip(roots, new, strict=True):
            root.replace_all_uses_with(node)
            if not same_strides(fake(root), fake(node)):
                self._restrided.append((node, fake(root)))
        for old in sorted({*matched, *roots}, reverse=True):  # as they stand in the graph
            self.graph.erase_node(old)
        for node in new:
            _refresh(node)
        return new

    def _check(self, roots: Sequence[Node], inside: set[Node]) -> None:
        """Check that all of `inside` can be computed at the first root."""
        here, region = self.position[roots[0]], self._region[roots[0]]
        read: dict[StorageWeakRef, tuple[int, int]] = {}  # from where to where
        for node in inside:
            at = self.position[node]
            if self._region[node] != region:
                raise CannotFuse("autocast or grad mode changes within it")
            if node not in roots and not inside.issuperset(node.users):
                raise CannotFuse(f"the output of its {words(node)} is used elsewhere, too")
            for used in node.all_input_nodes:
                if used in inside:
                    continue
                if self.position[used] > here:
                    raise CannotFuse("some of its layers are computed after others")
                for storage in storages(value_of(used)):
                    first, last = read.get(storage, (here, here))
                    read[storage] = min(first, at), max(last, at)
        for node, written in self._mutations.items():
            if node in inside:
                self._check_own(node, written, inside, read.keys())
                continue
            if any(read[storage][0] < self.position[node] < read[storage][1] for storage in written & read.keys()):
                raise CannotFuse("what it reads is changed in place before its end")
            if any(written & storages(value_of(root)) for root in roots):
                raise CannotFuse("its output is changed in place")

    def _check_own(self, node: Node, written: set[StorageWeakRef], inside: set[Node], outside: Collection[Any]) -> None:
        """Check a write in place within the pattern: it may be replaced only if it writes into a tensor of the pattern
        that nothing else reads."""
        alias = [other for other in inside if other is not node and storages(value_of(other)) & written]
        if "out" in node.kwargs or written & {*outside} or any(len(o.users) > 1 for o in alias if o < node):
            raise CannotFuse("a tensor that is used elsewhere is changed in place")

    def propagate_strides(self) -> None:
        """Propagate changed strides to later nodes. Restore the original strides where a view would fail, a view would
        become a copy or a copy a view, or another graph or the caller would see them."""
        for node, before in self._restrided:
            try:
                self._propagate(node, before)
            except (CannotFuse, RuntimeError, ValueError):
                self._restore_strides(node, before)
        self._restrided.clear()

    def _propagate(self, new: Node, old: Any) -> None:
        values: dict[Node, tuple[Any, Any]] = {new: (old, fake(new))}  # before, after
        for node in self.graph.nodes:
            inputs = [values[used] for used in node.all_input_nodes if used in values]
            if not inputs:
                continue
            opaque = node.op == "output" or isinstance(node.target, torch._ops.HigherOrderOperator)
            if opaque and any(_differ(*value) for value in inputs):
                raise CannotFuse("seen outside of the graph")
            if opaque:
                continue
            before = value_of(node)
            with self.as_in(node):
                after = evaluate(node, {used: value[1] for used, value in values.items()})
            for was, is_now in inputs:
                if bool(storages(before) & storages(was)) != bool(storages(after) & storages(is_now)):
                    raise CannotFuse("a view that would be a copy, or a copy that would be a view")
            _require_gradients(before, after)
            if _differ(before, after) or any(storages(before) & storages(was) for was, _ in inputs):
                values[node] = before, after
        for node, (_, after) in values.items():
            node.meta["example_value"] = after

    def _restore_strides(self, node: Node, before: Tensor) -> None:
        """Give the users of a node a copy with the strides of `before`."""
        users = list(node.users)
        if not users:
            return
        order = outermost_first(before.stride())
        emitter = Emitter(self, min(users), node.meta["fastvit_site"])
        copy = emitter.method("contiguous", emitter.method("permute", node, order))
        copy = emitter.method("permute", copy, [order.index(i) for i in range(len(order))])
        if not same_strides(fake(copy), before):
            raise CannotFuse("strides that no copy has")
        for user in users:
            user.replace_input_with(node, copy)

    def is_mutated(self, targets: set[StorageWeakRef]) -> bool:
        """Return whether any node writes into one of these storages."""
        return any(written & targets for written in self._mutations.values())

    def adopt(self, node: Node, root: Node) -> None:
        """Give a new node the position and region of root."""
        self.position[node], self._region[node] = self.position[root], self._region[root]

    @contextlib.contextmanager
    def as_in(self, node: Node) -> Iterator[None]:
        """Enter fake mode, and autocast as it is where node runs."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.fakes)
            stack.enter_context(torch.no_grad())
            for entered in self._autocast[self._region[node]]:
                kind, dtype, enabled, cache = (*entered.args, None, None, None)[:4]
                stack.enter_context(torch.autocast(kind, dtype, enabled is not False, cache))
            yield


class Emitter:
    """Write nodes before `root`, with fake values."""

    def __init__(self, rewriter: GraphRewriter, root: Node, site: Node) -> None:
        self._rewriter, self._root, self._site = rewriter, root, site
        self.written: list[Node] = []

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return self._write("call_function", function, args, kwargs)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        return self._write("call_method", name, args, kwargs)

    def size(self, tensor: Node, dim: int) -> Node:
        """Return a size as a node, if possible one that the graph has: a new one would be another use of the tensor."""
        size = fake(tensor).shape[dim]
        before = itertools.takewhile(lambda node: node is not self._root, self._rewriter.graph.nodes)
        symbols = (node for node in before if isinstance(value_of(node), torch.SymInt))
        known = next((node for node in symbols if known_equal(value_of(node), size)), None)
        return known or self.method("size", tensor, dim)

    def _write(self, op: str, target: Any, args: Any, kwargs: Any) -> Node:
        with self._rewriter.graph.inserting_before(self._root):
            node = self._rewriter.graph.create_node(op, target, args, kwargs)
        self.written.append(node)
        node.meta.update({key: self._root.meta[key] for key in _COPIED if key in self._root.meta})
        node.meta["fastvit_site"] = self._site
        self._rewriter.adopt(node, self._root)
        with self._rewriter.as_in(self._root):
            node.meta["example_value"] = evaluate(node)
        return node

    def in_place_of(self, root: Node, node: Node) -> Node:
        """Return node, or a copy of it with root's strides, for the place of root."""
        want, got = fake(root), fake(node)
        if not same_shape(want.shape, got.shape) or want.dtype != got.dtype or want.device != got.device:
            raise CannotFuse(f"the op would give {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}")
        if not same_strides(want, got) and want.is_contiguous():
            node = self.method("contiguous", node)
        _require_gradients(want, fake(node))
        return node

    def undo(self) -> None:
        for node in reversed(self.written):
            self._rewriter.graph.erase_node(node)


def _module_of(node: Node) -> str:
    """Return the name of the innermost module that calls it, as in model.named_modules(), or "" if it is not known."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    path = re.sub(r"^L\['\w+'\]\.?|^L\[\"\w+\"\]\.?", "", path)
    return re.sub(r"_modules\['?(\w+)'?\]", r"\1", path).removeprefix("_orig_mod.")


def _line_of(node: Node) -> str:
    """Return file and line of the call itself, "file.py:119", or "" if they are not known."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    path, line = frames[-1]  # the innermost frame
    return f"{PurePath(path).name}:{line}"


def _differ(before: Any, after: Any) -> bool:
    if isinstance(before, tuple | list):
        return any(map(_differ, before, after))
    return isinstance(before, Tensor) and not same_strides(before, after)


def _require_gradients(before: Any, after: Any) -> None:
    """Set requires_grad as `before` has it, because new values are made without autograd."""
    if isinstance(before, tuple | list):
        for b, a in zip(before, after, strict=True):
            _require_gradients(b, a)
    elif isinstance(before, Tensor) and before.requires_grad:
        after.requires_grad_()


def _refresh(node: Node) -> None:
    """Compute the fake values of a node's views again."""
    for user in node.users:
        if name_of(user) in VIEWS and first(user) is node:
            before = value_of(user)
            with torch.no_grad():
                user.meta["example_value"] = evaluate(user)
            _require_gradients(before, value_of(user))
            _refresh(user)
