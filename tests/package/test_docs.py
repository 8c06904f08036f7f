"""The API reference: `make docs` renders it without warnings, and everything in it is documented. The README's Python
runs as pasted, each block by itself, and prints what the README says. Its commands exist, and so do the files
that pages name."""

import functools
import importlib
import inspect
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from library_imports import import_timm

import fastvit
from fastvit import zoo
from fastvit.cli import terminal

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text().replace("\\\n", "")
(PAGES,) = re.findall(r"^PAGES := (.+)$", MAKEFILE, re.MULTILINE)
MODULES = {page: importlib.import_module(page) for page in ("fastvit", *PAGES.split())}
# The classes of the reference take the arguments of those that they mirror, and do not repeat their documentation.
DOCUMENTED = {page: module for page, module in MODULES.items() if page != "fastvit.reference"}
EXPORTED = [(page, name) for page, module in DOCUMENTED.items() for name in getattr(module, "__all__", [])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Render the pages with the recipe of `make docs` into a temporary folder."""
    pytest.importorskip("pdoc", reason="pdoc is not installed")
    (recipe,) = re.findall(r"^\t\$\(BIN\)/python -m pdoc (.+)$", MAKEFILE, re.MULTILINE)
    arguments = shlex.split(recipe.replace("$(PAGES)", PAGES))
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "pdoc", *arguments, "--output-directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    warnings = [line for line in done.stderr.splitlines() if "fastvit" in line]
    assert not warnings, warnings
    return folder


def test_pages(folder: Path) -> None:
    pages = {".".join(path.relative_to(folder).with_suffix("").parts) for path in folder.rglob("*.html")}
    assert pages == {*MODULES, "index"}
    for path in folder.rglob("*.html"):
        page = path.read_text()
        assert "<p>Args:" not in page, f"{path}: a section that is not Google's"
        assert "performed at every call" not in page, f"{path}: torch's docstrings"
        assert "Alias for field number" not in page, f"{path}: Python's docstrings"
    for module, name in EXPORTED:
        if isinstance(
            getattr(MODULES[module], name), functools.partial
        ):  # pdoc takes it for a variable of another file
            continue
        page = (folder / module.replace(".", "/")).with_suffix(".html").read_text()
        assert f"{module}.{name}" in MODULES or name == "__version__" or f'<section id="{name}">' in page


def test_side_links_and_order(folder: Path) -> None:
    """Each page lists all pages and its own names, once each and functions first; links lead to something."""
    pages = {path: path.read_text() for path in folder.rglob("*.html") if path.name != "index.html"}
    pages = {path: page[: page.index("</main>")] for path, page in pages.items()}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', page)) for path, page in pages.items()}
    for path, page in pages.items():
        side = page[page.index("<h2>Pages</h2>") : page.index("</nav>")]
        listed, names = side.split("<h2>On this page</h2>")
        texts = re.findall(r"<li><a[^>]*>(?:<strong>)?([\w.]+)", listed)
        assert texts == list(MODULES)
        kinds = re.findall(r'<a class="(class|function)" href="#\w+"', names)
        assert kinds == sorted(kinds, reverse=True)
        entries = re.findall(r'<a class="\w+" href="([^"]+)"', names)
        assert len(entries) == len({entry.removesuffix(".__init__") for entry in entries})
        for file, anchor in re.findall(r'<a [^>]*href="(?!http|data:)([^"#]*)#?([^"]*)"', page):
            target = (path.parent / file).resolve() if file else path
            assert target in pages, f"{path}: {file}"
            assert not anchor or anchor in anchors[target], f"{path}: {file}#{anchor}"


def arguments_to_document(value: Any) -> list[str]:
    """Dataclasses and exceptions need not document arguments: users read them but do not make them. A partial class has
    those of its class."""
    if not callable(value) or is_dataclass(value) or isinstance(value, functools.partial):
        return []
    if inspect.isclass(value) and issubclass(value, Exception):
        return []
    return [
        name
        for name, p in inspect.signature(value).parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def test_everything_exported_is_documented_with_its_arguments() -> None:
    values = {f"{module}.{name}": getattr(MODULES[module], name) for module, name in EXPORTED}
    assert [name for name, value in values.items() if not value.__doc__] == []
    arguments = [(n, v.__doc__, argument) for n, v in values.items() for argument in arguments_to_document(v)]
    assert [(name, a) for name, text, a in arguments if not re.search(rf"\b{a}\b", text)] == []


# ---- README ----

README = ROOT / "README.md"
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


def test_blocks_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert accelerated == report
    assert re.fullmatch(r"\d\.\d+ torch.Size\(\[2, 197, 768\]\)\n", started)
    assert features == "torch.Size([1, 257, 384]) torch.Size([2, 384])\n"


def test_snippets_of_the_first_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """They run as pasted, one after another; only compiled by aot_eager, which is quick."""
    import_timm()
    monkeypatch.setattr(fastvit, "compile", functools.partial(fastvit.compile, inner="aot_eager"))
    for name in ("vit_small_patch16_224", "vit_base_patch16_224"):
        monkeypatch.setitem(zoo.CONFIGS, name, zoo.CONFIGS[name] | {"depth": DEPTH})
    assert fastvit.__doc__ is not None
    snippets = re.findall(r"((?:^ {4}.+\n)+)", fastvit.__doc__, re.MULTILINE)
    names: dict[str, Any] = {}
    printed = {}
    for snippet in snippets:
        used = re.findall(r"fastvit\.(\w+)", snippet)[0]
        with pytest.warns(UserWarning, match="a tensor is on the cpu") if used == "graphs" else nullcontext():
            exec(textwrap.dedent(snippet), names)
        printed[used] = capsys.readouterr().out
    assert list(printed) == ["accelerate", "graphs", "compile", "create_model", "ops", "study"]
    assert "fused: attention in 12 of 12, MLP in 12 of 12" in printed["accelerate"]
    assert printed["graphs"].startswith("torch.Size([1, 1000]) ")
    assert "fused: attention 12 of 12, MLP 12 of 12" in printed["compile"]
    assert printed["create_model"] == "torch.Size([8, 10])\n"
    assert names["qkv"].grad.shape == names["qkv"].shape
    assert re.fullmatch(r"\[\d+, \d+\]\n", printed["study"])


@pytest.mark.parametrize("command", re.findall(r"^    fastvit (.+?)(?:  #.*)?$", TEXT, re.MULTILINE))
def test_commands_of_the_readme(command: str) -> None:
    for words in map(shlex.split, command.split("; fastvit ")):
        parser = terminal.Parser(f"fastvit {words[0]}")
        importlib.import_module(f"fastvit.cli.{words[0]}").configure(parser)
        parser.parse_args(words[1:])


PAGES_WITH_LINKS = "README.md", "kernels/README.md", "benchmarks/NOTES.md", "benchmarks/examples/README.md"


@pytest.mark.parametrize("page", PAGES_WITH_LINKS)
def test_links_to_files(page: str) -> None:
    links = re.findall(r"(?:\]\(|(?:src|srcset)=\")(?!http)([^)#\"]+)", (ROOT / page).read_text())
    assert len(links) > 5
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_notes_list_their_headings_and_name_files_that_exist() -> None:
    text = (ROOT / "benchmarks/NOTES.md").read_text()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert re.findall(r"^- \[(.+)\]\(#(.+)\)$", text, re.MULTILINE) == list(zip(headings, anchors, strict=True))
    files = {file for heading in headings for file in re.findall(r"`(.+)`", heading)}
    files |= set(re.findall(r"`((?:kernels|fastvit|benchmarks|tests)/\S+\.\w+)`", text))
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []


def test_how_many_models_are_fused_is_what_the_results_say() -> None:
    page = (README.parent / "benchmarks/results/README.md").read_text()
    by_compile, by_accelerate = (
        re.findall(rf"^(\d+ of \d+) with all attention fused by {route}", page, re.MULTILINE)
        for route in ("compile", "accelerate")
    )
    text = " ".join(README.read_text().split())
    said = re.search(r"In (\d+ of \d+) classes of transformers and (\d+ of \d+) models .* in (\d+) and (\d+)", text)
    assert said is not None
    assert said.groups() == (*by_compile[:2], *(count.split()[0] for count in by_accelerate[:2]))
