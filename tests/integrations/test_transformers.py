"""Features of Hugging Face transformers: masks, attention weights, hidden states, checkpointing inside forward, causal
text towers, attention implementations by name."""

from typing import Any

import pytest
import torch
from known_models import built, vjepa2
from library_imports import import_library
from library_models import TEXT, accelerate_and_compare, assert_steps_agree, fused_only, hugging_face, step
from models import Calls, accelerate_as_it_was, close, randomised
from torch import Tensor, nn

import fastvit
from fastvit.blocks.submodules import qualified_name
from fastvit.integrations.decide import HANDLERS
from fastvit.integrations.transformers import layers, register_attention


@pytest.fixture
def transformers():
    return import_library("transformers")


@pytest.fixture
def vit(device: torch.device) -> nn.Module:
    return randomised(hugging_face("ViTModel", add_pooling_layer=False)).to(device)


def tokens(model: nn.Module, image: Tensor, **more: object) -> Tensor:
    return model(image, **more).last_hidden_state


def padding(image: Tensor) -> Tensor:
    """(B, N) of 1 and 0: the first image's last tokens are not to be attended to."""
    mask = torch.ones(len(image), 17, dtype=torch.long, device=image.device)
    mask[0, 9:] = 0
    return mask


def test_a_mask_that_no_op_takes_under_compile(vit, device) -> None:
    """A mask (N, N), as flash attention takes it: the warning comes while the graph is made, and does not break it."""
    fastvit.accelerate(vit)
    torch._dynamo.reset()
    layer, hidden = vit.layers[0], torch.randn(2, 17, 64, device=device)
    mask = torch.zeros(17, 17, device=device)
    mask[:, 9:] = -torch.inf
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with pytest.warns(UserWarning, match="ViTLayer runs its own forward instead of fastvit's: an attention mask of sh"):
        got = compiled(hidden, mask)
    assert close(got, type(layer).forward(layer, hidden, mask))
    assert not close(got, layer(hidden))


@pytest.mark.parametrize("by_argument", [True, False])
def test_attention_weights_and_hidden_states(vit, image, by_argument: bool) -> None:
    vit.set_attn_implementation("eager")
    more = {"output_attentions": True} if by_argument else {}
    vit.config.output_attentions = not by_argument
    want = vit(image, output_hidden_states=True, **more)
    assert len(want.attentions) == 2
    fastvit.accelerate(vit)  # transformers' hooks are there by now
    with pytest.warns(UserWarning, match="the argument output_attentions|attention weights are collected"):
        got = vit(image, output_hidden_states=True, **more)
    assert all(close(a, b) for a, b in zip(got.attentions, want.attentions, strict=True))
    assert all(close(a, b) for a, b in zip(got.hidden_states, want.hidden_states, strict=True))


def test_hidden_states_and_arguments_of_a_trainer_stay_fused(device, image) -> None:
    """transformers.Trainer passes labels and a count for the loss."""
    model = hugging_face("ViTForImageClassification").to(device)
    more = {"labels": torch.tensor([0, 1], device=device), "num_items_in_batch": 2}
    with fused_only():
        accelerate_as_it_was(model, lambda: tuple(model(image, output_hidden_states=True, **more).values()))


@pytest.mark.filterwarnings("ignore:.*runs its own forward instead of fastvit's")
def test_a_forward_replaced_on_the_class_of_attention(vit: nn.Module, image: Tensor, monkeypatch) -> None:
    """A call for hidden states before leaves transformers' hooks on attention."""
    fastvit.accelerate(vit)
    vit(image, output_hidden_states=True)
    fused, kind = tokens(vit, image), type(vit.layers[0].attention)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: (forward(self, *args, **kwargs)[0] * 2, None))
    got = tokens(vit, image)
    fastvit.restore(vit)
    assert close(got, tokens(vit, image))
    assert not close(got, fused)


def test_tubelets_of_vjepa2_at_any_places(device: torch.device) -> None:
    """From some tubelets to others, whose places differ from sample to sample."""
    model, video = randomised(vjepa2()).to(device), torch.randn(2, 4, 3, 16, 16, device=device)
    context, target = torch.tensor([[0, 3, 5], [7, 1, 2]]), torch.tensor([[1, 6], [4, 0]])
    masks = {"context_mask": [context.to(device)], "target_mask": [target.to(device)]}
    model.train().gradient_checkpointing_enable()

    def predicted(model: nn.Module) -> Tensor:
        return model(video, **masks).predictor_output.last_hidden_state

    accelerate_and_compare(model, predicted, strict=True)


