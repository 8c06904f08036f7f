"""Read the trace of the pretended device, and compare what calls do.

with device_trace.recorded() as events: ...
device_trace.canonical(events)  # launches, with addresses as (number of the tensor's memory, offset)
"""

import bisect
import contextlib
import ctypes
import json
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

Event = dict[str, Any]
START, END = 0x200000000000, 0x200000000000 + (8 << 40)
OPS = ("kernel", "copy", "fill", "library", "host")
COUNTS = ("bytes", "ranges", "streams", "events", "graphs", "execs", "captures")
_cuda = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)


def counts() -> dict[str, int]:
    """Return how much of everything the device has now."""
    values = (ctypes.c_longlong * len(COUNTS))()
    _cuda.pretended_counts(values)
    return dict(zip(COUNTS, values, strict=True))


def track() -> None:
    """Write what PyTorch's allocator does into the trace, too. Call it once, after CUDA's first use."""
    ctypes.CDLL("libtracker.so").pretended_track()


@contextlib.contextmanager
def recorded() -> Iterator[list[Event]]:
    """Yield a list that has the events once the block has ended."""
    events: list[Event] = []
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as file:
        _cuda.pretended_trace(file.name.encode())
        try:
            yield events
        finally:
            _cuda.pretended_trace(None)
            events.extend(json.loads(line) for line in file)


def pointers(event: Event) -> list[int]:
    """Return the addresses of an op, in order."""
    if event["e"] in ("copy", "fill"):
        args = [event["dst"], event["src"]]
    else:  # structs whose size is a guess are left out
        args = [
            p for a in event.get("args", []) if not isinstance(a, dict) for p in (a if isinstance(a, list) else [a])
        ]
    return [p for p in args if START <= p < END]


class Blocks:
    """The memory that PyTorch's allocator has given out, as the trace goes on."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.of: dict[int, tuple[int, int]] = {}  # start -> size, number
        self.count = 0

    def see(self, event: Event) -> None:
        if event["e"] == "alloc":
            if event["p"] not in self.of:
                bisect.insort(self.starts, event["p"])
            self.of[event["p"]] = event["n"], self.count
            self.count += 1
        elif event["e"] == "freed" and event["p"] in self.of:
            self.starts.remove(event["p"])
            del self.of[event["p"]]

    def find(self, address: int) -> tuple[int, int] | None:
        """Return the number of the block that an address is in, and the offset."""
        i = bisect.bisect(self.starts, address) - 1
        if i < 0:
            return None
        size, number = self.of[self.starts[i]]
        offset = address - self.starts[i]
        return (number, offset) if offset < size else None


def canonical(
    events: list[Event], known: Mapping[str, Tensor] | None = None, blocks: Blocks | None = None
) -> list[tuple[Any, ...]]:
    """Return the ops, with every address as the number of its block, in order of first use, and an offset.

    known: tensors from before the trace, by name. Other memory from before has its address.
    """
    blocks, numbers, out = blocks or Blocks(), dict[int, int](), list[tuple[Any, ...]]()
    storages = [(name, tensor.untyped_storage()) for name, tensor in (known or {}).items()]

    def renamed(p: Any) -> Any:
        if isinstance(p, dict):
            return "a struct"
        if isinstance(p, list):
            return [renamed(q) for q in p]
        if not START <= p < END:
            return p
        for name, storage in storages:
            if 0 <= p - storage.data_ptr() < storage.nbytes():
                return f"{name}+{p - storage.data_ptr()}"
        if (found := blocks.find(p)) is None:
            return f"@{p - START:x}"
        return f"#{numbers.setdefault(found[0], len(numbers))}+{found[1]}"

    for event in events:
        blocks.see(event)
        kind = event["e"]
        if kind in ("copy", "fill"):
            src = renamed(event["src"]) if START <= event["src"] < END else "host"
            out.append((kind, event["n"], renamed(event["dst"]), src, event["value"], event["s"]))
        elif kind in ("kernel", "library"):
            rest = (event["grid"], event["block"], event["shared"]) if kind == "kernel" else (event["text"],)
            args = event["args"][:-1] if event["name"].startswith("cublas") else event["args"]  # without its workspace
            out.append((event["name"], *rest, [renamed(a) for a in args], event["s"]))
        elif kind == "host":
            out.append((kind, event["s"]))
    return out


def problems(events: list[Event]) -> list[Event]:
    """Return misuses, calls that a capture forbids, addresses of memory that was freed, and errors."""
    return [e for e in events if e["e"] in ("misuse", "illegal", "dangling", "capture_invalid") or e.get("error")]


def stubs(events: list[Event]) -> list[str]:
    """Return the functions that were called and do nothing here."""
    return [e["name"] for e in events if e["e"] == "stub"]
