"""Check every op on the GPU against float64 by the rule of fastvit.study.accuracy.rule, in all dtypes.

    python -m benchmarks.gpu.correct --out FOLDER --group "attention short"

Outputs and gradients are compared. Memory that fastvit computes into is full of NaN before, and fastvit runs twice,
with bitwise the same results. A group of cases is a process of its own: an illegal access ends no other.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu import process, summary
from benchmarks.gpu.journal import BEGUN, words
from benchmarks.harness.draw import Draw, Runner
from benchmarks.harness.workloads import Workload, workloads
from fastvit import ops
from fastvit.ops.dropout.op import draw_seeds, dropout_op
from fastvit.study.accuracy import formulas as eager
from fastvit.study.accuracy import rule
from fastvit.study.accuracy.rule import GRADIENT, OUTPUT, Compared, poisoned, pooled_ratios

SEED = 7
_GROUPS = {  # of ops that share a process with others
    "attention_varlen": "attention masks",
    "attention_windows": "attention masks",
    "add_layer_norm": "layer_norm",
    "layer_norm_linear": "linear",
    "layer_norm_attention": "linear",
    "rotary": "layer_norm",
    "qk_norm": "layer_norm",
    "layer_norm_mlp": "mlp",
}


def cases(rehearse: bool) -> list[Workload]:
    if not rehearse:
        return workloads("verify")
    # of windows, the mask of dropout cannot be drawn apart
    dropouts = [w for w in workloads("sanitize") if group(w) == "dropout" and w.op != "attention_windows"]
    return workloads("quick", ops=("attention", "layer_norm", "mlp")) + dropouts


def dtypes(rehearse: bool) -> list[str]:
    return ["bf16", "fp32"] if rehearse else [*summary.DTYPES]


def groups(rehearse: bool) -> list[str]:
    """Return the groups of cases, a process each, the most important first."""
    found = dict.fromkeys(map(group, cases(rehearse)))
    first = ("attention short", "layer_norm", "linear", "mlp", "attention long", "patch_embed", "block", "model")
    return sorted(found, key=lambda name: first.index(name) if name in first else len(first))


def name_of(case: Workload, dtype: str) -> str:
    """Return the name of its result in the journal."""
    return f"{case.op} {case} {dtype}"


def group(case: Workload) -> str:
    if case.sizes.get("dropout_p"):
        return "dropout"
    if {"mask", "kv_heads"} & {*case.sizes}:
        return "attention masks"
    if case.op != "attention":
        return _GROUPS.get(case.op, case.op)
    d, N = case.sizes["d"], case.sizes["N"]
    return f"attention d{d}" if d != 64 else "attention short" if N < 1000 else "attention long"


def build(case: Workload, provider: str, draw: Draw) -> Runner:
    """Build the workload's runner; with dropout, fastvit draws the masks of one seed, and eager gets the same masks."""
    runner = case.runner(provider, draw)
    p = 0.1 if case.op == "dropout" else case.sizes.get("dropout_p", 0.0)
    if not p:
        return runner
    forward = runner.forward if provider == "fastvit" else _masked(case, runner, p)

    def seeded() -> Tensor | tuple[Tensor, ...]:
        torch.manual_seed(SEED)
        return forward()

    return Runner(seeded, runner.inputs, runner.parameters)


def _masked(case: Workload, runner: Runner, p: float) -> Callable[[], Tensor]:
    x, *others = runner.inputs
    if case.op == "attention" and others:
        B, N, H, d = x.shape
        mask = _attention_mask(torch.Size((B, N, 3, H, d)), p, x.device)
        learnt = runner.parameters[0] if runner.parameters else None
        return lambda: eager.attention(x, *others, attn_mask=learnt, factors=mask)
    if case.op == "attention":
        mask = _attention_mask(x.shape, p, x.device)
        return lambda: eager.attention_qkvpacked(x, factors=mask)
    torch.manual_seed(SEED)
    seeds = draw_seeds(1 if case.op == "dropout" else 2, x.device).split(1)

    def draw(seed: Tensor, width: int) -> Tensor:
        ones = torch.ones(x.shape[0] * x.shape[1], width, device=x.device)
        return dropout_op(ones, seed, p).view(*x.shape[:2], width).to(x.dtype)

    if case.op == "dropout":
        mask = draw(seeds[0], x.shape[2])
        return lambda: x * mask
    w1, b1, w2, b2 = runner.parameters
    masks = draw(seeds[0], w1.shape[0]), draw(seeds[1], x.shape[2])
    return lambda: eager.mlp(x, w1, b1, w2, b2, factors=masks)


