"""Draw the speed of ViT-B/16 on a GPU, for light and for dark pages, from the results of `make gpu`.

    python -m benchmarks.report.speed benchmarks/results/nvidia_h200/results.jsonl benchmarks/results

writes speed_light.svg and speed_dark.svg into the folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu import results_file
from benchmarks.gpu.results_file import MODES, Record
from benchmarks.report.plot import paths
from fastvit.cli.terminal import guarded, write_figure
from fastvit.study.memory.plot import COLOURS

FILES = {"light": "speed_light.svg", "dark": "speed_dark.svg"}
_MODEL, _STYLE = "vit_base_patch16_224", "reduce-overhead"
_PROVIDERS = {  # name -> key in a result, whether it is compiled, colour and its strength
    "SDPA (flash)": ("flash", False, "sdpa", 1.0),
    "SDPA (cuDNN)": ("cudnn", False, "sdpa", 0.6),
    "SDPA, compiled": ("sdpa", True, "compile", 1.0),
    "fastvit": ("fastvit", False, "fastvit", 1.0),
    "fastvit.graphs": ("graphs", False, "fastvit", 0.6),
}
_GROUPS = (  # title, batch, which time, providers
    ("batch 256, as called", 256, "called", ("SDPA (flash)", "SDPA (cuDNN)", "fastvit")),
    ("batch 32, as called", 32, "called", tuple(_PROVIDERS)),
    ("batch 32, GPU alone", 32, "time", ("SDPA (flash)", "SDPA (cuDNN)", "SDPA, compiled", "fastvit")),
)
_PANELS = ("training", "inference")
Groups = list[tuple[str, dict[str, float]]]  # title; images a second by provider


def speeds(records: Sequence[Record], mode: str) -> Groups:
    """Return the images a second that the panel of a mode shows.

    Raises:
        ValueError: a result is missing.
    """
    passed = {r["name"]: r for r in records if r["status"] == "passed"}

    def rate(provider: str, batch: int, which: str) -> float:
        key, compiled, *_ = _PROVIDERS[provider]
        workload = f"model {_MODEL} B{batch} px224"
        try:
            if compiled:
                times = passed[f"{workload} {key}, {_STYLE}, {MODES[mode]}"]
            else:
                times = passed[f"{workload} {MODES[mode]}"]["providers"][key]
            return float(batch / times[which]["median"])
        except KeyError as missing:
            raise ValueError(f"no picture: {provider} of {workload}, {mode}, has no {missing}") from None

    return [(title, {name: rate(name, batch, which) for name in names}) for title, batch, which, names in _GROUPS]


def describe(records: Sequence[Record]) -> str:
    """Return what the picture shows, in words."""
    return "Images per second of ViT-B/16. " + " ".join(
        f"{mode}, {title}: {', '.join(f'{name} {rate:,.0f}' for name, rate in rates.items())}."
        for mode in _PANELS
        for title, rates in speeds(records, mode)
    )


def draw(records: Sequence[Record], theme: str) -> Any:
    """Return a matplotlib figure that is legible at half the width of a page."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colours = COLOURS[theme]
    machine = next(r for r in records if r["name"] == "machine")
    caption = (
        f"bfloat16, torch {machine['torch'].partition('+')[0]}, triton {machine['triton']}; training: without the "
        f"optimizer\ncompiled: torch.compile, {_STYLE}; GPU alone: in a CUDA graph"
    )
    with rc_context({"font.family": "DejaVu Sans", "font.size": 9.5, "text.color": colours["ink"]}):
        figure = Figure(figsize=(4.8, 4.4), layout="constrained")
        title = f"ViT-B/16 on {machine['device']}: images per second"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        for panel, mode in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
            _panel(panel, mode, speeds(records, mode), colours, named=mode == _PANELS[0])
        figure.supxlabel(caption, x=0.01, ha="left", fontsize=8, alpha=0.7)
        return figure


def _panel(panel: Any, title: str, groups: Groups, colours: dict[str, str], named: bool) -> None:
    """named: whether the providers' names stand on the left."""
    longest = max(rate for _, rates in groups for rate in rates.values())
    row = 0.0
    for heading, rates in groups:
        panel.text(0, row, heading * named, va="center", fontweight="bold", fontsize=9)
        for provider, rate in rates.items():
            row += 1
            _, _, colour, alpha = _PROVIDERS[provider]
            weight = "bold" if colour == "fastvit" else "normal"
            panel.barh(row, rate, color=colours[colour], alpha=alpha, height=0.8)
            panel.text(rate + longest / 40, row, f"{rate:,.0f}", va="center", fontsize=9, fontweight=weight)
            name = {"va": "center", "ha": "right", "color": colours[colour], "fontweight": weight}
            panel.text(-longest / 20, row, provider * named, **name)
        row += 1.4
    panel.set(xlim=(0, longest * 1.35), ylim=(row - 0.9, -0.6), xticks=[], yticks=[], facecolor="none")
    panel.set_title(title, loc="left", fontsize=10, fontweight="bold", color=colours["ink"])
    panel.spines[:].set_visible(False)


def main() -> None:
    path, folder = paths("benchmarks.report.speed", __doc__)
    if not (records := results_file.last(results_file.read(path))):
        raise ValueError(f"no result in {path}: make gpu writes results.jsonl")
    description = describe(records)
    for theme, name in FILES.items():
        write_figure(folder / name, draw(records, theme), description=description)


if __name__ == "__main__":
    sys.exit(guarded(main, name="benchmarks.report.speed"))
