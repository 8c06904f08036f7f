"""The page of `fastvit explore` in a browser, by pointer and by keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import exploring
import numpy as np
import pytest
from exploring import NAME, Opened, in_gib, rows_of, similarities

from fastvit import study
from fastvit.study.explore import recomputation
from fastvit.study.sources.find import find
from fastvit.study.sources.model_source import PROVIDERS


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with exploring.chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Iterator[tuple[study.Exploration, Path]]:
    with exploring.small_model():
        found, *_ = exploring.explored()
        path = tmp_path_factory.mktemp("explored") / "page.html"
        path.write_text(found.html())
        yield found, path


@pytest.fixture
def opened(browser: Any, written: tuple[study.Exploration, Path]) -> Iterator[Callable[..., Opened]]:
    """Open the page. At the end, no window has complained, and none has asked for another file."""
    windows: list[Opened] = []

    def open_(**options: Any) -> Opened:
        windows.append(Opened(browser, written[1], **options))
        return windows[-1]

    yield open_
    for window in windows:
        assert not window.complaints
        assert {url.partition(":")[0] for url in window.requests} <= {"file", "data"}
        assert [url for url in window.requests if url.startswith("file")] == [written[1].as_uri()]
        window.close()


def test_patches_are_counted(opened):
    window = opened()
    for keys, patch in [((), 8), (["ArrowLeft"], 5), (["ArrowLeft"], 4), (["End"], 20)]:
        window.slide("#picture", "Patch size", *keys)
        right = study.patch_embedding(40, patch, 48, prefix_tokens=2)
        assert window.number("#patch-numbers", "Patches") == right.patches
        assert window.number("#patch-numbers", "Tokens") == right.tokens
        assert window.number("#patch-numbers", "Numbers of a patch") == 3 * patch * patch
    grid = window.page.locator("#patch-grid")
    grid.press("Home")
    grid.press("ArrowDown")
    assert window.text("#patch-caption") == "Row 1, column 0: token 4 of the sequence."


def test_embedding_calculator(opened):
    window = opened()
    fields = {
        name: window.page.locator(f'#embedding input[data-name="{name}"]')
        for name in ("Image size", "Patch size P", "Width D", "Prefix tokens")
    }
    assert [int(field.input_value()) for field in fields.values()] == [40, 8, 48, 2]
    for values in [(40, 8, 48, 2), (518, 14, 1536, 5), (1024, 16, 768, 0)]:
        for field, value in zip(fields.values(), values, strict=True):
            field.fill(str(value))
        right = study.patch_embedding(*values[:3], prefix_tokens=values[3])
        for name, value in [
            ("Patches", right.patches),
            ("Tokens", right.tokens),
            ("Parameters", right.parameters),
            ("FLOPs", right.flops),
        ]:
            assert window.number("#embedding-numbers", name) == value
    fields["Image size"].fill("1000")
    assert window.text("#embedding-note") == "A patch of 16 does not divide an image of 1000; 1008 would do."
    assert fields["Patch size P"].get_attribute("aria-invalid") == "true"
    fields["Width D"].fill("")
    assert window.text("#embedding-note") == "Sizes are whole numbers."


def test_memory_is_that_of_the_data(opened, written):
    window, memory = opened(), written[0].data["memory"]

    def same(mode: str, dtype: str, size: int, patch: int, batch: int) -> None:
        """The table is the data, which test_study_explore.py compares with `study.memory`."""
        for provider in PROVIDERS:
            planned = memory["plan"][provider][mode][dtype][f"{size}x{patch}"][batch]
            assert window.parts(provider) == dict(zip(memory["parts"], planned, strict=True)) | {"peak": sum(planned)}

    same("train", "bfloat16", 40, 8, 8)
    window.slide("#memory", "Image size", "End")
    window.slide("#memory", "Batch", "ArrowRight", "ArrowRight")
    same("train", "bfloat16", 368, 8, 32)
    scores = window.text("#memory-bars b.eager")
    assert scores == f"Eager {in_gib(window.parts('eager')['peak'])} GiB"
    window.slide("#memory", "Patch size", "Home")
    window.page.get_by_label("float32").check()
    same("train", "float32", 368, 4, 32)
    window.page.get_by_label("Training").press("ArrowRight")
    same("infer", "float32", 368, 4, 32)
    cell = '#memory-table tr[data-part="peak"] td[data-provider="eager"]'
    assert window.text(cell) == in_gib(window.parts("eager")["peak"])
    assert window.text("#memory-command") == (
        f"fastvit memory {NAME} --image-size 368 --patch-size 4 --batch 32 --mode infer --dtype fp32 --device cuda"
    )
    assert window.page.locator("#memory-chart polyline").count() == 3


def test_a_budget_says_what_fits(opened):
    window = opened()
    window.slide("#memory", "Image size", "End")
    window.slide("#memory", "Batch", "End")
    window.slide("#memory", "Budget", "Home")
    peaks = {provider: window.parts(provider)["peak"] / 2**30 for provider in PROVIDERS}
    assert peaks["sdpa"] > 2 > 0.2 < peaks["fastvit"], "the budget must separate fastvit from sdpa"
    for _ in range(14):
        budget = int(re.findall(r"into (\d+) GiB", window.text("#memory-sum"))[0])
        names = {"eager": "Eager", "sdpa": "SDPA", "fastvit": "fastvit"}
        fits = [name for provider, name in names.items() if peaks[provider] <= budget]
        words = {
            0: "None of them fits",
            1: f"{''.join(fits)} fits",
            2: f"{' and '.join(fits)} fit",
            3: "All of them fit",
        }
        assert words[len(fits)] in window.text("#memory-sum")
        window.slide("#memory", "Budget", "ArrowRight")
    assert fits


def test_recomputation_that_fits(browser, written):
    """Below the bars, where fastvit's step is over the budget, of the model's own sizes."""
    found, path = written
    memory = found.data["memory"]
    peak = sum(memory["plan"]["fastvit"]["train"]["float32"]["40x8"][64])
    budgets = [share * peak / 2**30 for share in (0.1, 0.9, 1.1)]
    fit = recomputation.collect(find(NAME), (40, 40), True, {"float32": {2: 0, 64: peak}}, budgets)
    data = found.data | {"memory": memory | {"budgets": budgets, "fit": {"bfloat16": {}} | fit}}
    path = path.with_name("fit.html")
    path.write_text(study.Exploration(NAME, data).html())
    window = Opened(browser, path)
    said = window.page.locator("#memory-fit")

    def command(budget: float, size: int) -> str:
        return f"fastvit fit {NAME} --budget {budget}GiB --batch 64 --image-size {size} --dtype fp32 --device cuda"

    window.page.get_by_label("float32").check()
    window.slide("#memory", "Batch", *["ArrowRight"] * 3)
    assert "whatever its blocks recompute" in said.inner_text()
    window.slide("#memory", "Budget", "ArrowRight")
    policy = fit["float32"][64][budgets[1]]
    words = (
        f"{policy['words']}. Its planned peak is then {in_gib(policy['peak'])} GiB, and {percent(policy['recomputed'])}"
    )
    assert words in said.inner_text()
    assert said.inner_text().endswith(command(budgets[1], 40))
    window.slide("#memory", "Image size", "ArrowRight")
    assert "on this page for 40 px, patches of 8 px and two images or more" in said.inner_text()
    assert said.inner_text().endswith(command(budgets[1], 48))
    window.slide("#memory", "Patch size", "Home")
    assert said.inner_text().endswith("two images or more.")
    window.page.get_by_label("Training").press("ArrowRight")
    assert said.is_hidden()
    window.page.get_by_label("Inference").press("ArrowLeft")
    assert said.is_visible()
    window.slide("#memory", "Patch size", "End")
    window.slide("#memory", "Image size", "Home")
    window.slide("#memory", "Budget", "End")
    assert said.is_hidden()
    assert not window.complaints
    window.close()


def test_attention_by_keys_and_pointer(opened, written):
    window, attention = opened(), written[0].data["attention"]

    def caption(name: str, token: int) -> str:
        row = rows_of(attention["maps"][name], 27)[attention["queries"].index(token)]
        return (
            f"The brightest patch gets {percent(row[2:].max())}. {percent(row[:2].sum())} goes to CLS and 1 register."
        )

    plate = window.page.locator("#attention-map")
    assert caption("1.mean", 2 + 2 * 5 + 2) in window.text("#attention-caption")
    plate.press("ArrowUp")
    plate.press("End")
    assert window.text("#attention-caption").startswith("Layer 1, mean of the heads, query row 1, column 4.")
    assert caption("1.mean", 2 + 1 * 5 + 4) in window.text("#attention-caption")
    assert caption("rollout", 2 + 1 * 5 + 4) in window.text("#rollout-caption")
    assert "row 1, column 4" in str(plate.get_attribute("aria-label"))

    window.slide("#attention", "Layer", "ArrowLeft")
    window.page.get_by_role("button", name="Head 1").click()
    assert caption("0.1", 2 + 1 * 5 + 4) in window.text("#attention-caption")
    window.slide("#attention", "Head", "ArrowRight")
    assert caption("0.2", 2 + 1 * 5 + 4) in window.text("#attention-caption")
    window.page.locator('#attention select[data-name="Query"]').select_option("CLS")
    assert caption("0.2", 0) in window.text("#attention-caption")

    rollout = window.page.locator("#rollout-map")
    box = rollout.bounding_box()
    rollout.click(position={"x": box["width"] * 0.3, "y": box["height"] * 0.9})
    assert "query row 4, column 1." in window.text("#rollout-caption")
    assert caption("0.2", 2 + 4 * 5 + 1) in window.text("#attention-caption")


def test_a_heat_map_is_brightest_where_the_weight_is(opened, written):
    window, attention = opened(), written[0].data["attention"]
    window.page.get_by_label("Weight", exact=True).check()
    row = rows_of(attention["maps"]["1.mean"], 27)[attention["queries"].index(2)][2:]
    window.page.locator("#attention-map").press("PageUp")
    window.page.locator("#attention-map").press("Home")
    light = window.page.evaluate(
        """() => {
          const canvas = document.getElementById("attention-map"), [w, h] = [canvas.width, canvas.height];
          const { data } = canvas.getContext("2d").getImageData(0, 0, w, h);
          const [y, x] = [(i) => Math.floor((Math.floor(i / 5) + .5) * h / 5), (i) => Math.floor((i % 5 + .5) * w / 5)];
          const middle = (i) => 4 * (y(i) * w + x(i));
          return [...Array(25).keys()].map((i) => data.slice(middle(i), middle(i) + 3).reduce((a, b) => a + b));
        }"""
    )
    assert np.corrcoef(light, row)[0, 1] > 0.8


def test_layers_are_those_of_the_data(opened, written):
    """In the table, and as dots on the scale of the charts' labels."""
    window, layers = opened(), written[0].data["layers"]

    def number(text: str) -> float:
        return float(re.sub("[^0-9.-]", "", text.replace("\u2212", "-")))

    table = window.page.locator("#layers-table tbody tr")
    for i, heads in enumerate(layers["distance"]):
        layer, *far, share, cosine = (number(text) for text in table.nth(i).locator("th, td").all_inner_texts())
        assert layer == i
        assert far == pytest.approx([np.mean(heads), min(heads), max(heads)], abs=0.051)
        assert share == pytest.approx(100 * np.mean(heads) / layers["uniform"], abs=0.51)
        assert cosine == pytest.approx(layers["cosine"][i], abs=0.0051)
    assert table.count() == 2
    values = {"distance": [value for heads in layers["distance"] for value in heads], "evolution": layers["cosine"]}
    for chart, right in values.items():
        svg = window.page.locator(f"#{chart}-chart svg")
        labels = svg.locator("text[text-anchor=end]")
        at = labels.evaluate_all("all => all.map((label) => label.getAttribute('y') - 4)")
        scale = np.polyfit(at, [number(text) for text in labels.all_text_contents()], 1)
        dots = svg.locator("circle").evaluate_all("all => all.map((dot) => Number(dot.getAttribute('cy')))")
        assert np.polyval(scale, dots) == pytest.approx(right, abs=0.001)
        assert svg.get_attribute("aria-label")
    assert f"uniform attention, {layers['uniform']:.1f} px." in window.text("#distance-caption")


