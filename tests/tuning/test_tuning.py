"""Tuning a model: its calls, what is measured in which order, and the user's table."""

import functools
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from study_models import SMALL
from tuned_tables import ARCH, FILE, GPU, SQUARE, WIDE, write

from fastvit import ops
from fastvit.kernels import _attention_configs, _tuned
from fastvit.ops.runtime import backend as backends
from fastvit.ops.runtime import device as devices
from fastvit.ops.runtime import registry
from fastvit.ops.runtime.call import UNKEPT
from fastvit.study.sources import find

if not (backends.INTERPRET and backends.HAVE_TRITON):
    pytest.skip("tuning is tested in Triton's interpreter", allow_module_level=True)

from fastvit.tuning import candidates, launches, tuner
from fastvit.tuning.calls import MODES, OpCall, calls_of, on_meta
from fastvit.tuning.model import ModelTuning, Skipped
from fastvit.tuning.names import choice_in_words, key_in_words

CPU = torch.device("cpu")


@functools.cache
def calls(name: str, dtype: str = "bf16", size: int = 32, modes: tuple[str, ...] = MODES) -> list[OpCall]:
    return calls_of(find.find(name), (size, size), 2, dtype, modes)


def counted(name: str, mode: str, **options: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    for call in calls(name, **options):
        found[call.name] += call.counts[mode]
    return +found


# ---- the calls of a model ----


def test_the_calls_of_a_model_of_the_zoo():
    """Two blocks: two norms, attention, two linear layers after it and in the MLP; and the norm after them."""
    one = {"patch_embed_fwd": 1, "layer_norm_fwd": 5, "attention_qkvpacked_fwd": 2}
    assert counted(SMALL, "infer") == one | {"linear_fwd": 6}
    backward = {"layer_norm_bwd": 1, "layer_norm_bwd_recompute": 4, "attention_qkvpacked_bwd": 2, "linear_dact": 2}
    forward = one | {"linear_fwd": 4, "linear_act_fwd": 2}
    assert counted(SMALL, "train") == forward | backward | {"patch_embed_bwd_weight": 1}


def test_equal_calls_are_one():
    found = [call for call in calls(SMALL) if call.name == "attention_qkvpacked_fwd"]
    assert [call.counts for call in found] == [{"infer": 2, "train": 2}]
    assert len(set(calls(SMALL))) == len(calls(SMALL))


def test_the_calls_of_an_accelerated_model():
    """Under autocast: float32 parameters, 16-bit attention."""
    assert counted("study_models:of_timm", "infer", dtype="amp")["attention_qkvpacked_fwd"] == 2
    attention = next(c for c in calls("study_models:of_timm", dtype="amp") if c.name == "attention_qkvpacked_fwd")
    assert attention.leaves[0].dtype is torch.bfloat16


def test_the_calls_of_a_model_with_rotary_positions():
    name = "eva02_tiny_patch14_224"
    assert counted(name, "train", size=28)["rotary"] == 24, "forward and backward"
    assert counted(name, "train", size=28)["gated_dact"] == 12


def test_a_masked_call_has_one_choice_to_measure():
    """It sums the mask's gradient over programs. Kernels with masks take no measured choice."""
    masked = [c for c in calls("study_models:of_a_bias") if "attention" in c.name]
    names = {"attention_qkvpacked_fwd", "attention_qkvpacked_bwd_with_mask"}
    assert {call.name for call in masked} == names
    with on_meta(ARCH, 132):
        for call in masked:
            run = functools.partial(call.run, call.arguments(torch.device("meta")))
            asked = {table for table in _tuned.FIELDS if tuner.keys_of(run, table, {})}
            assert asked == ({"column_sum"} if call.name.endswith("with_mask") else set())


@pytest.mark.parametrize("name", [SMALL, "study_models:of_a_bias"])
def test_drawn_arguments_look_like_the_recorded_ones(name):
    for call in calls(name):
        arguments, keywords = call.arguments(CPU)
        again = torch.utils._pytree.tree_leaves((arguments, keywords))
        for drawn, leaf in zip(again, call.leaves, strict=True):
            if isinstance(drawn, torch.Tensor):
                assert (drawn.shape, drawn.stride(), drawn.dtype) == (leaf.shape, leaf.stride, leaf.dtype)
        with ops.use_backend("aten"), torch.no_grad():
            out = registry.IMPLEMENTATIONS[call.op](*arguments, call=UNKEPT[backends.Path.ATEN], **keywords)
        out = (out,) if isinstance(out, torch.Tensor) else out
        assert all(t.isfinite().all() for t in out if isinstance(t, torch.Tensor)), call.name


def test_no_probability_of_a_drawn_backward_pass_exceeds_one():
    """Kernels clamp it in their last tile only, so choices with other tiles would have other results."""
    (call,) = (call for call in calls(SMALL) if call.name == "attention_qkvpacked_bwd")
    names = [argument.name for argument in call.op._schema.arguments]
    given = dict(zip(names, call.arguments(CPU)[0], strict=True))
    q, k, _ = given["qkv"].float().transpose(1, 3).unbind(2)
    scores = given["scale"] * q @ k.transpose(2, 3)
    assert (scores.amax(-1) <= given["lse"] + 1e-3).all()


def test_a_model_without_fused_ops_is_refused():
    source = SimpleNamespace(name="a model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastvit.tuning.calls.trace_step", lambda *_, **__: SimpleNamespace(seen=SimpleNamespace(ops=[])))
        with pytest.raises(ValueError, match="a model runs none of fastvit's ops"):
            calls_of(source, (32, 32), 1, "bf16", ["infer"])  # type: ignore[arg-type]


# ---- what is measured, and in which order ----


def stand_in(seconds: dict[str, float], **options: Any) -> ModelTuning:
    """Return the tuning of SMALL on a GPU that takes these seconds for a call, by its name."""
    of = SimpleNamespace(arch=ARCH, device=CPU, shipped={}, entries={}, has=lambda table, key: False, **options)
    tuning = ModelTuning(calls(SMALL), of, 132)  # type: ignore[arg-type]
    tuning.seconds = {i: seconds.get(call.name, 1e-6) for i, call in enumerate(tuning.calls)}
    return tuning


def test_the_largest_share_of_the_step_comes_first(monkeypatch):
    monkeypatch.setattr(backends, "INTERPRET", False)  # where all matmuls are Triton's
    works = stand_in({"attention_qkvpacked_bwd": 1.0, "patch_embed_fwd": 1.9, "linear_dact": 0.4}).works()
    tables = [work.table for work in works]
    assert tables[0] == "patch_embed", "1.9 s in each of two steps"
    assert tables[1:4] == ["attention_bwd_dq", "attention_bwd_dkdv", "attention_bwd_short"], "1 s twice, in training"
    at = {table: tables.index(table) for table in tables}
    assert at["activation_backward"] < at["gemm"] < at["use_triton_gemm"], "a choice between kernels comes after theirs"
    assert len({(work.table, work.label) for work in works}) == len(works)


def test_every_table_that_a_model_asks_for_is_measured(monkeypatch):
    """So are tables of kernels that the shipped choices do not launch: two of attention's backward on sm_90."""
    monkeypatch.setattr(backends, "INTERPRET", False)
    assert {work.table for work in stand_in({}).works()} == set(_tuned.FIELDS)


def test_a_call_is_measured_by_the_op_that_takes_most():
    tuning = stand_in({"layer_norm_bwd": 2.0})
    (norm,) = (work for work in tuning.works() if (work.table, work.label) == ("layer_norm", "norm backward D=48"))
    assert norm.build.args[0].name == "layer_norm_bwd"  # type: ignore[attr-defined]


def test_one_that_cannot_be_timed_does_not_stop_the_others():
    def tune(work: tuner.Work) -> list[str]:
        if work.table == "gemm":
            raise tuner.HostBound("the GPU waited")
        return [work.table]

    tuning = stand_in({}, tune=tune)
    works = tuning.works()
    found = list(tuning.tune(works))
    assert len(found) == len(works)
    assert {r.reason for r in found if isinstance(r, Skipped)} == {"the GPU waited"}


def test_a_call_that_cannot_be_timed_is_named(monkeypatch):
    def timed(call: OpCall, choices: Any, rounds: int) -> list[float]:
        if call.name == "linear_dact":
            raise backends.KernelUnsupported("too wide")
        return [1.0]

    tuning = stand_in({})
    tuning.seconds = {}
    monkeypatch.setattr(tuning, "_timed", timed)
    assert tuning.time_calls() == [Skipped("linear_dact", "too wide")]
    assert len(tuning.seconds) == len(tuning.calls) - 1


def test_only_calls_with_other_choices_are_timed_again(monkeypatch):
    (attention,) = (c for c in calls(SMALL) if c.name == "attention_qkvpacked_fwd")
    tuning = stand_in({call.name: 1.0 for call in calls(SMALL)})
    tuning.tuner.entries[("attention_fwd", (65, 16, 2, 0, 0))] = (64, 64, 4, 2)
    timed = []

    def two(call: OpCall, choices: Any, rounds: int) -> list[float]:
        timed.append(call)
        return [1.0, 0.25]

    monkeypatch.setattr(tuning, "_timed", two)
    infer, train = tuning.step("infer"), tuning.step("train")
    assert timed == [attention], "once for both steps"
    assert infer == (14.0, 14.0 - 2 * 0.75, 14)
    assert train.before - train.after == pytest.approx(2 * 0.75)


def tuned(
    folder: Path, table: str, run: Callable[[], object], timer: Callable[[Any], float] = lambda run: 1.0, **options: Any
) -> tuple[tuner.Result, tuner.Tuner]:
    """Tune the choice of a call, of which the timer says how many seconds it takes."""
    one = tuner.Tuner(CPU, timer, folder / FILE, GPU, lambda: {"sources": ""}, **options)
    (result,) = one.tune(tuner.Work(table, "a call", lambda device: run))  # type: ignore[arg-type]
    return result, one


def test_the_baseline_is_the_shipped_table(tmp_path):
    table, key = "attention_fwd", (20, 16, 2, 0, 0)
    shipped = {(table, key): (64, 64, 4, 2)}

    def choice() -> object:
        return _tuned.choice(ARCH, table, *key)

    result, one = tuned(
        tmp_path, table, lambda: (torch.ones(1) * bool(choice()),),
        lambda run: 1.0 if choice() == shipped[table, key] else 2.0, shipped=shipped, most=2,
    )  # fmt: skip
    assert (result.shipped, result.chosen) == (1.0, None)
    assert one.entries == shipped


def test_sums_are_measured_for_the_rows_that_choices_leave(tmp_path):
    """Another table's choice sets the number of programs, and so of rows to add up."""

    def run() -> tuple[torch.Tensor, ...]:
        _tuned.choice(ARCH, "column_sum", 9 if _tuned.choice(ARCH, "layer_norm", 768, 1) is None else 10, 768)
        return (torch.ones(1),)

    result, _ = tuned(tmp_path, "column_sum", run, shipped={("layer_norm", (768, 1)): (4, 4, 4, 1)}, most=1)
    assert result.key == (10, 768)


def test_results_in_memory_that_is_written_again_are_compared(tmp_path):
    """Some ops write into a given tensor: a candidate's result must not be compared with itself."""
    out = torch.ones(1)

    def run() -> tuple[torch.Tensor, ...]:
        return (out.fill_(1.0 if _tuned.choice(ARCH, "attention_fwd", 20, 16, 2, 0, 0) is None else 2.0),)

    result, _ = tuned(tmp_path, "attention_fwd", run, most=1)
    assert (result.tried, result.unfit) == (0, 1)


def test_long_sequences_have_no_kernel_for_short_ones_to_try():
    assert candidates.candidates("attention_bwd_short", (1025, 64, 2, 0, 0)) == []


def test_compilation_ends_with_its_caller(tmp_path):
    """Ctrl-C leaves no kernels to compile in the background."""

    def compile(number: int) -> None:
        time.sleep(0.01)
        (tmp_path / str(number)).touch()

    done = launches.in_processes(compile, range(300), 1)  # type: ignore[type-var]
    next(done)
    done.close()  # type: ignore[attr-defined]
    assert len(list(tmp_path.iterdir())) < 300


# ---- the user's table ----


def tile(n: int) -> tuple[int, int]:
    config = _attention_configs.attention_fwd(n, 64, 2, False, ARCH)
    return config.block_m, config.block_n


def test_the_users_choices_go_before_the_shipped_ones_one_by_one(tmp_path, monkeypatch):
    shipped = {"197,64,2,0,0": SQUARE, "50,64,2,0,0": SQUARE}
    monkeypatch.setattr(_tuned, "FOLDER", write(tmp_path / "shipped", {}, tables={"attention_fwd": shipped}).parent)
    write(tmp_path / "user", WIDE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _tuned.load(ARCH, GPU, tmp_path / "user")
    assert (tile(197), tile(50), tile(100)) == ((128, 128), (64, 64), (64, 32))
    _tuned.forget()
    _tuned.load(ARCH, GPU, None)
    assert tile(197) == (64, 64)


def test_a_second_model_of_an_arch_changes_no_choice_of_the_first(tmp_path):
    """The first one has no table, and its launches must not change during a run."""
    write(tmp_path, SQUARE)
    _tuned.load(ARCH, "A GPU without a table", tmp_path)
    _tuned.load(ARCH, GPU, tmp_path)
    assert tile(197) == (64, 32)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"measured": {"sources": "other kernels"}}, "measured with other kernels than these; `fastvit tune` measures"),
    ({"measured": {}}, "measured with other kernels"),
    ({"measured": []}, "no attribute"),
]


