"""A module is read once, and again after each change: what runs is never what it was before."""

import copy
import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from library_imports import import_library
from models import D, H, blocks, close, randomised
from module_changes import CHANGES, X, result, undo_of
from torch import Tensor, nn

import fastvit
from fastvit import layers
from fastvit.blocks import read, read_mlp, read_timm, unchanged

HAS_COMPILER = pytest.mark.skipif(unchanged.compiled() is None, reason="unchanged.c cannot be compiled")
NOT_IN_THE_REFERENCE = {"a norm before fc2", "kept samples not scaled"}


def pair(kind: str) -> tuple[nn.Module, nn.Module]:
    """Return a block that runs fused, and the reference's or timm's with the same parameters. timm's attention uses its
    scale."""
    if kind == "PostNormBlock":
        return blocks(kind, init_values=0.3, drop_path=0.3, mlp_ratio=4.0)
    home = import_library("timm").models.vision_transformer
    options = {"qkv_bias": False, "init_values": 0.3, "drop_path": 0.3}
    plain = randomised(home.Block(D, H, **options))
    block = layers.Block(D, H, **options) if kind == "ours" else home.Block(D, H, **options)
    block.load_state_dict(plain.state_dict())
    if kind == "accelerated":
        block.attn.fused_attn = False
        fastvit.accelerate(block, strict=True)
    plain.attn.fused_attn = False
    return block, plain


@pytest.mark.filterwarnings("ignore:.*runs its own forward instead of fastvit's", "ignore:.*(deprecated|in beta)")
@pytest.mark.parametrize("kind", ["ours", "accelerated", "PostNormBlock"])
def test_no_change_is_missed(kind: str) -> None:
    """Each is made and undone. A half with a change runs its modules one by one, or calls a replaced layer."""
    for name, change in CHANGES.items():
        if kind == "PostNormBlock" and name in NOT_IN_THE_REFERENCE:
            continue
        both = pair(kind)

        def check(what: str, both: tuple[nn.Module, nn.Module] = both) -> None:
            for got, want in zip(*map(result, both), strict=True):
                assert close(got, want), what

        check(f"before {name}")
        undo = [undo_of(block) for block in both]
        for block in both:
            change(block)
        check(name)
        check(f"{name}, again")
        for back in undo:
            back()
        check(f"after {name}")


# ---- what is kept ----


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The readers that are called."""
    called: list[str] = []
    for home, name in ((read, "describe_attention"), (read_mlp, "describe_mlp")):
        function = getattr(home, name)
        counted = functools.wraps(function)(lambda *a, _f=function, _n=name, **k: (called.append(_n), _f(*a, **k))[1])
        monkeypatch.setattr(home, name, counted)
    return called


def accelerated(**options: Any) -> nn.Module:
    block = import_library("timm").models.vision_transformer.Block(D, H, **options)
    fastvit.accelerate(block, strict=True)
    return block


KEPT: dict[str, Callable[[], nn.Module]] = {
    "Block": lambda: layers.Block(D, H, init_values=0.3, drop_path=0.1, qk_norm=True),
    "PostNormBlock": lambda: layers.PostNormBlock(D, H),
    "a half with a hook": lambda: hooked(layers.Block(D, H)),
    "EvaBlock": lambda: layers.EvaBlock(D, H, qkv_fused=False, swiglu_mlp=True, init_values=0.3),
    "Attention": lambda: layers.Attention(D, H),
    "SwiGLU": lambda: layers.SwiGLU(D, D),
    "timm": lambda: accelerated(qk_norm=True),
}


def hooked(block: nn.Module) -> nn.Module:
    block.attn.qkv.register_forward_hook(lambda *_: None)
    return block


@HAS_COMPILER
@pytest.mark.parametrize("kind", KEPT)
def test_an_unchanged_module_is_read_once(kind: str, reads: list[str]) -> None:
    block = KEPT[kind]()
    block(X)
    assert reads
    reads.clear()
    block(X)
    with torch.no_grad():
        block(X)
    block.float()
    block(X)
    assert not reads


SCALE = {"now": 0.5}


class Tempered(layers.Attention):
    """Its scale is not an attribute of the instance."""

    scale = property(lambda self: SCALE["now"], lambda self, value: None)


def test_attributes_that_a_subclass_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    attn = Tempered(D, H)
    before = attn(X)
    monkeypatch.setitem(SCALE, "now", 2.0)
    assert not close(attn(X), before)


def test_what_depends_on_values_is_read_in_every_call() -> None:
    """EVA's joined biases, and the layers of a parallel block, which are views; the default eps of another dtype."""
    timm = import_library("timm")
    parallel = timm.models.vision_transformer.ParallelScalingBlock(D, H)
    fastvit.accelerate(parallel, strict=True)
    for block, name in ((layers.EvaBlock(D, H), "attn.q_bias"), (parallel, "in_proj.weight")):
        with torch.no_grad():
            block(X)
            block.get_parameter(name).add_(1.0)
        got = result(block)
        for a, b in zip(got, result(copy.deepcopy(block)), strict=True):
            assert close(a, b)
    block = layers.Block(D, H, norm_layer=nn.RMSNorm)
    eps = [
        unchanged.read_once(read_timm.read_halves, block.to(dtype))[0].norm.eps for dtype in (torch.float, torch.double)
    ]
    assert eps == [torch.finfo(dtype).eps for dtype in (torch.float, torch.double)]


