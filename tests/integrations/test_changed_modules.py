"""Modules that users change before or after `accelerate`: hooks, adapters, replaced forwards and classes."""

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from library_models import outcome
from models import Calls, LoRA, accelerate_as_it_was, close
from torch import Tensor, nn

import fastvit


def test_a_hook_inside_is_skipped_at_once_and_its_neighbours_are_not(vit: nn.Module, image: Tensor) -> None:
    seen = []
    want = vit(image)
    vit.blocks[0].attn.qkv.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    report = fastvit.accelerate(vit)
    assert outcome(report, "blocks.0") == ("skipped", "qkv has hooks or a forward of its own")
    assert outcome(report, "blocks.0.attn")[0] == "skipped"
    assert outcome(report, "blocks.0.mlp") == ("accelerated", "mlp")
    assert outcome(report, "blocks.0.norm1") == ("accelerated", "layer_norm")
    assert outcome(report, "blocks.1")[0] == "accelerated"
    assert close(vit(image), want)
    assert len(seen) == 1


def test_a_forward_put_on_before_keeps_running(vit: nn.Module, image: Tensor) -> None:
    block = vit.blocks[0]
    block.forward = lambda x, attn_mask=None, is_causal=False: 2 * x
    report = accelerate_as_it_was(vit, lambda: vit(image))
    assert outcome(report, "blocks.0")[0] == "skipped"


def test_a_hook_added_later_falls_back_with_one_warning(vit: nn.Module, image: Tensor) -> None:
    want = vit(image)
    fastvit.accelerate(vit)
    seen = []
    handle = vit.blocks[0].mlp.act.register_forward_hook(lambda *_: seen.append(1))
    vit.blocks[1].mlp.act.register_forward_pre_hook(lambda *_: None)  # the same class and reason
    warning = "^blocks.0: Block runs its own forward instead of fastvit's: act has hooks"
    with pytest.warns(UserWarning, match=warning) as record:
        outputs = [vit(image) for _ in range(3)]
    assert all(close(out, want) for out in outputs)
    assert len(record) == 1
    assert record[0].filename == __file__  # the line that called the model, not one of timm's or torch's
    assert len(seen) == 3
    handle.remove()
    vit.blocks[1].mlp.act._forward_pre_hooks.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert close(vit(image), want)


def test_hooks_on_the_accelerated_module_itself_run(vit: nn.Module, image: Tensor) -> None:
    fastvit.accelerate(vit)
    shapes = []
    vit.blocks[0].register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
    vit.blocks[0].register_forward_hook(lambda module, args, out: shapes.append(out.shape) or out.mul_(2.0))
    vit.blocks[0].register_full_backward_hook(lambda module, into, out: shapes.append(out[0].shape))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vit(image).sum().backward()
    assert shapes == [(2, 5, 192)] * 3


def test_an_adapter_put_in_later_is_honoured(vit: nn.Module, image: Tensor) -> None:
    fastvit.accelerate(vit)
    vit.blocks[1].mlp.fc2 = LoRA(vit.blocks[1].mlp.fc2).to(image.device)
    with pytest.warns(UserWarning, match="blocks.1: Block runs its own forward .*: fc2 is models.LoRA"):
        got = vit(image)
    fastvit.restore(vit)
    assert close(got, vit(image))


@pytest.mark.parametrize("name", ["attn.q_norm", "attn.k_norm", "attn.norm", "mlp.norm"])
def test_a_hook_where_a_block_has_no_norm(name: str, vit: nn.Module, image: Tensor) -> None:
    """A hook on the nn.Identity in its place runs."""
    vit.blocks[0].get_submodule(name).register_forward_hook(lambda _, __, output: output * 2)
    report = accelerate_as_it_was(vit, lambda: vit(image))
    assert outcome(report, "blocks.0")[0] == "skipped"


def test_a_hook_where_a_parallel_block_has_no_qk_norm(timm) -> None:
    """A hook on the nn.Identity in its place runs."""
    block = timm.models.vision_transformer.ParallelScalingBlock(64, 4)
    block.q_norm.register_forward_hook(lambda _, __, output: output * 2)
    x = torch.randn(2, 7, 64)
    report = accelerate_as_it_was(nn.ModuleList([block]), lambda: block(x))
    assert outcome(report, "0") == ("skipped", "q_norm has hooks or a forward of its own")


