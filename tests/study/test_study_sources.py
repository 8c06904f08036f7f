"""The models that a study finds by name, file or function, and their sizes."""

import json

import pytest
import torch
from library_imports import import_library, import_timm
from study_models import SMALL, timm_vit
from torch import nn

import fastvit
from fastvit import study, zoo
from fastvit.study.sources.find import find
from fastvit.study.sources.model_source import channels
from fastvit.study.sources.normalization import HALF, statistics


@pytest.mark.parametrize(
    ("name", "built", "message"),
    [
        ("vit_base_patch16_244", None, "vit_base_patch16_244.*nearest: vit_base_patch16_224"),
        ("no/such/config.json", None, "no/such/config.json"),
        ("no_such_module:vit", None, "no_such_module"),
        ("study_models:missing", None, "study_models has no function 'missing'"),
        ("study_models:nothing", None, "must return an nn.Module, got NoneType"),
        ("study_models:mistakes", None, "mistakes: RuntimeError: what went wrong$"),
        ("resnet50", None, "no plain ViT"),
        (SMALL, {"image_size": 33}, "image size 33 is not a multiple of the patch size 4.*nearest: 32"),
        ("study_models:reference_vit", {"provider": "fastvit"}, "the reference has no fused form"),
        ("study_models:no_library", {"provider": "fastvit"}, "accelerate knows no block of Sequential"),
        ("study_models:no_library", {"provider": "eager"}, "Sequential has no switch for eager attention"),
    ],
)
def test_models_that_are_not_there_or_cannot_be_built(name, built, message):
    import_timm()
    with pytest.raises((ValueError, FileNotFoundError, ImportError), match=message):
        find(name).on_meta(**built or {})


def test_a_function_says_its_size_by_its_default_or_by_its_model():
    assert find("study_models:with_dropout").image_size == (64, 64)
    assert find("study_models:one_size").image_size == (32, 32)
    grey = find("study_models:timm_vit").on_meta("sdpa", in_chans=1)
    assert channels(grey) == 1


def test_a_configuration_of_transformers(tmp_path):
    import_library("transformers")
    config = tmp_path / "config.json"
    values = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 28, "patch_size": 14}
    config.write_text(json.dumps({"model_type": "dinov2", **values}))
    for name in (config, tmp_path):
        source = find(str(name))
        assert (source.image_size, source.patch_size) == ((28, 28), (14, 14))
        for provider, attention in (("eager", "eager"), ("sdpa", "sdpa")):
            built = source.on_meta(provider, 56)
            assert (built.config.image_size, built.config._attn_implementation) == (56, attention)
        assert source.prefix_tokens(source.on_meta("fastvit"), (28, 28), (14, 14)) == 1
    for text, message in (("{", "is not a configuration in JSON"), ("{}", "no model_type")):
        config.write_text(text)
        with pytest.raises(ValueError, match=message):
            find(str(config))


def test_models_of_videos(tmp_path):
    import_library("transformers")
    layers = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 192}
    predictor = {"pred_hidden_size": 96, "pred_num_hidden_layers": 2, "pred_num_attention_heads": 3}
    video = {"model_type": "vjepa2", "patch_size": 8, "tubelet_size": 2, "crop_size": 32, "frames_per_clip": 4}
    values = video | layers | predictor
    (tmp_path / "config.json").write_text(json.dumps(values))
    name = str(tmp_path)
    points = study.memory(name, image_sizes=[32, 48], batches=[1], providers=["fastvit"], device="cpu").points
    assert [p.tokens for p in points] == [2 * 16, 2 * 36], "tubelets times patches"
    (cost,) = study.models([name])
    assert (cost.prefix_tokens, cost.fused) == (None, True)
    assert find(name).on_meta("fastvit", 48).config.crop_size == 48
    model = find(name).make("fastvit")
    report = fastvit.fit(model, budget="1GiB", batch=1)
    assert len(report.choices) == 2, "not those of the predictor, which does not run without data"


NEEDS_DATA = "its forward reads values of tensors, and a study runs it without data$"


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda self, images: self.vit(images)[0] if images.sum() > 0 else None, f"DataDependent.*: {NEEDS_DATA}"),
        (lambda self, images: {}, "TypeError: the model returns no tensor, but dict$"),
        (lambda self, input_ids, images: images, "TypeError: Raises takes input_ids first, and a study gives a model"),
    ],
)
def test_a_model_that_raises_says_so_in_one_line_and_pytorch_logs_nothing(forward, message, caplog):
    model = type("Raises", (nn.Module,), {"forward": forward})()
    model.vit = timm_vit()
    with pytest.raises(ValueError, match=rf"^Raises: {message}"):
        fastvit.fit(model, budget="1GiB", batch=1, image_size=32)
    assert not caplog.records


def test_names_are_normalised_as_timm_does_it():
    timm = import_timm()
    names = [name for name in zoo.list_models() if timm.is_model(name)]
    assert len(names) > 150
    for name in names:
        config = timm.get_pretrained_cfg(name)
        assert statistics(name) == (tuple(config.mean), tuple(config.std)), name
    assert find("vit_base_patch16_224.augreg_in21k").normalization == HALF


def test_weights_are_for_names_of_the_zoo():
    with pytest.raises(ValueError, match="weights are for names of `fastvit models`, and study_models:timm_vit is of"):
        find("study_models:timm_vit").with_weights("x.safetensors")
    with torch.device("meta"):
        assert isinstance(find(SMALL).with_weights(None), type(zoo.create_model(SMALL)))
