"""`fastvit explore`: the data of the page, the page as a text, and in a browser."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import exploring
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from exploring import NAME, Opened, percent, rows_of, similarities
from library_imports import import_timm
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fastvit
from fastvit import study, zoo
from fastvit.cli import main
from fastvit.study.explore import attention as explored_attention
from fastvit.study.explore import document, exploration
from fastvit.study.explore import memory as explored_memory
from fastvit.study.sources.find import find

Explored = tuple[study.Exploration, Path, Path]
LISTED = exploration._NAMES  # which small_model() replaces


@pytest.fixture(scope="module")
def explored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explored]:
    """The page of the small model, and the files of its picture and weights."""
    pytest.importorskip("triton", reason="triton is not installed")
    folder = tmp_path_factory.mktemp("explored")
    files = exploring.picture(folder), exploring.weights(folder)
    with exploring.small_model():
        yield study.explore(NAME, files[0], weights=files[1]), *files


@pytest.mark.parametrize(("size", "patch", "bias"), [((224, 224), 16, True), ((32, 48), 8, False)])
def test_patch_embedding_is_a_convolution(size, patch, bias):
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        projection = nn.Conv2d(3, 192, patch, patch, bias=bias)
        out = projection(torch.empty(1, 3, *size))
    cost = study.patch_embedding(size, patch, 192, prefix_tokens=5, bias=bias)
    assert cost.patches == out[0, 0].numel()
    assert cost.tokens == cost.patches + 5
    assert cost.parameters == sum(p.numel() for p in projection.parameters())
    assert cost.flops == counter.get_total_flops()
    with pytest.raises(ValueError, match="must divide image_size"):
        study.patch_embedding(225, patch, 192)


# ---- what the page has is what the functions say ----


def near(ours: np.ndarray, right: torch.Tensor) -> None:
    """Check rows to half of a 255th of the largest weight of each."""
    most = right.amax(-1, keepdim=True)
    assert most.max() > 3 / 27, "all rows are flat: this test could not tell them apart"
    assert ((torch.from_numpy(ours) - right).abs() <= most * 0.5001 / 255).all()


def test_facts_attention_layers_and_positions(explored):
    page, image, weights = explored
    (cost,), facts = study.models(NAME), page.data["model"]
    assert (facts["tokens"], facts["prefix"], facts["grid"]) == (27, 2, (5, 5))
    assert (facts["parameters"], facts["flops"]) == (cost.parameters.total, cost.flops)
    assert (facts["width"], facts["channels"], facts["bias"]) == (48, 3, True)
    for row, other in zip(page.data["models"], study.models(exploring.NAMES), strict=True):
        assert (row["name"], row["tokens"], row["flops"]) == (other.name, other.tokens, other.flops)
        assert row["parameters"] == other.parameters.total
    model, pixels = (
        zoo.create_model(NAME, weights=weights).eval(),
        study.read_picture(image, 40, (0.5,) * 3, (0.5,) * 3).pixels,
    )
    queries = ["cls", *((row, column) for row in range(5) for column in range(5))]
    attention, layers = page.data["attention"], page.data["layers"]
    assert attention["queries"] == [0, *range(2, 27)]
    for layer, rows in enumerate(study.attention_maps(model, pixels, queries=queries).rows):
        for name, right in [(f"{layer}.{head}", rows[head]) for head in range(3)] + [(f"{layer}.mean", rows.mean(0))]:
            near(rows_of(attention["maps"][name], 27), right)
    near(rows_of(attention["maps"]["rollout"], 27), study.attention_rollout(model, pixels, queries).rows)
    far, evolution = study.attention_distance(model, pixels), study.cls_evolution(model, pixels)
    assert (torch.tensor(layers["distance"]) - far.distance).abs().max() <= 0.0051
    assert layers["uniform"] == pytest.approx(far.uniform, abs=0.0051)
    assert (torch.tensor(layers["cosine"]) - evolution.mean).abs().max() <= 0.000051
    positions = model.pos_embed[0, 2:]
    right = F.cosine_similarity(positions[:, None], positions[None], dim=-1)
    ours = similarities(page.data["positions"]["cosine"], 25)
    assert np.abs(ours - right.detach().numpy()).max() <= 0.5001 / 127


def test_positions_that_are_fixed_or_rotate():
    """A parameter that alone does not learn, as in transformers' MAE, is fixed, but not one of a frozen model."""
    model = zoo.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
    assert not exploration._positions(model, (2, 2))["fixed"]
    model.pos_embed.requires_grad_(False)
    assert exploration._positions(model, (2, 2))["fixed"]
    assert not exploration._positions(model.requires_grad_(False), (2, 2))["fixed"]
    rotary = exploration._positions(import_timm().create_model("vit_small_patch16_rope_224", depth=1), (14, 14))
    assert rotary["cosine"] is None
    assert "rotates queries and keys" in rotary["note"]


