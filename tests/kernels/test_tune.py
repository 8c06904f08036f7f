"""Tuned tables: how choices are made, how files are written, read and refused, and that kernels follow them."""

import dataclasses
import functools
import json
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastvit import ops
from fastvit.kernels import _attention_configs, _configs, _tuned
from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime import device as devices

if not (backends.INTERPRET and backends.HAVE_TRITON):
    pytest.skip("tuning is tested in Triton's interpreter", allow_module_level=True)

from benchmarks.gpu import tune
from benchmarks.gpu.tables import works
from fastvit.tuning import tuner as tuning
from fastvit.tuning.candidates import candidates
from fastvit.tuning.tuner import Timer, Tuner, Work, decide, difference

ARCH, GPU = "sm_90", "Test GPU 80GB"
CPU = torch.device("cpu")
KEY = (20, 16, 2, 0, 0)  # of attention_fwd


pytestmark = pytest.mark.usefixtures("nothing_tuned")


def document(tables: Any, **changes: Any) -> dict[str, Any]:
    return {"format": _tuned.FORMAT, "gpu": GPU, "arch": ARCH, "tables": tables} | changes


def entry(table: str, *values: int) -> dict[str, int]:
    return dict(zip(_tuned.FIELDS[table], values, strict=True))


def load(monkeypatch: pytest.MonkeyPatch, folder: Path, data: Any) -> None:
    """Load a table as the ops do at their first launch on a GPU. data: text, or what becomes JSON."""
    text = data if isinstance(data, str) else json.dumps(data)
    (folder / _tuned.file_name(GPU)).write_text(text)
    monkeypatch.setattr(_tuned, "FOLDER", folder)
    _tuned.load(ARCH, GPU)


# ---- the margin ----


TRIED: list[tuple[Any, Any]] = [
    ({(1,): [0.981] * 3}, None),
    ({(1,): [0.979] * 3}, (1,)),
    ({}, None),
    ({(1,): [0.979] * 3, (2,): [0.9] * 3, (3,): [1.1] * 3}, (2,)),
    ({(1,): [0.1, 1.0, 1.0]}, None),  # one lucky round
]


@pytest.mark.parametrize(("tried", "chosen"), TRIED)
def test_a_choice_must_be_two_percent_faster(tried: Any, chosen: Any) -> None:
    assert decide([1.0, 1.0, 1.0], tried) == chosen


def test_ratios_are_of_the_same_round() -> None:
    """A machine that slows down half-way does not make a choice faster."""
    assert decide([1.0, 3.0, 3.0], {(1,): [1.0, 3.0, 3.0]}) is None
    with pytest.raises(ValueError, match="three or more rounds"):
        decide([1.0, 1.0], {(1,): [0.5, 0.5]})


# ---- tuning, with made-up times ----


def attention_work() -> Work:
    return next(work for work in works(tiny=True) if work.table == "attention_fwd")


def seconds_by_block_m(seconds: dict[int, float]) -> Timer:
    return lambda run: seconds[_attention_configs.attention_fwd(20, 16, 2, False, ARCH).block_m]


def tuner(folder: Path, timer: Timer) -> Tuner:
    return Tuner(CPU, timer, folder / _tuned.file_name(GPU), GPU, functools.partial(tune.measured, CPU), most=3)