@pytest.mark.parametrize(("changes", "why"), BAD)
def test_a_damaged_or_stale_table_is_ignored_with_one_warning(changes, why, tmp_path):
    path = write(tmp_path, SQUARE, **changes)
    with pytest.warns(UserWarning, match=why) as caught:
        [_tuned.load(ARCH, GPU, tmp_path) for _ in range(2)]
    assert len(caught) == 1
    assert str(path) in str(caught[0].message)
    assert tile(197) == (64, 32)


def test_a_folder_that_cannot_be_read_is_no_error(tmp_path, monkeypatch):
    def refused(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "file").write_text("")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _tuned.load(ARCH, GPU, tmp_path / "file" / "below")
        monkeypatch.setattr(Path, "read_bytes", refused)
        _tuned.forget()
        _tuned.load(ARCH, GPU, tmp_path)
    assert not (tmp_path / "file" / "below").exists()


def test_the_digest_is_of_the_kernels(tmp_path, monkeypatch):
    """Any change of a kernel makes a user's table stale; a table in their folder does not."""
    _tuned.sources.cache_clear()
    (tmp_path / "kernel.py").write_text("a = 1")
    monkeypatch.setattr(_tuned, "__file__", str(tmp_path / "_tuned.py"))
    found = set()
    for name, text in (("kernel.py", "a = 1"), ("kernel.py", "a = 2"), ("other.py", ""), ("tuned_x.json", "{}")):
        (tmp_path / name).write_text(text)
        found.add(_tuned.sources())
        _tuned.sources.cache_clear()
    assert len(found) == 3


