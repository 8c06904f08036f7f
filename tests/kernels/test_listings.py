"""How the reports read SASS: loops, tensor instructions, spills, loads in flight and wrong addresses."""

from typing import Any

import pytest

from benchmarks.codegen import sass
from benchmarks.codegen.accesses import early_arrivals
from benchmarks.codegen.wrong_sums import wrong_sums


def only_loop(*instructions: str) -> Any:
    """Return the loop of a listing of one loop with these instructions and a branch."""
    body = "".join(f"        /*0010*/                   {text} ;\n" for text in instructions)
    end = "        /*0030*/              @!P0 BRA `(.L_x_0) ;\n        /*0040*/      EXIT ;\n"
    return sass.parse(f".L_x_0:\n{body}{end}").hot_loop


LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R21], desc[UR20][R10.64], P1 ;
.L_x_1:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*0030*/              @!P0 BRA `(.L_x_1) ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0050*/               @P2 BRA `(.L_x_3) ;
.L_x_2:
        /*0060*/                   FFMA R3, R4, R5, R6 ;
        /*0070*/                   MUFU.EX2 R3, R3 ;
        /*0080*/              @!P1 BRA `(.L_x_0) ;
        /*0090*/                   STG.E.128 desc[UR20][R2.64], R4 ;
        /*00a0*/                   EXIT ;
.L_x_3:
        /*00b0*/                   IMAD.MOV.U32 R3, RZ, RZ, R4 ;
        /*00c0*/                   BRA `(.L_x_2) ;
"""


def test_loops_are_found_with_what_lies_out_of_line() -> None:
    listing = sass.parse(LISTING)
    assert [loop.slots for loop in listing.loops] == [10, 2]
    assert [loop.slots for loop in listing.innermost] == [2]
    hot = listing.hot_loop
    assert hot.slots == 10
    assert hot.tensor == {"HGMMA.64x64x16.F32.BF16": 1}
    assert hot.mix == {"BRA": 4, "LDGSTS": 1, "SYNCS": 1, "HGMMA": 1, "FFMA": 1, "MUFU": 1, "IMAD": 1}
    assert hot.macs_per_thread == 64 * 64 * 16 / 128
    assert not hot.one_by_one
    assert listing.whole.slots == 13


STEP = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
LOADS = "HMMA R3", "LDGSTS.E.BYPASS.128 [R21], desc[UR20][R10.64]", "LDGDEPBAR"


@pytest.mark.parametrize(
    ("instructions", "attribute", "expected"),
    [
        (("LDL R8, [R1+0x30]", "STL [R1+0x40], R214", "LDL.LU R21, [R1]", "LDS R2, [R3]"), "spilled", 3),
        # wgmma one after the other, and pipelined
        ((STEP, "WARPGROUP.DEPBAR.LE gsb0, 0x0") * 4, "one_by_one", True),
        ((STEP, "WARPGROUP.DEPBAR.LE gsb0, 0x1") * 4, "one_by_one", False),
        ((STEP, "WARPGROUP.DEPBAR.LE gsb0, 0x1") * 2, "products_in_flight", 1),
        (("DEPBAR.LE SB0, 0x0", *LOADS), "loads_in_flight", 0),
        (("DEPBAR.LE SB0, 0x1        ?WAIT4_END_GROUP", *LOADS), "loads_in_flight", 1),
    ],
)
def test_what_a_loop_does(instructions: tuple[str, ...], attribute: str, expected: object) -> None:
    assert getattr(only_loop(*instructions), attribute) == expected


@pytest.mark.parametrize(("between", "expected"), [("", 1), ("UMOV UR9, URZ", 0)])
def test_an_address_is_wrong_if_both_its_halves_come_from_one_register(between: str, expected: int) -> None:
    code = ["UIADD3 UR4, UP0, UR9, 0x20, URZ", between, "UIADD3.X UR5, UR9, -0x3ffffff0, URZ, UP0, !UPT"]
    listing = sass.parse("\n".join(f"        /*{16 * i:04x}*/   {line} ;" for i, line in enumerate(filter(None, code))))
    assert wrong_sums(listing.whole.instructions) == expected


@pytest.mark.parametrize(("between", "expected"), [([], 1), (["bar.sync 2, 128;"], 0)])
def test_warps_meet_after_a_wait_before_one_arrives(between: list[str], expected: int) -> None:
    lines = ["wgmma.wait_group.sync.aligned 1;", *between, "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];"]
    assert early_arrivals("\n".join([*lines, "mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 64;"])) == expected
