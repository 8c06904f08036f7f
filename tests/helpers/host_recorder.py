"""A recorder of graphs for CPU tensors: a replay runs the function again, into the same static tensors.

All static results of other graphs are overwritten, as if they shared its memory, and a backward pass may only be
replayed right after its own forward pass. So results that alias static tensors, stale ones and saved tensors that are
read too late show.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastvit.cuda_graphs.recorder import Recorder, Replay, Unfit, line_of


class HostRecorder:
    made: ClassVar[list["HostRecorder"]] = []
    capturing = False
    waits = ""  # what `watch` finds
    refuses: str | None = None  # why the next capture fails

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.statics: dict[int, list[Tensor]] = {}
        self.last: Any = None  # whose forward pass was replayed last
        self.replays = 0
        HostRecorder.made.append(self)

    @staticmethod
    def check(tensors: Sequence[Tensor]) -> None:
        if any(t.device.type != "cpu" for t in tensors):
            raise Unfit("a tensor is elsewhere")

    @staticmethod
    def is_capturing() -> bool:
        return HostRecorder.capturing

    def _run(self, function: Callable[[Replay], Any]) -> tuple[Any, int]:
        cuts: list[None] = []
        HostRecorder.capturing = True
        try:
            return function(lambda: cuts.append(None)), len(cuts)
        finally:
            HostRecorder.capturing = False

    def record(self, function: Callable[[Replay], Any]) -> tuple[Any, list[Replay]]:
        captured, is_backward = function.__self__, "backward" in function.__name__  # type: ignore[attr-defined]
        state, buffers = torch.get_rng_state(), [(t, t.clone()) for t in captured.model.buffers()]
        try:
            if HostRecorder.refuses:
                raise RuntimeError(HostRecorder.refuses)
            result, cuts = self._run(function)
        except Exception as error:
            raise Unfit(f"its capture failed at {line_of(error)}: {error}") from error
        finally:
            torch.set_rng_state(state)  # a capture computes nothing
            for t, before in buffers:
                t.data.copy_(before)
        number = len(self.statics)
        grad = torch.is_grad_enabled()
        self.statics[number] = statics = tensors_of(result)
        outside = {t.data_ptr() for t in (*captured.model.parameters(), *captured.inputs)}  # not the graphs' own memory
        groups = result[1] if is_backward else []
        new: list[Tensor] = []

        def replay(group: int) -> None:
            self.replays += 1
            if not is_backward:
                self.last = captured
            assert self.last is captured, "another graph was replayed between a forward pass and its backward pass"
            if group == 0:
                with torch.set_grad_enabled(grad):
                    new[:] = tensors_of(self._run(function)[0])
            if not captured.out_gradients:
                captured._live = [], []  # as after a capture: it keeps no memory of the model
            for other, tensors in self.statics.items():
                for t in tensors if other != number else ():
                    if t.is_floating_point() and t.data_ptr() not in outside:
                        t.data.fill_(float("nan"))
            given = [g for g, t in zip(groups, result[0], strict=True) if t is not None] if is_backward else []
            for i, (static, t) in enumerate(zip(statics, new, strict=True)):
                if not is_backward or given[i] == group:
                    static.data.copy_(t)
                elif given[i] > group:
                    static.data.fill_(float("nan"))  # not computed yet

        return result, [lambda group=group: replay(group) for group in range(cuts + 1)]

    def begin_replay(self) -> None: ...

    def bytes(self) -> int:
        return sum(t.nbytes for tensors in self.statics.values() for t in tensors)

    def random_state(self) -> Tensor:
        return torch.get_rng_state()

    @staticmethod
    def host_state() -> Any:
        return Recorder.host_state()[:2]  # without what the CPU's kernels draw from

    @contextlib.contextmanager
    def drawing_from(self, state: Tensor | None) -> Iterator[None]:
        with torch.random.fork_rng([], enabled=state is not None):
            if state is not None:
                torch.set_rng_state(state)
            yield

    @staticmethod
    def watch(function: Callable[[], Any]) -> tuple[Any, str, bool]:
        return function(), HostRecorder.waits, False


def tensors_of(result: Any) -> list[Tensor]:
    return [t for t in tree_leaves(result) if isinstance(t, Tensor)]
