"""The whole model against the reference, and under what PyTorch does with models. Against timm: test_vit_timm.py."""

import copy
import pickle
from typing import Any

import pytest
import torch
from models import assert_same_step, assert_steps_as_accurate, randomised, step, twins
from oracle import inputs
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import fastvit
from fastvit import VisionTransformer, layers, reference

TINY: dict[str, Any] = {
    "img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 96, "mlp_ratio": 2.0,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "cls": {},
    "registers": {"reg_tokens": 4, "no_embed_class": True, "init_values": 0.1},
    "registers_embedded": {"reg_tokens": 2, "qkv_bias": False},
    "qk_norm": {"qk_norm": True},
    "avg": {"global_pool": "avg", "class_token": False},
    "avg_with_cls_norm_first": {"global_pool": "avg", "fc_norm": False},
    "max": {"global_pool": "max"},
    "avgmax": {"global_pool": "avgmax", "reg_tokens": 1},
    "all_tokens_no_norm": {"global_pool": "", "final_norm": False, "num_classes": 0},
    "clip": {"pre_norm": True, "act_layer": "quick_gelu"},
    "map": {"global_pool": "map", "class_token": False, "act_layer": "gelu_tanh"},
    "map_of_its_own_size": {
        "global_pool": "map", "reg_tokens": 2, "attn_pool_num_heads": 4, "attn_pool_mlp_ratio": 1.0,
    },
    "no_position": {"pos_embed": "none"},
    "sincos": {"pos_embed": "sincos", "reg_tokens": 1},
    "sincos2d_dynamic": {"pos_embed": "sincos2d", "dynamic_img_size": True, "img_size": 12},
    "postnorm": {"block_fn": "postnorm", "final_norm": False, "init_values": 0.5},
    "rms_norm": {"norm_layer": "rmsnorm", "embed_norm_layer": "rmsnorm"},
    "non_square": {"img_size": (8, 20), "patch_size": (4, 2), "in_chans": 1},
    "dynamic": {"dynamic_img_size": True, "img_size": 12},
}  # fmt: skip


def image(model: VisionTransformer, batch: int = 2, **arguments: Any) -> Tensor:
    size = (16, 16) if model.dynamic_img_size else model.patch_embed.img_size
    shape = (batch, model.patch_embed.proj.in_channels, *size)
    return inputs("normal", *shape, **{"dtype": torch.float64, "device": "cpu", **arguments})


