"""The time plan of the first nine minutes: by when each part has to end, and how long the rest will take.

Seconds since the start, for a GPU with 16 cores; a run of another length shrinks or stretches them all. A part that
ends early gives its time to the next ones; one that reaches its limit is ended, and what it has found so far stays.
An H200 with 16 cores took less: machine 11 s, 677 kernels 42 s, all checks 45 s, tuning 28 s, rows 91 s, more 30 s. What
torch.compile takes is an estimate.

| part    | ends by | what it does, and why so long |
| ------- | ------- | ----------------------------- |
| machine |      40 | torch is imported, one kernel launched, the limits measured; alone, because limits are timed |
| kernels |     125 | 680 kernels at 1.3 s each on 15 processes are 59 s, and 25 s to start and to record them; rows, tuning and bfloat16 come first, so that a cut costs the checks of float16 and float32 a compilation each |
| checks  |     240 | ops against float64 in 6 processes; next to them compute-sanitizer, and torch.compile in 5, at most 4 models each: nothing is timed yet, so that all may share GPU and cores |
| models  |     280 | 20 compiled models are timed, one process after the other, at about 1.5 s, and 5 processes end, at 2 s; before the rows, because each process holds memory that the largest rows need |
| tuning  |     338 | 42 choices of `gemm` and `use_triton_gemm` at the shapes of the rows, at 1 to 2 s; the wider model first |
| rows    |     472 | 32 rows of attention, block and models, at about 4 s; those at batch 256 take up to 30 s |
| more    |     535 | 20 rows of the other ops, at about 2 s; 9 minutes less what ending takes |

From `models` on one process at a time uses the GPU. No compilation by torch.compile begins that would run into that
time, and one that does is ended there.
"""  # noqa: E501

from __future__ import annotations

PARTS = {"machine": 40.0, "kernels": 125.0, "checks": 240.0, "models": 280.0, "tuning": 338.0, "rows": 472.0,
         "more": 535.0}  # fmt: skip
SECONDS = PARTS["more"]
# Seconds that a rehearsal takes on two cores
REHEARSED = {"machine": 5.0, "kernels": 4.0, "checks": 22.0, "models": 5.0, "tuning": 35.0, "rows": 3.0, "more": 3.0}


class Plan:
    """A run of so many seconds. todo: the parts that have something to do."""

    def __init__(self, seconds: float, todo: set[str], rehearse: bool = False) -> None:
        self.seconds = seconds
        self._scale = seconds / SECONDS
        ends = [0.0, *PARTS.values()]
        lengths = {part: (end - start) * self._scale for part, start, end in zip(PARTS, ends, ends[1:], strict=False)}
        self._lengths = REHEARSED if rehearse else lengths
        self.todo = [part for part in PARTS if part in todo]
        self._part, self._since = "", 0.0

    def begin(self, part: str, elapsed: float) -> float:
        """Note that the part begins; seconds since the start by which it has to end."""
        self._part, self._since = part, elapsed
        return PARTS[part] * self._scale

    def left(self, elapsed: float) -> float:
        """Return the seconds that the rest will take by the plan."""
        parts = [*PARTS]
        now = parts.index(self._part) if self._part else -1
        later = sum(self._lengths[part] for part in self.todo if parts.index(part) > now)
        current = self._lengths[self._part] - (elapsed - self._since) if self._part in self.todo else 0.0
        return min(later + max(current, 0.0), max(self.seconds - elapsed, 0.0))
