"""Train an image classifier from scratch or from weights, and compare runs.

    python benchmarks/examples/train.py run --model vit --out runs/vit
    python benchmarks/examples/train.py run --model resnet --out runs/resnet
    python benchmarks/examples/train.py compare runs/vit runs/resnet --plot comparison.svg

--data takes:

    digits         scikit-learn's, which need no download (default)
    cifar10, cifar100, fashion-mnist
                   torchvision downloads them into ~/.cache/torch/datasets
                   ($TORCH_HOME/datasets)
    FOLDER         FOLDER/train/CLASS/ and FOLDER/val/CLASS/ with images, or
                   FOLDER/CLASS/, of which a fifth is then held out for the
                   test

The recipe is a usual one for ViTs: AdamW, weight decay 0.05, warm-up and
cosine decay, RandomResizedCrop, RandAugment, MixUp 0.8, CutMix 1.0, label
smoothing 0.1, dropout and stochastic depth 0.1. Every model gets the same one.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

from training import check_installed

try:
    from fastvit.cli import options, terminal
except ImportError as error:  # a clone that was never installed
    sys.exit(f'train.py: {error}: run pip install ".[train]" in the clone')

_EXAMPLES = "benchmarks/examples/README.md has commands for CIFAR, fine-tuning, distillation and several GPUs."
_FIRST = os.environ.get("RANK", "0") == "0"  # of the processes of torchrun, the one that prints and writes


def _run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the run: settings, log, checkpoint, model.safetensors")
    add("--data", default="digits", help="digits, cifar10, cifar100, fashion-mnist, or a folder")
    add("--model", default="vit", help="vit, resnet, or a name of fastvit.list_models() or of timm")
    add("--set", nargs="+", action="extend", type=_assignment, default=[], metavar="NAME=VALUE",
        help="arguments of the model: depth=6")  # fmt: skip
    add("--plain", action="store_true", help="our model in plain PyTorch (fastvit.reference), with the same weights")
    add("--weights", help="start from this file or repository of the Hub, with a new head")
    add("--image-size", type=options.count, help="side of the images in pixels; default: the data's, 224 for a folder")

    group = parser.add_argument_group("recipe")
    add = group.add_argument
    add("--epochs", type=options.count, default=100, help="passes through the training images")
    add("--steps", type=options.count, help="end after so many steps instead of --epochs")
    add("--batch", type=options.count, default=128, help="images of a step, over all processes")
    add("--lr", type=_amount, default=1e-3, help="highest learning rate")
    add("--warm-up", type=_amount, default=5.0, metavar="EPOCHS", help="epochs of linear warm-up")
    add("--weight-decay", type=_amount, default=0.05, help="not of biases, norms, positions and tokens")
    add("--layer-decay", type=_amount, help="each layer learns more slowly than the next one by this factor")
    add("--clip", type=_amount, default=1.0, help="largest norm of the gradient; 0: not clipped")
    add("--rand-augment", type=int, choices=range(10), help="its magnitude; 0: none; default: 9, 5 under 16 px")
    add("--mixup", type=_amount, default=0.8, help="alpha of MixUp; 0: none")
    add("--cutmix", type=_amount, default=1.0, help="alpha of CutMix; 0: none")
    add("--smoothing", type=_share, default=0.1, help="label smoothing")
    add("--dropout", type=_share, help="of tokens, attention and MLP; default: the model's own, 0.1 for CIFAR's")
    add("--drop-path", type=_share, help="stochastic depth; default: 0.1")
    add("--teacher", metavar="RUN", help="distil the model of this run, from the same images")
    add("--distill", choices=("hard", "soft"), help="learn its choice, or its probabilities; default: hard")
    add("--temperature", type=_amount, default=1.0, help="of soft distillation")

    group = parser.add_argument_group("machine")
    add = group.add_argument
    add("--amp", action="store_true", help="bfloat16 autocast")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile the model")
    add("--parallel", choices=("ddp", "fsdp"), help="under torchrun; default: ddp")
    add("--workers", type=options.index, default=_workers(), help="processes that prepare images, for each that trains")
    add("--seed", type=options.index, default=0, help="of initial values, order, augmentation and dropout")
    add("--log-every", type=options.count, default=10, metavar="STEPS", help="steps of a line in log.jsonl")
    add("--save-every", type=options.count, metavar="STEPS", help="steps between checkpoints; default: an epoch")


def _say(text: str) -> None:
    """Print what happens next: each of these takes seconds."""
    if _FIRST:
        print(f"train.py: {text}", file=sys.stderr, flush=True)


def _resume(args: argparse.Namespace) -> int:
    from training.state import Run

    settings = Run(args.run, writes=False).settings()
    if args.workers is not None:
        settings["workers"] = args.workers
    return _train(argparse.Namespace(**{**settings, "out": args.run}), new=False)


def _train(args: argparse.Namespace, new: bool = True) -> int:
    import torch
    import torch._dynamo
    import torch.distributed as dist
    from training import models
    from training.data import DOWNLOADED, read
    from training.loop import Trainer
    from training.state import Run

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if new and args.parallel and world == 1:
        raise ValueError("--parallel is for the processes of torchrun: torchrun --nproc-per-node 8 train.py run ...")
    if new and args.distill and not args.teacher:
        raise ValueError("--distill needs --teacher RUN, whose model it learns from")
    args.parallel = (args.parallel or "ddp") if world > 1 else None
    if args.batch % (2 * world):
        raise ValueError(f"--batch must give each process an even number of images, got {args.batch} for {world}")
    if args.compile and args.compile not in torch._dynamo.list_backends(exclude_tags=()):
        raise ValueError(f"--compile must name a backend of torch.compile, got {args.compile!r}")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    run = Run(args.out, writes=_FIRST)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        if new:
            run.check_new()
        _say(f"reading {args.data}" + ", which torchvision downloads the first time" * (args.data in DOWNLOADED))
        if world > 1:
            if run.writes and args.data in DOWNLOADED:
                read(args.data)  # downloads what the others then read
            dist.barrier()
        data = read(args.data)
        if new:
            models.settle(args, data)
        elif data.classes != args.classes:
            raise ValueError(f"{args.data} has other classes than when the run began")
        _say(f"making {args.name}")
        trainer = Trainer(args, data, run, device)
        if new and run.writes:
            run.begin(args)
        _say(f"training until step {trainer.total}" + ", after compiling the model" * bool(args.compile))
        last = trainer.fit(resume=not new and run.checkpoint.exists())
        del trainer  # before the group: DDP's reducer, if it frees the group, waits for a thread that needs the GIL
    except KeyboardInterrupt:
        _say(f"interrupted: {run.kept()}")
        return 130
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if run.writes and last:
        print(f"accuracy {last['accuracy']:.2%}; weights: {run.weights}")
    return 0


def _compare(args: argparse.Namespace) -> int:
    from training import compare

    if args.plot is not None:
        terminal.check_picture("--plot", args.plot)
    if args.json is not None:
        terminal.check_folder("--json", args.json)
    curves = [compare.read(folder) for folder in args.runs]
    rows, notes = [compare.row(curve) for curve in curves], compare.notes(curves)
    terminal.print_table(compare.HEADS, rows)
    print(*notes, sep="\n")
    if args.json is not None:
        terminal.write(args.json, json.dumps({"heads": compare.HEADS, "rows": rows, "notes": notes}, indent=1) + "\n")
    if args.plot is not None:
        for theme, path in (("light", args.plot), ("dark", args.plot.with_stem(f"{args.plot.stem}_dark"))):
            terminal.write_figure(path, compare.draw(curves, theme), theme)
    return 0


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _workers() -> int:
    """Return half of the cores, shared by the processes of this machine that train; at most 8."""
    return min((os.cpu_count() or 1) // (2 * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))), 8)


def _amount(text: str, limit: float = float("inf")) -> float:
    with contextlib.suppress(ValueError):
        if 0.0 <= (value := float(text)) < limit:
            return value
    raise argparse.ArgumentTypeError(f"must be a number in [0, {limit:g}), got {text!r}")


_share = functools.partial(_amount, limit=1.0)


def main(arguments: list[str] | None = None) -> int:
    parser = terminal.Parser("train.py", description=__doc__ or "", epilog=_EXAMPLES)
    verbs = parser.add_subparsers(dest="verb", required=True)
    train = verbs.add_parser("run", help="train a model")
    _run_options(train)
    resume = verbs.add_parser("resume", help="continue a run from its last checkpoint")
    resume.add_argument("run", type=Path, help="folder of a run")
    resume.add_argument("--workers", type=options.index, help="processes that prepare images; default: the run's")
    compare = verbs.add_parser("compare", help="compare runs in a table and a picture")
    compare.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    compare.add_argument("--plot", type=Path, help="writes NAME.svg, and NAME_dark.svg for dark pages; .png too")
    compare.add_argument("--json", type=Path, help="file for the table")
    args = parser.parse_args(arguments)
    _say("loading torch and timm")
    check_installed("torch", "timm", "torchvision", "rich", "matplotlib", "PIL", "safetensors", "sklearn")
    return {"run": _train, "resume": _resume, "compare": _compare}[args.verb](args)


if __name__ == "__main__":
    sys.exit(terminal.guarded(main, name="train.py"))
