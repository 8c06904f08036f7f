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
BATCH = {0: torch.export.Dim("batch", max=64)}


def nodes(path):
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def assert_runs_alike(path, model, dtype=torch.float32):
    """Check that results are within 1e-4 of PyTorch's, at batch sizes other than the traced one."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (1, 3):
        image = torch.randn(batch, 3, 32, 32)
        image = image if dtype is torch.float32 else (image * 40 + 120).clamp(0, 255).to(dtype)
        (got, *_), want = session.run(None, {session.get_inputs()[0].name: image.numpy()}), model(image)
        torch.testing.assert_close(torch.from_numpy(got), want, rtol=0, atol=1e-4)


def export(model, path, dtype=torch.float32, opset=23):
    image = torch.zeros(2, 3, 32, 32, dtype=dtype)
    torch.onnx.export(model, (image,), path, opset_version=opset, dynamo=True, dynamic_shapes=(BATCH,), verbose=False)
    return nodes(path)


def timm_vit(mlp: str = "Mlp", **options):
    timm = import_timm()
    layer = functools.partial(getattr(timm.layers, mlp), act_layer=torch.nn.GELU)
    return timm.create_model("vit_tiny_patch16_224", **TINY, mlp_layer=layer, **options)


NODES = ("LayerNormalization", "Gelu", "Attention", "Softmax")


@pytest.mark.parametrize(
    ("make", "opset", "wanted"),  # wanted: how many of NODES it becomes
    [
        (functools.partial(VisionTransformer, **TINY), 20, (3, 1, 0, 1)),  # without a node for attention
        (functools.partial(timm_vit, "SwiGLU", scale_mlp_norm=True), 23, (4, 1, 1, 0)),
    ],
    ids=["ours", "SwiGLU of timm"],
)
@torch.no_grad()
def test_nodes_and_results(make, opset, wanted, tmp_path):
    model, path = randomised(make()).eval(), tmp_path / "model.onnx"
    fastvit.accelerate(model, strict=True)
    exported = export(model, path, opset=opset)
    assert tuple(exported[node] for node in NODES) == wanted
    fastvit.restore(model)
    assert_runs_alike(path, model)


def test_options_of_our_model(tmp_path):
    """With gradients on."""
    options = {"act_layer": "quick_gelu", "init_values": 0.5, "reg_tokens": 2, "global_pool": "avg"}
    pixels = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
    model, path = randomised(VisionTransformer(**TINY, **options, **pixels)).eval(), tmp_path / "model.onnx"
    exported = export(model, path, torch.uint8)
    assert (exported["LayerNormalization"], exported["Sigmoid"], exported["Attention"]) == (3, 1, 1)
    assert_runs_alike(path, model.requires_grad_(False), torch.uint8)


@torch.no_grad()
def test_the_exporter_of_torchscript(tmp_path):
    model, path = randomised(VisionTransformer(**TINY)).eval(), tmp_path / "model.onnx"
    axes = {"input_names": ["image"], "dynamic_axes": {"image": {0: "batch"}}}
    torch.onnx.export(model, (torch.zeros(2, 3, 32, 32),), path, opset_version=17, dynamo=False, **axes)
    assert nodes(path)["LayerNormalization"] == 3
    assert_runs_alike(path, model)