def test_positions_by_keys(opened, written):
    window = opened()
    cosines = similarities(written[0].data["positions"]["cosine"], 25)
    window.page.locator("#position-map").press("ArrowRight")
    at = 2 * 5 + 3
    others = np.delete(cosines[at], at)
    name = '#position-numbers [data-name="{}"] dd'.format
    assert window.text(name("Position"), first_line=True) == "2, 3"
    shown = {
        what: float(window.text(name(what), first_line=True).replace("\u2212", "-"))
        for what in ("Most alike", "Least alike", "Mean")
    }
    assert shown["Most alike"] == pytest.approx(others.max(), abs=0.0051)
    assert shown["Least alike"] == pytest.approx(others.min(), abs=0.0051)
    assert shown["Mean"] == pytest.approx(others.mean(), abs=0.0051)
    neighbours = [
        float(x) for x in window.text(name("Left and right"), first_line=True).replace("\u2212", "-").split(", ")
    ]
    assert neighbours == pytest.approx([cosines[at, at - 1], cosines[at, at + 1]], abs=0.0051)


def test_models_are_sorted_and_filtered(opened):
    window = opened()

    def names() -> list[str]:
        return window.page.locator("#models-table tbody th").all_inner_texts()

    for key, sort in [("flops", "flops"), ("tokens", "tokens"), ("name", "name")]:
        right = [cost.name for cost in study.models(exploring.NAMES, sort=sort)]
        button = window.page.locator(f'#models-table th[data-key="{key}"] button')
        button.press("Enter")
        assert button.locator("..").get_attribute("aria-sort") == "ascending"
        assert names() == (right if key == "name" else right[::-1])
    button.click()
    assert names() == sorted(exploring.NAMES, reverse=True)
    window.page.get_by_label("Names that contain").fill("SMALL patch")
    assert names() == ["vit_small_patch32_224", "vit_small_patch14_dinov2"]
    assert "2 of 4 models" in window.text("#models-controls")


