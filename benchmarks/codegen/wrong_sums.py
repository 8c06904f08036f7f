"""Find what ptxas 12.8, of triton 3.6 and 3.7, compiles wrongly: sums with 64-bit addresses whose upper half is zero.

The addition takes two instructions, and for the upper half of the address ptxas may take the register of the lower one:

    UIADD3 UR4, UP0, UR9, 0x20, URZ
    UIADD3.X UR5, UR9, -0x3ffffff0, URZ, UP0, !UPT          should add to URZ

Triton's descriptors of operands in shared memory are such addresses. On an H200, kernels with these instructions
returned nonsense or read outside their memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from benchmarks.codegen.sass import Instruction

_LOWER = re.compile(r"(UR\d+), (UP\d), (UR\d+), \S+, URZ$")
_UPPER = re.compile(r"UR\d+, (UR\d+), \S+, URZ, (UP\d), !UPT$")
_WRITTEN = re.compile(r"UR(\d+)")


def wrong_sums(instructions: Iterable[Instruction]) -> int:
    """Count the additions whose halves come from one register that nothing has written in between."""
    found = 0
    lower: dict[str, str] = {}  # register of the lower half, by the predicate that carries
    for instruction in instructions:
        operands = instruction.operands.strip()
        if instruction.opcode == "UIADD3.X" and (upper := _UPPER.match(operands)):
            found += lower.get(upper[2]) == upper[1]
        if instruction.opcode.startswith(("U", "R2UR")) and (written := _WRITTEN.match(operands)):
            count = 2 if instruction.opcode.endswith((".64", ".WIDE", ".WIDE.U32")) else 1
            changed = {f"UR{int(written[1]) + i}" for i in range(count)}
            lower = {carry: register for carry, register in lower.items() if register not in changed}
        if instruction.opcode == "UIADD3" and (added := _LOWER.match(operands)) and added[1] != added[3]:
            lower[added[2]] = added[3]
    return found
