"""`fastvit.fit`: gradients are those without it, bit by bit, and everything else of the model stays as it was."""

import copy
import pickle
import threading
import warnings
from functools import partial
from typing import Any

import library_models
import pytest
import torch
from library_models import Step, assert_steps_equal, hugging_face, output_of, vit
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

import fastvit
from fastvit.layers import PostNormBlock
from fastvit.study.fitting.choices import BLOCK, NOTHING, Choice, choices_of, put_on
from fastvit.study.fitting.costs import blocks_of
from fastvit.study.memory.peak import saved_bytes

DROPOUT: dict[str, Any] = {"drop_path_rate": 0.3, "proj_drop_rate": 0.2, "attn_drop_rate": 0.2}


def accelerated(make, *args, **options):
    model = make(*args, **options)
    assert fastvit.accelerate(model).accelerated
    return model


def ours(name="vit_tiny_patch16_224", **options):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_heads": 2, "depth": 3, "num_classes": 5}
    return fastvit.create_model(name, **{**sizes, **options})


MODELS = {
    "ours": partial(ours, init_values=0.3, **DROPOUT),
    "norms of q and k, SwiGLU": partial(ours, qk_norm=True, mlp_layer="swiglu"),
    "EVA": partial(ours, "eva02_tiny_patch14_224", init_values=0.3, drop_path_rate=0.4),
    "post-norm": partial(ours, block_fn=PostNormBlock),
    "timm": partial(accelerated, vit, depth=3, **DROPOUT),
    "timm, plain": partial(vit, depth=3, **DROPOUT),
    "transformers": partial(accelerated, hugging_face, "ViTModel", attention_probs_dropout_prob=0.2),
}
IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, image: Tensor = IMAGE) -> Step:
    return library_models.step(model, lambda m: m(image))


def saved(model: nn.Module, image: Tensor = IMAGE) -> int:
    return saved_bytes(lambda: output_of(model(image)), [*model.parameters()])


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_without_it(name: str) -> None:
    """With every choice that the blocks have, and none is left afterwards."""
    model = MODELS[name]().train()
    before = {**vars(next(iter(blocks_of(model).values())))}
    want, most, keys = step(model), saved(model), [*model.state_dict()]
    blocks = [*blocks_of(model).values()]
    for choice in choices_of(blocks[0]):
        for block in blocks[1:]:
            put_on(block, choice)
        assert_steps_equal(step(model), want)
        assert choice == NOTHING or saved(model) < most or choice == Choice(mlp="activation")
    assert [*model.state_dict()] == keys
    fastvit.unfit(model)
    assert vars(blocks[1]).keys() == before.keys()
    assert saved(model) == most


def test_fit_chooses_for_this_model() -> None:
    model = accelerated(vit, depth=3, img_size=64).train()
    image = torch.randn(8, 3, 64, 64)
    free = fastvit.fit(model, budget="1TB", batch=8, optimizer="none")
    assert free.choices == (NOTHING,) * 3
    assert (free.image_size, free.setting.dtype, free.device) == ((64, 64), "float32", "cpu")
    want, most = step(model, image), saved(model, image)
    report = fastvit.fit(model, budget=(free.peak + free.frontier[0].peak) // 2, batch=8, optimizer="none")
    assert report.fits
    assert report.peak <= report.budget
    assert saved(model, image) < most
    assert_steps_equal(step(model, image), want)
    assert fastvit.fit(model, budget="1TB", batch=8, optimizer="none") == free
    half = fastvit.fit(model.bfloat16(), budget="1TB", batch=8, optimizer="none")
    assert half.setting.dtype == "bfloat16"
    assert half.peak < 0.6 * free.peak


def test_hooks_do_not_run_on_tensors_without_values() -> None:
    """Neither do they count, and all are there again afterwards, also after an error. weight_norm needs its own."""

    class Log:
        def __init__(self) -> None:
            self.values: list[float] = []
            self.lock = threading.Lock()  # cannot be copied

        def add(self, *tensors: Any) -> None:
            self.values.append(sum(t.sum().item() for t in tree_leaves(tensors) if isinstance(t, Tensor)))

    model, log, everywhere = ours().train(), Log(), Log()
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        nn.utils.weight_norm(model.head)
    block = model.blocks[1]
    block.register_forward_pre_hook(log.add)
    block.register_forward_hook(log.add)
    block.mlp.register_full_backward_pre_hook(log.add)
    block.attn.register_full_backward_hook(log.add)
    handle = register_module_forward_hook(everywhere.add)
    try:
        assert fastvit.fit(model, budget="1TB", batch=2, optimizer="none").choices == (NOTHING,) * 3
        with pytest.raises(ValueError, match="image"):
            fastvit.fit(model, budget="1TB", batch=2, image_size=48)
        assert not log.values
        assert not everywhere.values
        step(model)
        assert len(log.values) == 4
        assert everywhere.values
    finally:
        handle.remove()


def test_copies_keep_it_and_files_know_nothing_of_it() -> None:
    model = ours().train()
    for block, choice in zip(model.blocks, (BLOCK, Choice("qkv", "all"), NOTHING), strict=True):
        put_on(block, choice)
    want, kept = step(model), saved(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.blocks[0].forward.args[0] is other.blocks[0]
        assert saved(other) == kept
        assert_steps_equal(step(other), want)
    plain = ours()
    plain.load_state_dict(model.state_dict())
    assert saved(plain.train()) > kept


def sharded() -> nn.Module:
    model = ours()
    model.norm.weight = type("DTensor", (nn.Parameter,), {})(torch.ones(64))
    return model


def repeated() -> nn.Module:
    model = ours()
    model.blocks.append(model.blocks[0])
    return model


def changed(change: str) -> nn.Module:
    """Return a model after one of its methods."""
    model = ours()
    getattr(model, change)()
    return model


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: "vit", {}, r"model must be an nn\.Module, got str"),
    (ours, {"budget": "64KiB"}, r"budget is .*, but a step of one image takes"),
    (ours, {"batch": 0}, "batch must be a positive integer"),
    (partial(changed, "set_grad_checkpointing"), {}, "recomputes whole blocks already"),
    (lambda: type("DistributedDataParallel", (nn.Sequential,), {})(ours()), {}, "DistributedDataParallel already"),
    (sharded, {}, "sharded already"),
    (partial(changed, "double"), {}, r"parameters of .*float32.*, got torch\.float64"),
    (partial(changed, "compile"), {}, "compiled already"),
    (repeated, {}, r"does not run blocks\.0 to blocks\.2 once each, in order"),
]


@pytest.mark.parametrize(("make", "options", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_it_refuses(make, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        fastvit.fit(make(), **{"budget": "1GiB", "batch": 1, **options})


def test_a_fitted_model_is_not_accelerated_or_restored() -> None:
    model = accelerated(vit)
    for choice in (BLOCK, Choice("qkv")):
        put_on(model.blocks[0], choice)
        for function in (fastvit.accelerate, fastvit.restore):
            with pytest.raises(ValueError, match=r"blocks\.0.*unfit"):
                function(model)
    fastvit.unfit(model)
    assert fastvit.accelerate(model).accelerated
