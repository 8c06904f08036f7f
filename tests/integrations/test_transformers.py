"""Features of Hugging Face transformers: masks, attention weights, hidden states, checkpointing inside forward, causal
text towers, attention implementations by name."""

import warnings

import pytest
import torch
from library_imports import import_library
from library_models import SIZES, outcome
from models import Calls, accelerate_as_it_was, close
from torch import Tensor, nn

import fastvit
from fastvit.integrations.transformers import layers, register_attention


@pytest.fixture
def transformers():
    return import_library("transformers")


@pytest.fixture
def vit(transformers, device) -> nn.Module:
    config = transformers.ViTConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.ViTModel(config, add_pooling_layer=False).to(device).eval()


def tokens(model: nn.Module, image: Tensor, **more: object) -> Tensor:
    return model(image, **more).last_hidden_state


def padding(image: Tensor) -> Tensor:
    """(B, N) of 1 and 0: the first image's last tokens are not to be attended to."""
    mask = torch.ones(len(image), 17, dtype=torch.long, device=image.device)
    mask[0, 9:] = 0
    return mask


def test_a_padding_mask_is_honoured(vit, image) -> None:
    want, unmasked = tokens(vit, image, attention_mask=padding(image)), tokens(vit, image)
    fastvit.accelerate(vit)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = tokens(vit, image, attention_mask=padding(image))
    assert close(got, want)
    assert not close(got, unmasked)
    assert close(tokens(vit, image), unmasked)


@pytest.mark.parametrize("taken", [True, False])
def test_a_mask_under_compile(vit, device, taken: bool, recwarn: pytest.WarningsRecorder) -> None:
    """One that no op takes, as flash attention has it, (N, N): the warning comes while the graph is made, and does not
    break it."""
    fastvit.accelerate(vit)
    torch._dynamo.reset()
    layer = next(module for module in vit.modules() if type(module).__name__ == "ViTLayer")
    hidden = torch.randn(2, 17, vit.config.hidden_size, device=device)
    mask = torch.zeros(2, 1, 17, 17, device=device)
    mask[0, ..., 9:] = -torch.inf
    mask = mask if taken else mask[0, 0]
    want = type(layer).forward(layer, hidden, mask)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert close(compiled(hidden, mask), want)
    warned = [str(w.message) for w in recwarn if "own forward" in str(w.message)]
    assert bool(warned) != taken
    assert all("ViTLayer runs its own forward instead of fastvit's: an attention mask of sh" in text for text in warned)
    assert not close(want, layer(hidden))


@pytest.mark.parametrize("asked", ["by argument", "by configuration"])
def test_attention_weights_and_hidden_states(vit, image, asked) -> None:
    vit.set_attn_implementation("eager")
    more = {"output_attentions": True} if asked == "by argument" else {}
    vit.config.output_attentions = asked == "by configuration"
    want = vit(image, output_hidden_states=True, **more)
    assert len(want.attentions) == 2
    fastvit.accelerate(vit)  # transformers' hooks are there by now
    with pytest.warns(UserWarning, match="the argument output_attentions|attention weights are collected"):
        got = vit(image, output_hidden_states=True, **more)
    assert all(close(a, b) for a, b in zip(got.attentions, want.attentions, strict=True))
    assert all(close(a, b) for a, b in zip(got.hidden_states, want.hidden_states, strict=True))


def test_hidden_states_alone_stay_fused(vit, image, recwarn) -> None:
    report = accelerate_as_it_was(vit, lambda: vit(image, output_hidden_states=True).hidden_states)
    assert [e.kind for e in report.accelerated].count("ViTLayer") == 2
    assert not [w for w in recwarn if "own forward" in str(w.message)]


def test_hooks_of_users_run(vit, image) -> None:
    seen = []
    vit(image, output_hidden_states=True)
    vit.layers[0].attention.register_forward_pre_hook(lambda *_: seen.append("into"))
    vit.layers[1].attention.register_full_backward_hook(lambda *_: seen.append("back"))
    fastvit.accelerate(vit)
    tokens(vit, image).sum().backward()
    assert seen == ["into", "back"]


