"""torch.onnx.export of models with fused ops, run by ONNX Runtime: which nodes they become, and dynamic batch sizes."""

import functools
from collections import Counter

import pytest
import torch
from library_imports import import_timm
from models import randomised

import fastvit
from fastvit import VisionTransformer

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 1, "num_heads": 3, "num_classes": 5}


def assert_runs_alike(path, model, dtype):
    """Check that results are within 1e-4 of PyTorch's, at batch sizes other than the traced one."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (1, 3):
        image = torch.randn(batch, 3, 32, 32)
        image = image if dtype is torch.float32 else (image * 40 + 120).clamp(0, 255).to(dtype)
        (got, *_), want = session.run(None, {session.get_inputs()[0].name: image.numpy()}), model(image).detach()
        torch.testing.assert_close(torch.from_numpy(got), want, rtol=0, atol=1e-4)


def gated_vit_of_timm():
    timm = import_timm()
    layer = functools.partial(timm.layers.SwiGLU, act_layer=torch.nn.GELU)
    return timm.create_model("vit_tiny_patch16_224", **TINY, mlp_layer=layer, scale_mlp_norm=True)


OPTIONS = {"act_layer": "quick_gelu", "init_values": 0.5, "reg_tokens": 2, "global_pool": "avg"}
PIXELS = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
NODES = ("LayerNormalization", "Gelu", "Sigmoid", "Attention", "Softmax")


@pytest.mark.parametrize(
    ("make", "opset", "dtype", "wanted"),  # wanted: how many of NODES it becomes
    [
        (functools.partial(VisionTransformer, **TINY), 20, torch.float32, (3, 1, 0, 0, 1)),  # no node for attention
        (functools.partial(VisionTransformer, **TINY, **OPTIONS, **PIXELS), 23, torch.uint8, (3, 0, 1, 1, 0)),
        (gated_vit_of_timm, 23, torch.float32, (4, 1, 0, 1, 0)),
    ],
    ids=["ours", "ours with options, from bytes", "SwiGLU of timm"],
)
def test_nodes_and_results(make, opset, dtype, wanted, tmp_path):
    model, path = randomised(make()).eval(), tmp_path / "model.onnx"
    fastvit.accelerate(model, strict=True)
    image, shapes = torch.zeros(2, 3, 32, 32, dtype=dtype), ({0: torch.export.Dim("batch", max=64)},)
    with torch.set_grad_enabled(dtype is torch.uint8):
        torch.onnx.export(model, (image,), path, opset_version=opset, dynamo=True, dynamic_shapes=shapes, verbose=False)
    exported = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert tuple(exported[node] for node in NODES) == wanted
    fastvit.restore(model)
    assert_runs_alike(path, model, dtype)
