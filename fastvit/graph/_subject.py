"""A graph of torch functions as Dynamo hands it over, before autograd, and the one way in which rewrites change it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.multiprocessing.reductions import StorageWeakRef

from fastvit.graph._calls import Refused, name_of, words
from fastvit.graph._layout import same_shape
from fastvit.graph._report import Entry, Kind, entry_of

VIEWS = frozenset(
    ("reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "permute", "transpose",
     "movedim", "t", "mT", "T", "unbind", "chunk", "split", "split_with_sizes", "narrow", "select", "getitem", "expand",
     "expand_as", "contiguous", "detach", "alias")
)  # fmt: skip
# After one of these the values that Dynamo noted before no longer hold
_RESHAPED_IN_PLACE = frozenset(
    ("squeeze_", "unsqueeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "resize_", "resize_as_", "set_")
)
_REGIONS = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode")
_COPIED = ("stack_trace", "nn_module_stack", "source_fn_stack")


class Subject:
    """One graph, while it is rewritten.

    Positions and regions are those of the nodes that Dynamo wrote; a node that is put in has those of the node that it
    stands for. A region is a stretch in which autocast and grad mode do not change.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.graph = gm.graph
        self.entries: dict[Node, Entry] = {}  # by the node that Dynamo wrote
        self.position: dict[Node, int] = {}
        self._region: dict[Node, int] = {}
        self._autocast: list[tuple[Any, ...]] = [()]  # of each region, the autocasts entered in the graph
        self._mutations: list[tuple[int, set[StorageWeakRef]]] = []
        self._restrided: list[Node] = []  # what was put in with other strides than what stood there
        self.fakes: Any = next((v.fake_mode for v in map(value_of, self.graph.nodes) if hasattr(v, "fake_mode")), None)
        for position, node in enumerate(self.graph.nodes):
            self.position[node] = position
            self._enter_region(node)
            self._region[node] = len(self._autocast) - 1
            if mutated := _mutated(node):
                self._mutations.append((position, mutated))

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

    @property
    def rewritable(self) -> bool:
        return self.fakes is not None and not any(name_of(node) in _RESHAPED_IN_PLACE for node in self.graph.nodes)

    # ---- the report ----

    def note(self, node: Node, kind: Kind, fused: bool, detail: str) -> None:
        """What became of a site. Of several notes the last counts, but none takes back that it is fused."""
        site = node.meta.get("fastvit_site", node)
        if fused or site not in self.entries or not self.entries[site].fused:
            self.entries[site] = entry_of(site, kind, fused, detail)

    # ---- changes ----

    def replace(self, root: Node, matched: Collection[Node], build: Callable[[Emitter], Node], site: Node) -> Node:
        """Puts what `build` emits in the place of root, and takes out root and the other matched nodes, which nothing
        else may use. Raises Refused where that could change what the model computes."""
        return self.replace_all([root], matched, lambda emit: [build(emit)], site)[0]

    def replace_all(
        self, roots: Sequence[Node], matched: Collection[Node], build: Callable[[Emitter], list[Node]], site: Node
    ) -> list[Node]:
        """The same for several roots, in order: all are computed where the first was."""
        self._check(roots, {*matched, *roots})
        emitter = Emitter(self, roots[0], site.meta.get("fastvit_site", site))
        try:
            new = [emitter.in_place_of(root, node) for root, node in zip(roots, build(emitter), strict=True)]
            if any(node in matched for written in emitter.written for node in written.all_input_nodes):
                raise Refused("what it computes on the way is used by its end, too")
        except (TypeError, ValueError, NotImplementedError) as error:  # what the ops themselves refuse
            emitter.undo()
            raise Refused(str(error)) from None
        except Refused:
            emitter.undo()
            raise
        for root, node in zip(roots, new, strict=True):
            root.replace_all_uses_with(node)
            if not same_shape(fake(root).stride(), fake(node).stride()):
                self._restrided.append(node)
        for old in sorted({*matched, *roots}, reverse=True):  # as they stand in the graph
            self.graph.erase_node(old)
        for node in new:
            _refresh(node)
        return new

    def _check(self, roots: Sequence[Node], inside: set[Node]) -> None:
        """Whether all of `inside` can be computed at the first root."""
        here, region = self.position[roots[0]], self._region[roots[0]]
        read: dict[StorageWeakRef, tuple[int, int]] = {}  # from where to where
        for node in inside:
            at = self.position[node]
            if self._region[node] != region:
                raise Refused("autocast or grad mode changes within it")
            if node not in roots and not inside.issuperset(node.users):
                raise Refused(f"the output of its {words(node)} is used elsewhere, too")
            for used in node.all_input_nodes:
                if used in inside:
                    continue
                if self.position[used] > here:
                    raise Refused("some of its layers are computed behind others")
                for storage in storages(value_of(used)):
                    first, last = read.get(storage, (here, here))
                    read[storage] = min(first, at), max(last, at)
        for position, mutated in self._mutations:
            if any(read[storage][0] < position < read[storage][1] for storage in mutated & read.keys()):
                raise Refused("what it reads is changed in place before its end")

    def settle(self) -> None:
        """Values anew for all that depends on other strides than before. Raises Refused where a view cannot be taken of
        them, far behind what was put in."""
        changed = {user for node in self._restrided for user in node.users}
        for node in self.graph.nodes if changed else ():
            if node not in changed or node.op == "output" or isinstance(node.target, torch._ops.HigherOrderOperator):
                continue
            before = value_of(node)
            try:
                with self.as_in(node):
                    node.meta["example_value"] = after = evaluate(node)
            except (RuntimeError, ValueError):
                raise Refused(f"{words(node)}, behind it, needs other strides") from None
            if _differ(before, after):
                changed.update(node.users)

    def is_mutated(self, of: set[StorageWeakRef]) -> bool:
        return any(mutated & of for _, mutated in self._mutations)

    def adopt(self, node: Node, root: Node) -> None:
        self.position[node], self._region[node] = self.position[root], self._region[root]

    @contextlib.contextmanager
    def as_in(self, node: Node) -> Iterator[None]:
        """Fake tensors, and autocast as it is where node runs."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.fakes)
            stack.enter_context(torch.no_grad())
            for entered in self._autocast[self._region[node]]:
                kind, dtype, enabled, cache = (*entered.args, None, None, None)[:4]
                stack.enter_context(torch.autocast(kind, dtype, enabled is not False, cache))
            yield


class Emitter:
    """Writes nodes before `root`, with fake values."""

    def __init__(self, subject: Subject, root: Node, site: Node) -> None:
        self._subject, self._root, self._site = subject, root, site
        self.written: list[Node] = []

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return self._write("call_function", function, args, kwargs)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        return self._write("call_method", name, args, kwargs)

    def _write(self, op: str, target: Any, args: Any, kwargs: Any) -> Node:
        with self._subject.graph.inserting_before(self._root):
            node = self._subject.graph.create_node(op, target, args, kwargs)
        self.written.append(node)
        node.meta.update({key: self._root.meta[key] for key in _COPIED if key in self._root.meta})
        node.meta["fastvit_site"] = self._site
        self._subject.adopt(node, self._root)
        with self._subject.as_in(self._root):
            node.meta["example_value"] = evaluate(node)
        return node

    def in_place_of(self, root: Node, node: Node) -> Node:
        """node, or a copy of it with root's strides, if it can stand for root."""
        want, got = fake(root), fake(node)
        if not same_shape(want.shape, got.shape) or want.dtype != got.dtype or want.device != got.device:
            raise Refused(f"the op would give {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}")
        if same_shape(want.stride(), got.stride()) or _replays(root, got):
            return node
        if not want.is_contiguous():
            raise Refused("strides that later views need")
        return self.method("contiguous", node)

    def undo(self) -> None:
        for node in reversed(self.written):
            self._subject.graph.erase_node(node)