def models(**arguments: Any) -> tuple[VisionTransformer, reference.VisionTransformer]:
    """Ours and the reference with the same random parameters."""
    arguments = {**TINY, **arguments}
    return twins(VisionTransformer(**arguments), reference.VisionTransformer(**arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_model_is_as_accurate_as_the_reference(variant: str, dtype: torch.dtype, device: torch.device) -> None:
    assert_accurate(VARIANTS[variant], dtype, device)


@pytest.mark.parametrize("variant", ["registers", "map_of_its_own_size"])
def test_model_of_kernels(variant: str, triton_backend: None, device: torch.device) -> None:
    assert_accurate({**VARIANTS[variant], "depth": 1}, torch.bfloat16, device)


def assert_accurate(arguments: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
    """Compare a training step of ours and the reference with the reference in float64."""
    ours, eager = models(**arguments, device=device, dtype=dtype)
    x = image(ours, device=device).to(dtype)
    exact = step(copy.deepcopy(eager).double(), x.double())
    low, got = step(eager, x), step(ours, x)
    assert {n: t.dtype for n, t in got.items()} == {n: t.dtype for n, t in low.items()}
    got, low, exact = ({"output": r["output"], "gradients": together(r, exact)} for r in (got, low, exact))
    assert_steps_as_accurate(got, low, exact)


def together(results: dict[str, Tensor], exact: dict[str, Tensor]) -> Tensor:
    """All gradients as one vector, each in units of its own size. Alone, a gradient of 32 numbers in bfloat16 is now
    and then exact in eager by luck: 2 of 520 were outside of the oracle's rule on one version of PyTorch and none on
    another, while the errors of fused were the smaller ones in the median of both."""
    gradients = {name: g.double() for name, g in results.items() if name != "output"}
    return torch.cat([(g / exact[name].square().mean().sqrt()).flatten() for name, g in gradients.items()])


# ---- a citizen of PyTorch ----


@pytest.mark.parametrize("global_pool", ["token", "map"])
def test_compile_fullgraph(global_pool: str) -> None:
    options = {"init_values": 0.1, "drop_path_rate": 0.1, "global_pool": global_pool}
    model = randomised(VisionTransformer(**TINY, **options))
    x = image(model, dtype=torch.float32)
    torch._dynamo.reset()
    for mode in (model.train, model.eval):
        mode()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert_same_step(compiled, model, x)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_flops_are_counted_without_gradients_too(without: Any) -> None:
    model = randomised(VisionTransformer(**TINY, reg_tokens=2)).eval()
    x = image(model, dtype=torch.float32)
    counted = []
    for mode in (torch.enable_grad, without):
        with mode(), FlopCounterMode(display=False) as counter:
            model(x)
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0


def test_compile_takes_another_batch_size_without_another_graph() -> None:
    """Nothing in forward or backward chooses by how many images there are."""
    model = randomised(VisionTransformer(**TINY, init_values=0.1)).train()
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=graphs)
    compiled_at = set()
    for batch in (9, 2, 3, 64):
        assert_same_step(compiled, model, image(model, batch, dtype=torch.float32))
        compiled_at.add(graphs.frame_count)
    assert len(compiled_at) == 1


@pytest.mark.parametrize("global_pool", ["token", "map"])
def test_export(global_pool: str) -> None:
    model = randomised(VisionTransformer(**TINY, global_pool=global_pool)).eval()
    x = image(model, dtype=torch.float32)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
    plain = program.run_decompositions(fastvit.export.decompositions())
    assert not [n for n in plain.graph.nodes if str(n.target).startswith("fastvit")]
    for batch in (2, 5):
        x = image(model, batch, dtype=torch.float32)
        for exported in (program, plain):
            torch.testing.assert_close(exported.module()(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast(dtype: torch.dtype, device: torch.device) -> None:
    ours, eager = models(init_values=0.1, device=device)
    x = image(ours, dtype=torch.float32, device=device)
    exact = step(copy.deepcopy(eager).double(), x.double())
    results = []
    for model in (eager, ours):
        model.forward = torch.autocast(device.type, dtype)(model.forward)
        results.append(step(model, x))
    assert_steps_as_accurate(results[1], results[0], exact)


def test_activation_checkpointing_changes_nothing() -> None:
    rates = {"drop_path_rate": 0.3, "attn_drop_rate": 0.2, "proj_drop_rate": 0.2}
    model = randomised(VisionTransformer(**TINY, **rates))
    x = image(model, dtype=torch.float32)
    results = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        results.append(step(model, x))
    for name, got in results[1].items():
        assert torch.equal(got, results[0][name]), name


def test_deepcopy_pickle_state_dict_and_dtype() -> None:
    options = {"act_layer": "gelu_tanh", "reg_tokens": 1, "init_values": 0.1, "global_pool": "map"}
    model = randomised(VisionTransformer(**TINY, **options)).eval()
    x = image(model, dtype=torch.float32)
    fresh = VisionTransformer(**TINY, **options).eval()
    fresh.load_state_dict(model.state_dict())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), fresh):
        assert torch.equal(twin(x), model(x))
    assert model.to(torch.bfloat16)(x.bfloat16()).dtype is torch.bfloat16


def test_train_and_eval() -> None:
    """Each rate takes effect in training, is off in evaluation, and is reproducible under a seed."""
    for rate in ("drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"):
        model = randomised(VisionTransformer(**TINY, **{rate: 0.5}))
        x = image(model, dtype=torch.float32)

        def run(seed: int, model: nn.Module = model, x: Tensor = x) -> Tensor:
            torch.manual_seed(seed)
            return model(x)

        assert torch.equal(run(0), run(0)), rate
        assert not torch.equal(run(0), run(1)), rate
        model.eval()
        assert torch.equal(run(0), run(1)), rate
        assert model.train().training


def test_uint8_images() -> None:
    normalised = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
    model, eager = models(**normalised)
    x = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    mean, std = (torch.tensor(t).view(1, 3, 1, 1) for t in normalised.values())
    expected = model((x / 255 - mean) / std)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(eager(x), expected, rtol=1e-4, atol=1e-5)


def test_a_replaced_patch_embedding_is_honoured() -> None:
    class Stem(nn.Module):
        def __init__(self, of: layers.PatchEmbed) -> None:
            super().__init__()
            self.proj, self.grid_size = of.proj, of.grid_size

        def forward(self, x: Tensor) -> Tensor:
            return self.proj(x).flatten(2).transpose(1, 2).relu()

    model = randomised(VisionTransformer(**TINY))
    x = image(model, dtype=torch.float32)
    before = model(x)
    model.patch_embed = Stem(model.patch_embed)
    tokens = model._tokens(x)
    patches = model.patch_embed(x) + model.pos_embed[:, 1:]
    torch.testing.assert_close(
        tokens, torch.cat([(model.cls_token + model.pos_embed[:, :1]).expand(2, -1, -1), patches], 1)
    )
    assert not torch.allclose(model(x), before)