def _attention_mask(shape: torch.Size, p: float, device: torch.device) -> Tensor:
    """Return the factors of attention's dropout, (B, H, N, N), found for one head dimension of keys at a time: all
    weights are equal, and each output element is the value of one key."""
    B, N, _, H, d = shape
    found = torch.empty(B, H, N, N, device=device)
    for first in range(0, N, d):
        width = min(d, N - first)
        qkv = torch.zeros(B, N, 3, H, d, device=device)
        qkv[:, first : first + width, 2, :, :width] = torch.eye(width, device=device)[None, :, None]
        torch.manual_seed(SEED)
        out = ops.attention_qkvpacked(qkv, dropout_p=p).transpose(1, 2)
        found[..., first : first + width] = (out[..., :width] != 0) / (1 - p)
    return found


def results(runner: Runner, gradients: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], ...]:
    """Return outputs, with autograd and without, and gradients."""
    runner.train(False)
    outputs = runner.outputs()
    found = torch.autograd.grad(outputs, runner.leaves, gradients)
    return (*(out.detach() for out in outputs), *runner.infer()), found


def check(case: Workload, dtype: torch.dtype, device: torch.device) -> tuple[list[float], str]:
    """Return the worst error ratios of outputs and of gradients, and the reason why the case fails, or ""."""
    same = True

    def compared(number: int) -> Iterator[Compared]:
        nonlocal same
        found = []
        for provider, compute in (("fastvit", None), ("eager", None), ("eager", torch.float64)):
            runner = build(case, provider, draw := Draw(dtype, device, compute, number))
            gradients = draw.cotangents(runner.outputs())
            with poisoned() if provider == "fastvit" else contextlib.nullcontext():
                found.append(results(runner, gradients))
                if provider == "fastvit":
                    again = results(runner, gradients)
        same &= all(torch.equal(a, b) for kind in (0, 1) for a, b in zip(found[0][kind], again[kind], strict=True))
        yield from rule.compared("output", *(outputs for outputs, _ in found))
        yield from rule.compared("d", *(gradients for _, gradients in found))

    of_each = pooled_ratios(compared)
    ratios = [max(ratio for name, ratio in of_each.items() if name.startswith(kind)) for kind in ("output", "d")]
    wrong = []
    if ratios[0] > OUTPUT or ratios[1] > GRADIENT:
        wrong.append("inaccurate")
    if not same:
        wrong.append("another result the second time")
    return ratios, ", ".join(wrong)


def main(arguments: list[str] | None = None) -> int:
    parser = process.arguments(__doc__)
    parser.add_argument("--group", required=True)
    chosen = parser.parse_args(arguments)
    device = process.device_of(chosen)
    journal = process.journal(chosen.out, device)
    warnings.filterwarnings("ignore", message=".*deterministic.*")  # of eager's backward passes
    torch.backends.cudnn.allow_tf32 = False  # eager's convolutions in float32 are to be float32
    bad = 0
    for case in cases(chosen.rehearse):
        if group(case) != chosen.group:
            continue
        for dtype in dtypes(chosen.rehearse):
            which = {"case": f"{case.op} {case}", "dtype": dtype}
            name = name_of(case, dtype)
            journal.add("correct", name, BEGUN, **which)
            try:
                ratios, reason = check(case, summary.DTYPES[dtype], device)
                journal.add("correct", name, "failed" if reason else "passed", ratios=ratios, reason=reason, **which)
            except Exception as error:
                reason = words(error)
                journal.add("correct", name, "failed", reason=reason, **which)
                if device.type == "cuda":
                    torch.cuda.synchronize()  # raises, and ends the process, where the error has ended the context
            bad += bool(reason)
            if reason:
                print(f"> WRONG {name}: {reason}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