@pytest.mark.parametrize(
    ("provider", "mode", "dtype", "size", "patch", "batch"),
    [("fastvit", "train", "bfloat16", 272, 8, 32), ("sdpa", "infer", "float32", 64, 4, 2)],
)
def test_memory_of_the_page_is_that_of_the_study(explored, provider, mode, dtype, size, patch, batch):
    memory = explored[0].data["memory"]
    (point,) = study.memory(
        NAME, image_sizes=[size], patch_size=patch, batches=[batch], mode=mode, dtype=dtype, providers=[provider],
        device="cuda",
    ).points  # fmt: skip
    ours = dict(zip(memory["parts"], memory["plan"][provider][mode][dtype][f"{size}x{patch}"][batch], strict=True))
    assert memory["tokens"][f"{size}x{patch}"] == point.tokens
    assert ours | {"graph": 0} == asdict(point.planned)


def test_recomputation_of_the_page_is_that_of_the_study(explored):
    """At a batch between the two that are traced, with budgets from below the least peak to above the largest."""
    memory = explored[0].data["memory"]
    assert set(memory["fit"]) == {"bfloat16", "float32"}
    assert [*memory["fit"]["float32"]] == [b for b in memory["batches"] if b > 1]
    peak = sum(memory["plan"]["fastvit"]["train"]["bfloat16"]["40x8"][32])
    gib = [share * peak / 2**30 for share in (0.1, 0.9, 1.01)]
    policies = explored_memory.recomputation(find(NAME), (40, 40), True, {"bfloat16": {2: 0, 32: peak, 256: 0}}, gib)[
        "bfloat16"
    ]
    assert policies[2] == policies[256] == {}
    assert [*policies[32]] == gib[:2]
    least, policy = policies[32].values()
    assert least is None
    right = study.fit(NAME, budget=int(gib[1] * 2**30), batch=32, device="cuda")
    assert policy["words"].startswith("block 0: ")
    assert policy["peak"] == pytest.approx(right.peak, rel=0.01)
    # by the search between two batches, and by a trace: one of two choices of nearly one price may be chosen
    assert policy["recomputed"] == pytest.approx(right.recomputed, abs=0.02)
    assert policy["recomputed"] > 0


def test_the_page_says_what_it_has_not(monkeypatch):
    for name, values in (("PROVIDERS", ("fastvit",)), ("MODES", ("train",)), ("DTYPES", ("bfloat16",))):
        monkeypatch.setattr(explored_memory, name, values)
    memory = explored_memory.collect(find("study_models:no_list"), (32, 32), (8, 8), 1, exploration._silent)
    assert memory["fit"] is None
    assert "Not shown: what blocks recompute: VisionTransformer has no list of blocks of one class" in memory["note"]
    convolution, pixels = nn.Conv2d(3, 8, 4, 4), torch.zeros(3, 16, 16)
    maps = explored_attention.collect(convolution, pixels, None, exploration._silent, 0)
    assert maps["maps"] is None
    assert maps["note"].startswith("No attention is shown: ")
    layers = explored_attention.collect_by_layer(convolution, pixels, exploration._silent)
    assert layers["distance"] is layers["cosine"] is None
    assert "No attention distances are shown: " in layers["note"]
    assert "No states after blocks are shown: " in layers["note"]


def test_stops():
    stops = [224, 252, 322, 378, 448, 518, 644, 770, 1022, 1540, 2044]
    assert explored_memory.size_stops(518, [7, 14]) == stops
    assert explored_memory.size_stops(40, [4, 8]) == [40, 48, 56, 64, 80, 88, 112, 136, 184, 272, 368]
    assert exploration.patch_stops((224, 224), (112, 112)) == [4, 7, 8, 14, 16, 28, 32, 56, 112]
    assert set(LISTED) <= set(zoo.CONFIGS)


@pytest.mark.parametrize(("room", "whole"), [(16_000, {0, 1}), (25_000, {1})])
def test_attention_stays_within_its_room(room, whole):
    model = fastvit.VisionTransformer(img_size=32, patch_size=4, embed_dim=48, depth=2, num_heads=3).eval()
    attention = explored_attention.collect(model, torch.randn(3, 32, 32), [1], exploration._silent, room)
    maps = attention["maps"]
    assert len(json.dumps(maps)) <= room + 40 * len(maps)  # and the names
    assert attention["stride"] == (2 if room == 16_000 else 1)
    assert whole == {layer for layer in (0, 1) if f"{layer}.0" in maps}
    assert {"rollout", "0.mean", "1.mean"} <= set(maps)


# ---- the page as a text ----


