"""Models with int8 linear layers, by PyTorch or torchao: these layers run by themselves, and all else stays fused."""

import copy
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from library_imports import import_library
from library_models import gated_vit, hugging_face, outcome, output_of, vit
from models import Calls, randomised
from oracle import assert_as_accurate
from torch import Tensor, nn

import fastvit


def dynamic(model: nn.Module) -> nn.Module:
    """A quantised copy, by PyTorch."""
    quantization = pytest.importorskip("torch.ao.quantization")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.ao is deprecated
        return quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def torchao(model: nn.Module) -> nn.Module:
    """A quantised copy, by torchao."""
    quantization = pytest.importorskip("torchao.quantization")
    model = copy.deepcopy(model)
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "timm": partial(vit, init_values=0.3),
    "SwiGLU": partial(gated_vit, "SwiGLU"),
    "DINOv2 of transformers": partial(hugging_face, "Dinov2Model"),
}
QUANTISE = [dynamic, torchao]


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return randomised(make().eval().requires_grad_(False), std=0.05)


def run(model: nn.Module, image: Tensor) -> tuple[Tensor, list[str]]:
    """Return the output, and the operators that ran."""
    with Calls() as calls:
        out = output_of(model(image))
    return out, calls.names


def assert_quantised_as_well(got: Tensor, quantised: Tensor, exact: Tensor) -> None:
    """Check that got is as near to float64 as the quantised model that is not fused. They are not equal: if attention
    rounds differently, an input of a layer may become the next int8."""
    assert_as_accurate(got, quantised, exact, what="output")
    cosine = torch.cosine_similarity(got.flatten().double(), exact.flatten(), dim=0).item()
    assert cosine > 0.99
    assert (got - exact).abs().max() > 1e-3 * exact.abs().max()  # it is quantised


@pytest.mark.parametrize("quantise", QUANTISE)
@pytest.mark.parametrize(
    ("library", "order"),
    [("timm", "accelerate, quantise"), *((library, "quantise, accelerate") for library in MODELS)],
)
def test_all_but_quantised_layers_stays_fused(
    library: str, order: str, quantise: Callable[[nn.Module], nn.Module]
) -> None:
    plain, image = made(MODELS[library]), torch.randn(4, 3, 32, 32)
    exact, _ = run(copy.deepcopy(plain).double(), image.double())
    quantised = quantise(plain)
    want, _ = run(quantised, image)
    if order == "accelerate, quantise":
        model = copy.deepcopy(plain)
        report = fastvit.accelerate(model)
        model = quantise(model)
    else:
        model = quantised
        report = fastvit.accelerate(model, strict=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*runs its own forward instead")
        got, names = run(model, image)
    assert_quantised_as_well(got, want, exact)
    assert report.fused("attention") == (2, 2)
    assert sum(name.startswith("fastvit::attention") for name in names) == 2
    assert not {"aten::native_layer_norm", "aten::_softmax"}.intersection(names)
    fastvit.restore(model)
    assert torch.equal(run(model, image)[0], want)


def test_our_own_models() -> None:
    """They agree with their modules called one by one, and load a state_dict of an equally quantised model."""
    sizes = {"img_size": 32, "num_classes": 7, "depth": 2, "embed_dim": 64, "num_heads": 2}
    model, image = made(partial(fastvit.create_model, "vit_tiny_patch16_224", **sizes)), torch.randn(4, 3, 32, 32)
    exact, _ = run(copy.deepcopy(model).double(), image.double())
    quantised = dynamic(model)
    got, names = run(quantised, image)
    assert sum(called.startswith("fastvit::attention") for called in names) == 2
    singly, other = copy.deepcopy(quantised), dynamic(fastvit.create_model("vit_tiny_patch16_224", **sizes).eval())
    for block in singly.blocks:  # a hook inside a fused span
        for inner in (block.attn, block.mlp, block.attn.proj, block.mlp.fc2):
            inner.register_forward_hook(lambda *_: None)
    assert_quantised_as_well(got, run(singly, image)[0], exact)
    other.load_state_dict(quantised.state_dict())
    assert torch.equal(run(other, image)[0], got)


def test_the_report_names_quantised_layers() -> None:
    report = fastvit.accelerate(dynamic(vit()))
    kind = "torch.ao.nn.quantized.dynamic.modules.linear.Linear"
    assert outcome(report, "blocks.0")[1].partition(kind)[0] == (
        "layer_norm, attention_qkvpacked; attn.qkv, attn.proj, mlp.fc1, mlp.fc2 as "
    )
    assert outcome(report, "blocks.0.mlp.fc1") == ("as it was", "called in blocks.0")
    assert (report.fused("attention"), report.fused("MLP")) == ((2, 2), (0, 2))


def test_a_layer_of_attention_and_the_mlp_in_one() -> None:
    """The whole block runs by its modules, because an op reads that layer in two parts."""
    block_fn = import_library("timm").models.vision_transformer.ParallelScalingBlock
    model = dynamic(made(lambda: vit(block_fn=block_fn)))
    image = torch.randn(2, 3, 32, 32)
    want = model(image)
    report = fastvit.accelerate(model)
    reason = "an adapter or a quantised weight on a layer that is attention's and the MLP's"
    assert outcome(report, "blocks.0") == ("skipped", reason)
    assert torch.equal(model(image), want)