def percent(x: float) -> str:
    return f"{100 * x:.{1 if x < 0.0995 else 0}f}\u00a0%"


# ---- accessibility ----

CONTRAST = """() => {
  const style = getComputedStyle(document.documentElement);
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (name) => {
    canvas.fillStyle = style.getPropertyValue(name);
    canvas.fillRect(0, 0, 1, 1);
    const linear = [...canvas.getImageData(0, 0, 1, 1).data].map((v) => v / 255)
      .map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * linear[0] + .7152 * linear[1] + .0722 * linear[2] + .05;
  };
  const ratio = (a, b) => Math.max(light(a), light(b)) / Math.min(light(a), light(b));
  const on = (paper, ...names) => names.map((name) => [name + " on " + paper, ratio(name, paper)]);
  return Object.fromEntries([
    ...on("--paper", "--ink", "--soft", "--accent", "--eager", "--sdpa", "--fastvit"),
    ...on("--raised", "--ink", "--soft"),
  ]);
}"""  # as WCAG 2.2 defines the contrast ratio


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible(opened, scheme):
    page = opened(color_scheme=scheme).page
    assert min(page.evaluate(CONTRAST).values()) >= 4.5
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", paper))) / 3
    assert light > 240 if scheme == "light" else light < 40


def test_nothing_is_wider_than_a_phone(opened):
    width = 320
    window = opened(width=width, has_touch=True, device_scale_factor=2)
    assert window.page.evaluate("document.documentElement.scrollWidth") == width
    window.slide("#memory", "Image size", "End")
    window.page.locator("#attention-map").tap()
    assert window.page.evaluate("document.documentElement.scrollWidth") == width