def test_nothing_leads_out_of_the_page_and_names_are_no_markup(explored):
    written, image, _ = explored
    page = written.html()
    assert set(re.findall(r"\w+://[^\s\"'<>)]+", page)) == {"http://www.w3.org/2000/svg"}  # a name, never asked for
    assert not re.search(r"<(link|iframe|object|embed|img|script)\b[^>]*\b(src|href)=", page)
    assert not re.search(r"url\(|@import|\bimport\(|\bfetch\(|XMLHttpRequest|sendBeacon|WebSocket", page)
    assert "default-src 'none'" in page
    assert len(page.encode()) < 4_000_000
    assert image.name not in page
    assert "onerror=alert(1)>" not in page
    assert written.data["provenance"].endswith(f"Picture: {image.name}.")
    nasty = "</script><script>alert(1)</script><!--"
    page = document.rendered(nasty, {"name": nasty, "@@STYLE@@": r"\1"})
    assert page.count("<script") == 2 == page.count("</script>")
    assert "<!--" not in page
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert json.loads(data) == {"name": nasty, "@@STYLE@@": r"\1"}


# ---- the command, and a browser ----


def test_command(tmp_path, monkeypatch, capsys):
    """It runs without picture and weights, at a size whose memory is not planned."""
    monkeypatch.setattr(exploration, "_NAMES", exploring.NAMES[:1])
    monkeypatch.setitem(zoo.CONFIGS, NAME, exploring.CONFIG)
    out = tmp_path / "page.html"
    assert main(["explore", NAME, "--image-size", "16x24", "--out", str(out), "--layers", "0,1"]) == 0
    assert capsys.readouterr().err == f"wrote {out}\n"
    (data,) = re.findall(r'id="data">(.*?)</script>', out.read_text())
    data = json.loads(data)
    assert data["model"]["tokens"] == 2 * 3 + 2
    assert "random, since no file was given" in data["provenance"]
    assert data["picture"]["patch_stops"] == [4, 8]
    assert data["memory"] == {"plan": None, "note": "Memory is planned for square images and patches only."}


def test_the_page_in_a_browser(explored, tmp_path):
    """By pointer and by keys, it shows what its data are. It complains of nothing, and asks for no other file."""
    page, attention, memory = explored[0], explored[0].data["attention"], explored[0].data["memory"]
    path = tmp_path / "page.html"
    path.write_text(page.html())
    with exploring.chromium() as browser:
        window = Opened(browser, path)
        window.slide("#picture", "Patch size", "ArrowLeft")
        right = study.patch_embedding(40, 5, 48, prefix_tokens=2)
        assert window.number("#patch-numbers", "Patches") == right.patches
        assert window.number("#patch-numbers", "Tokens") == right.tokens
        for name, value in (("Image size", 518), ("Patch size P", 14), ("Width D", 1536), ("Prefix tokens", 5)):
            window.page.locator(f'#embedding input[data-name="{name}"]').fill(str(value))
        right = study.patch_embedding(518, 14, 1536, prefix_tokens=5)
        assert window.number("#embedding-numbers", "FLOPs") == right.flops

        window.slide("#memory", "Image size", "End")
        window.slide("#memory", "Batch", "ArrowRight", "ArrowRight")
        window.page.get_by_label("float32").check()
        window.page.get_by_label("Training").press("ArrowRight")
        for provider in memory["providers"]:
            planned = memory["plan"][provider]["infer"]["float32"]["368x8"][32]
            assert window.parts(provider) == dict(zip(memory["parts"], planned, strict=True)) | {"peak": sum(planned)}
        assert window.text("#memory-command") == (
            f"fastvit memory {NAME} --image-size 368 --patch-size 8 --batch 32 --mode infer --dtype fp32 --device cuda"
        )

        def caption(name: str, token: int) -> str:
            row = rows_of(attention["maps"][name], 27)[attention["queries"].index(token)]
            brightest, prefix = percent(row[2:].max()), percent(row[:2].sum())
            return f"The brightest patch gets {brightest}. {prefix} goes to CLS and 1 register."

        window.page.locator("#attention-map").press("ArrowUp")
        window.slide("#attention", "Layer", "ArrowLeft")
        window.page.get_by_role("button", name="Head 1").click()
        assert caption("0.1", 2 + 1 * 5 + 2) in window.text("#attention-caption")
        assert caption("rollout", 2 + 1 * 5 + 2) in window.text("#rollout-caption")
        rows = window.page.locator("#layers-table tbody tr").all_inner_texts()
        for text, heads in zip(rows, page.data["layers"]["distance"], strict=True):
            assert f"{np.mean(heads):.1f}" in text
        window.page.locator("#position-map").press("ArrowRight")
        assert window.text('#position-numbers [data-name="Position"] dd', first_line=True) == "2, 3"
        window.page.locator('#models-table th[data-key="flops"] button').press("Enter")
        names = [cost.name for cost in study.models(exploring.NAMES, sort="flops")][::-1]
        assert window.page.locator("#models-table tbody th").all_inner_texts() == names

        assert not window.complaints
        assert window.requests == [path.as_uri(), *(url for url in window.requests if url.startswith("data:"))]