@HAS_COMPILER
def test_addresses_that_are_used_again_are_no_match() -> None:
    block = layers.Block(D, H, drop_path=0.5)
    for i in range(100):
        block.norm1.weight = nn.Parameter(torch.ones(D))
        block.drop_path1.drop_prob = i / 128
        block.mlp.act = nn.GELU("tanh" if i % 2 else "none")
        attention, mlp = unchanged.read_once(read_timm.read_halves, block)
        assert attention.norm.weight is block.norm1.weight
        assert attention.drop_path == i / 128
        assert mlp.branch.activation == ("gelu_tanh" if i % 2 else "gelu")
        assert mlp.branch.act is block.mlp.act


def test_nothing_is_kept_alive() -> None:
    """Neither a replaced parameter nor a deleted model, also not one that its parameter refers to."""
    block, timms = layers.Block(D, H), accelerated()
    for module in (block, timms):
        module(X)
        module.norm1.weight.owner = [module]
    old = weakref.ref(block.mlp.fc1.weight)
    block.mlp.fc1.weight = nn.Parameter(torch.zeros_like(block.mlp.fc1.weight))
    assert old() is None
    references = [weakref.ref(block), weakref.ref(timms), weakref.ref(timms.attn.qkv.weight)]
    before = len(unchanged._kept)
    del block, timms, module
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    assert len(unchanged._kept) <= before


def test_copies_do_not_see_it() -> None:
    block = layers.Block(D, H)
    before = pickle.dumps(block), set(vars(block))
    want = block(X)
    assert (pickle.dumps(block), set(vars(block))) == before
    copied = copy.deepcopy(block)
    assert close(copied(X), want)
    nn.init.zeros_(copied.mlp.fc2.weight)
    copied.norm1 = layers.RMSNorm(D)
    assert not close(copied(X), want)
    assert close(block(X), want)


def test_threads_share_a_module() -> None:
    """One changes it while the other runs it; when they are done, nothing is left of an earlier state."""
    block = layers.Block(D, H).eval()
    weights = [nn.Parameter(torch.full((D,), float(i))) for i in (1, 2)]

    def outputs() -> list[Tensor]:
        results = []
        for weight in weights:
            block.norm1.weight = weight
            results.append(block(X).detach())
        return results

    want, failures, done = outputs(), [], threading.Event()

    def run() -> None:
        while not done.is_set():
            got = block(X)
            if not any(close(got, one) for one in want):
                failures.append(got)

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(outputs(), want, strict=True))
    done.set()
    thread.join()
    assert not failures


@pytest.mark.parametrize("make", [KEPT["Block"], KEPT["timm"]], ids=["ours", "timm"])
def test_tensors_can_be_swapped(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions may swap tensors, and always swap those of other classes."""
    block = make().eval()
    want = block(X).detach()
    monkeypatch.setattr(torch.__future__, "get_swap_module_params_on_conversion", lambda: True)
    block.double()
    assert close(block(X.double()).float(), want)
    other = nn.Parameter(torch.zeros_like(block.norm1.weight))
    torch.utils.swap_tensors(block.norm1.weight, other)
    got = block(X.double())
    assert close(got, copy.deepcopy(block)(X.double()))
    assert not close(got.float(), want)
