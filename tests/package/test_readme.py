"""The README's Python runs as pasted, each block by itself, and prints what the README says. Its commands exist."""

import re
import shlex
import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch
from library_imports import import_timm

import fastvit
from fastvit import zoo
from fastvit.cli import terminal

README = Path(__file__).parents[2] / "README.md"
TEXT = README.read_text()
BLOCK = re.compile(r"```python\n(.*?)```$", re.DOTALL | re.MULTILINE)


DEPTH = 2  # of our models in this test, where the README's have 12 blocks


def write_checkpoints(folder: Path) -> None:
    """Write the checkpoints that the blocks read: timm's weights as safetensors, and a DINOv2 with the names and the
    518 px of Meta's files. A folder goes before the repository of the same name."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    tag, dinov2_small = folder / "vit_base_patch16_224.augreg2_in21k_ft_in1k", folder / "facebook/dinov2-small"
    for path in (tag, dinov2_small):
        path.mkdir(parents=True)
    model = import_timm().create_model("vit_base_patch16_224", depth=DEPTH)
    save_file(model.state_dict(), tag / "model.safetensors")
    dinov2 = fastvit.reference.VisionTransformer(
        img_size=518, patch_size=14, embed_dim=384, depth=DEPTH, num_heads=6, init_values=1e-5, num_classes=0
    )
    state = {**dinov2.state_dict(), "mask_token": torch.zeros(1, 384)}
    torch.save(state, dinov2_small / "pytorch_model.bin")


def test_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import_timm()
    for name in ("vit_base_patch16_224", "vit_small_patch14_dinov2", "vit_tiny_patch16_224"):
        monkeypatch.setitem(zoo.CONFIGS, name, zoo.CONFIGS[name] | {"depth": DEPTH})
    write_checkpoints(tmp_path)
    monkeypatch.chdir(tmp_path)
    printed = []
    for block in BLOCK.finditer(TEXT):
        line = TEXT[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], README, "exec"), {})  # tracebacks then have the README's line
        printed.append(capsys.readouterr().out)
    assert {"model.pt2", "aten.pt2", "model.onnx"} <= {path.name for path in tmp_path.iterdir()}
    shutil.rmtree(tmp_path)  # which pytest would not delete

    (report,) = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
    accelerated, started, features, _ = printed
    assert accelerated.startswith(report)
    assert re.fullmatch(r"\d\.\d+ torch.Size\(\[2, 197, 768\]\)\n", started)
    assert features == "torch.Size([1, 257, 384]) torch.Size([2, 384])\n"


@pytest.mark.parametrize("command", re.findall(r"^    fastvit (.+?)(?:  #.*)?$", TEXT, re.MULTILINE))
def test_commands(command: str) -> None:
    for words in map(shlex.split, command.split("; fastvit ")):
        parser = terminal.Parser(f"fastvit {words[0]}")
        import_module(f"fastvit.cli.{words[0]}").configure(parser)
        parser.parse_args(words[1:])


def test_links_to_files() -> None:
    links = re.findall(r"(?:\]\(|(?:src|srcset)=\")(?!http)([^)#\"]+)", TEXT)
    assert len(links) > 5
    assert [path for path in links if not (README.parent / path).exists()] == []


def test_how_many_models_the_graph_route_fuses_is_what_the_results_say() -> None:
    page = (README.parent / "benchmarks/results/README.md").read_text()
    results = re.findall(r"^(\d+ of \d+) with every self-attention fused", page, re.MULTILINE)
    text = " ".join(README.read_text().split())
    said = re.search(r"In (\d+ of \d+) classes of transformers and (\d+ of \d+) models of timm", text)
    assert said is not None
    assert results[:2] == list(said.groups())
