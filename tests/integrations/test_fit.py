"""`fastvit.fit`: gradients are those without it, bit by bit, and everything else of the model stays as it was."""

import copy
import pickle
import threading
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from library_imports import import_library
from library_models import hugging_face, torchvision_vit, vit
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

import fastvit
from fastvit.layers import PostNormBlock
from fastvit.study.fitting.choices import BLOCK, NOTHING, Choice, choices_of, put_on
from fastvit.study.fitting.costs import blocks_of
from fastvit.study.memory.peak import saved_bytes
from fastvit.study.sources.model_source import output_of

DROPOUT: dict[str, Any] = {"drop_path_rate": 0.3, "proj_drop_rate": 0.2, "attn_drop_rate": 0.2}


def accelerated(make, *args, **options):
    model = make(*args, **options)
    assert fastvit.accelerate(model).accelerated
    return model


def ours(name="vit_tiny_patch16_224", **options):
    return fastvit.create_model(name, img_size=32, depth=3, num_classes=5, **options)


MODELS = {
    "ours": partial(ours, init_values=0.3, **DROPOUT),
    "post-norm": partial(ours, block_fn=PostNormBlock),
    "EVA": partial(fastvit.create_model, "eva02_tiny_patch14_224", img_size=28, depth=3, num_classes=5),
    "DINOv3": partial(ours, "vit_small_patch16_dinov3"),
    "timm": partial(accelerated, vit, depth=3, **DROPOUT),
    "timm, plain": partial(vit, depth=3, **DROPOUT),
    "timm EVA": partial(accelerated, vit, "eva02_tiny_patch14_224", img_size=28, depth=3),
    "transformers": partial(accelerated, hugging_face, "ViTModel", attention_probs_dropout_prob=0.2),
    "torchvision": partial(accelerated, torchvision_vit),
}


def image_of(model: nn.Module) -> Tensor:
    size = 28 if type(model).__name__ == "Eva" and model.patch_embed.patch_size[0] == 14 else 32
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, image: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    out = output_of(model(image))
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(out.square().mean(), parameters, allow_unused=True)
    return [out.detach(), *(g for g in found if g is not None)]


def saved(model: nn.Module, image: Tensor) -> int:
    return saved_bytes(lambda: output_of(model(image)), [*model.parameters()])


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_without_it(name: str) -> None:
    """With every choice that the blocks have, and none is left afterwards."""
    model = MODELS[name]().train()
    image, before = image_of(model), {**vars(next(iter(blocks_of(model).values())))}
    want, most, keys = step(model, image), saved(model, image), [*model.state_dict()]
    blocks = [*blocks_of(model).values()]
    for choice in choices_of(blocks[0]):
        for block in blocks[1:]:
            put_on(block, choice)
        assert all(map(torch.equal, step(model, image), want)), str(choice)
        assert choice == NOTHING or saved(model, image) < most or choice == Choice(mlp="activation")
    assert [*model.state_dict()] == keys
    fastvit.unfit(model)
    assert vars(blocks[1]).keys() == before.keys()
    assert saved(model, image) == most


