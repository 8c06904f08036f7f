"""The data of `fastvit explore`, and the page as a text."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import exploring
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from exploring import NAME, rows_of, similarities
from library_imports import import_timm
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fastvit
from fastvit import study, zoo
from fastvit.cli import main
from fastvit.study.explore import attention as explored_attention
from fastvit.study.explore import document, exploration, layer_figures, recomputation
from fastvit.study.explore import memory as explored_memory
from fastvit.study.memory.plan import plan
from fastvit.study.memory.step import Setting
from fastvit.study.memory.traced_step import TracedStep, sizes_to_trace
from fastvit.study.sources.find import find

Explored = tuple[study.Exploration, Path, Path]


@pytest.fixture
def explored() -> Iterator[Explored]:
    with exploring.small_model():
        yield exploring.explored()


@pytest.mark.parametrize(("size", "patch", "bias"), [((224, 224), 16, True), ((32, 48), 8, False)])
def test_patch_embedding_is_a_convolution(size, patch, bias):
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        projection = nn.Conv2d(3, 192, patch, patch, bias=bias)
        out = projection(torch.empty(1, 3, *size))
    found = study.patch_embedding(size, patch, 192, prefix_tokens=5, bias=bias)
    assert found.patches == out[0, 0].numel()
    assert found.tokens == found.patches + 5
    assert found.parameters == sum(p.numel() for p in projection.parameters())
    assert found.flops == counter.get_total_flops()
    with pytest.raises(ValueError, match="must divide image_size"):
        study.patch_embedding(225, patch, 192)


# ---- what the page has is what the functions say ----


def test_facts_and_models(explored):
    data = explored[0].data
    assert len(repr(explored[0])) < 100, "a REPL shows no data"
    (cost,) = study.models(NAME)
    facts = data["model"]
    assert (facts["tokens"], facts["prefix"], facts["grid"]) == (27, 2, (5, 5))
    assert (facts["parameters"], facts["flops"]) == (cost.parameters.total, cost.flops)
    assert (facts["width"], facts["channels"], facts["bias"]) == (48, 3, True)
    for row, other in zip(data["models"], study.models(exploring.NAMES), strict=True):
        assert (row["name"], row["tokens"], row["flops"]) == (other.name, other.tokens, other.flops)
        assert row["parameters"] == other.parameters.total


def test_table_is_of_known_models():
    assert set(exploration._NAMES) <= set(zoo.CONFIGS)
    assert len(exploration._NAMES) == len(set(exploration._NAMES)) <= 40


def test_attention_is_that_of_attention_maps(explored):
    found, image, weights = explored
    attention = found.data["attention"]
    model = exploring.built(weights)
    pixels = study.read_picture(image, 40, (0.5,) * 3, (0.5,) * 3).pixels
    queries = ["cls", *((row, column) for row in range(5) for column in range(5))]
    assert attention["queries"] == [0, *range(2, 27)]
    for layer, rows in enumerate(study.attention_maps(model, pixels, queries=queries).rows):
        for name, right in [(f"{layer}.{head}", rows[head]) for head in range(3)] + [(f"{layer}.mean", rows.mean(0))]:
            near(rows_of(attention["maps"][name], 27), right)
    near(rows_of(attention["maps"]["rollout"], 27), study.attention_rollout(model, pixels, queries).rows)


def test_layers_are_those_of_the_study(explored):
    found, image, weights = explored
    layers = found.data["layers"]
    model, pixels = exploring.built(weights), study.read_picture(image, 40, (0.5,) * 3, (0.5,) * 3).pixels
    far, evolution = study.attention_distance(model, pixels), study.cls_evolution(model, pixels)
    assert (torch.tensor(layers["distance"]) - far.distance).abs().max() <= 0.0051
    assert layers["uniform"] == pytest.approx(far.uniform, abs=0.0051)
    assert (torch.tensor(layers["cosine"]) - evolution.mean).abs().max() <= 0.000051
    assert layers["state"] == "CLS"


def near(ours: np.ndarray, right: torch.Tensor) -> None:
    """Check rows to half of a 255th of the largest weight of each."""
    most = right.amax(-1, keepdim=True)
    assert most.max() > 3 / 27, "all rows are flat: this test could not tell them apart"
    assert ((torch.from_numpy(ours) - right).abs() <= most * 0.5001 / 255).all()


def test_positions(explored):
    found, _, weights = explored
    positions = exploring.built(weights).pos_embed[0, 2:]
    right = F.cosine_similarity(positions[:, None], positions[None], dim=-1)
    ours = similarities(found.data["positions"]["cosine"], 25)
    assert np.abs(ours - right.detach().numpy()).max() <= 0.5001 / 127
    assert right.min() < 0 < 0.1 < right.fill_diagonal_(0).max()


def test_fixed_positions():
    """A model without weights: the note says that learnt positions are random, and not that fixed ones are."""
    with exploring.small_model(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(zoo.CONFIGS, NAME, {**exploring.CONFIG, "depth": 1, "pos_embed": "sincos2d"})
        patch.setattr(explored_memory, "collect", lambda *_: None)  # takes seconds
        patch.setattr(exploration, "_model_rows", lambda _: None)
        found = study.explore(NAME)
        model = zoo.create_model(NAME)
    positions = found.data["positions"]
    assert positions["fixed"]
    assert "random" not in positions["note"]
    assert "Attention is that of an untrained model" in found.data["provenance"]
    right = exploration.position_similarity(model.pos_embed[0, 2:])
    assert np.abs(similarities(positions["cosine"], 25) - right.numpy()).max() <= 0.5001 / 127


def test_which_positions_are_fixed():
    """A parameter that alone does not learn, as in transformers' MAE, but not one of a model that is frozen."""
    model = zoo.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
    assert not exploration._positions(model, (2, 2))["fixed"]
    model.pos_embed.requires_grad_(False)
    assert exploration._positions(model, (2, 2))["fixed"]
    model.requires_grad_(False)
    assert not exploration._positions(model, (2, 2))["fixed"]


