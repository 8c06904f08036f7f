"""Record what Triton compiles a kernel for, types, alignments and constants of its arguments, from its own binder
without a GPU: a new batch size compiles nothing, which in the middle of an epoch would take seconds."""

import json
from collections import defaultdict
from pathlib import Path

import torch
from compiling import needs_triton, python

from fastvit.ops.runtime.rows import as_rows

BATCHES = (1, 2, 3, 5, 8, 16, 17)

# Kernels whose launch configuration follows the number of rows (smaller tiles where there are few, TMA where there are
# many, a single split without float32 partials): up to three of them, not one for each batch size
BY_ROWS = {"linear_fwd_kernel", "linear_dact_kernel", "gated_fwd_kernel", "gated_dact_kernel", "patch_embed_fwd_kernel"}
BY_ROWS |= {"patch_embed_bwd_image_kernel", "patch_embed_bwd_weight_kernel"}
# Kernels that run for few rows only, or for many only: otherwise the vendor's matmul does
OR_VENDOR = {"linear_fwd_kernel", "linear_dact_kernel", "gated_fwd_kernel", "gated_dact_kernel"}
OR_VENDOR |= {"act_bwd_kernel", "gated_act_kernel"}

RECORD = """
import json
import sys

from benchmarks.codegen.launches import record
from benchmarks.harness.workloads import Workload

_BY = ("TMA", "BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK_D", "GROUP_M")

def entries(op, sizes, B):
    for launch in record([Workload(op, {"B": B, **sizes})], "sm_90", ["bf16"]):
        constants = launch.constexprs
        config = {name: constants.pop(name) for name in _BY if name in constants}
        options = {name: launch.options[name] for name in ("num_warps", "num_stages", "maxnreg")}
        rest = [launch.signature, sorted(constants.items(), key=str), sorted(launch.attrs.items())]
        if launch.name == "patch_embed_bwd_weight_kernel":
            config["partial"] = launch.signature.pop("partial_ptr")
        yield launch.name, json.dumps([config, options]), json.dumps(rest, sort_keys=True, default=str)

batches, cases = json.loads(sys.argv[1])
print(json.dumps([[list(entries(op, sizes, B)) for B in batches] for op, sizes in cases]))
"""

CASES = [
    ("add_layer_norm", {"row_scale": True}),
    ("dropout", {}),
    ("linear", {"scales": True, "activation": "gelu"}),
    ("rotary", {"spelling": "interleaved"}),
    ("qk_norm", {"norm": "rms"}),
    ("mlp", {"dropout_p": 0.1, "scales": True}),
    ("layer_norm_mlp", {"activation": "swiglu", "hidden": 512}),
    ("layer_norm_mlp", {"activation": "geglu", "hidden": 1365, "inner": True}),
    ("attention", {"separate": True, "dropout_p": 0.1}),
    ("layer_norm_attention", {"rotary": "halves", "qk_norm": "layer"}),
    ("block", {}),
]


def cases() -> list[tuple[str, dict[str, object]]]:
    every: list[tuple[str, dict[str, object]]] = []
    for N, D in ((196, 192), (197, 768), (1025, 192)):
        for op, options in CASES:
            sizes = {"H": D // 64, "d": 64} if op in ("attention", "rotary", "qk_norm") else {"D": D}
            sizes |= {"H": D // 64} if op in ("block", "layer_norm_attention") else {}
            sizes |= {"out": 4 * D} if op == "linear" else {}
            every.append((op, {"N": N, **sizes, **options}))
    for px, patch in ((224, 16), (98, 14)):  # the last: images of an odd number of pixels
        every += [("patch_embed", {"px": px, "patch": patch, "D": 192, "image": i}) for i in ("wanted", "uint8")]
    return every


@needs_triton
def test_a_new_batch_size_compiles_nothing(tmp_path: Path) -> None:
    script = tmp_path / "record.py"
    script.write_text(RECORD)
    recorded = json.loads(python(str(script), json.dumps([BATCHES, cases()])))
    seen = set()
    for (op, sizes), batches in zip(cases(), recorded, strict=True):
        compiled: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        configs: dict[tuple[str, str], set[str]] = defaultdict(set)
        for B, launches in zip(BATCHES, batches, strict=True):
            for kernel, config, rest in launches:
                compiled[kernel][B].add(rest)
                configs[kernel, rest].add(config)
        for kernel, by_batch in compiled.items():
            most = max(by_batch.values(), key=len) if kernel in OR_VENDOR else by_batch[1]
            for B in BATCHES:
                same = by_batch[B] <= most if kernel in OR_VENDOR else by_batch[B] == most
                assert same, f"{op} {sizes}: {kernel} at B = {B}"
        for (kernel, _), several in configs.items():
            assert len(several) <= (3 if kernel in BY_ROWS else 1), f"{op} {sizes}: {kernel} with {several}"
        seen |= set(compiled)
    assert seen >= BY_ROWS | {"attention_bwd_dq_kernel", "layer_norm_bwd_kernel", "column_sum_kernel"}


def test_an_expanded_row_is_laid_out_alike_at_every_batch_size() -> None:
    assert {as_rows(torch.ones(B, 1, 8).expand(B, 5, 8)).stride() for B in (1, 2, 3)} == {(8, 1)}
