"""The model with random arguments and frozen parts; see tests/ops/promises/test_fuzz.py."""

import copy
import random
from typing import Any

import pytest
import torch
from models import randomised
from oracle import inputs
from torch import Tensor, nn

pytest.importorskip("hypothesis")  # a machine with a GPU may lack it
from fuzzing import assert_right, fuzz
from hypothesis import given
from hypothesis import strategies as st

from fastvit import VisionTransformer, reference
from fastvit.ops.runtime.activations import ACTIVATIONS


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of a small VisionTransformer."""
    flag = st.booleans()
    heads, patch = draw(st.integers(1, 3)), draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    class_token = draw(flag)
    img_size = tuple(n * draw(st.integers(1, 4)) for n in patch)
    pools = ["", "avg", "avgmax", "max"] + ["token"] * class_token
    pools += ["map"] * (img_size != patch)  # what attends to one patch alone has a gradient of zero, but for rounding
    return {
        "patch_size": patch,
        "img_size": img_size,
        "in_chans": draw(st.integers(1, 4)),
        "num_classes": draw(st.integers(0, 9)),
        "num_heads": heads,
        "embed_dim": heads * draw(st.sampled_from([16, 24, 40])),
        "depth": draw(st.integers(0, 2)),
        "mlp_ratio": draw(st.sampled_from([0.5, 1.3, 4.0])),
        "class_token": class_token,
        "reg_tokens": draw(st.integers(0, 3)),
        "global_pool": draw(st.sampled_from(pools)),
        "init_values": draw(st.sampled_from([None, 0.3])),
        "pos_embed": draw(st.sampled_from(["learn", "sincos", "sincos2d", "none"])),
        "block_fn": draw(st.sampled_from(["block", "postnorm"])),
        "act_layer": draw(st.sampled_from(ACTIVATIONS)),
        **{name: draw(flag) for name in ("qkv_bias", "proj_bias", "no_embed_class", "pre_norm", "final_norm")},
        **{name: draw(flag) for name in ("fc_norm", "dynamic_img_size")},
    }


@st.composite
def trained(draw: st.DrawFn) -> dict[str, Any]:
    """Draw what is trained: some parameters, as in fine-tuning or probing; the image."""
    return {
        "share": draw(st.sampled_from([0.0, 0.2, 0.8, 1.0])),
        "seed": draw(st.integers(0, 9)),
        "image": draw(st.booleans()),
        "checkpointing": draw(st.booleans()),
    }


def step(model: nn.Module, image: Tensor, part: dict[str, Any]) -> dict[str, Tensor]:
    """Return the logits and the gradients of the trained part, by name."""
    chosen = random.Random(part["seed"])
    wanted = {}
    for name, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad_(chosen.random() < part["share"]).requires_grad:
            wanted[name] = parameter
    image = image.detach().clone().requires_grad_(part["image"])
    logits = model(image)
    wanted |= {"image": image} if part["image"] else {}
    dlogits = inputs("normal", *logits.shape, dtype=logits.dtype, device=image.device, seed=2)
    gradients = torch.autograd.grad(logits, list(wanted.values()), dlogits, allow_unused=True) if wanted else ()
    return {"logits": logits} | dict(zip(wanted, gradients, strict=True))


# in the interpreter each op is fuzzed by itself, in tests/ops/promises/test_fuzz.py
@pytest.mark.parametrize("backend", ["aten", *["triton"] * torch.cuda.is_available()], indirect=True)
@fuzz
@given(models(), trained(), st.integers(0, 3))
def test_model(backend, device, arguments, part, batch):
    model = randomised(VisionTransformer(**arguments, device=device))
    model.set_grad_checkpointing(part["checkpointing"])
    eager = reference.VisionTransformer(**arguments, device=device)
    eager.load_state_dict(model.state_dict())
    image = inputs("normal", batch, arguments["in_chans"], *arguments["img_size"], dtype=torch.float32, device=device)
    same, exact = step(eager, image, part), step(copy.deepcopy(eager).double(), image.double(), part)
    for name, got in step(model, image, part).items():
        if exact[name] is None:  # it does not influence the logits: a norm whose output is not read
            assert got is None or not got.any(), name
        else:
            assert_right(name, got, same[name], exact[name])