def test_a_model_with_rotary_positions_has_none_to_show():
    model = zoo.create_model("vit_small_patch16_dinov3", depth=1, img_size=32)
    found = exploration._positions(model, (2, 2))
    assert found["cosine"] is None
    timms = import_timm().create_model("vit_small_patch16_rope_224", depth=1)
    assert timms.rope.pos_embed.shape[0] == 14 * 14
    assert exploration._positions(timms, (14, 14)) == found
    assert "rotates queries and keys" in found["note"]


@pytest.mark.parametrize("provider", ["eager", "sdpa", "fastvit"])
def test_memory_of_the_page_is_that_of_the_study(explored, provider):
    memory = explored[0].data["memory"]
    assert memory["patches"] == [4, 8]
    for mode, dtype, size, patch, batch in [
        ("train", "bfloat16", 272, 8, 32),
        ("train", "float32", 40, 4, 1),
        ("infer", "float32", 64, 4, 2),
    ]:
        study_ = study.memory(
            NAME, image_sizes=[size], patch_size=patch, batches=[batch], mode=mode, dtype=dtype, providers=[provider],
            device="cuda",
        )  # fmt: skip
        (point,) = study_.points
        ours = dict(zip(memory["parts"], memory["plan"][provider][mode][dtype][f"{size}x{patch}"][batch], strict=True))
        assert memory["tokens"][f"{size}x{patch}"] == point.tokens
        assert ours == asdict(point.planned)


def test_recomputation_of_the_page_is_that_of_the_study(explored):
    """At a batch between the two that are traced, with budgets from below the least peak to above the largest."""
    memory = explored[0].data["memory"]
    assert set(memory["fit"]) == {"bfloat16", "float32"}
    assert [*memory["fit"]["float32"]] == [b for b in memory["batches"] if b > 1]
    peak = sum(memory["plan"]["fastvit"]["train"]["bfloat16"]["40x8"][32])
    gib = [share * peak / 2**30 for share in (0.1, 0.9, 1.01)]
    found = recomputation.collect(find(NAME), (40, 40), True, {"bfloat16": {2: 0, 32: peak, 256: 0}}, gib)["bfloat16"]
    assert found[2] == found[256] == {}
    assert [*found[32]] == gib[:2]
    least, policy = found[32].values()
    assert least is None
    right = study.fit(NAME, budget=int(gib[1] * 2**30), batch=32, device="cuda")
    assert policy["words"].startswith("block 0: ")
    assert policy["peak"] == pytest.approx(right.peak, rel=0.01)
    # by the search between two batches, and by a trace: one of two choices of nearly one price may be chosen
    assert policy["recomputed"] == pytest.approx(right.recomputed, abs=0.02)
    assert policy["recomputed"] > 0


