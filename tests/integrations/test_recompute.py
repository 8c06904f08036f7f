"""Accelerated blocks of other libraries that compute again what their backward passes need."""

from functools import partial

import pytest
import torch
from library_imports import import_library
from library_models import hugging_face, step, torchvision_vit, vit

import fastvit
from fastvit.blocks.recompute import ATTRIBUTE, Recompute
from fastvit.integrations.apply import HANDLERS
from fastvit.study.memory.peak import saved_bytes


def with_adapters():
    peft = import_library("peft")
    config = peft.LoraConfig(r=4, target_modules=["qkv", "fc1"], init_lora_weights=False)
    return peft.get_peft_model(vit(), config).base_model.model


MODELS = {
    "timm": partial(vit, init_values=0.3, drop_path_rate=0.3, proj_drop_rate=0.2),
    "EVA": partial(vit, "eva02_tiny_patch14_224", img_size=56),
    "ViT": partial(hugging_face, "ViTModel", attention_probs_dropout_prob=0.2),
    "DINOv3": partial(hugging_face, "DINOv3ViTModel"),
    "torchvision": torchvision_vit,
    "LoRA": with_adapters,
}


def blocks(model):
    handlers = {id(m): m.forward.args[0] for m in model.modules() if isinstance(m.__dict__.get("forward"), partial)}
    return [module for module in model.modules() if id(module) in handlers and handlers[id(module)].takes_recompute]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_do_not_change(name):
    model = MODELS[name]().train()
    fastvit.accelerate(model)
    size = 56 if name == "EVA" else 32
    run = partial(lambda image, m: m(image), torch.randn(2, 3, size, size))
    want, keys, parameters = step(model, run), list(model.state_dict()), list(model.parameters())
    found = [saved_bytes(lambda: run(model), parameters)]
    assert len(blocks(model)) == 2
    for recompute in (Recompute("attention"), Recompute("qkv", "all"), Recompute("all", "all")):
        for block in blocks(model):
            setattr(block, ATTRIBUTE, recompute)
        got = step(model, run)
        assert torch.equal(got.output, want.output)
        assert all(torch.equal(got.gradients[key], gradient) for key, gradient in want.gradients.items())
        found.append(saved_bytes(lambda: run(model), parameters))
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == (len(found) if name != "LoRA" else 3)  # a half in steps is saved or not
    assert list(model.state_dict()) == keys


def test_which_classes_recompute():
    """Whole pre-norm blocks, and no other class."""
    names = {name if isinstance(name, str) else name.__name__ for name, of in HANDLERS.items() if of.takes_recompute}
    whole = ("Block", "Layer", "EncoderLayer")
    assert all(name.endswith(whole) for name in names)
    assert {name.split(".")[0] for name in names} == {"timm", "torchvision", "transformers", "dinov2", "dinov3"}
    assert "timm.models.vision_transformer.ParallelScalingBlock" not in names
