"""What a compiled kernel issues, read off its disassembly: loops, instruction mix by pipe, widths of global loads.

NVIDIA listings come from `nvdisasm -c` (labels at branch targets), AMD ones are LLVM's assembly. Both are cut into
basic blocks; loops are the natural loops of the control flow graph, so blocks that the assembler placed out of line
count where they run. An issue slot is one instruction of one warp.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

PIPES = ("tensor", "sfu", "fma", "alu", "uniform", "memory", "control")

# By the opcode's first part. What is not listed here is integer or logic work: "alu", or "uniform" with a leading U.
_OPCODES = {
    "tensor": "HMMA IMMA DMMA BMMA QMMA OMMA HGMMA IGMMA QGMMA BGMMA UTCHMMA UTCIMMA UTCQMMA UTCOMMA",
    "sfu": "MUFU F2F F2I I2F FRND POPC FLO BREV F2IP",
    "fma": "FADD FMUL FFMA FADD2 FMUL2 FFMA2 HADD2 HMUL2 HFMA2 HFMA2_MMA IMAD IDP FADD32I FMUL32I FFMA32I FSWZADD",
    "memory": "LDG STG LD ST LDS STS LDSM STSM LDL STL LDC LDCU ULDC LDGSTS ATOM ATOMG ATOMS RED REDG REDUX SHFL SYNCS "
    "UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UTMACMDFLUSH UBLKCP LDTM STTM UTCCP CCTL MATCH LDGMC MOVM",
    "control": "BRA BRX JMP EXIT RET CALL BSSY BSYNC BREAK BAR UCGABAR_ARV UCGABAR_WAIT WARPSYNC WARPGROUP NOP DEPBAR "
    "LDGDEPBAR ARRIVES MEMBAR ERRBAR FENCE YIELD NANOSLEEP KILL BPT ELECT PLOP DEPBAR.LE UTCBAR UTCATOMSWS ACQBULK "
    "WARPGROUPSET USETMAXREG PREEXIT WARPGROUP.ARRIVE WARPGROUP.DEPBAR SETMAXREG ACQSHMINIT CCTLL UVIADDNOP",
}
_PIPE = {opcode: pipe for pipe, opcodes in _OPCODES.items() for opcode in opcodes.split()}

_NV_LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)\s*([^;]*);")
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
    def pipe(self) -> str:
        if self.opcode[0].islower():
            return _amd_pipe(self.opcode)
        base = self.opcode.split(".")[0]
        return _PIPE.get(base) or ("uniform" if base[0] == "U" or base in ("R2UR", "S2UR") else "alu")

    @property
    def macs(self) -> float:
        """Multiply-adds of a tensor-core instruction per thread of the warps that issue it; 0 where the mnemonic does
        not tell (Blackwell keeps the shape in a descriptor)."""
        if warpgroup := re.match(r"[HIQB]GMMA\.(?:SP\.)?(\d+)x(\d+)x(\d+)", self.opcode):
            m, n, k = map(int, warpgroup.groups())
            return m * n * k / 128
        if warp := re.match(r"[HIQD]MMA\.(?:SP\.)?(\d+)", self.opcode):
            return _mma_volume(warp.group(1)) / 32
        if wave := re.match(r"v_s?mfmac?_\w*?_(\d+)x(\d+)x(\d+)", self.opcode):
            m, n, k = map(int, wave.groups())
            return m * n * k / 64
        return 0.0


def _mma_volume(digits: str) -> int:
    """ "16816" -> 16 * 8 * 16, "1688" -> 16 * 8 * 8."""
    k = int(digits[3:] or 8)
    return 16 * 8 * k


def _amd_pipe(opcode: str) -> str:
    if "mfma" in opcode or "wmma" in opcode:
        return "tensor"
    if re.match(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_", opcode):
        return "sfu"
    if re.match(r"v_(pk_)?(add|sub|mul|fma|fmac|mac|mad)\w*_f(16|32|64)", opcode):
        return "fma"
    if re.match(r"(global|buffer|flat|ds|scratch|s_load|s_buffer)_", opcode):
        return "memory"
    if re.match(r"s_(cbranch|branch|endpgm|barrier|waitcnt|nop|setprio|sleep|sendmsg)", opcode):
        return "control"
    return "uniform" if opcode.startswith("s_") else "alu"


@dataclass
class Block:
    instructions: list[Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Region:
    """Some instructions of a kernel: a loop, or all of it."""

    instructions: tuple[Instruction, ...]

    @property
    def slots(self) -> int:
        """Instructions that a warp issues in one pass."""
        return len(self.instructions)

    @cached_property
    def pipes(self) -> dict[str, int]:
        """Slots by pipe. "fma" holds float32 and packed-half arithmetic and IMAD, "sfu" what runs at a quarter rate."""
        counts = Counter(i.pipe for i in self.instructions)
        return {pipe: counts[pipe] for pipe in PIPES}

    @cached_property
    def opcodes(self) -> Counter[str]:
        """Counts by full mnemonic."""
        return Counter(i.opcode for i in self.instructions)

    def count(self, prefix: str) -> int:
        """Instructions whose mnemonic begins so: count("MUFU.EX2"), count("LDGSTS")."""
        return sum(n for opcode, n in self.opcodes.items() if opcode.startswith(prefix))

    @cached_property
    def macs_per_thread(self) -> float:
        return sum(i.macs for i in self.instructions)

    @property
    def one_by_one(self) -> bool:
        """Whether ptxas let every wgmma wait for the one before (its message C7515), instead of for a matmul's last. A
        wait that leaves one in flight (0x1) is in the source."""
        waits = [i for i in self.instructions if i.opcode.startswith("WARPGROUP.DEPBAR") and i.operands.endswith("0x0")]
        return 2 < self.count("HGMMA") <= len(waits)

    def slots_per(self, elements: float) -> float:
        """Slots over the elements (scores, outputs) that one thread owns in one pass."""
        return self.slots / elements


@dataclass(frozen=True)
class Listing:
    """A disassembled kernel."""

    whole: Region
    loops: tuple[Region, ...]  # innermost first is not implied: program order of their heads
    innermost: tuple[Region, ...]  # loops without a loop inside
    hot_loops: tuple[Region, ...]  # loops with tensor-core work and no such loop inside

    @property
    def hot_loop(self) -> Region:
        """The part that does the work: the loop with the most tensor-core work; all of a matmul without such a loop;
        else the longest innermost loop, or all of a kernel without loops."""
        if self.hot_loops:
            return max(self.hot_loops, key=lambda loop: (loop.macs_per_thread, loop.pipes["tensor"]))
        if self.whole.pipes["tensor"]:
            return self.whole
        return max(self.innermost, key=lambda loop: loop.slots, default=self.whole)


def parse(text: str) -> Listing:
    """text: `nvdisasm -c` of one kernel, or AMD assembly."""
    blocks = _blocks(text)
    whole = Region(tuple(i for n in _reachable(blocks) for i in blocks[n].instructions))  # not the padding at the end
    bodies = _natural_loops(blocks)
    regions = {
        head: Region(tuple(i for n in sorted(body) for i in blocks[n].instructions)) for head, body in bodies.items()
    }

    def inner(head: int) -> Iterable[int]:
        return (other for other in bodies if other != head and bodies[other] < bodies[head])

    innermost = [h for h in bodies if not any(True for _ in inner(h))]
    hot = [h for h in bodies if regions[h].pipes["tensor"] and not any(regions[o].pipes["tensor"] for o in inner(h))]
    return Listing(
        whole,
        tuple(regions.values()),
        tuple(regions[h] for h in innermost),
        tuple(regions[h] for h in hot),
    )


def _blocks(text: str) -> list[Block]:
    """Basic blocks in program order, with edges."""
    blocks = [Block()]
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    falls: list[bool] = [True]

    def begin() -> None:
        blocks.append(Block())
        falls.append(True)

    amd = ".amdgcn_target" in text
    for line in text.splitlines():
        if label := (_AMD_LABEL if amd else _NV_LABEL).match(line):
            if blocks[-1].instructions:
                begin()
            labels[label.group(1)] = len(blocks) - 1
            continue
        instruction = _amd_instruction(line) if amd else _nv_instruction(line)
        if instruction is None:
            continue
        blocks[-1].instructions.append(instruction)
        ends, target, through = _branch(instruction)
        if ends:
            falls[-1] = through
            if target is not None:
                jumps.append((len(blocks) - 1, target))
            begin()
        if instruction.opcode == "s_endpgm":
            break
    for n, through in enumerate(falls[:-1]):
        if through:
            blocks[n].successors.append(n + 1)
    for n, name in jumps:
        if name in labels:
            blocks[n].successors.append(labels[name])
    return blocks


def _nv_instruction(line: str) -> Instruction | None:
    match = _NV_LINE.match(line)
    return Instruction(match.group(2), match.group(3).strip(), match.group(1) is not None) if match else None


def _amd_instruction(line: str) -> Instruction | None:
    match = _AMD_LINE.match(line)
    return Instruction(match.group(1), match.group(2).strip()) if match else None


def _branch(i: Instruction) -> tuple[bool, str | None, bool]:
    """(ends its block, target label, execution may go on behind it)"""
    if i.opcode[0].islower():
        if i.opcode.startswith(("s_cbranch", "s_branch")):
            return True, i.operands.split()[0], i.opcode.startswith("s_cbranch")
        return i.opcode == "s_endpgm", None, False
    base = i.opcode.split(".")[0]
    if base in ("BRA", "JMP"):
        target = _NV_TARGET.search(i.operands)
        conditional = i.predicated or bool(re.match(r"!?U?P\d", i.operands)) or ".DIV" in i.opcode
        return True, target.group(1) if target else None, conditional
    if base in ("EXIT", "RET"):
        return True, None, i.predicated
    return False, None, True


def _natural_loops(blocks: list[Block]) -> dict[int, set[int]]:
    """Head block -> blocks of its loop, by back edges to a dominator."""
    predecessors: list[list[int]] = [[] for _ in blocks]
    for n, block in enumerate(blocks):
        for s in block.successors:
            predecessors[s].append(n)
    dominators = _dominators(blocks, predecessors)
    loops: dict[int, set[int]] = {}
    for n, block in enumerate(blocks):
        for head in block.successors:
            if head in dominators.get(n, ()):
                body = loops.setdefault(head, {head})
                pending = [n]
                while pending:
                    at = pending.pop()
                    if at not in body:
                        body.add(at)
                        pending.extend(p for p in predecessors[at] if p in dominators)
    return dict(sorted(loops.items()))


def _dominators(blocks: list[Block], predecessors: list[list[int]]) -> dict[int, set[int]]:
    """Of the blocks that can be reached from the first."""
    reachable = _reachable(blocks)
    dominators = {n: set(reachable) for n in reachable}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for n in reachable[1:]:
            incoming = [dominators[p] for p in predecessors[n] if p in reachable]
            new = set.intersection(*incoming) | {n}
            if new != dominators[n]:
                dominators[n], changed = new, True
    return dominators


def _reachable(blocks: list[Block]) -> list[int]:
    """Those that can be reached from the first, in program order."""
    reachable: set[int] = set()
    pending = [0]
    while pending:
        n = pending.pop()
        if n not in reachable:
            reachable.add(n)
            pending.extend(blocks[n].successors)
    return sorted(reachable)
