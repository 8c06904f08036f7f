"""Train an image classifier from scratch or from weights, and compare runs.

    python benchmarks/examples/train.py run --model vit --out runs/vit
    python benchmarks/examples/train.py run --model resnet --out runs/resnet
    python benchmarks/examples/train.py compare runs/vit runs/resnet --plot comparison.svg

The recipe is a usual one for ViTs, of timm's parts: AdamW, warm-up and cosine
decay, RandomResizedCrop, RandAugment, MixUp, CutMix, label smoothing, dropout
and stochastic depth. Every model gets the same one.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

try:
    from fastvit.cli import options, terminal
except ImportError as error:  # a clone that was never installed
    sys.exit(f'train.py: {error}: run pip install ".[train]" in the clone')

HEADS = ["run", "model", "params", "GFLOPs", "accuracy", "best", "loss", "images/s", "minutes"]


def check_installed(*modules: str) -> None:
    """Raise ImportError, with the command that helps, if one of these is missing or torchvision does not fit torch."""
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise ImportError(f'not installed: {", ".join(missing)}. Run pip install ".[train]" in the clone')
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError) as error:  # RuntimeError: its operators do not load
        how = 'install both of one build (README.md, "Install"), then pip install ".[train]"'
        raise ImportError(f"torchvision does not fit torch: {how}. It says: {error}") from None


def run_options(parser: argparse.ArgumentParser) -> None:
    add, cores = parser.add_argument, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    add("--out", type=Path, required=True, help="folder of the run: settings, log, checkpoint, model.safetensors")
    add("--data", default="digits", help="digits, cifar10, cifar100, fashion-mnist, or a folder with "
        "train/CLASS/ and val/CLASS/, or with CLASS/, of which a fifth is held out for the test")  # fmt: skip
    add("--model", default="vit", help="vit, resnet, or a name of fastvit.list_models() or of timm")
    add("--set", nargs="+", action="extend", type=assignment, default=[], metavar="NAME=VALUE",
        help="arguments of the model: depth=6")  # fmt: skip
    add("--plain", action="store_true", help="our model in plain PyTorch (fastvit.reference), with the same weights")
    add("--weights", help="start from this file or repository of the Hub, with a new head")
    add("--image-size", type=options.count, help="side of the images in pixels; default: the data's, 224 for a folder")
    add("--epochs", type=options.count, default=100, help="passes through the training images")
    add("--batch", type=options.count, default=128, help="images of a step, over all processes")
    add("--lr", type=amount, default=1e-3, help="highest learning rate")
    add("--warm-up", type=amount, default=5.0, metavar="EPOCHS", help="epochs of linear warm-up")
    add("--weight-decay", type=amount, default=0.05, help="not of biases, norms, positions and tokens")
    add("--layer-decay", type=amount, help="each layer learns more slowly than the next one by this factor")
    add("--clip", type=amount, default=1.0, help="largest norm of the gradient; 0: not clipped")
    add("--crop", type=amount, help="least area of RandomResizedCrop; default: 0.3, 0.7 under 32 px")
    add("--rand-augment", type=int, choices=range(10), help="its magnitude; 0: none; default: 9, 0 under 16 px")
    add("--mixup", type=amount, default=0.8, help="alpha of MixUp; 0: none")
    add("--cutmix", type=amount, default=1.0, help="alpha of CutMix; 0: none")
    add("--smoothing", type=amount, default=0.1, help="label smoothing")
    add("--dropout", type=amount, help="of tokens, attention and MLP; default: the model's own, 0.1 for CIFAR's")
    add("--drop-path", type=amount, default=0.1, help="stochastic depth")
    add("--teacher", metavar="RUN", help="distil the model of this run: learn its choices, too, from the same images")
    add("--amp", action="store_true", help="bfloat16 autocast")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile the model")
    add("--parallel", choices=("ddp", "fsdp"), default="ddp", help="under torchrun")
    add("--workers", type=options.index, default=min(cores // 2, 8), help="processes that prepare images, for each GPU")
    add("--seed", type=options.index, default=0, help="of initial values, order, augmentation and dropout")
    add("--log-every", type=options.count, default=10, metavar="STEPS", help="steps of a line in log.jsonl")


def assignment(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def amount(text: str) -> float:
    if not 0.0 <= (value := float(text)) < float("inf"):
        raise ValueError
    return value


def train(args: argparse.Namespace) -> None:
    """Run or resume, in each of the processes that torchrun starts."""
    import torch
    import torch.distributed as dist
    from timm.utils import init_distributed_device
    from training import Trainer

    out, verb = vars(args).pop("out"), vars(args).pop("verb")  # the others are the settings
    if verb == "resume":
        args = argparse.Namespace(**json.loads((out / "settings.json").read_text()))
    elif (out / "settings.json").exists():
        raise ValueError(f"{out} has a run: `train.py resume {out}` continues it; or take another --out")
    out.mkdir(parents=True, exist_ok=True)
    device = init_distributed_device(argparse.Namespace(device="cuda" if torch.cuda.is_available() else "cpu"))
    if not dist.is_initialized():  # a group of one process, so that all runs do the same
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        if args.batch % (2 * dist.get_world_size()):
            raise ValueError(f"--batch must give each process an even number of images, got {args.batch}")
        Trainer(args, out, device).fit()
    except KeyboardInterrupt:
        kept = f"`train.py resume {out}` goes on after the last whole epoch"
        raise KeyboardInterrupt(kept if (out / "checkpoint.pt").exists() else "no epoch was saved") from None
    except (ValueError, OSError) as error:  # a worker's has its traceback in its text, and its own words last
        raise ValueError(str(error).strip().rpartition("\n")[2]) from None
    finally:
        dist.destroy_process_group()


def compare(args: argparse.Namespace) -> None:
    """Print a table of runs, and write it and their curves to files."""
    if args.plot is not None:
        terminal.check_picture("--plot", args.plot)
    if args.json is not None:
        terminal.check_folder("--json", args.json)
    runs = {folder.resolve().name: read_run(folder) for folder in args.runs}
    settings, rows = [settings for settings, _, _ in runs.values()], [row(name, *run) for name, run in runs.items()]
    notes = {f"{s['data']}: {s['images']:,} images; {s['device']}, torch {s['torch']}": None for s in settings}
    for name, (plain, losses, ends) in runs.items():
        for other, (fused, other_losses, other_ends) in runs.items():
            if other != name and plain == {**fused, "plain": True}:
                apart = max(abs(loss - other_losses[step]) for step, loss in losses.items())
                images = abs(ends[-1]["right"] - other_ends[-1]["right"])
                what = f"{other} and {name}: training losses of {max(losses)} steps"
                notes[f"{what} differ by at most {apart:.1e}, correct test images by {images}"] = None
    terminal.print_table(HEADS, rows)
    print(*notes, sep="\n")
    if args.json is not None:
        terminal.write(args.json, json.dumps({"heads": HEADS, "rows": rows, "notes": [*notes]}, indent=1) + "\n")
    if args.plot is not None:
        for theme, path in (("light", args.plot), ("dark", args.plot.with_stem(f"{args.plot.stem}_dark"))):
            terminal.write_figure(path, draw(runs, theme), theme)


def read_run(folder: Path) -> tuple[dict[str, Any], dict[int, float], list[dict[str, Any]]]:
    """Return a run's settings, its training losses by step, and a record of each epoch."""
    lines = (folder / "log.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines if line.endswith("}")]  # a killed process leaves half a line
    losses = {record["step"]: record["loss"] for record in records if record["kind"] == "train"}
    epochs = [record for record in records if record["kind"] == "epoch"]
    if not epochs:
        raise ValueError(f"{folder} has no epoch that has ended: `train.py resume {folder}` continues it")
    return json.loads((folder / "settings.json").read_text()), losses, epochs