def test_fit_chooses_for_this_model() -> None:
    model = accelerated(vit, depth=4, img_size=128).train()
    image = torch.randn(8, 3, 128, 128)
    free = fastvit.fit(model, budget="1TB", batch=8, optimizer="none")
    assert free.choices == (NOTHING,) * 4
    assert (free.image_size, free.setting.dtype, free.device) == ((128, 128), "float32", "cpu")
    want, most = step(model, image), saved(model, image)
    report = fastvit.fit(model, budget=(free.peak + free.frontier[0].peak) // 2, batch=8, optimizer="none")
    assert report.fits
    assert report.peak <= report.budget
    assert saved(model, image) < most
    assert all(map(torch.equal, step(model, image), want))
    again = fastvit.fit(model, budget="1TB", batch=8, optimizer="none")
    assert again == free
    half = fastvit.fit(model.bfloat16(), budget="1TB", batch=8, optimizer="none")
    assert half.setting.dtype == "bfloat16"
    assert half.peak < 0.6 * free.peak


def test_a_model_of_one_block() -> None:
    """Lists of one module are also those of a head and of a model in a Sequential."""
    for make in (fastvit.create_model, partial(accelerated, vit)):
        model = make("vit_tiny_patch16_224", img_size=32, depth=1)
        model.head = nn.Sequential(model.head)
        model = nn.Sequential(model)
        free = fastvit.fit(model, budget="1TB", batch=128, optimizer="none", image_size=32)
        assert free.blocks == ("0.blocks.0",)
        report = fastvit.fit(model, budget=free.peak - 1, batch=128, optimizer="none", image_size=32)
        assert report.fits
        assert report.peak < free.peak


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
        step(model, image_of(model))
        assert len(log.values) == 4
        assert everywhere.values
    finally:
        handle.remove()


def test_copies_keep_it_and_files_know_nothing_of_it() -> None:
    model = ours().train()
    for block, choice in zip(model.blocks, (BLOCK, Choice("qkv", "all"), NOTHING), strict=True):
        put_on(block, choice)
    image = image_of(model)
    want, kept = step(model, image), saved(model, image)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.blocks[0].forward.args[0] is other.blocks[0]
        assert saved(other, image) == kept
        assert all(map(torch.equal, step(other, image), want))
    plain = ours()
    plain.load_state_dict(model.state_dict())
    assert saved(plain.train(), image) > kept


def test_adapters() -> None:
    """Halves with adapters run in steps, which are recomputed as a whole."""
    peft = import_library("peft")
    model = peft.get_peft_model(vit(depth=3), peft.LoraConfig(target_modules=["qkv", "fc1"], lora_dropout=0.2)).train()
    fastvit.accelerate(model)
    image = torch.randn(2, 3, 32, 32)
    want, most = step(model, image), saved(model, image)
    for block in blocks_of(model).values():
        put_on(block, Choice("all", "all"))
    assert saved(model, image) < 0.7 * most
    assert all(map(torch.equal, step(model, image), want))


@pytest.mark.parametrize("choices", [(Choice("qkv", "all"), Choice("all", "all")), (BLOCK, NOTHING)], ids=str)
def test_under_torch_compile(choices: tuple[Choice, ...]) -> None:
    model = ours()
    image = image_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        want = step(model, image)
        for block, choice in zip(model.blocks, choices, strict=False):
            put_on(block, choice)
        torch._dynamo.reset()
        got = step(torch.compile(model, backend="aot_eager", fullgraph=True), image)
    torch.testing.assert_close(got, want)


def test_what_it_refuses() -> None:
    model = ours()
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got str"):
        fastvit.fit("vit", budget="1GiB", batch=1)
    with pytest.raises(ValueError, match=r"budget is 1\.0 MiB, but a step of one image takes"):
        fastvit.fit(model, budget="1MiB", batch=1)
    with pytest.raises(ValueError, match="batch must be a positive integer"):
        fastvit.fit(model, budget="1GiB", batch=0)
    with pytest.raises(ValueError, match="has no list of blocks"):
        fastvit.fit(nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.ReLU()), budget="1GiB", batch=1)
    assert [*vars(model.blocks[0])] == [*vars(ours().blocks[0])]
    model.set_grad_checkpointing()
    with pytest.raises(ValueError, match="recomputes whole blocks already"):
        fastvit.fit(model, budget="1GiB", batch=1)
    with pytest.raises(ValueError, match="DistributedDataParallel already"):
        fastvit.fit(type("DistributedDataParallel", (nn.Sequential,), {})(ours()), budget="1GiB", batch=1)
    sharded = ours()
    sharded.norm.weight = type("DTensor", (nn.Parameter,), {})(torch.ones(192))
    with pytest.raises(ValueError, match="sharded already"):
        fastvit.fit(sharded, budget="1GiB", batch=1)
    with pytest.raises(ValueError, match=r"parameters of .*float32.*, got torch\.float64"):
        fastvit.fit(ours().double(), budget="1GiB", batch=1)
    compiled = ours()
    compiled.compile()
    with pytest.raises(ValueError, match="compiled already"):
        fastvit.fit(compiled, budget="1GiB", batch=1)
    fitted = accelerated(vit)
    for choice in (BLOCK, Choice("qkv")):
        put_on(fitted.blocks[0], choice)
        for function in (fastvit.accelerate, fastvit.restore):
            with pytest.raises(ValueError, match=r"blocks\.0.*unfit"):
                function(fitted)
    fastvit.unfit(fitted)
    assert fastvit.accelerate(fitted).accelerated


def test_a_batch_too_large_warns() -> None:
    model = ours()
    options = {"batch": 512, "image_size": 32, "optimizer": "none"}
    budget = fastvit.fit(model, budget="1TB", **options).frontier[0].peak * 4 // 5
    with pytest.warns(UserWarning, match="a batch of 512 does not fit"):
        report = fastvit.fit(model, budget=budget, **options)
    assert report.micro_batch * report.accumulation >= 512 > report.micro_batch
