"""Compare an op, or a model, with float64 on the GPU at hand, as `fastvit verify` does.

    python -m benchmarks.gpu.check --out FOLDER layer_norm

Every verdict goes into the journal at once. An op is a process of its own: an illegal access ends no other.
"""

from __future__ import annotations

import sys

from benchmarks.gpu import journal, summary
from fastvit import study
from fastvit.study.accuracy.verification import OPS

MODEL, DEPTH = "vit_small_patch16_224", 2


def main(arguments: list[str] | None = None) -> int:
    parser = journal.parser(__doc__)
    parser.add_argument("subject", choices=(*OPS, MODEL))
    chosen = parser.parse_args(arguments)
    device = journal.device_of(chosen)
    results = journal.open_journal(chosen.out, device)
    if chosen.subject == MODEL:
        verdicts = study.verify(MODEL, names=["layer_norm"], depth=DEPTH, device=device)
    else:
        verdicts = study.verify(names=[chosen.subject], device=device)
    failed = 0
    for verdict in verdicts:
        size = f"d{verdict.head_dim}" if verdict.head_dim else f"D{verdict.width}"
        case, dtype = f"{verdict.name} {size} N{verdict.tokens}", summary.DTYPES[verdict.dtype]
        name = f"{case} {dtype}"
        ratios = {} if verdict.output is None else {"ratios": [verdict.output, verdict.gradient]}
        reason = verdict.note if verdict.passed or verdict.note else "inaccurate"
        status = "passed" if verdict.passed else "failed"
        results.add("correct", name, status, case=case, dtype=dtype, reason=reason, **ratios)
        failed += not verdict.passed
        if not verdict.passed:
            print(f"> WRONG {name}: {reason}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