@pytest.mark.parametrize("name", ["ViT of transformers", "SAM of transformers", "VitDet", "Swin of transformers"])
def test_checkpointing_inside_forward(name: str, device: torch.device) -> None:
    known = built(name, device)
    model, kind = known.model, ("Layer", "Block")
    fastvit.accelerate(model)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    layer = next(m for m in model.modules() if type(m).__name__.endswith(kind) and hasattr(m, "gradient_checkpointing"))
    checkpoint, calls = layer._gradient_checkpointing_func, []
    layer._gradient_checkpointing_func = lambda function, *args: calls.append(args) or checkpoint(function, *args)
    try:
        assert_steps_agree(step(model, known.call), known.own)
        count = 2 if "Swin" in name else 1  # its stages, which are checkpointed too, run their layers again
        assert len(calls) == count
        model.eval()
        known.call(model)
        assert len(calls) == count
    finally:
        model.eval().gradient_checkpointing_disable()
        fastvit.restore(model)


@pytest.mark.parametrize(
    ("model", "options", "rates"),
    [
        ("ViT", {"attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.5}, (0.1, 0.5, 0.0, 0.5, 0.0)),
        ("Dinov2", {"drop_path_rate": 0.5}, (0.0, 0.0, 0.0, 0.0, 0.5)),
        ("InternVLVision", {"projection_dropout": 0.25, "hidden_dropout_prob": 0.5}, (0.0, 0.25, 0.0, 0.5, 0.0)),
    ],
)
def test_rates_of_dropouts(model: str, options: dict[str, float], rates: tuple[float, ...]) -> None:
    """Dropout of probabilities, after the projection, the activation and fc2, and of branches: in training only."""
    modules = hugging_face(f"{model}Model", **options).modules()
    layer = [module for module in modules if type(module).__name__ == f"{model}Layer"][-1]
    for training, wanted in ((True, rates), (False, (0.0,) * 5)):
        half, mlp_half = HANDLERS[qualified_name(layer)].read(layer.train(training))
        attention, mlp = half.branch, mlp_half.branch
        assert (attention.attn_drop, attention.proj_drop, mlp.drop1, mlp.drop2, mlp_half.drop_path) == wanted
        assert half.drop_path == mlp_half.drop_path


def registered(model: nn.Module, *functions: Any, count: int = 2) -> None:
    """With attention by name, a model gives what it gave, and calls the op that many times in each call."""
    register_attention()
    want = [function(model).last_hidden_state for function in functions]
    model.set_attn_implementation("fastvit")
    for function, expected in zip(functions, want, strict=True):
        with Calls() as calls:
            assert close(function(model).last_hidden_state, expected)
        assert calls.names.count("fastvit::attention_fwd") == count


@pytest.mark.parametrize("options", [{}, {"num_key_value_heads_per_layer": [4, 2]}], ids=["ViT", "shared keys"])
def test_as_an_attention_implementation(options: dict[str, Any], image) -> None:
    kind = "Sapiens2Model" if options else "ViTModel"
    model = randomised(hugging_face(kind, **options)).to(image.device)
    masked = [] if options else [lambda m: m(image, attention_mask=padding(image))]
    want = step(model, lambda m: m(image))
    registered(model, lambda m: m(image), *masked)
    assert_steps_agree(step(model, lambda m: m(image)), want)
    torch._dynamo.reset()
    assert close(tokens(torch.compile(model, backend="eager", fullgraph=True), image), want.output)


def test_attention_implementation_of_a_text_tower(transformers, device) -> None:
    """It is causal; with a mask, that says so."""
    model = transformers.CLIPTextModel(transformers.CLIPTextConfig(**TEXT)).to(device).eval()
    ids = torch.randint(0, 49, (2, 9), device=device)
    padded = torch.ones_like(ids)
    padded[0, 6:] = 0
    registered(model, lambda m: m(ids, None), lambda m: m(ids, padded), count=1)


def test_attention_implementation_of_cross_attention(transformers, device) -> None:
    """BLIP-2's queries attend to the tokens of an image."""
    sizes = {name: TEXT[name] for name in TEXT if not name.endswith(("vocab_size", "token_id"))}
    config = transformers.Blip2QFormerConfig(**sizes, encoder_hidden_size=32, cross_attention_frequency=1)
    model = transformers.Blip2QFormerModel(config).to(device).eval()
    queries, context = torch.randn(2, 5, 64, device=device), torch.randn(2, 9, 32, device=device)
    seen = torch.ones(2, 9, dtype=torch.long, device=device)
    seen[0, 4:] = 0
    arguments = {"query_embeds": queries, "encoder_hidden_states": context, "encoder_attention_mask": seen}
    registered(model, lambda m: m(**arguments))


def test_attention_implementation_leaves_decoders_to_sdpa(transformers, device) -> None:
    """They pass further arguments, and keys of earlier tokens."""
    model = transformers.LlamaModel(transformers.LlamaConfig(**TEXT, num_key_value_heads=2)).to(device).eval()
    ids = torch.randint(0, 50, (2, 9), device=device)
    registered(model, lambda m: m(ids), count=0)
    attn, (q, k) = model.layers[0].self_attn, (torch.randn(2, 4, n, 16, device=device) for n in (3, 9))
    with Calls() as calls:
        layers.attention_forward(attn, q, k, k, None)
    assert "fastvit::attention_fwd" not in calls.names
