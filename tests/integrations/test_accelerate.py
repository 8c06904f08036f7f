"""The promises of `fastvit.accelerate` for any model: in place, exact classes only, undone without a trace, nothing
dropped silently."""

import copy
import functools
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from library_models import outcome
from library_models import vit as timm_vit
from models import Calls, accelerate_as_it_was, close
from torch import Tensor, nn

import fastvit
from fastvit.blocks.recompute import recompute_all, recompute_as_by_default


def test_accelerate_and_restore_are_idempotent_and_make_no_tensor(vit: nn.Module, image: Tensor) -> None:
    attributes = [m.__dict__.keys() for m in vit.modules()]
    want, text = vit(image), repr(vit)
    with Calls() as calls:
        first = fastvit.accelerate(vit)
        assert fastvit.accelerate(vit) == first
    assert not calls.names
    assert repr(vit) == text
    assert close(vit(image), want)
    fastvit.restore(vit)
    fastvit.restore(vit)
    assert [m.__dict__.keys() for m in vit.modules()] == attributes
    assert torch.equal(vit(image), want)


def test_context_manager_restores_after_an_error(vit: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="mine"), fastvit.accelerated(vit):
        raise RuntimeError("mine" if "forward" in vit.blocks[0].__dict__ else "not accelerated")
    assert not any("forward" in m.__dict__ for m in vit.modules())


def test_deepcopy_and_pickle_stay_accelerated_and_apart(vit: nn.Module, image: Tensor) -> None:
    fastvit.accelerate(vit)
    want = vit(image)
    for other in (copy.deepcopy(vit), pickle.loads(pickle.dumps(vit))):
        assert torch.equal(other(image), want)
        assert other.blocks[0].forward.args[1] is other.blocks[0]
        with torch.no_grad():
            other.blocks[0].mlp.fc2.weight.mul_(2)
        assert not close(other(image), want)
        fastvit.restore(other)
        assert "forward" not in other.blocks[0].__dict__
    assert torch.equal(vit(image), want)
    assert "forward" in vit.blocks[0].__dict__


SHALLOW: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copy": copy.copy,
    "replica": lambda module: module._replicate_for_data_parallel(),  # what nn.DataParallel makes for each device
}


@pytest.mark.parametrize("how", SHALLOW)
@pytest.mark.parametrize("put_on", ["accelerate", "fit", "graphs", "compiled"])
def test_shallow_copies_run_their_own_parts(how: str, put_on: str, vit: nn.Module) -> None:
    """And the original runs its own, as before."""
    block, x = vit.blocks[0], torch.randn(2, 5, 64, device=vit.pos_embed.device)
    want = block(x)
    if put_on in ("accelerate", "compiled"):
        fastvit.accelerate(block, strict=True)
    elif put_on == "fit":
        recompute_all(block)
    else:
        fastvit.graphs(block)
    copied = SHALLOW[how](block)
    copied._modules = {**block._modules, "mlp": nn.Identity()}
    plain = copy.copy(copied)
    fastvit.restore(plain) if put_on != "fit" else recompute_as_by_default(plain)
    expected = plain(x)
    assert not close(expected, want)
    call = torch.compile(copied, backend="eager", fullgraph=True) if put_on == "compiled" else copied
    assert close(call(x), expected)
    warns = put_on == "graphs" and not x.is_cuda
    with pytest.warns(UserWarning, match="a tensor is on the cpu") if warns else nullcontext():
        assert close(block(x), want)


class Copied(nn.LayerNorm):
    """Copies itself, as modules may."""

    def __copy__(self) -> nn.Module:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied


def test_copies_of_copies_and_wrappers_of_other_libraries() -> None:
    """A copy's state is its own; a wrapper that took the attributes of what it wraps is no stand-in."""
    module = Copied(8)
    fastvit.graphs(module)
    copied = copy.copy(module)
    copied.eps = 7.0
    for other in (copied, copy.copy(copied), copy.deepcopy(copied), pickle.loads(pickle.dumps(copied))):
        assert other.eps == 7.0
        assert "forward" not in vars(other)
    norm, x = nn.LayerNorm(8), torch.randn(2, 8)
    fastvit.accelerate(norm)
    inner = norm.forward
    norm.forward = functools.update_wrapper(partial(lambda *args: inner(*args) + 1), inner)
    assert close(copy.copy(norm)(x), norm(x))


