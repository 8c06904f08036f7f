"""Help, examples, mistakes and missing packages, for all verbs of the command."""

import importlib
import os
import re
import shlex
import subprocess
import sys
import time
import types

import pytest
from study_models import SMALL

from fastvit._base import which_triton
from fastvit.cli import VERBS, main, terminal
from fastvit.cli.terminal import described

MEMORY = ["memory", SMALL, "--image-size", "32,64"]
FIT = ["fit", SMALL, "--budget", "1GiB", "--batch", "8", "--device", "cpu"]
ATTENTION = ["attention", SMALL, "picture.png"]
LARGEST = ["--batch", "1048576", "--image-size", "65536", "--device", "cpu"]  # each is possible by itself
MISTAKES = [
    ([*MEMORY, "--plot", "a.pdf"], "--plot writes .png or .svg"),
    ([*MEMORY, "--plot", "no/folder/a.png"], "there is no folder"),
    ([*MEMORY, "--plot", "/proc/a.png"], "--plot: /proc cannot be written: "),
    ([*MEMORY, "--together", "--plot", "a.svg"], "--plot draws"),
    ([*MEMORY, "--together", "--budget", "1GiB"], "--budget searches"),
    (["memory", SMALL, *LARGEST, "--providers", "eager"], "Storage size calculation overflowed"),
    ([*FIT, "--batch", "1048576", "--image-size", "1024"], "is too large to be planned"),
    (["fit", "study_models:convolution", *FIT[2:]], "no block of Sequential"),
    (["fit", "study_models:no_list", *FIT[2:]], "has no list of blocks of one class"),
    (["models", "study_models:image_and_text"], "required positional argument: 'text'"),
    (["verify", "--ops", "conv"], "no op is called 'conv'; the ops are add_layer_norm"),
    (["verify", "--device", "cuda:99"], "device cuda:99 is not there"),
    (["verify", "mlp"], "mlp is an op, not a model: fastvit verify --ops mlp"),
    (["verify", "study_models:one_size", "--depth", "1"], "study_models:one_size takes no depth"),
    (["explore", SMALL, "--out", "page.pdf"], "--out writes .html, got page.pdf"),
    (["attention", "picture.png", SMALL], "'picture.png' is not a known model but a file: the model goes first"),
    (["explore", SMALL, "--layers", "12"], "layers must be in 0..1, got 12"),
    (["attention", SMALL, "text.png"], "text.png is no picture that Pillow reads: cannot identify"),
    ([*ATTENTION, "--image-size", "65536"], "sides of at most 8192 pixels, got 65536 x 65536"),
    ([*ATTENTION, "--mean", "nan,0,0"], "mean must have three values above -1000 and below 1000"),
    ([*ATTENTION, "--std", "1,1e-300,1"], "std must have three values above 0.001 and below 1000"),
    ([*ATTENTION, "other.png"], "maps are of one IMAGE, got 2; --by-layer takes several"),
    ([*ATTENTION, "--by-layer", "--head", "1"], "--head is of maps, which --by-layer does not compute"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_mistakes_are_one_line(words, message, tmp_path, monkeypatch, capsys):
    pytest.importorskip("PIL.Image").new("RGB", (8, 8)).save(tmp_path / "picture.png")
    (tmp_path / "text.png").write_text("text")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(terminal, "INTERVAL", 3600.0)  # no line of progress before the error
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err
    assert err.startswith("fastvit: ")
    assert err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"picture.png", "text.png"}


WRONG_ARGUMENTS = [
    (["memory"], "required: MODEL"),
    ([*MEMORY, "--budget", "24"], "must have a unit, such as 24GiB or 24GB, got '24'"),
    (["fit", SMALL, "--budget", "24GiB", "--batch", "8,16"], "must be an integer from 1 to 1048576, got '8,16'"),
    ([*MEMORY, "--providers", "fastvt"], "must be of eager, sdpa, fastvit, got 'fastvt'; did you mean fast"),
    (["verify", "--dtype", "int8"], "must be of fp32, bf16, fp16, got 'int8'"),
    ([*MEMORY, "--batch-size", "8"], "there is no option --batch-size; did you mean --batch?"),
    ([*MEMORY, "--image_size=224"], "there is no option --image_size=224; did you mean --image-size? (see fastvit mem"),
    ([*MEMORY, "--image-size", "224", "512", "768"], "takes its values without spaces: --image-size 224,512"),
    (["fit", SMALL, "--image-size", "224", "512", *FIT[2:]], "--image-size 224x512"),
    (["doctor", "torch"], "fastvit doctor: 'torch' is one argument too many"),
    ([*ATTENTION, "--std", "a,b,c"], "argument --std: must be"),
    ([*ATTENTION, "--out", "map.jpg"], "argument --out: must be"),
]
# Values that no machine can hold, and what is wrong in other ways
NUMBERS = {
    ("memory", "--batch"): ("0", "1.5", ",", "1048577", "9" * 5000, "\u00b2"),
    ("models", "--image-size"): ("-1", "65537", "32x"),
    ("memory", "--patch-size"): ("0",),
    ("fit", "--budget"): ("0GiB", "nanGiB", "infGiB", "1e-300GiB", "1025TiB"),
    ("verify", "--head-dim"): ("0",),
    ("verify", "--depth"): ("0",),
    ("warmup", "--processes"): ("0",),
    ("warmup", "--multiprocessors"): ("0",),
    ("explore", "--layers"): ("-1",),
    ("attention", "--query"): ("-1,0", "0,0,0"),
}
WRONG_ARGUMENTS += [
    ([verb, f"{option}={value}"], f"argument {option}: ")
    for (verb, option), values in NUMBERS.items()
    for value in values
]


@pytest.mark.parametrize(("words", "message"), WRONG_ARGUMENTS)
def test_wrong_arguments(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_errors_in_words():
    """All of their lines in one, and no escape sequence for the terminal."""
    assert described(ValueError("it does not fit:\n  blocks.0\n  blocks.1")) == "it does not fit: blocks.0 blocks.1"
    assert len(described(ValueError("key " * 1000))) < 700
    assert described(ValueError("key \x1b[2J\u202eß")) == r"key \x1b[2J\u202eß"
    assert described(FileNotFoundError(2, "No such file", "\x1b[2J")) == r"No such file: \x1b[2J"


def test_progress_in_a_pipe_is_a_line_for_what_lasts(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "INTERVAL", 0.0)
    lines = ""
    with terminal.progress(3, "planning") as step:
        for text in ("eager", "sdpa"):
            step(text)
            for _ in range(1000):
                time.sleep(0.01)
                lines += capsys.readouterr().err
                if text in lines:
                    break
    assert lines == "planning: eager (1 of 3)\nplanning: sdpa (2 of 3)\n", "each once"


def test_an_interruption_says_what_is_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(terminal, "_saved", "")

    def interrupted(*said: str) -> int:
        raise KeyboardInterrupt(*said)

    assert terminal.guarded(interrupted) == 130
    assert terminal.guarded(lambda: interrupted("3 models are in a.json"), name="benchmarks.coverage") == 130
    terminal.write(tmp_path / "a.txt", "a")
    assert terminal.guarded(interrupted) == 130
    assert capsys.readouterr().err.splitlines() == [
        "fastvit: interrupted; nothing was written",
        "benchmarks.coverage: interrupted; 3 models are in a.json",
        f"wrote {tmp_path / 'a.txt'}",
        f"fastvit: interrupted; wrote {tmp_path / 'a.txt'}",
    ]


def test_no_number_of_a_table_is_cut(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "20")
    terminal.print_table(
        ["model", "a", "b"], [["the name of a model", "123,456,789,012", "1.02 0.98"], [], ["x", "2", "34"]]
    )
    out = capsys.readouterr().out
    assert {"123,456,789,012", "34"} <= set(out.split())
    assert "1.02 0.98" in out
    assert "…" not in out


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
    assert done.stdout.count("examples:") >= 9
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []
    assert not re.search(r"default: (None|False|\[|-)", done.stdout)


@pytest.mark.parametrize("verb", VERBS)
def test_examples_are_commands(verb):
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
        parser.parse_args(words[1:])


@pytest.mark.parametrize(
    ("module", "words", "package"),
    [
        ("rich.table", ["models", SMALL], "'fastvit[study]'"),
        ("PIL", ATTENTION, "'fastvit[study]'"),
        ("matplotlib", [*FIT, "--plot", "a.svg"], "'fastvit[study]'"),
        ("timm", ["memory", "resnet18"], "timm"),
    ],
)
def test_a_package_that_is_not_installed_is_named(module, words, package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    assert main(words) == 2
    assert f"pip install {package}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[*MEMORY, "--device", "cuda"], ["warmup", SMALL, "--target", "sm_80"]])
def test_triton_that_is_not_installed_is_named_before_torch_is_imported(words):
    program = "import sys; sys.modules['triton'] = sys.modules['torch'] = None\n"
    program += "from fastvit.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, env=environment)
    assert (run.returncode, run.stdout) == (2, "")
    (line,) = run.stderr.splitlines()
    assert f"needs triton, which is not installed: {which_triton.how_to_install()}" in line


def test_the_triton_of_a_torch(monkeypatch):
    """The version that torch requires, or the one that was tested with it."""
    for version, requires, package in (
        ("2.13.0+cpu", None, "triton==3.7.1"),
        ("2.12.1+rocm7.2", ["triton-rocm==3.6.5 ; platform_system == 'Linux'"], "triton-rocm==3.6.5"),
    ):
        torch = types.SimpleNamespace(version=version, requires=requires)
        monkeypatch.setattr(which_triton.importlib.metadata, "distribution", lambda name, torch=torch: torch)
        assert which_triton.how_to_install() == f"pip install {package}, which belongs to torch {version}"