def value_of(node: Node) -> Any:
    return node.meta.get("example_value")


def fake(node: Any) -> Tensor:
    value = value_of(node) if isinstance(node, Node) else None
    if not isinstance(value, Tensor):
        raise Refused(f"nothing is known about the shape of {node}")
    return value


def evaluate(node: Node) -> Any:
    """On fake values."""
    args, kwargs = map_arg((node.args, node.kwargs), value_of)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def storages(value: Any) -> set[StorageWeakRef]:
    if isinstance(value, Tensor):
        return {StorageWeakRef(value.untyped_storage())}
    return set().union(*map(storages, value)) if isinstance(value, tuple | list) else set()


def _mutated(node: Node) -> set[StorageWeakRef]:
    """The storages that a node writes into: known by their coming back, by convention or by the schema. What a
    function of higher order does with its inputs is not known."""
    if node.op not in ("call_function", "call_method"):
        return set()
    name = name_of(node)
    inputs = [storages(value_of(used)) for used in node.all_input_nodes]
    into: set[StorageWeakRef] = set().union(*inputs)
    schema = getattr(node.target, "_schema", None)
    if isinstance(node.target, torch._ops.HigherOrderOperator) or getattr(schema, "is_mutable", False):
        return into
    if name == "setitem" or (node.op == "call_method" and name.endswith("_") and not name.endswith("__")):
        return inputs[0] if inputs else set()
    return set() if name in VIEWS else into & storages(value_of(node))


def _differ(before: Any, after: Any) -> bool:
    if isinstance(before, tuple | list):
        return any(map(_differ, before, after))
    return isinstance(before, Tensor) and not same_shape(before.stride(), after.stride())


def _views(node: Node) -> list[Node]:
    return [user for user in node.users if name_of(user) in VIEWS and user.args[0] is node]


def _replays(root: Node, value: Any) -> bool:
    """Whether the views of root can be taken of `value`, which has other strides."""
    before = value_of(root)
    root.meta["example_value"] = value
    try:
        for user in _views(root):
            with torch.no_grad():
                if not _replays(user, evaluate(user)):
                    return False
        return True
    except (RuntimeError, ValueError):  # a view across strides
        return False
    finally:
        root.meta["example_value"] = before


def _refresh(node: Node) -> None:
    """The values of a node's views, after it."""
    for user in _views(node):
        with torch.no_grad():
            user.meta["example_value"] = evaluate(user)
        _refresh(user)
