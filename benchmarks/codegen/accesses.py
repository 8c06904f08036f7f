"""Find in PTX with `.loc` comments the widths of global loads and stores by source line, and arrivals at barriers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Access:
    """`count` loads or stores of `width` bytes per thread at one place in the source."""

    kind: str  # "load" or "store"
    width: int
    count: int
    location: str  # "layer_norm.py:31:11 < layer_norm.py:79:8": line and column, then those of the caller or callers

    def __str__(self) -> str:
        return f"{self.count} {self.kind}{'s' * (self.count > 1)} of {self.width} bytes at {self.location}"


def narrow(accesses: Iterable[Access], tiles: Mapping[str, int], threads: int, granule: int = 16) -> list[Access]:
    """Return accesses of less than `granule` bytes to tiles of 16 bytes or more per thread: these tiles are moved
    element by element. Vectors such as a bias or the statistics of rows are shorter and do not count.

    tiles: from `tile_bytes`. If a place is known without all of its callers, the smallest tile that it may mean counts;
    if the compiler renamed it, the access counts from 32 bytes per thread on."""

    def tile(access: Access) -> int:
        place = access.location
        known = [size for key, size in tiles.items() if f"{key} <".startswith(f"{place} <")]
        return min(known) if known else access.width * access.count * threads // 2

    return [a for a in accesses if a.width < granule and tile(a) >= 16 * threads]


_TILE = re.compile(r"\btt\.(?:load|store) .*: (?:tensor<([\dx]+)x)?!tt\.ptr<\w*?(\d+)[^>]*>+ loc\((#loc\d*)\)")
_PLAIN = re.compile(r"^(#loc\d*) = loc\(\"(\S+)\":(\d+):(\d+)\)")
_NAMED = re.compile(r"^(#loc\d*) = loc\(\"[^\"]*\"\((#loc\d*)\)\)")
_CALLED = re.compile(r"^(#loc\d*) = loc\(callsite\((#loc\d*) at (#loc\d*)\)\)")


def tile_bytes(ttir: str) -> dict[str, int]:
    """Return the bytes of the largest tile that is loaded or stored at each place, from Triton's IR."""
    places: dict[str, list[str]] = {}
    pending = []
    for line in ttir.splitlines():
        if found := _PLAIN.match(line):
            name, path, row, column = found.groups()
            places[name] = [f"{path.rsplit('/', 1)[-1]}:{row}:{column}"]
        elif found := _NAMED.match(line) or _CALLED.match(line):
            pending.append((found.group(1), found.groups()[1:]))
    while ready := [(name, parts) for name, parts in pending if all(part in places for part in parts)]:
        for name, parts in ready:
            places[name] = [step for part in parts for step in places[part]]
        pending = [item for item in pending if item[0] not in places]
    tiles: Counter[str] = Counter()
    for shape, bits, place in _TILE.findall(ttir):
        size = math.prod(map(int, (shape or "1").split("x"))) * int(bits) // 8
        tiles |= Counter({" < ".join(dict.fromkeys(places.get(place, ["?"]))): size})
    return dict(tiles)


_LOCATION = re.compile(r"^\s*\.loc\s+(\d+)\s(?:.*inlined_at (\d+) (\d+) (\d+) )?.*(?://|;)\s*(\S+):(\d+:\d+)(.*)$")
_CALL = re.compile(r"\S+:\d+:\d+")
_PTX = re.compile(r"\b(ld|st)\.global(?:\.[a-zA-Z]\w*(?:::\w+)*)*?(?:\.v(\d))?\.[bsuf](\d+)\b")
_PTX_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global.*\],\s*\[.*?\],\s*(0x[0-9a-f]+|\d+)")


def global_accesses(text: str) -> list[Access]:
    """Return the accesses in order of source lines. `count` is that of the basic block with most accesses at the place,
    so that a prologue and its loop do not add up. TMA copies whole tiles and is not counted."""
    counts: Counter[tuple[str, int, str]] = Counter()
    block: Counter[tuple[str, int, str]] = Counter()
    names: dict[str, str] = {}  # of source files
    place = "?"
    inline = False  # in inline assembly, where LLVM may give consecutive lines of the source
    for line in text.splitlines():
        if "inline asm" in line:
            inline = "begin inline asm" in line
        elif found := _LOCATION.match(line):
            if inline:
                continue
            index, caller, row, column, name, position, callers = found.groups()
            names[index] = name
            calls = [f"{names.get(caller, '?')}:{row}:{column}"] if caller else _CALL.findall(callers)
            place = " < ".join(dict.fromkeys([f"{name}:{position}", *calls]))
        elif line.startswith("$L__BB"):
            counts |= block
            block.clear()
        elif access := _access(line):
            block[(*access, place)] += 1
    counts |= block
    return sorted(
        (Access(kind, width, n, where) for (kind, width, where), n in counts.items()),
        key=lambda a: (a.location, a.kind, a.width),
    )


def _access(line: str) -> tuple[str, int] | None:
    """Return ("load" or "store", bytes per thread) of a global access, None for any other line."""
    if found := _PTX.search(line):
        kind = "load" if found.group(1) == "ld" else "store"
        return kind, int(found.group(2) or 1) * int(found.group(3)) // 8
    if found := _PTX_COPY.search(line):
        return "load", int(found.group(1), 0)
    return None


def early_arrivals(ptx: str) -> int:
    """Count arrivals at an mbarrier between a wait for wgmma or TMA and the next bar.sync. One thread arrives for its
    whole group of warps, but waits for its own warp's part only."""
    count, waited = 0, False
    for line in ptx.splitlines():
        if "wgmma.wait_group" in line or "cp.async.bulk.wait_group" in line:
            waited = True
        elif "bar.sync" in line or "barrier.sync" in line:
            waited = False
        elif "mbarrier.arrive." in line and "expect_tx" not in line:
            count += waited
    return count