FOLDERS: list[tuple[dict[str, str], str]] = [
    ({"FASTVIT_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b"),
    ({"XDG_CACHE_HOME": "/c"}, "/c/fastvit"),
    ({}, "/a/home/.cache/fastvit"),
    ({"FASTVIT_CACHE_DIR": "~/x"}, "/a/home/x"),
]


@pytest.mark.parametrize(("environment", "folder"), FOLDERS)
def test_the_folder_of_the_users_tables(environment, folder, monkeypatch):
    for name in ("FASTVIT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/a/home"} | environment).items():
        monkeypatch.setenv(name, value)
    assert devices.cache_folder() == Path(folder)


def test_keys_and_choices_in_words():
    assert key_in_words("attention_fwd", (197, 64, 2, 0, 0)) == "attention forward N=197 d=64"
    assert key_in_words("gemm", (13, 3072, 768, 2)) == "linear 768->3072 M<8192"
    which = key_in_words("use_triton_gemm", (13, 3072, 768, 2, 1))
    assert which == "linear backward 768->3072 M<8192, Triton or cuBLAS"
    assert key_in_words("layer_norm", (768, 1)) == "norm backward D=768"
    assert choice_in_words("attention_fwd", (128, 64, 8, 3)) == "128x64, 8 warps, 3 stages"
    assert choice_in_words("use_triton_gemm", (0,)) == "cuBLAS"
    assert choice_in_words("attention_bwd_short", (0, 64, 64, 4, 2)) == "two kernels"
    for table, fields in _tuned.FIELDS.items():
        assert key_in_words(table, (16,) * len(_tuned.KEY[table]))
        assert choice_in_words(table, (16,) * len(fields))
