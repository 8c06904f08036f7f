"""Modules that users change before or after `accelerate`: hooks, adapters, replaced forwards and classes."""

import copy
import functools

import pytest
import torch
from known_models import small, small_inputs
from library_models import fused_only, outcome, torchvision_vit
from models import Calls, accelerate_as_it_was, close, randomised
from torch import Tensor, nn
from torch.nn.utils import prune

import fastvit


def test_a_hook_inside_is_skipped_at_once_and_its_neighbours_are_not(vit: nn.Module, image: Tensor) -> None:
    shapes = []
    vit.blocks[0].attn.qkv.register_forward_hook(lambda module, args, out: shapes.append(out.shape))
    report = accelerate_as_it_was(vit, lambda: vit(image))
    assert outcome(report, "blocks.0") == ("skipped", "qkv has hooks or a forward of its own")
    accelerated = {
        "blocks.0.mlp": "mlp",
        "blocks.0.norm1": "layer_norm",
        "blocks.1": "layer_norm_attention, layer_norm_mlp",
    }
    assert {e.name: e.detail for e in report.accelerated}.items() >= accelerated.items()
    assert len(shapes) == 2


def test_a_hook_added_later_falls_back_with_one_warning(vit: nn.Module, image: Tensor) -> None:
    want = vit(image)
    fastvit.accelerate(vit)
    calls = []
    handle = vit.blocks[0].mlp.act.register_forward_hook(lambda *_: calls.append(1))
    vit.blocks[1].mlp.act.register_forward_pre_hook(lambda *_: None)  # the same class and reason
    warning = "^blocks.0: Block runs its own forward instead of fastvit's: act has hooks"
    with pytest.warns(UserWarning, match=warning) as record:
        outputs = [vit(image) for _ in range(3)]
    assert all(close(out, want) for out in outputs)
    assert len(record) == 1
    assert record[0].filename == __file__  # the line that called the model, not one of timm's or torch's
    assert len(calls) == 3
    handle.remove()
    vit.blocks[1].mlp.act._forward_pre_hooks.clear()
    with fused_only():
        assert close(vit(image), want)


def test_hooks_on_the_accelerated_module_itself_run(vit: nn.Module, image: Tensor) -> None:
    fastvit.accelerate(vit)
    shapes = []
    vit.blocks[0].register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
    vit.blocks[0].register_forward_hook(lambda module, args, out: shapes.append(out.shape) or out.mul_(2.0))
    vit.blocks[0].register_full_backward_hook(lambda module, into, out: shapes.append(out[0].shape))
    with fused_only():
        vit(image).sum().backward()
    assert shapes == [(2, 17, 64)] * 3


@pytest.mark.filterwarnings("ignore:.*runs its own forward instead of fastvit's")
def test_symbolic_tracing_sees_the_modules(vit: nn.Module, image: Tensor) -> None:
    """timm's feature extractors trace with torch.fx, whose proxies are no tensors."""
    want = torch.fx.symbolic_trace(vit)
    fastvit.accelerate(vit)
    got = torch.fx.symbolic_trace(vit)
    names = [[node.name for node in traced.graph.nodes] for traced in (got, want)]
    assert names[0] == names[1]
    assert close(got(image), want(image))


@pytest.mark.filterwarnings("ignore:.*runs its own forward instead of fastvit's")
@pytest.mark.parametrize(
    ("path", "when"),
    [("blocks.0", "after"), ("blocks.0.attn", "before"), ("patch_embed.proj", "after")],
)
def test_a_forward_replaced_on_the_class(
    vit: nn.Module, image: Tensor, monkeypatch: pytest.MonkeyPatch, path: str, when: str
) -> None:
    plain, kind = copy.deepcopy(vit), type(vit.get_submodule(path))
    forward = kind.forward
    doubled = functools.wraps(forward)(lambda self, *args, **kwargs: forward(self, *args, **kwargs) * 2)
    if when == "after":
        fastvit.accelerate(vit)
    fused = vit(image)
    monkeypatch.setattr(kind, "forward", doubled)
    report = fastvit.accelerate(vit) if when == "before" else None
    want = plain(image)
    assert close(vit(image), want)
    assert not close(fused, want)
    if report is not None:
        assert "was replaced" in outcome(report, "blocks.0")[1]
    monkeypatch.undo()
    assert close(vit(image), fused)
    if when == "after":
        with Calls() as calls:
            vit(image)
        assert "fastvit::patch_embed_fwd" in calls.names
        assert "aten::native_layer_norm" not in calls.names


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


def test_a_layer_added_to_a_sequence(image: Tensor) -> None:
    """torchvision's MLP calls all that is in it."""
    model = torchvision_vit()
    model.encoder.layers[0].mlp.append(nn.Tanh())
    report = accelerate_as_it_was(model, lambda: model(image))
    assert outcome(report, "encoder.layers.encoder_layer_0") == ("skipped", "further layers in it")


def test_layer_scale_that_is_no_parameter_any_more() -> None:
    """Pruning and FSDP put a tensor in the place of a layer's own parameter."""
    model = randomised(small("beit.BeitModel", layer_scale_init_value=0.3))
    fastvit.accelerate(model)
    for layer in model.layers:
        prune.identity(layer, "lambda_1")
    with fused_only():
        got = model(**small_inputs(model)).last_hidden_state
    fastvit.restore(model)
    assert close(got, model(**small_inputs(model)).last_hidden_state)


def test_a_reader_that_stumbles_leaves_the_module(vit: nn.Module, image: Tensor) -> None:
    """Other libraries may have changed a module in any way."""
    want = vit(image)
    heads = vit.blocks[0].attn.__dict__.pop("num_heads")
    vit.blocks[1].attn.num_heads = None
    report = fastvit.accelerate(vit)
    for name, error in (("blocks.0", "AttributeError"), ("blocks.1", "TypeError: unsupported operand")):
        assert outcome(report, name)[1].startswith(f"it is not as its class makes it: {error}")
    for block in vit.blocks:
        block.attn.num_heads = heads
    assert close(vit(image), want)
    fastvit.accelerate(vit)
    del vit.blocks[0].attn.num_heads
    with (
        pytest.warns(UserWarning, match="it is not as its class makes it: AttributeError"),
        pytest.raises(AttributeError, match="num_heads"),  # of timm's forward
    ):
        vit(image)