def test_a_page_says_why_it_has_no_recomputation():
    plans = {
        "fastvit": {
            "train": {d: {"32x8": dict.fromkeys(explored_memory.BATCHES, (0,))} for d in explored_memory.DTYPES}
        }
    }
    found, (why,) = explored_memory._fit(find("study_models:of_no_list"), (32, 32), True, plans, "32x8")
    assert found is None
    assert why == "what blocks recompute: VisionTransformer has no list of blocks of one class"


@pytest.mark.parametrize(
    ("provider", "mode", "gpu"),
    [("eager", "train", True), ("sdpa", "infer", False), ("fastvit", "train", True), ("fastvit", "infer", True),
     ("fastvit", "train", False)],
)  # fmt: skip
def test_a_plan_scaled_from_one_step_is_the_plan(provider, mode, gpu, monkeypatch):
    """A trace of several images scales to any number but one, which has a trace of its own."""
    scaled_is_planned(monkeypatch, "vit_small_patch16_224", 1, provider, Setting(mode), gpu)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("vit_small_plus_patch16_dinov3", 5), ("aimv2_large_patch14_224", 0), ("vit_small_patch16_rope_224", 1)],
)
def test_plans_of_rotary_gated_and_qk_normed_models_scale(name, prefix, monkeypatch):
    scaled_is_planned(monkeypatch, name, prefix, "fastvit", Setting(), gpu=True)