def row(name: str, settings: dict[str, Any], losses: dict[int, float], epochs: list[dict[str, Any]]) -> list[str]:
    """Return a run's cells under HEADS."""
    last, best = epochs[-1], max(epoch["accuracy"] for epoch in epochs)
    return [
        name, settings["model"] + ", plain" * settings["plain"], f"{settings['parameters'] / 1e6:.2f} M",
        f"{settings['flops'] / 1e9:.3f}", f"{last['accuracy']:.2%}", f"{best:.2%}", f"{last['loss']:.4f}",
        f"{last['images_per_second']:,.0f}", f"{last['seconds'] / 60:.1f}",
    ]  # fmt: skip


def draw(runs: dict[str, Any], theme: str) -> Any:
    """Draw test accuracies and training losses against epochs and time: a matplotlib figure."""
    import numpy as np
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from fastvit.study.memory.plot import COLOURS, style

    colours = COLOURS[theme]
    lines, ink = [colours[name] for name in ("fastvit", "sdpa", "compile", "eager")], colours["ink"]
    with rc_context({"font.family": "DejaVu Sans", "font.size": 10, "text.color": ink, "axes.labelcolor": ink}):
        figure = Figure(figsize=(9, 6.4), layout="constrained")
        panels = figure.subplots(2, 2, sharex="col")
        for (i, j), panel in np.ndenumerate(panels):
            style(panel, colours, ("test accuracy, %", "training loss")[i])
            panel.set_xlabel(("epochs", "minutes of training")[j] if i else "")
            for number, (name, (_, losses, epochs)) in enumerate(runs.items()):
                y = losses if i else {epoch["step"]: 100 * epoch["accuracy"] for epoch in epochs}
                ends = [epoch["seconds"] / 60 if j else epoch["epoch"] for epoch in epochs]
                x = np.interp([*y], [0, *(epoch["step"] for epoch in epochs)], [0, *ends])
                panel.plot(x, [*y.values()], color=lines[number % 4], linewidth=2, label=name,
                           linestyle="-" if number < 4 else "--", marker="o" if len(y) < 20 else "")  # fmt: skip
            panel.set_xlim(left=0)
        figure.legend(handles=panels[0, 0].lines, loc="outside upper left", ncols=4, frameon=False, labelcolor=ink)
        return figure


def main(arguments: list[str] | None = None) -> None:
    examples = "benchmarks/examples/README.md has commands for CIFAR, fine-tuning, distillation and several GPUs."
    parser = terminal.Parser("train.py", description=__doc__ or "", epilog=examples)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run_options(verbs.add_parser("run", help="train a model"))
    resume = verbs.add_parser("resume", help="continue a run after its last whole epoch")
    resume.add_argument("out", type=Path, metavar="RUN", help="folder of a run")
    compared = verbs.add_parser("compare", help="compare runs in a table and a picture")
    compared.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    compared.add_argument("--plot", type=Path, help="writes NAME.svg, and NAME_dark.svg for dark pages; .png too")
    compared.add_argument("--json", type=Path, help="file for the table")
    args = parser.parse_args(arguments)
    if os.environ.get("RANK", "0") == "0":
        print("train.py: loading torch and timm", file=sys.stderr, flush=True)
    check_installed("torch", "timm", "torchvision", "rich", "matplotlib", "PIL", "safetensors", "sklearn")
    (compare if args.verb == "compare" else train)(args)


if __name__ == "__main__":
    sys.exit(terminal.guarded(main, name="train.py"))
