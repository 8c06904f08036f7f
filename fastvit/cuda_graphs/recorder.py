"""Capture functions as CUDA graphs, and replay them. No other module of `cuda_graphs` calls CUDA."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.utils.checkpoint
from torch import Tensor

from fastvit.ops.runtime import call

T = TypeVar("T")
Replay = Callable[[], object]
_TORCH = str(Path(torch.__file__).parent)
_process = threading.RLock()


class Unfit(Exception):
    """A call that no graph can run. The message gives the reason."""


class Recorder:
    """Captures functions as CUDA graphs that share a memory pool: no two of them may be in use at a time.

    device: the GPU of everything that the functions read and write.
    """

    def __init__(self, device: torch.device) -> None:
        if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:  # which frees what a captured function lets go of
            raise Unfit("PYTORCH_NO_CUDA_MEMORY_CACHING is set, and graphs need a pool of memory")
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # whose memory is in the pool
        self._used: torch.cuda.Stream | None = None  # the stream of the last replay

    @staticmethod
    def check(tensors: Sequence[Tensor]) -> None:
        """Raise `Unfit` if a call on these tensors cannot be captured or replayed now."""
        for t in tensors:
            if not t.is_cuda:
                raise Unfit(f"a tensor is on the {t.device.type}, and graphs are for GPUs of CUDA")
            if t.device.index != torch.cuda.current_device():
                raise Unfit("tensors are not all on the current GPU")
        if call.launches_are_watched():
            raise Unfit("a profiler hooks the launches of Triton's kernels, which replays do not call")

    @staticmethod
    def is_capturing() -> bool:
        """Return whether the current stream is being captured, by this class or by anyone."""
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def record(self, function: Callable[[Replay], T]) -> tuple[T, list[Replay]]:
        """Run a function while it is captured: its kernels do not run.

        Args:
            function: gets a function that ends a graph and begins the next, which any thread may call.

        Returns:
            Its result, and the functions that replay the graphs on the current stream.

        Raises:
            Unfit: the capture failed.
        """
        graphs: list[torch.cuda.CUDAGraph] = []
        begun: torch.cuda.CUDAGraph | None = None

        def begin() -> None:
            nonlocal begun
            begun = None
            graphs.append(torch.cuda.CUDAGraph())
            with torch.inference_mode(False):  # torch 2.9: the generator's tensors would be of that mode
                graphs[-1].capture_begin(self._pool, capture_error_mode="relaxed")  # another thread may end it
            begun = graphs[-1]

        def cut() -> None:
            with torch.cuda.stream(self._stream):
                graphs[-1].capture_end()
                begin()

        gc.collect()
        if not self._graphs:  # PyTorch refuses a pool whose graphs are all gone
            self._pool = torch.cuda.graph_pool_handle()
        with may_wait():
            torch.cuda.synchronize(self.device)
            torch._C._cuda_clearCublasWorkspaces()  # one in the pool would outlive its graphs
            torch.cuda.empty_cache()
            try:
                with torch.cuda.stream(self._stream), device_states(lambda *_: ([], [])):
                    try:
                        begin()
                        result = function(cut)
                    except BaseException:  # such as KeyboardInterrupt
                        with contextlib.suppress(RuntimeError):  # it fails because the function did
                            graphs[-1].capture_end()
                        raise
                    graphs[-1].capture_end()
            except BaseException as error:
                self._clean_up(begun)
                if not isinstance(error, Exception):
                    raise
                raise Unfit(f"its capture failed at {line_of(error)}: {described(error)}") from error
            finally:
                torch._C._cuda_clearCublasWorkspaces()
        self._graphs.update(graphs)
        return result, [graph.replay for graph in graphs]

    def _clean_up(self, begun: torch.cuda.CUDAGraph | None) -> None:
        """Undo what a failed capture leaves behind: the pool takes allocations as if it went on, and so does the
        generator take draws, until another capture ends. begun: the last graph whose capture has begun."""
        with contextlib.suppress(AttributeError, RuntimeError):  # it takes none
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
        try:
            if begun is not None:
                begun.pool()
        except RuntimeError:  # a graph that was not made does not release the pool
            with contextlib.suppress(AttributeError, RuntimeError):
                torch._C._cuda_releasePool(self.device.index, self._pool)
        self._pool, self._graphs = torch.cuda.graph_pool_handle(), WeakSet()
        number = torch.zeros(1, device=self.device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
            number.add_(1)

    def begin_replay(self) -> None:
        """Let the current stream wait for the last replay, if that was on another stream."""
        stream = torch.cuda.current_stream(self.device)
        if self._used is not None and self._used != stream:
            stream.wait_stream(self._used)
        self._used = stream

    def bytes(self) -> int:
        """Return the size of the memory pool."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(self._pool))

    # ---- random numbers ----

    def random_state(self) -> Tensor:
        """Return the state of the generator that kernels draw from."""
        return torch.cuda.get_rng_state(self.device)

    @staticmethod
    def host_state() -> Any:
        """Return the states of the generators whose numbers a graph would repeat."""
        numpy = sys.modules.get("numpy")
        of_numpy = "" if numpy is None else str(numpy.random.get_state())
        return random.getstate(), of_numpy, torch.get_rng_state().tolist()

    @contextlib.contextmanager
    def drawing_from(self, state: Tensor | None) -> Iterator[None]:
        """Draw from a state within the context; None: from the present one."""
        with torch.random.fork_rng([self.device.index], enabled=state is not None):
            if state is not None:
                torch.cuda.set_rng_state(state, self.device)
            yield

    @staticmethod
    def watch(function: Callable[[], T]) -> tuple[T, str, bool]:
        """Call a function. Return its result, the line of an operation that made the host wait for the GPU, or "", and
        whether torch.utils.checkpoint has kept the generator's state."""
        kept: list[Any] = []
        seen: list[tuple[Any, ...]] = []
        waits: list[str] = []
        before, mode, thread = torch.utils.checkpoint.get_device_states, _sync_debug_mode(), threading.get_ident()

        def get(*args: Any) -> Any:
            kept.append(args)
            return before(*args)

        def show(message: Warning | str, category: type[Warning], filename: str, line: int, *_: Any) -> None:
            is_wait = "synchronizing CUDA operation" in str(message)
            if is_wait and threading.get_ident() == thread:  # other threads wait for themselves
                waits.append(f"{filename}:{line}")
            if not (is_wait and mode == 0) and "debug mode is a prototype" not in str(message):
                seen.append((message, category, filename, line))

        with warnings.catch_warnings(), device_states(get):
            warnings.simplefilter("always")
            warnings.showwarning = show  # type: ignore[assignment]
            if mode == 0:  # else it warns already, or raises
                torch.cuda.set_sync_debug_mode("warn")
            try:
                result = function()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        for warning in seen:
            warnings.warn_explicit(*warning)
        return result, waits[0] if waits else "", bool(kept)