def scaled_is_planned(
    monkeypatch: pytest.MonkeyPatch, name: str, prefix: int, provider: str, setting: Setting, gpu: bool
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setitem(zoo.CONFIGS, name, zoo.config(name) | {"depth": 2})
    source = find(name)
    with torch.device("meta"):
        at = sizes_to_trace(source.build(), prefix)
    (patch, _), options = source.patch_size, {"gpu": gpu}
    one, more = (TracedStep(source, provider, setting, traced, **options) for traced in (at._replace(batch=1), at))
    for grid, p, batch, scaled in [(14, patch // 2, 8, more), (32, patch, 3, more), (14, 2 * patch, 1, one)]:
        right = plan(source, provider, (grid * p,) * 2, batch, setting, **options, patch_size=(p, p)).parts
        assert scaled.parts(grid * p, p, batch) == right


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_sizes_to_trace_at_are_told_from_widths_and_from_each_other(prefix):
    widths = 17 * 19, 23 * 47
    with torch.device("meta"):
        at = sizes_to_trace(nn.ModuleList([nn.Linear(*widths)]), prefix)
    assert at.grow() == (
        at.batch, at.side, at.side**2 + 1, at.side**2 + prefix, (2 * at.side - 1) ** 2 + 3 * prefix, at.patch
    )  # fmt: skip
    tell = set(at.grow()) - {at.side**2}
    assert len(tell) == (5 if prefix < 2 else 6)
    for n in tell:  # what is left without the others' primes divides no width
        for m in (*widths, *tell - {n}):
            while (common := math.gcd(n, m)) > 1:
                n //= common
        assert n > 1


def test_every_extent_scales_by_what_grows(monkeypatch):
    """Models with registers without positions (transformers' DINOv2), and with tables of relative positions (BEiT)."""
    pytest.importorskip("triton", reason="triton is not installed")
    for name, prefix in [("study_models:of_registers", 3), ("study_models:of_relative_positions", 1)]:
        source = find(name)
        at = sizes_to_trace(source.on_meta("sdpa"), prefix, 8)
        scaled = TracedStep(source, "sdpa", Setting(), at, gpu=True)
        right = plan(source, "sdpa", (48, 48), 3, Setting(), gpu=True, patch_size=(8, 8)).parts
        assert scaled.parts(48, 8, 3) == right


def test_stops():
    stops = [224, 252, 322, 378, 448, 518, 644, 770, 1022, 1540, 2044]
    assert explored_memory.size_stops(518, [7, 14]) == stops
    assert explored_memory.size_stops(40, [4, 8]) == [40, 48, 56, 64, 80, 88, 112, 136, 184, 272, 368]


def test_patches_that_divide():
    assert exploration.patch_stops((224, 224), (112, 112)) == [4, 7, 8, 14, 16, 28, 32, 56, 112]


# ---- room ----


@pytest.mark.parametrize(("room", "whole"), [(16_000, {0, 1}), (25_000, {1})])
def test_attention_stays_within_its_room(room, whole):
    model = fastvit.VisionTransformer(img_size=32, patch_size=4, embed_dim=48, depth=2, num_heads=3).eval()
    found = explored_attention.collect(model, torch.randn(3, 32, 32), [1], exploration._silent, room)
    maps = found["maps"]
    assert len(json.dumps(maps)) <= room + 40 * len(maps)  # and the names
    assert found["stride"] == (2 if room == 16_000 else 1)
    assert whole == {layer for layer in (0, 1) if f"{layer}.0" in maps}
    assert {"rollout", "0.mean", "1.mean"} <= set(maps)
    for name in maps:
        assert rows_of(maps[name], 65).shape == (len(found["queries"]), 65)


def test_the_rooms_together_are_within_the_limit():
    static = len(document.rendered("", {}))
    assert exploration.ROOM + static + 450_000 < 4_000_000  # memory and the picture


def test_layers_by_interest():
    assert explored_attention._by_interest(5, []) == [4, 0, 3, 1, 2]
    assert explored_attention._by_interest(4, [2]) == [2, 3, 0, 1]


def test_layers_in_words():
    assert explored_attention._ranges([0, 1, 5]) == "0, 1, 5"
    assert explored_attention._ranges([0, 1, 2, 7, 8, 9, 11]) == "0 to 2, 7 to 9, 11"


def test_a_model_whose_attention_is_not_seen_says_so():
    found = explored_attention.collect(nn.Conv2d(3, 8, 4, 4), torch.zeros(3, 16, 16), None, exploration._silent, 0)
    assert found["maps"] is None
    assert found["note"].startswith("No attention is shown: ")
    layers = layer_figures.collect(nn.Conv2d(3, 8, 4, 4), torch.zeros(3, 16, 16), exploration._silent)
    assert layers["distance"] is layers["cosine"] is None
    assert "No attention distances are shown: " in layers["note"]
    assert "No states after blocks are shown: " in layers["note"]


# ---- the page as a text ----


def test_nothing_leads_out_of_the_page(explored):
    page = explored[0].html()
    assert set(re.findall(r"\w+://[^\s\"'<>)]+", page)) == {"http://www.w3.org/2000/svg"}  # a name, never asked for
    assert not re.search(r"<(link|iframe|object|embed|img|script)\b[^>]*\b(src|href)=", page)
    assert not re.search(r"url\(|@import|\bimport\(|\bfetch\(|XMLHttpRequest|sendBeacon|WebSocket", page)
    assert "default-src 'none'" in page
    assert "@@" not in page
    assert len(page.encode()) < 4_000_000


def test_names_are_no_markup(explored):
    found, image, _ = explored
    page = found.html()
    assert image.name not in page
    assert "onerror=alert(1)>" not in page
    assert found.data["provenance"].endswith(f"Picture: {image.name}.")
    nasty = "</script><script>alert(1)</script><!--"
    page = document.rendered(nasty, {"name": nasty, "@@STYLE@@": r"\1"})
    assert page.count("<script") == 2 == page.count("</script>")
    assert "<!--" not in page
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert json.loads(data) == {"name": nasty, "@@STYLE@@": r"\1"}


# ---- the command ----


def test_command(tmp_path, monkeypatch, capsys):
    """It runs without picture and weights, at a size whose memory is not planned."""
    monkeypatch.setattr(exploration, "_NAMES", exploring.NAMES[:1])
    monkeypatch.setitem(zoo.CONFIGS, NAME, exploring.CONFIG)
    out = tmp_path / "page.html"
    assert main(["explore", NAME, "--image-size", "16x24", "--out", str(out), "--layers", "0,1"]) == 0
    page = out.read_text()
    assert capsys.readouterr().err == f"wrote {out}\n"
    (data,) = re.findall(r'id="data">(.*?)</script>', page)
    data = json.loads(data)
    assert data["model"]["tokens"] == 2 * 3 + 2
    assert "random, since no file was given" in data["provenance"]
    assert data["attention"]["note"].startswith("Of random weights. ")
    assert "a computed landscape" in data["provenance"]
    assert data["picture"]["patch_stops"] == [4, 8]
    assert data["memory"] == {"plan": None, "note": "Memory is planned for square images and patches only."}
