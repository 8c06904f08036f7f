"""Read loops and instructions of a compiled kernel from its disassembly.

NVIDIA listings come from `nvdisasm -c` (labels at branch targets), AMD ones are LLVM's assembly. Both are cut into
basic blocks. Loops are the natural loops of the control flow graph, so that blocks that the assembler moved out of line
count where they run. An issue slot is one instruction of one warp.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import networkx

_TENSOR = re.compile(r"[A-Z]+MMA\b|v_\w*(?:mfma|wmma)")  # HMMA, HGMMA, IMMA, UTCHMMA; AMD's
# `?`: for Blackwell, nvdisasm may append a wait time
_NV_LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)\s*([^;?]*)[^;]*;")
_NV_LABEL = re.compile(r"^([.$\w]+):")
_NV_TARGET = re.compile(r"`\(([.$\w]+)\)")
_AMD_LINE = re.compile(r"^\s+([a-z]+_[a-z0-9_]+)\s*([^;]*)")
_AMD_LABEL = re.compile(r"^(\.LBB\w+):")


@dataclass(frozen=True)
class Instruction:
    opcode: str  # with its suffixes: "LDG.E.128", "HGMMA.64x64x16.F32.BF16"
    operands: str
    predicated: bool = False

    @property
    def tensor(self) -> bool:
        return _TENSOR.match(self.opcode) is not None

    @property
    def macs(self) -> float:
        """Multiply-adds of a tensor-core instruction per thread of the warps that issue it; 0 if the mnemonic has no
        shape (Blackwell keeps it in a descriptor)."""
        if shape := re.match(r"(?:[HIQB]GMMA\.(?:SP\.)?|v_s?mfmac?_\w*?_)(\d+)x(\d+)x(\d+)", self.opcode):
            m, n, k = map(int, shape.groups())
            return m * n * k / (64 if self.opcode.startswith("v_") else 128)
        if warp := re.match(r"[HIQD]MMA\.(?:SP\.)?168(\d+)", self.opcode):
            return 16 * 8 * int(warp.group(1)) / 32
        return 0.0


@dataclass(frozen=True)
class Region:
    """Some instructions of a kernel: a loop, or all of it."""

    instructions: tuple[Instruction, ...]

    @property
    def slots(self) -> int:
        """Instructions that a warp issues in one pass of the region."""
        return len(self.instructions)

    @cached_property
    def tensor(self) -> Counter[str]:
        """Counts of tensor-core instructions by mnemonic."""
        return Counter(i.opcode for i in self.instructions if i.tensor)

    @property
    def mix(self) -> dict[str, int]:
        """Slots by the first part of the mnemonic, the most frequent first."""
        return dict(Counter(i.opcode.split(".")[0] for i in self.instructions).most_common())

    @property
    def spilled(self) -> int:
        """Slots of loads and stores of local memory, where ptxas keeps spilled registers."""
        return sum(i.opcode.startswith(("LDL", "STL")) for i in self.instructions)

    @cached_property
    def macs_per_thread(self) -> float:
        return sum(i.macs for i in self.instructions)

    @property
    def one_by_one(self) -> bool:
        """Whether ptxas serialised wgmma (its message C7515): every one waits for the one before, and not only for the
        last one of a matmul. A wait that leaves one in flight (0x1) is in the source."""
        waits = [i for i in self.instructions if i.opcode.startswith("WARPGROUP.DEPBAR") and i.operands.endswith("0x0")]
        return 2 < sum(i.opcode.startswith("HGMMA") for i in self.instructions) <= len(waits)

    @property
    def products_in_flight(self) -> int | None:
        """Matmuls by wgmma that the last wait leaves in flight; None without a wait."""
        waits = [i.operands for i in self.instructions if i.opcode.startswith("WARPGROUP.DEPBAR")]
        return int(waits[-1].split(",")[-1], 16) if waits else None

    @property
    def loads_in_flight(self) -> int | None:
        """Groups of asynchronous copies in flight while the loop's matmuls run: the least of all matmuls; None for a
        loop without such copies. At 0 the loop waits for the loads that it has just issued."""
        if not any(i.opcode.startswith("LDGSTS") for i in self.instructions):
            return None
        pending, least = 0, 0
        for _ in range(8):  # passes, until the number of groups in flight no longer grows
            during = []
            for i in self.instructions:
                if i.opcode == "LDGDEPBAR":
                    pending += 1
                elif i.opcode == "DEPBAR.LE" and i.operands.startswith("SB0"):
                    pending = min(pending, int(i.operands.split(",")[1], 16))
                elif i.tensor:
                    during.append(pending)
            least = min(during, default=0)
        return least


@dataclass(frozen=True)
class Listing:
    """A disassembled kernel."""

    whole: Region
    loops: tuple[Region, ...]  # in program order of their heads
    innermost: tuple[Region, ...]  # loops without a loop inside
    hot_loops: tuple[Region, ...]  # loops with tensor-core work and no such loop inside

    @property
    def hot_loop(self) -> Region:
        """The loop with the most tensor-core work; the whole kernel if its tensor-core work is in no loop; without
        tensor-core work the longest innermost loop, or the whole kernel if it has no loops."""
        if self.hot_loops:
            return max(self.hot_loops, key=lambda loop: (loop.macs_per_thread, loop.tensor.total()))
        if self.whole.tensor:
            return self.whole
        return max(self.innermost, key=lambda loop: loop.slots, default=self.whole)


def parse(text: str) -> Listing:
    """Parse a kernel. text: output of `nvdisasm -c`, or AMD assembly."""
    blocks, graph = _blocks(text)
    bodies = _natural_loops(graph)

    def region(body: Iterable[int]) -> Region:
        return Region(tuple(i for n in sorted(body) for i in blocks[n]))

    loops = {head: region(body) for head, body in bodies.items()}
    inside = {head: [loops[other] for other in bodies if bodies[other] < bodies[head]] for head in bodies}
    return Listing(
        region(graph),
        tuple(loops.values()),
        tuple(loop for head, loop in loops.items() if not inside[head]),
        tuple(loop for head, loop in loops.items() if loop.tensor and not any(o.tensor for o in inside[head])),
    )


def _blocks(text: str) -> tuple[list[list[Instruction]], networkx.DiGraph]:
    """Return basic blocks in program order, and the control flow graph of those that can be reached from the first,
    which leaves out the padding at the end."""
    import networkx  # imported here, because recording launches does not need it

    blocks: list[list[Instruction]] = [[]]
    labels: dict[str, int] = {}
    falls: list[tuple[int, int]] = []
    jumps: list[tuple[int, str]] = []
    amd = ".amdgcn_target" in text
    for line in text.splitlines():
        if label := (_AMD_LABEL if amd else _NV_LABEL).match(line):
            if blocks[-1]:
                falls.append((len(blocks) - 1, len(blocks)))
                blocks.append([])
            labels[label.group(1)] = len(blocks) - 1
        elif instruction := _instruction(line, amd):
            blocks[-1].append(instruction)
            ends, target, through = _branch(instruction)
            if target:
                jumps.append((len(blocks) - 1, target))
            if ends:
                falls += [(len(blocks) - 1, len(blocks))] * through
                blocks.append([])
            if instruction.opcode == "s_endpgm":
                break
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(blocks)))
    graph.add_edges_from([*falls, *((n, labels[name]) for n, name in jumps if name in labels)])
    return blocks, graph.subgraph({0} | networkx.descendants(graph, 0))


def _instruction(line: str, amd: bool) -> Instruction | None:
    if not (match := (_AMD_LINE if amd else _NV_LINE).match(line)):
        return None
    *predicate, opcode, operands = match.groups()
    return Instruction(opcode, operands.strip(), any(predicate))


def _branch(i: Instruction) -> tuple[bool, str | None, bool]:
    """Return (ends its block, target label, execution may continue after it)."""
    if i.opcode.startswith(("s_cbranch", "s_branch")):
        return True, i.operands.split()[0], i.opcode.startswith("s_cbranch")
    base = i.opcode.split(".")[0]
    if base == "CALL":  # on sm_80, ptxas may leave a loop with a call
        target = _NV_TARGET.search(i.operands)
        return True, target.group(1) if target else None, True
    if base in ("BRA", "JMP"):
        target = _NV_TARGET.search(i.operands)
        conditional = i.predicated or bool(re.match(r"!?U?P\d", i.operands)) or ".DIV" in i.opcode
        return True, target.group(1) if target else None, conditional
    return base in ("EXIT", "RET", "s_endpgm"), None, i.predicated


def _natural_loops(graph: networkx.DiGraph) -> dict[int, set[int]]:
    """Return the blocks of each loop by its head block, from back edges to a dominator."""
    import networkx

    dominator = networkx.immediate_dominators(graph, 0)

    def dominates(head: int, n: int) -> bool:
        while n not in (head, 0):
            n = dominator[n]
        return n == head

    loops: dict[int, set[int]] = {}
    for n, head in graph.edges:
        if dominates(head, n):
            rest = graph.subgraph(set(graph) - {head})
            loops.setdefault(head, {head}).update({n}, networkx.ancestors(rest, n) if n != head else ())
    return dict(sorted(loops.items()))
