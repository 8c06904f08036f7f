"""`fastvit memory`, and what all verbs share: examples, mistakes, missing packages."""

import csv
import errno
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from study_models import SMALL, known

from fastvit import study
from fastvit.cli import VERBS, main, memory, terminal
from fastvit.ops.runtime import dispatch

FAST = ["memory", SMALL, "--image-size", "32,64", "--batch", "2", "--device", "cpu", "--mode", "infer"]


@pytest.fixture(autouse=True)
def _models() -> Iterator[None]:
    with known():
        yield


def test_the_table(capsys):
    assert main(FAST) == 0
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 100
    assert "\x1b" not in out
    assert not err
    for word in (SMALL, "eager", "SDPA", "fastvit", "attention as N^2", "257"):
        assert word in out


def test_json_and_csv_are_the_study(capsys):
    assert main([*FAST, "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    want = study.memory(SMALL, image_sizes=(32, 64), batches=(2,), mode="infer", dtype="bf16", device="cpu")
    assert [p["planned"]["peak"] for p in got["points"]] == [p.planned.peak for p in want.points]
    assert got["exponents"]["eager"] == pytest.approx(want.exponents("eager"))
    assert main([*FAST, "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [int(r["planned"]) for r in rows] == [p.planned.peak for p in want.points]
    assert [int(r["tokens"]) for r in rows] == [p.tokens for p in want.points]


def test_the_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name, theme in (("memory.svg", "dark"), ("memory.png", "light")):
        assert main([*FAST, "--plot", str(tmp_path / name), "--theme", theme]) == 0
        assert capsys.readouterr().err == f"wrote {tmp_path / name}\n"
    assert "#0d1117" in (tmp_path / "memory.svg").read_text()
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_budget_by_the_command(capsys):
    assert main([*FAST, "--budget", "64MiB", "--providers", "fused", "--json"]) == 0
    (fit,) = json.loads(capsys.readouterr().out)["fits"]
    want = study.largest_batch(SMALL, 64 << 20, image_size=64, mode="infer", dtype="bf16", device="cpu")
    assert fit["batch"]["64"] == want
    assert fit["image_size"]["2"] % 4 == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["memory", "missing.json"], "missing.json"),
        ([*FAST, "--plot", "a.pdf"], "--plot writes .png or .svg"),
        ([*FAST, "--plot", "no/folder/a.png"], "there is no folder"),
        (["memory", SMALL, "--plot", "a.png"], "two image sizes or more"),
        (["memory", "study_models:of_an_image_and_text", "--image-size", "32"], "required positional argument: 'text'"),
        (["models", "study_models:of_an_image_and_text"], "of_an_image_and_text: TypeError: "),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err
    assert err.startswith("fastvit: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["memory"], "required: MODEL"),
        (["memori"], "invalid choice"),
        ([*FAST, "--budget", "much"], "such as 24GiB"),
        ([*FAST, "--budget", "24"], "must have a unit, such as 24GiB or 24GB, got '24'"),
        ([*FAST, "--image-size", "a"], "a size is 224"),
        ([*FAST, "--batch", "0"], "positive integers"),
        ([*FAST, "--providers", "flash"], "must be of eager"),
    ],
)
def test_wrong_arguments(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_budget_of_other_patches_and_of_one_size(capsys):
    words = ["--budget", "64MiB", "--providers", "sdpa", "--json", "--batch", "2", "--device", "cpu", "--mode", "infer"]
    assert main(["memory", SMALL, "--image-size", "36", "--patch-size", "6", *words]) == 0
    assert json.loads(capsys.readouterr().out)["fits"][0]["image_size"]["2"] % 6 == 0
    assert main(["memory", "study_models:of_one_size", *words]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["fits"][0]["image_size"]["2"] is None
    assert "takes no image_size: its model has one only" in err


def test_a_function_in_the_folder_of_the_caller(tmp_path):
    (tmp_path / "mine.py").write_text("import fastvit\ndef vit(): return fastvit.create_model('vit_cifar_small')\n")
    words = ["memory", "mine:vit", "--providers", "fused", "--mode", "infer", "--device", "cpu", "--json"]
    program = f"import sys; sys.path.pop(0); sys.argv[1:] = {words!r}\nfrom fastvit.cli import main; sys.exit(main())"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["points"][0]["tokens"] == 65


def test_an_error_of_many_lines_is_told_whole():
    from fastvit.cli.terminal import described

    assert described(ValueError("it does not fit:\n  blocks.0\n  blocks.1")) == "it does not fit: blocks.0 blocks.1"
    assert len(described(ValueError("key " * 1000))) < 700


def test_escape_sequences_in_an_error_do_not_reach_the_terminal():
    from fastvit.cli.terminal import described

    assert described(ValueError("key \x1b[2J\u202eß")) == r"key \x1b[2J\u202eß"
    assert described(FileNotFoundError(2, "No such file", "\x1b[2J")) == r"No such file: \x1b[2J"


def test_a_full_disk(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main([*FAST, "--plot", str(tmp_path / "a.png")]) == 2
    assert capsys.readouterr().err == f"fastvit: No space left on device: {tmp_path / 'a.png'}\n"
    assert not list(tmp_path.iterdir())


def test_help_imports_no_torch():
    program = (
        "import sys\nfrom fastvit.cli import VERBS, main\n"
        "for words in (['--help'], *([verb, '--help'] for verb in VERBS)):\n"
        "    try: main(words)\n    except SystemExit as stop: assert not stop.code, words\n"
        "assert not {'torch', 'numpy', 'rich', 'triton'} & sys.modules.keys(), sys.modules.keys()"
    )
    environment = os.environ | {"COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("examples:") >= 8
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []
    assert "images (default: 8)" in done.stdout
    assert not re.search(r"default: (None|False|\[|-)", done.stdout)


def test_the_package_runs_as_a_program_which_prints_its_help():
    done = subprocess.run([sys.executable, "-m", "fastvit"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: fastvit [-h]")


@pytest.mark.parametrize("verb", VERBS)
def test_examples_are_commands(verb, monkeypatch):
    """The verb's parser takes every example in its help."""
    module = importlib.import_module(f"fastvit.cli.{verb}")
    parser = terminal.Parser(f"fastvit {verb}")
    module.configure(parser)
    lines = re.sub(r" \\\n +", " ", parser.epilog).splitlines()
    examples = [line.split("  ")[1] for line in lines if re.match(r"  (\w+=\w+ )?fastvit ", line)]
    assert examples
    for example in examples:
        words = shlex.split(example.partition(" # ")[0].partition(" > ")[0].partition("fastvit ")[2])
        assert words[0] == verb
        args = parser.parse_args(words[1:])
        if getattr(args, "plot", None) is not None:
            memory._check_plot(args)


def test_what_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert main(FAST) == 2
    assert "pip install 'fastvit[study]'" in capsys.readouterr().err
    monkeypatch.setattr(dispatch, "HAVE_TRITON", False)
    assert main([*FAST[:-4], "--device", "cuda"]) == 2
    assert "pip install triton" in capsys.readouterr().err


def test_sizes_in_words():
    from fastvit.cli.memory import memory_size

    assert memory_size("24GiB") == 24 << 30
    assert memory_size("0.5 gb") == 5 * 10**8