@pytest.mark.filterwarnings("ignore:.*runs its own forward instead of fastvit's")
def test_symbolic_tracing_sees_the_modules(vit: nn.Module, image: Tensor) -> None:
    """timm's feature extractors trace with torch.fx, whose proxies are no tensors."""
    want = torch.fx.symbolic_trace(vit)
    fastvit.accelerate(vit)
    got = torch.fx.symbolic_trace(vit)
    names = [[node.name for node in traced.graph.nodes] for traced in (got, want)]
    assert names[0] == names[1]
    assert close(got(image), want(image))


REPLACED = ("blocks.0", "blocks.0.attn", "blocks.0.mlp", "blocks.0.attn.qkv", "blocks.0.norm1", "patch_embed.proj")


@pytest.mark.filterwarnings("ignore:.*runs its own forward instead of fastvit's")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("path", REPLACED)
def test_a_forward_replaced_on_the_class(
    vit: nn.Module, image: Tensor, monkeypatch: pytest.MonkeyPatch, path: str, when: str
) -> None:
    plain, kind = copy.deepcopy(vit), type(vit.get_submodule(path))
    forward = kind.forward

    @functools.wraps(forward)
    def doubled(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs) * 2

    if when == "after":
        fastvit.accelerate(vit)
    fused = vit(image)
    monkeypatch.setattr(kind, "forward", doubled)
    report = fastvit.accelerate(vit) if when == "before" else None
    want = plain(image)
    assert close(vit(image), want)
    assert not close(fused, want)
    if report is not None:
        name = path if path == "patch_embed.proj" else "blocks.0"
        assert "was replaced" in outcome(report, name)[1]
    monkeypatch.undo()
    assert close(vit(image), fused)
    if when == "after":
        with Calls() as calls:
            vit(image)
        assert "fastvit::patch_embed_fwd" in calls.names
        assert "aten::native_layer_norm" not in calls.names


@pytest.mark.filterwarnings("ignore:.*runs its own forward instead of fastvit's")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_class_that_was_swapped(vit: nn.Module, image: Tensor, when: str) -> None:
    """Token merging does it with blocks."""

    class Halved(type(vit.blocks[0])):  # type: ignore[misc]
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(x, *args, **kwargs) / 2

    plain = copy.deepcopy(vit)
    if when == "after":
        fastvit.accelerate(vit)
    for model in (vit, plain):
        model.blocks[1].__class__ = Halved
    if when == "before":
        fastvit.accelerate(vit)
    assert close(vit(image), plain(image))


def test_a_parametrized_module_stays_accelerated(vit: nn.Module, image: Tensor) -> None:
    """`parametrize` swaps the class for a subclass that only makes the parameter."""
    plain = copy.deepcopy(vit)
    fastvit.accelerate(vit)
    for model in (vit, plain):
        nn.utils.parametrize.register_parametrization(model.norm, "weight", nn.Softplus(), unsafe=True)
    with Calls() as calls:
        got = vit(image)
    assert close(got, plain(image))
    assert "aten::native_layer_norm" not in calls.names


def test_a_reader_that_stumbles_leaves_the_module(vit: nn.Module, image: Tensor) -> None:
    """Other libraries may have changed a module in any way."""
    want = vit(image)
    del vit.blocks[0].attn.num_heads
    type_error = "it is not as its class makes it: TypeError: unsupported operand"
    vit.blocks[1].attn.num_heads = None
    report = fastvit.accelerate(vit)
    assert outcome(report, "blocks.0")[1].startswith("it is not as its class makes it: AttributeError")
    assert outcome(report, "blocks.1")[1].startswith(type_error)
    for block in vit.blocks:
        block.attn.num_heads = 3
    assert close(vit(image), want)
    fastvit.accelerate(vit)
    del vit.blocks[0].attn.num_heads
    with (
        pytest.warns(UserWarning, match="it is not as its class makes it: AttributeError"),
        pytest.raises(AttributeError, match="num_heads"),  # of timm's forward
    ):
        vit(image)