def test_shallow_copies_of_what_another_process_accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = nn.LayerNorm(8)
    fastvit.accelerate(norm)
    pickled = pickle.dumps(norm)
    monkeypatch.delitem(copy._copy_dispatch, nn.LayerNorm)  # type: ignore[attr-defined]
    for how in SHALLOW.values():
        assert "forward" not in vars(how(pickle.loads(pickled)))


def test_timms_attention_drops_and_scales_as_its_own_does(device: torch.device, image: Tensor) -> None:
    """scaled_dot_product_attention, in it, follows the attention's mode and takes no scale from it."""
    vit = timm_vit().to(device)
    for block in vit.blocks:
        block.attn.qkv.weight.data *= 10
        block.attn.scale *= 4
        block.attn.attn_drop = nn.Dropout(0.5)  # in training, in a model that is not
    for fused in (True, False):
        for block in vit.blocks:
            block.attn.fused_attn = fused
            block.attn.attn_drop.train(fused)
        accelerate_as_it_was(vit, lambda: vit(image))
        fastvit.restore(vit)


@pytest.mark.parametrize("name", ["patch_embed.proj", "blocks.0", "blocks.0.attn", "blocks.0.mlp", "norm", "pre_norm"])
def test_the_input_by_name(name: str, vit: nn.Module, image: Tensor) -> None:
    vit.pre_norm = nn.LayerNorm(64, device=image.device)
    module, x = vit.get_submodule(name), torch.randn(2, 5, 64, device=image.device)
    argument = {"input": image} if "proj" in name else {"input" if name == "pre_norm" else "x": x}
    accelerate_as_it_was(module, partial(module, **argument))
    warns = nullcontext() if "proj" in name else pytest.warns(UserWarning, match="runs its own forward")
    with warns, pytest.raises(TypeError, match="argument"):
        module()


def test_tensor_subclasses_are_left_to_the_module(vit: nn.Module) -> None:
    """They support PyTorch's own functions only. With such a weight, only its layer runs as a module."""
    from torch.testing._internal.two_tensor import TwoTensor

    x = torch.randn(2, 5, 64, device=vit.pos_embed.device)
    mlp, block = vit.blocks[0].mlp, vit.blocks[0]
    want, whole = mlp(x), block(x)
    fastvit.accelerate(mlp)
    with pytest.warns(UserWarning, match="Mlp runs its own forward instead of fastvit's: a TwoTensor"):
        assert close(mlp(TwoTensor(x, x)).a, want)
    weight = mlp.fc2.weight.detach()
    mlp.fc2.weight = nn.Parameter(TwoTensor(weight, weight))
    assert close(mlp(x).a, want)
    expected = "layer_norm_attention, layer_norm, linear; mlp.fc2 as nn.Linear with "
    status, detail = outcome(fastvit.accelerate(block), "")
    assert (status, detail.startswith(expected), "TwoTensor" in detail) == ("accelerated", True, True)
    assert close(block(x).a, whole)


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "no module": (lambda vit: "vit", "model must be an nn.Module, got str"),
    "nn.DataParallel": (nn.DataParallel, r"nn.DataParallel \(the model itself\).*or in DistributedDataParallel"),
    "ScriptModule": (
        lambda vit: nn.Sequential(torch.jit.script(nn.LayerNorm(8)), vit),
        r"ScriptModule \(0\), whose forward cannot be replaced",
    ),
    "compiled": (partial(torch.compile, backend="eager"), "compiled already"),
    "compiled inside": (lambda vit: vit.blocks[0].compile(backend="eager") or vit, "compiled already"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_run_modules_forwards_is_refused(kind: str, vit: nn.Module) -> None:
    make, message = REFUSED[kind]
    with pytest.raises((TypeError, ValueError), match=message):
        fastvit.accelerate(make(vit))
    assert not any("forward" in m.__dict__ for m in vit.modules())
