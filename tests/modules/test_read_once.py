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
from models import D, H, LoRA, close, randomised, tokens
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fastvit
from fastvit import eva_layers, layers
from fastvit.blocks import read_eva, read_timm, unchanged

Undo = Callable[[], Any]
HAS_COMPILER = pytest.mark.skipif(unchanged._compiled() is None, reason="unchanged.c cannot be compiled")
X, DY = tokens(dtype=torch.float32)


def result(block: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the output and the gradient of the input."""
    x = X.clone().requires_grad_()
    torch.manual_seed(3)
    y = block(x)
    return y.detach(), torch.autograd.grad(y, x, DY)[0]


# ---- changes ----


def attribute(path: str, name: str, value: Any) -> Callable[[nn.Module], Undo]:
    def change(block: nn.Module) -> Undo:
        module = block.get_submodule(path)
        if not hasattr(module, name):  # of timm's modules alone
            return lambda: None
        before = getattr(module, name)
        setattr(module, name, value)
        return lambda: setattr(module, name, before)

    return change


def new_attribute(path: str, name: str, value: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Undo]:
    def change(block: nn.Module) -> Undo:
        module = block.get_submodule(path)
        setattr(module, name, value(module))
        return lambda: delattr(module, name)

    return change


def hook(register: str, path: str, function: Callable[..., Any], **options: Any) -> Callable[[nn.Module], Undo]:
    return lambda block: getattr(block.get_submodule(path), register)(function, **options).remove


def replaced(path: str, make: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], Undo]:
    def change(block: nn.Module) -> Undo:
        before = block.get_submodule(path)
        torch.manual_seed(5)
        block.set_submodule(path, make(before))
        return lambda: block.set_submodule(path, before)

    return change


def parameter(path: str, name: str, make: Callable[[nn.Module], nn.Parameter | None]) -> Callable[[nn.Module], Undo]:
    def change(block: nn.Module) -> Undo:
        module = block.get_submodule(path)
        before = module._parameters[name]
        setattr(module, name, make(module))
        return lambda: setattr(module, name, before)

    return change


def no_parameter(path: str, name: str, set_tensor: Callable[[nn.Module, str, Tensor], None]) -> Callable[..., Undo]:
    """A tensor instead of a parameter, as FSDP has them."""

    def change(block: nn.Module) -> Undo:
        module = block.get_submodule(path)
        before = module._parameters.pop(name)
        set_tensor(module, name, before.detach() * 2)

        def undo() -> None:
            delattr(module, name)
            module.register_parameter(name, before)

        return undo

    return change


def norm_added(block: nn.Module) -> Undo:
    """Ours has none before, timm's an identity."""
    before = block.mlp._modules.get("norm")
    block.mlp.norm = nn.LayerNorm(4 * D)
    return lambda: delattr(block.mlp, "norm") if before is None else setattr(block.mlp, "norm", before)


def in_place(path: str, change: Callable[[Tensor], Any], undo: Callable[[Tensor], Any]) -> Callable[[nn.Module], Undo]:
    def run(block: nn.Module) -> Undo:
        change(block.get_parameter(path).data)
        return lambda: undo(block.get_parameter(path).data)

    return run


def mode(path: str) -> Callable[[nn.Module], Undo]:
    return lambda block: block.get_submodule(path).eval().train


def class_forward(block: nn.Module) -> Undo:
    """Replace it once, for both blocks."""
    forward = nn.GELU.forward
    if forward.__name__ != "doubled":

        def doubled(self: nn.GELU, x: Tensor) -> Tensor:
            return forward(self, x) * 2

        nn.GELU.forward = doubled  # type: ignore[method-assign]
        return lambda: setattr(nn.GELU, "forward", forward)
    return lambda: None


class Doubled(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def another_class(block: nn.Module) -> Undo:
    block.mlp.act.__class__ = Doubled
    return lambda: setattr(block.mlp.act, "__class__", nn.GELU)


def frozen(block: nn.Module) -> Undo:
    block.mlp.fc1.requires_grad_(False)
    return lambda: block.mlp.fc1.requires_grad_()


def parametrized(block: nn.Module) -> Undo:
    layer = block.mlp.fc1
    before = layer.weight.detach().clone()
    parametrize.register_parametrization(layer, "weight", nn.Softplus(), unsafe=True)

    def undo() -> None:
        parametrize.remove_parametrizations(layer, "weight")
        layer.weight.data.copy_(before)

    return undo


def weight_normed(block: nn.Module) -> Undo:
    nn.utils.weight_norm(block.mlp.fc2)
    block.mlp.fc2.weight_g.data.mul_(2)

    def undo() -> None:
        block.mlp.fc2.weight_g.data.div_(2)
        nn.utils.remove_weight_norm(block.mlp.fc2)

    return undo


def heads(block: nn.Module) -> Undo:
    def set_heads(number: int) -> None:
        block.attn.num_heads, block.attn.head_dim = number, D // number

    set_heads(2)
    return lambda: set_heads(H)


def adapter(block: nn.Module) -> Undo:
    """peft's, added to qkv."""
    before, peft = block.attn.qkv, import_library("peft")
    torch.manual_seed(5)
    config = peft.LoraConfig(r=2, target_modules=["attn.qkv"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, nn.Sequential(block))  # which gets its configuration as an attribute
    return lambda: block.set_submodule("attn.qkv", before)


def with_adapter(change: str, undo: str) -> Callable[[nn.Module], Undo]:
    """Change the adapter after a call with it."""

    def run(block: nn.Module) -> Undo:
        remove = adapter(block)
        result(block)
        getattr(block.attn.qkv, change)()

        def back() -> None:
            getattr(block.attn.qkv, undo)()
            result(block)
            remove()

        return back

    return run


def quantised(layer: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(layer).eval(), {nn.Linear})[0]


def doubled_result(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def noise(module: nn.Module) -> nn.Parameter:
    return nn.Parameter(torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(2)) * 0.1)


CHANGES: dict[str, Callable[[nn.Module], Undo]] = {
    "another layer": replaced("mlp.fc1", lambda old: nn.Linear(old.in_features, old.out_features)),
    "another activation": replaced("mlp.act", lambda _: nn.ReLU()),
    "an activation without an op": replaced("mlp.act", lambda _: nn.Tanh()),
    "no LayerScale": replaced("ls1", lambda _: nn.Identity()),
    "another adapter": replaced("mlp.fc2", LoRA),
    "a quantised layer": replaced("mlp.fc1", quantised),
    "forward hook": hook("register_forward_hook", "mlp.act", doubled_result),
    "forward hook first": hook("register_forward_hook", "attn.proj", doubled_result, prepend=True),
    "forward hook of a half": hook("register_forward_hook", "attn", doubled_result),
    "forward hook of the block": hook("register_forward_hook", "", doubled_result),
    "forward pre-hook": hook("register_forward_pre_hook", "mlp.fc1", lambda _, args: (args[0] * 2,)),
    "backward hook": hook("register_full_backward_hook", "attn.proj", lambda _, grads, __: (grads[0] * 2,)),
    "backward pre-hook": hook("register_full_backward_pre_hook", "norm2", lambda _, grads: (grads[0] * 2,)),
    "own forward": new_attribute("mlp.fc2", "forward", lambda m: lambda x: type(m).forward(m, x) * 2),
    "the class's forward": class_forward,
    "another class": another_class,
    "a parameter": parameter("norm1", "weight", noise),
    "a weight": parameter("mlp.fc1", "weight", noise),
    "a parameter in place": in_place("attn.qkv.weight", lambda t: t.mul_(2), lambda t: t.div_(2)),
    "no bias": parameter("attn.proj", "bias", lambda _: None),
    "a bias": parameter("attn.qkv", "bias", lambda m: nn.Parameter(torch.ones(len(m.weight)))),
    "a plain tensor": no_parameter("norm1", "weight", setattr),
    "a buffer": no_parameter("mlp.fc1", "bias", nn.Module.register_buffer),
    "a norm before fc2": norm_added,
    "frozen": frozen,
    "parametrized": parametrized,
    "weight norm": weight_normed,
    "evaluation": mode(""),
    "evaluation of stochastic depth": mode("drop_path2"),
    "stochastic depth": attribute("drop_path1", "drop_prob", 1.0),
    "kept samples not scaled": attribute("drop_path2", "scale_by_keep", False),
    "dropout": attribute("attn.proj_drop", "p", 1.0),
    "eps": attribute("norm1", "eps", 0.5),
    "approximate": attribute("mlp.act", "approximate", "tanh"),
    "scale": attribute("attn", "scale", 0.5),
    "fused_attn": attribute("attn", "fused_attn", True),
    "heads": heads,
    "LoRA": adapter,
    "LoRA merged": with_adapter("merge", "unmerge"),
}


def pair(kind: str) -> tuple[nn.Module, nn.Module]:
    """Return a block that runs fused, and timm's with the same parameters. timm's attention uses its scale."""
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


@pytest.mark.filterwarnings("ignore:.*runs its own forward instead of fastvit's", "ignore:.*deprecated")
@pytest.mark.parametrize("kind", ["ours", "accelerated"])
def test_no_change_is_missed(kind: str) -> None:
    """Each is made and undone."""
    for name, change in CHANGES.items():
        blocks = pair(kind)

        def check(what: str, blocks: tuple[nn.Module, nn.Module] = blocks) -> None:
            for got, want in zip(*map(result, blocks), strict=True):
                assert close(got, want), what

        check(f"before {name}")
        undo = [change(block) for block in blocks]
        check(name)
        check(f"{name}, again")
        for back in reversed(undo):
            back()
        check(f"after {name}")


# ---- what is kept ----


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The readers that are called."""
    called: list[str] = []
    for name in ("describe_attention", "describe_mlp", "describe_gated_mlp"):
        for home in (read_timm, read_eva.read):
            function = getattr(home, name)
            counted = functools.wraps(function)(
                lambda *a, _f=function, _n=name, **k: (called.append(_n), _f(*a, **k))[1]
            )
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
    "EvaBlock": lambda: eva_layers.EvaBlock(D, H, qkv_fused=False, swiglu_mlp=True, init_values=0.3),
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
    for block, name in ((eva_layers.EvaBlock(D, H), "attn.q_bias"), (parallel, "in_proj.weight")):
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