def _sync_debug_mode() -> int:
    return torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let no other thread warm up or capture within the context. Warnings and the debug mode of waits belong to the
    process, and a capture begins with a wait, which would end another one.

    Raises:
        Unfit: another thread does. Waiting for it could be for ever: it may run any code of a model.
    """
    if not _process.acquire(blocking=False):
        raise Unfit("another thread warms up or captures a model")
    try:
        yield
    finally:
        _process.release()


@contextlib.contextmanager
def may_wait() -> Iterator[None]:
    """Let the host wait for the GPU within the context, whatever torch.cuda.set_sync_debug_mode says of waits."""
    mode = _sync_debug_mode()
    if mode:
        torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        if mode:
            torch.cuda.set_sync_debug_mode(mode)


@contextlib.contextmanager
def device_states(get: Callable[..., Any]) -> Iterator[None]:
    """Let torch.utils.checkpoint call another function for the states of the GPUs' generators, which it restores when
    it computes again. A capture allows neither to read nor to set them."""
    before = torch.utils.checkpoint.get_device_states
    torch.utils.checkpoint.get_device_states = get
    try:
        yield
    finally:
        torch.utils.checkpoint.get_device_states = before


def described(error: BaseException) -> str:
    """Return the first line of an error, or its class."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def line_of(error: BaseException) -> str:
    """Return the innermost line outside of torch that led to an error: "file.py:12"."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_TORCH)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "an unknown line"
