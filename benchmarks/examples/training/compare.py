"""Compare runs: a table, and curves against epochs and against time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastvit.study.memory.plot import COLOURS, style

from .state import Record, Run

HEADS = ["run", "model", "params", "GFLOPs", "accuracy", "best", "loss", "images/s", "minutes"]
_LINES = ("fastvit", "sdpa", "compile", "eager")  # colours of the memory study, in the order of the runs


class Curve(NamedTuple):
    """name: of the run's folder; settings and about: the run and its model; losses: by step; epochs: a record each."""

    name: str
    settings: Record
    about: Record
    losses: dict[int, float]
    epochs: list[Record]


def read(folder: Path) -> Curve:
    """Read a run's log. Raises ValueError if no epoch has ended."""
    run = Run(folder, writes=False)
    settings = run.settings()
    records = run.records()
    about = next((r for r in records if r["kind"] == "run"), None)
    epochs = [r for r in records if r["kind"] == "epoch"]
    if about is None or not epochs:
        raise ValueError(f"{folder} has no epoch that has ended: `train.py resume {folder}` continues it")
    losses = {r["step"]: r["loss"] for r in records if r["kind"] == "train"}
    return Curve(folder.resolve().name, settings, about, losses, epochs)


def row(curve: Curve) -> list[str]:
    """Return the cells of a row under HEADS. GFLOPs: of one image forward; a multiply-add counts as two."""
    last, about = curve.epochs[-1], curve.about
    return [
        curve.name, about["name"] + ", plain" * about["plain"], f"{about['parameters'] / 1e6:.2f} M",
        f"{about['flops'] / 1e9:.3f}", f"{last['accuracy']:.2%}", f"{max(r['accuracy'] for r in curve.epochs):.2%}",
        f"{last['loss']:.4f}", f"{last['images_per_second']:,.0f}", f"{last['seconds'] / 60:.1f}",
    ]  # fmt: skip


def notes(curves: list[Curve]) -> list[str]:
    """Return lines below the table: data and machine, and how far a model is from itself in plain PyTorch."""
    parts = list(dict.fromkeys(
        f"{about['data']}: {about['images']:,} images; {about['device']}, torch {about['torch']}"
        for about in (curve.about for curve in curves)
    ))  # fmt: skip
    for plain in (curve for curve in curves if curve.about["plain"]):
        for fused in curves:
            if fused.settings == {**plain.settings, "plain": False} and fused.losses.keys() == plain.losses.keys():
                apart = max(abs(fused.losses[step] - plain.losses[step]) for step in fused.losses)
                images = abs(fused.epochs[-1]["right"] - plain.epochs[-1]["right"])
                parts.append(
                    f"{fused.name} and {plain.name}: training losses of {max(fused.losses)} steps differ by at most "
                    f"{apart:.1e}, correct test images by {images}"
                )
    return parts


def draw(curves: list[Curve], theme: str) -> Any:
    """Draw the accuracy after each epoch and the loss of each record, against epochs and time: a matplotlib figure."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colours = COLOURS[theme]
    ink = colours["ink"]
    with rc_context({"font.family": "DejaVu Sans", "font.size": 10, "text.color": ink, "axes.labelcolor": ink}):
        figure = Figure(figsize=(9, 6.4), layout="constrained")
        panels = figure.subplots(2, 2, sharex="col")
        for column, axis_name in enumerate(("epochs", "minutes of training")):
            for line, title in enumerate(("test accuracy, %", "training loss")):
                panel = panels[line][column]
                for i, curve in enumerate(curves):
                    y = curve.losses if line else {r["step"]: 100 * r["accuracy"] for r in curve.epochs}
                    ends = [r["seconds"] / 60 if column else r["epoch"] + 1 for r in curve.epochs]
                    x = np.interp([*y], [0, *(r["step"] for r in curve.epochs)], [0, *ends])
                    panel.plot(x, [*y.values()], color=colours[_LINES[i % 4]], linewidth=2, label=curve.name,
                               linestyle="-" if i < 4 else "--", marker="o" if len(y) < 20 else "")  # fmt: skip
                style(panel, colours, title)
                panel.set_xlabel(axis_name if line else "")
                panel.set_xlim(left=0)
        figure.legend(handles=panels[0][0].lines, loc="outside upper left", ncols=4, frameon=False, labelcolor=ink)
        return figure