@pytest.mark.parametrize("asked", ["by hook", "by call", "by configuration"])
def test_eager_attention_alone_returns_its_weights(vit, image, asked) -> None:
    vit.set_attn_implementation("eager")
    for layer in vit.layers:
        layer.mlp.fc1.register_forward_hook(lambda *_: None)  # nothing but the attention could be accelerated

    def weights() -> Tensor:
        if asked == "by call":
            return vit.layers[0].attention(torch.ones(1, 3, 64, device=image.device))[1]
        if asked == "by configuration":
            vit.config.output_attentions = True
            return vit(image).attentions[0]
        seen = []
        with vit.layers[0].attention.register_forward_hook(lambda module, args, out: seen.append(out[1])):
            vit(image)
        return seen[0]

    report = accelerate_as_it_was(vit, weights)
    assert ("ViTAttention", "eager attention returns its weights as well") in {
        (e.kind, e.detail) for e in report.skipped
    }


def test_attention_made_causal(vit, image) -> None:
    for layer in vit.layers:
        layer.attention.is_causal = True
    report = accelerate_as_it_was(vit, lambda: tokens(vit, image))
    assert {e.detail for e in report.skipped} == {"its attention is causal"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_forward(vit, image, reentrant) -> None:
    weight = vit.layers[0].mlp.fc1.weight
    cotangent = torch.randn(2, 17, 64, device=image.device)
    (want,) = torch.autograd.grad(tokens(vit, image), weight, cotangent)
    fastvit.accelerate(vit)
    vit.gradient_checkpointing_enable({"use_reentrant": reentrant})
    checkpoint, calls = vit.layers[0]._gradient_checkpointing_func, []

    def counted(function, *args):
        calls.append(args)
        return checkpoint(function, *args)

    vit.layers[0]._gradient_checkpointing_func = counted
    vit.train()
    image.requires_grad_()  # reentrant checkpoints need an input with a gradient
    tokens(vit, image).backward(cotangent)
    assert len(calls) == 1
    assert close(weight.grad, want)
    vit.eval()
    tokens(vit, image)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("model", "options", "rates"),
    [
        ("ViT", {"attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.5}, (0.1, 0.5, 0.0, 0.5, 0.0)),
        ("Dinov2", {"drop_path_rate": 0.5}, (0.0, 0.0, 0.0, 0.0, 0.5)),
        ("InternVLVision", {"projection_dropout": 0.25, "hidden_dropout_prob": 0.5}, (0.0, 0.25, 0.0, 0.5, 0.0)),
    ],
)
def test_rates_of_dropouts(transformers, model: str, options: dict[str, float], rates: tuple[float, ...]) -> None:
    """Dropout of probabilities, after the projection, the activation and fc2, and of branches: in training only."""
    config = getattr(transformers, f"{model}Config")(**SIZES, **options)
    modules = getattr(transformers, f"{model}Model")(config).modules()
    layer = [module for module in modules if type(module).__name__ == f"{model}Layer"][-1]
    for training, wanted in ((True, rates), (False, (0.0,) * 5)):
        half, mlp_half = layers.read_layer(model, layer.train(training)).block
        attention, mlp = half.branch, mlp_half.branch
        assert (attention.attn_drop, attention.proj_drop, mlp.drop1, mlp.drop2, mlp_half.drop_path) == wanted
        assert half.drop_path == mlp_half.drop_path


def test_a_custom_attention_implementation_is_not_replaced(transformers, vit, image) -> None:
    def mine(module, query, key, value, mask, **_):
        return value.transpose(1, 2), None

    transformers.AttentionInterface.register("mine", mine)
    vit.set_attn_implementation("mine")
    report = accelerate_as_it_was(vit, lambda: tokens(vit, image))
    assert {(e.kind, e.detail) for e in report.skipped} == {
        ("ViTLayer", "its attention implementation is 'mine'"),
        ("ViTAttention", "its attention implementation is 'mine'"),
    }
    assert [e.kind for e in report.accelerated].count("ViTMLP") == 2


def test_clips_text_tower_is_skipped(transformers, image) -> None:
    text = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128}
    config = transformers.CLIPConfig(text_config={**text, "vocab_size": 50, "eos_token_id": 49}, vision_config=SIZES)
    model = transformers.CLIPModel(config).to(image.device).eval()
    ids = torch.randint(0, 49, (2, 7), device=image.device)
    ids[:, -1] = 49
    report = accelerate_as_it_was(model, lambda: model(input_ids=ids, pixel_values=image).logits_per_image)
    reasons = {e.name: e.detail for e in report.skipped}
    assert reasons["text_model.encoder.layers.0"] == "the text tower's attention is causal"
    assert {e.name for e in report.accelerated} >= {"vision_model.encoder.layers.0", "text_model.encoder.layers.0.mlp"}


def test_the_text_tower_of_aimv2_keeps_its_attention(transformers) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96}
    model = transformers.Aimv2TextModel(transformers.Aimv2TextConfig(**sizes, vocab_size=9, eos_token_id=1)).eval()
    ids = torch.tensor([[3, 4, 1], [5, 1, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    report = accelerate_as_it_was(model, lambda: model(ids, mask).last_hidden_state)
    causal = "the text tower's attention is causal"
    assert outcome(report, "encoder.layers.0") == outcome(report, "encoder.layers.0.attention") == ("skipped", causal)
    assert report.fused("MLP") == (1, 1)


def test_as_an_attention_implementation(vit, image) -> None:
    register_attention()
    want, masked = tokens(vit, image), tokens(vit, image, attention_mask=padding(image))
    vit.set_attn_implementation("fastvit")
    for more, expected in (({}, want), ({"attention_mask": padding(image)}, masked)):
        with Calls() as calls:
            assert close(tokens(vit, image, **more), expected)
        assert calls.names.count("fastvit::attention_fwd") == 2


def test_attention_implementation_leaves_decoders_to_sdpa(transformers, device) -> None:
    """They pass further arguments, and keys of earlier tokens."""
    register_attention()
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64,
    )  # fmt: skip
    model = transformers.LlamaModel(config).to(device).eval()
    ids = torch.randint(0, 50, (2, 9), device=device)
    want = model(ids).last_hidden_state
    model.set_attn_implementation("fastvit")
    assert close(model(ids).last_hidden_state, want)
    attn, (q, k) = model.layers[0].self_attn, (torch.randn(2, 4, n, 16, device=device) for n in (3, 9))
    with Calls() as calls:
        layers.attention_forward(attn, q, k, k, None)
    assert "fastvit::attention_fwd" not in calls.names


def test_attention_implementation_of_a_text_tower(transformers, device) -> None:
    """It is causal; with a mask, that says so."""
    register_attention()
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    model = transformers.CLIPTextModel(transformers.CLIPTextConfig(vocab_size=50, eos_token_id=49, **sizes)).to(device)
    ids = torch.randint(0, 50, (2, 9), device=device)
    padded = torch.ones_like(ids)
    padded[0, 6:] = 0
    want = [model.eval()(ids, mask).last_hidden_state for mask in (None, padded)]
    model.set_attn_implementation("fastvit")
    with Calls() as calls:
        assert all(close(model(ids, m).last_hidden_state, w) for m, w in zip((None, padded), want, strict=True))
    assert calls.names.count("fastvit::attention_fwd") == 2


def test_attention_implementation_of_cross_attention(transformers, device) -> None:
    """BLIP-2's queries attend to the tokens of an image."""
    register_attention()
    config = transformers.Blip2QFormerConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, encoder_hidden_size=32,
        cross_attention_frequency=1,
    )  # fmt: skip
    model = transformers.Blip2QFormerModel(config).to(device).eval()
    queries, context = torch.randn(2, 5, 64, device=device), torch.randn(2, 9, 32, device=device)
    seen = torch.ones(2, 9, dtype=torch.long, device=device)
    seen[0, 4:] = 0
    arguments = {"query_embeds": queries, "encoder_hidden_states": context, "encoder_attention_mask": seen}
    want = model(**arguments).last_hidden_state
    model.set_attn_implementation("fastvit")
    with Calls() as calls:
        assert close(model(**arguments).last_hidden_state, want)
    assert calls.names.count("fastvit::attention_fwd") == 2


def test_attention_implementation_under_compile(vit, image) -> None:
    register_attention()
    want = tokens(vit, image)
    vit.set_attn_implementation("fastvit")
    torch._dynamo.reset()
    assert close(tokens(torch.compile(vit, backend="aot_eager", fullgraph=True), image), want)


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