@pytest.mark.usefixtures("triton_backend")
def test_the_faster_choice_is_written_and_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped choice has 64 query rows; the candidate with 128 is timed as twice as fast."""
    (line,) = tuner(tmp_path, seconds_by_block_m({64: 1.0, 128: 0.5})).tune(attention_work())
    assert "(128, 64, 8, 3), 2.000x" in str(line)
    path = tmp_path / _tuned.file_name(GPU)
    data = json.loads(path.read_text())
    assert data["tables"] == {"attention_fwd": {"20,16,2,0,0": entry("attention_fwd", 128, 64, 8, 3)}}
    assert (data["gpu"], data["arch"]) == (GPU, ARCH)
    assert {"commit", "sources", "torch", "triton", "device", "when"} <= set(data["measured"])
    sample = data["samples"]["attention_fwd[20,16,2,0,0]"]
    assert sample["shipped"] == {"median": 1.0, "q20": 1.0, "q80": 1.0, "least": 1.0, "rounds": tuning.ROUNDS[1]}
    assert sample["tried"]["(128, 64, 8, 3)"]["median"] == 0.5
    before = _attention_configs.attention_fwd(*KEY[:3], False, ARCH, False)
    load(monkeypatch, tmp_path, data)
    after = _attention_configs.attention_fwd(*KEY[:3], False, ARCH, False)
    assert (before.block_m, after.block_m) == (64, 128)
    assert after.tails == before.tails


@pytest.mark.usefixtures("triton_backend")
def test_the_shipped_choice_stays_within_the_margin(tmp_path: Path) -> None:
    (line,) = tuner(tmp_path, seconds_by_block_m({64: 1.0, 128: 0.99})).tune(attention_work())
    assert "as shipped" in str(line)
    data = json.loads((tmp_path / _tuned.file_name(GPU)).read_text())
    assert data["tables"] == {"attention_fwd": {}}
    assert data["samples"]["attention_fwd[20,16,2,0,0]"]["chosen"] is None


Outcome = Callable[[tuple[int, ...] | None], float]


def choosing(outcome: Outcome) -> Work:
    """Return a work whose result is a function of the choice in use."""
    use = lambda: (torch.tensor([outcome(_tuned.choice(ARCH, "attention_fwd", *KEY))]),)  # noqa: E731
    return Work("attention_fwd", "outcome", lambda device: use)


def too_large(choice: tuple[int, ...] | None) -> float:
    if choice is not None and choice[0] == 128:
        raise RuntimeError("out of resource: shared memory")
    return 1.0


UNFIT: list[tuple[Outcome, str]] = [
    (lambda choice: 2.0 if choice and choice[0] == 128 else 1.0, "differs from the shipped"),
    (too_large, "shared memory"),
]


@pytest.mark.parametrize(("outcome", "reason"), UNFIT)
def test_a_fast_choice_with_other_results_or_none_is_unfit(outcome: Outcome, reason: str, tmp_path: Path) -> None:
    (line,) = tuner(tmp_path, seconds_by_block_m({64: 1.0, 128: 0.5})).tune(choosing(outcome))
    assert "as shipped; 2 tried, 1 unfit" in str(line)
    data = json.loads((tmp_path / _tuned.file_name(GPU)).read_text())
    assert reason in data["samples"]["attention_fwd[20,16,2,0,0]"]["unfit"]["(128, 64, 8, 3)"]


def broken(*_: Any) -> float:
    raise RuntimeError("broken")


def asking(table: str, ask: Callable[[], object]) -> Work:
    return Work(table, "a call", lambda device: lambda: (ask(), torch.ones(1))[1:])


NO_WORK: list[tuple[Work, str]] = [
    (choosing(broken), "broken"),
    (asking("gemm", lambda: None), "no launch asked"),
    (asking("layer_norm", lambda: _configs.layer_norm(768)), "without the target"),
]


@pytest.mark.parametrize(("work", "message"), NO_WORK)
def test_a_work_that_cannot_be_tuned_is_an_error(work: Work, message: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=message):
        tuner(tmp_path, seconds_by_block_m({64: 1.0})).tune(work)


@pytest.mark.parametrize("changed", [False, True])
def test_tuning_goes_on_unless_the_code_has_changed(
    changed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = choosing(lambda choice: 1.0)
    timer = seconds_by_block_m({64: 1.0, 128: 0.5})
    monkeypatch.setattr(tune, "sources", lambda: "code")
    assert len(tuner(tmp_path, timer).tune(work)) == 1
    if changed:
        monkeypatch.setattr(tune, "sources", lambda: "other code")
    again = tuner(tmp_path, timer)
    assert len(again.tune(work)) == (1 if changed else 0)
    assert again.entries == {("attention_fwd", KEY): (128, 64, 8, 3)}


def test_a_work_that_the_host_holds_up_is_not_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "Clock", lambda device: types.SimpleNamespace(time=lambda run: float("nan")))
    assert tune.main(["--rehearse", "--table", "attention_fwd", "--out", str(tmp_path)]) == 1
    assert "not tuned, the GPU waited for the host" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_differences_are_relative_to_the_largest_result() -> None:
    one = torch.tensor([1.0, -4.0])
    assert difference((one, one), (one, one + torch.tensor([0.1, 0.0]))) == pytest.approx(0.025)
    assert difference((torch.tensor([torch.nan]),), (torch.ones(1),)) == torch.inf


def test_every_candidate_is_valid_and_new() -> None:
    keys = {
        "layer_norm": [(D, b) for D in (192, 768, 1664) for b in (0, 1)],
        "column_sum": [(9, 768)],
        "activation_backward": [(3072, 2)],
        "gemm": [(16, 3072, 768, 2)],
        "use_triton_gemm": [(16, 3072, 768, 2, 0), (16, 3072, 768, 2, 1)],
        "patch_embed": [(16, 768, 768, 2, 2, 0), (768, 768, 16, 2, 2, 1)],
    } | {f"attention_{t}": [(n, 64, 2, 0, 0) for n in (50, 197, 257)] for t in ("fwd", "bwd_dq", "bwd_dkdv")}
    keys["attention_bwd_short"] = [(n, 64, 2, 0, 0) for n in (50, 197, 256)]
    assert set(keys) == set(_tuned.FIELDS)
    for table, some in keys.items():
        for key in some:
            found = candidates(table, key)
            assert len(found) >= 2
            assert len(set(found)) == len(found)
            for choice in found:
                _tuned.check(table, key, entry(table, *choice))


def test_a_rehearsal_cannot_write_where_results_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.main(["--rehearse"])
    assert "an --out of its own" in capsys.readouterr().err


# ---- what the kernels take from a file ----

OVERRIDES: list[tuple[str, str, tuple[int, ...], Callable[[], Any], dict[str, Any]]] = [
    (
        "layer_norm", "768,1", (4, 8, 3, 4), lambda: _configs.layer_norm(768, backward=True, arch=ARCH),
        {"block_rows": 4, "programs_per_sm": 3, "num_stages": 4},
    ),
    ("column_sum", "9,768", (64, 16, 8), lambda: _configs.column_sum(264, 768, ARCH), {"block_dim": 16}),
    (
        "activation_backward", "3072,2", (4, 512, 4, 8), lambda: _configs.activation_backward(3072, 2, ARCH),
        {"block_m": 4, "steps": 4, "num_warps": 8},
    ),
    (
        "gemm", "16,3072,768,2", (64, 128, 32, 1, 4, 5, 0, 0), lambda: _configs.gemm(50432, 3072, 768, 2, ARCH),
        {"block_m": 64, "block_k": 32, "num_stages": 5, "max_registers": None},
    ),
    (
        "gemm", "13,768,768,2", (128, 256, 64, 1, 8, 4, 0, 1),
        lambda: _configs.gemm(6304, 768, 768, 2, ARCH, described=True), {"block_n": 256, "programs_per_sm": 1},
    ),
    (
        "attention_fwd", "197,64,2,0,0", (128, 32, 8, 3),
        lambda: _attention_configs.attention_fwd(197, 64, 2, False, ARCH),
        {"block_m": 128, "block_n": 32, "tails": (16, 0), "num_stages": 3},
    ),
    (
        "attention_bwd_dq", "257,64,2,0,1", (128, 128, 8, 2),
        lambda: _attention_configs.attention_bwd_dq(257, 64, 2, False, ARCH, True), {"block_n": 128, "tail": 16},
    ),
    (
        "attention_bwd_dkdv", "257,80,2,1,0", (32, 128, 8, 3),
        lambda: _attention_configs.attention_bwd_dkdv(257, 80, 2, True, ARCH, False),
        {"block_m": 32, "parts": (64, 16)},
    ),
    (
        "attention_bwd_short", "128,64,2,0,0", (1, 128, 32, 16, 2),
        lambda: _attention_configs.attention_bwd_short(128, 64, 2, False, ARCH, False),
        {"block_n": 32, "num_warps": 16},
    ),
    (
        "patch_embed", "768,588,16,2,2,1", (64, 128, 32, 4, 4),
        lambda: _configs.patch_embed(
            768, 588, 50000, itemsize=2, loaded=2, arch=ARCH, multiprocessors=132, split=True
        ),
        {"block_m": 64, "block_n": 128, "splits": 2 * 132 // (12 * 5)},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("table", "key", "choice", "config", "expected"), OVERRIDES, ids=[o[0] for o in OVERRIDES])
def test_the_file_overrides_its_table(
    table: str, key: str, choice: Any, config: Any, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = dataclasses.asdict(config())
    load(monkeypatch, tmp_path, document({table: {key: entry(table, *choice)}}))
    found = dataclasses.asdict(config())
    assert found.items() >= expected.items()
    assert found != shipped
    _tuned.forget()


def test_a_kernel_can_be_replaced_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _attention_configs.attention_bwd_short(128, 64, 2, False, ARCH, False) is not None
    assert _configs.use_triton_gemm(50_432, 3072, 768, 2, False, ARCH)
    tables = {
        "attention_bwd_short": {"128,64,2,0,0": entry("attention_bwd_short", 0, 64, 64, 4, 2)},
        "use_triton_gemm": {"16,3072,768,2,0": {"use": 0}},
    }
    load(monkeypatch, tmp_path, document(tables))
    assert _attention_configs.attention_bwd_short(128, 64, 2, False, ARCH, False) is None
    assert not _configs.use_triton_gemm(50_432, 3072, 768, 2, False, ARCH)
    assert _configs.use_triton_gemm(50_432, 768, 3072, 2, False, ARCH), "other shapes as shipped"
    assert _configs.use_triton_gemm(197, 3072, 768, 2, False, ARCH), "other numbers of rows too"
    assert not _configs.use_triton_gemm(50_432, 3072, 768, 2, True, ARCH), "the gradient, too"
    assert _configs.use_triton_gemm(50_432, 3072, 768, 2, False, "sm_80"), "other targets, too"


@pytest.mark.usefixtures("triton_backend")
def test_kernels_compute_the_same_with_a_tuned_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values derived from a choice, such as the tail of 37 keys, come from the tuned one."""
    qkv = torch.randn(1, 37, 3, 2, 16, requires_grad=True)
    gradient = torch.randn(1, 37, 2, 16)

    def results() -> tuple[torch.Tensor, ...]:
        out = ops.attention_qkvpacked(qkv)
        return out.detach(), *torch.autograd.grad(out, qkv, gradient)

    shipped = results()
    tables = {
        "attention_fwd": {"37,16,4,0,0": entry("attention_fwd", 16, 16, 4, 2)},
        "attention_bwd_dq": {"37,16,4,0,0": entry("attention_bwd_dq", 64, 16, 4, 2)},
        "attention_bwd_dkdv": {"37,16,4,0,0": entry("attention_bwd_dkdv", 16, 64, 4, 2)},
    }
    load(monkeypatch, tmp_path, document(tables))
    assert _attention_configs.attention_fwd(37, 16, 4, False, ARCH).block_m == 16
    for got, expected in zip(results(), shipped, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


GOOD = entry("attention_fwd", 128, 128, 8, 2)
SHORT = entry("attention_bwd_short", 1, 128, 64, 8, 2)


def one(table: str, key: str, fields: dict[str, Any]) -> dict[str, Any]:
    return document({table: {key: fields}})


def fwd(**changes: Any) -> dict[str, Any]:
    return one("attention_fwd", "20,16,2,0,0", GOOD | changes)


DAMAGED: dict[str, tuple[Any, str]] = {
    "cut off": (json.dumps(fwd())[:-20], "delimiter|Expecting|Unterminated"),
    "a list": ([1, 2], "not of format 2"),
    "another format": (document({}, format=1), "not of format 2"),
    "another GPU": (document({}, gpu="Another"), "made on 'Another'"),
    "another arch": (document({}, arch="sm_80"), "not on 'Test GPU 80GB', 'sm_90'"),
    "no tables": (document(None), "tables is not an object"),
    "an unknown table": (one("softmax", "20,16,2,0,0", GOOD), "unknown table 'softmax'"),
    "a short key": (one("attention_fwd", "20,16", GOOD), "key or fields"),
    "a key of words": (one("attention_fwd", "a,b,c,d,e", GOOD), "invalid literal"),
    "a missing field": (one("attention_fwd", "20,16,2,0,0", {"block_m": 64}), "key or fields"),
    "a fraction": (fwd(num_warps=4.0), "4.0"),
    "true": (fwd(num_warps=True), "True"),
    "96 rows": (fwd(block_m=96), "power of two"),
    "8 rows": (fwd(block_m=8), "less than 16"),
    "long for the short kernel": (one("attention_bwd_short", "577,64,2,0,0", SHORT), "no more than 384 keys"),
    "a row too many": (one("attention_bwd_short", "197,64,2,0,0", SHORT), "less than the 197 queries"),
    "no stage": (one("gemm", "1,2,3,2", entry("gemm", 128, 128, 64, 1, 8, 0, 0, 0)), "not from 1 to 32"),
    "no program": (one("layer_norm", "768,0", entry("layer_norm", 4, 4, 0, 3)), "not from 1 to 32"),
    "a narrow tile": (one("gemm", "1,2,3,2", entry("gemm", 128, 32, 64, 1, 8, 3, 0, 0)), "less than 64"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file_is_ignored_with_one_warning(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, reason = DAMAGED[what]
    shipped = _attention_configs.attention_fwd(20, 16, 2, False, ARCH)
    with pytest.warns(UserWarning, match=reason) as caught:
        load(monkeypatch, tmp_path, data)
    assert len(caught) == 1
    assert "tuned_test_gpu_80gb.json is ignored" in str(caught[0].message)
    assert _attention_configs.attention_fwd(20, 16, 2, False, ARCH) == shipped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _tuned.load(ARCH, GPU)  # a second GPU of the same model


def test_without_a_file_there_is_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _tuned.load(ARCH, GPU, tmp_path)


@pytest.mark.parametrize("path", sorted(_tuned.FOLDER.glob("tuned_*.json")), ids=lambda path: path.name)
def test_files_in_the_package_are_sound(path: Path) -> None:
    data = json.loads(path.read_text())
    assert path.name == _tuned.file_name(data["gpu"])
    assert _tuned.parse(data, data["arch"], data["gpu"]), "a file without a choice is useless"


def test_the_ops_load_the_table_of_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0, gcnArchName="gfx942:sramecc+")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    loaded = []
    monkeypatch.setattr(_tuned, "load", lambda arch, gpu, user: loaded.append((arch, gpu)))
    monkeypatch.setattr(torch.version, "hip", None)
    devices._cuda_arch.cache_clear()
    try:
        assert devices._cuda_arch(0) == devices._cuda_arch(0) == "sm_90"
    finally:
        devices._cuda_arch.cache_clear()
    assert loaded == [("sm_90", "NVIDIA H200")]