def test_everything_is_reached_by_keys_and_has_a_name(opened):
    page = opened().page
    seen = []
    for _ in range(120):
        page.keyboard.press("Tab")
        at = page.evaluate(
            """() => {
              const e = document.activeElement, own = e.labels?.[0]?.textContent || e.getAttribute("aria-label");
              const outline = getComputedStyle(e.closest(".choice label") ?? e).outlineStyle;
              return [e.dataset.name || e.id, (own || e.textContent).trim(), outline, e === document.body];
            }"""
        )
        if at[3]:
            break
        seen.append(at)
    assert all(label for _, label, *_ in seen)
    assert [what for what, _, outline, _ in seen if outline == "none"] == []
    reached = [what for what, *_ in seen]
    maps = {"patch-grid", "attention-map", "rollout-map", "position-map"}
    assert maps | {"models-filter", "Layer", "Batch", "Width D"} <= set(reached)


def test_less_motion(opened):
    duration = "getComputedStyle(document.querySelector('.bar i')).transitionDuration"
    assert opened().page.evaluate(duration) == "0.18s"
    assert opened(reduced_motion="reduce").page.evaluate(duration) == "0s"


def test_fixed_positions_are_labelled(browser, written, opened):
    found, path = written
    assert "it was learnt" in opened().text("#positions-lede")
    path = path.with_name("fixed.html")
    path.write_text(
        study.Exploration(NAME, found.data | {"positions": {**found.data["positions"], "fixed": True}}).html()
    )
    window = Opened(browser, path)
    assert "They are fixed" in window.text("#positions-lede")
    assert not window.complaints
    window.close()


def test_a_page_without_attention_layers_positions_and_memory(browser, written):
    found, path = written
    nothing = {
        name: {"note": f"no {name}", "maps": None, "cosine": None, "plan": None}
        for name in ("attention", "layers", "positions", "memory")
    }
    path = path.with_name("nothing.html")
    path.write_text(study.Exploration(NAME, found.data | nothing).html())
    window = Opened(browser, path)
    for name in nothing:
        assert f"no {name}" in window.text(f"#{name}")
    assert window.page.locator("canvas").count() == 2
    assert not window.complaints
    window.close()
