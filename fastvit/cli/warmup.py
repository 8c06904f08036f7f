"""`fastvit warmup`: compile a model's kernels before its first step."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time

from fastvit._base import which_triton
from fastvit.cli import options, terminal

DTYPES = ("fp32", "tf32", "bf16", "fp16", "amp")

_EPILOG = """A model's first step compiles its Triton kernels one after the other. This
compiles them beforehand, in several processes, into Triton's cache: the folder
$TRITON_CACHE_DIR, or ~/.triton/cache. With --target it needs no GPU, so the
cache can be built into a container image.

The first step finds a kernel in the cache if these agree:
  versions    of fastvit and triton, and Triton's environment variables
  GPU         its architecture (--target sm_90)
  the step    dtype, image size, and whether it trains
  batch size  roughly: the number of rows chooses the tiles of matmuls and of
              patch embedding. For a ViT-B at 224 px, batches of 1, 8 and 16
              have all kernels of 1 to 512. Measured tables choose for numbers
              of rows within a factor of two: then name all batch sizes.
  processors  patch embedding depends on the number of --multiprocessors; by
              default it is that of A100, A40, L40S, H100, B200 or RTX 5090
  tables      those measured for the current GPU are used, with --target none;
              the first step compiles the kernels that they change
Tensors that are not aligned to 16 bytes, such as some slices, have kernels of
their own, which the first step compiles too.

examples:
  fastvit warmup vit_base_patch16_224 --batch 1,8,16 --mode infer
  fastvit warmup vit_base_patch16_224 --mode train --dtype amp
  fastvit warmup module:function --target sm_80 --batch 1
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    options.add_model(parser)
    options.add_batches(parser, "32")
    options.add_image_size(parser)
    text = "tf32: float32 with matmuls in TF32; amp: under autocast to bf16"
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help=text)
    parser.add_argument("--mode", choices=("train", "infer", "both"), default="both", help="whose kernels")
    parser.add_argument("--target", metavar="ARCH", help="sm_80, sm_90, ... (default: the current GPU)")
    parser.add_argument("--multiprocessors", type=options.count, metavar="N", help="of the GPU that --target is for")
    parser.add_argument("--processes", type=options.count, metavar="N", help="at most (default: one for each core)")


def run(args: argparse.Namespace) -> int:
    if args.multiprocessors and not args.target:
        raise ValueError("--multiprocessors is for --target: the GPU at hand says how many it has")
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise ValueError("with TRITON_INTERPRET=1 nothing is compiled")
    which_triton.check("fastvit warmup")
    import torch

    from fastvit import warmup
    from fastvit.study.memory.step import Setting, StepSpec
    from fastvit.study.sources.find import find
    from fastvit.study.sources.model_source import pixels

    source = find(args.model)
    size, _ = source.sizes(args.image_size)
    target, multiprocessors = _target(args)
    torch.set_float32_matmul_precision("high" if args.dtype == "tf32" else "highest")
    dtype = "fp32" if args.dtype == "tf32" else args.dtype
    modes = ("infer", "train") if args.mode == "both" else (args.mode,)
    recorder = warmup.Recorder(target)
    with terminal.progress(len(modes) * len(args.batch), "finding kernels") as progress:
        for batch, mode in itertools.product(args.batch, modes):
            progress(f"{mode}, batch {batch}")
            spec = StepSpec(source, size, batch, Setting(mode, dtype, "none"), gpu=True)
            warmup.record_step(recorder, spec, multiprocessors)
    step = f"{source.name}, batch {', '.join(map(str, args.batch))}, {pixels(size)} px, {args.dtype}"
    launches = list(recorder.launches.values())
    if not launches:
        raise ValueError(f"{step}: Triton takes none of its ops")
    start, compiled_now, failed = time.perf_counter(), 0, 0
    processes = min(args.processes or warmup.cores(), len(launches))
    with terminal.progress(len(launches), "compiling") as progress:
        for launch, compiled in warmup.in_processes(warmup.compiled, launches, processes):
            progress(launch.name.removesuffix("_kernel"))
            compiled_now += compiled is True
            if isinstance(compiled, str):
                failed += 1
                print(f"fastvit: {launch.name} does not compile: {compiled.splitlines()[0]}", file=sys.stderr)
    cached = len(launches) - compiled_now - failed
    seconds = time.perf_counter() - start
    print(f"{step}, {' and '.join(modes)}, for {target}:")
    print(f"{len(launches)} kernels, {cached} of them compiled before, in {seconds:.1f} s by {processes} processes")
    return int(failed > 0)


def _target(args: argparse.Namespace) -> tuple[str, int]:
    """Return the architecture to compile for, and the number of multiprocessors to choose for."""
    import torch

    from fastvit import warmup

    nvidia = [arch for arch in warmup.MULTIPROCESSORS if arch.startswith("sm_")]
    if args.target is None:
        if torch.version.hip:
            raise ValueError("kernels are compiled beforehand for NVIDIA GPUs only")
        try:
            return warmup.gpu_at_hand()
        except ValueError as error:
            raise ValueError(f"{error}; --target {'|'.join(nvidia)} compiles without one") from None
    if args.target not in nvidia:
        raise ValueError(f"--target must be one of {', '.join(nvidia)}, got {args.target!r}")
    return args.target, args.multiprocessors or warmup.MULTIPROCESSORS[args.target]
