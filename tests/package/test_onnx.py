"""torch.onnx.export of models with fused ops, run by ONNX Runtime: which nodes they become, and dynamic batch sizes."""

import functools
from collections import Counter

import pytest
import torch
from library_imports import import_library, import_timm
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
        want = want if isinstance(want, torch.Tensor) else want[0]
        torch.testing.assert_close(torch.from_numpy(got), want, rtol=0, atol=1e-4)


def export(model, path, dtype=torch.float32, opset=23):
    image = torch.zeros(2, 3, 32, 32, dtype=dtype)
    torch.onnx.export(model, (image,), path, opset_version=opset, dynamo=True, dynamic_shapes=(BATCH,), verbose=False)
    return nodes(path)


@pytest.mark.parametrize("opset", [20, 23])
@torch.no_grad()
def test_our_model_has_the_nodes_of_its_opset(opset, tmp_path):
    model, path = randomised(VisionTransformer(**TINY)).eval(), tmp_path / "model.onnx"
    found = export(model, path, opset=opset)
    assert found["LayerNormalization"] == 3
    assert found["Gelu"] == 1
    assert found["Attention"] == (opset >= 23)
    assert found["Softmax"] == (opset < 23)
    assert_runs_alike(path, model)


def test_options_of_our_model(tmp_path):
    """With gradients on."""
    options = {"act_layer": "quick_gelu", "init_values": 0.5, "reg_tokens": 2, "global_pool": "avg"}
    pixels = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
    model, path = randomised(VisionTransformer(**TINY, **options, **pixels)).eval(), tmp_path / "model.onnx"
    found = export(model, path, torch.uint8)
    assert (found["LayerNormalization"], found["Sigmoid"], found["Attention"]) == (3, 1, 1)
    assert_runs_alike(path, model.requires_grad_(False), torch.uint8)


@torch.no_grad()
def test_attention_pooling(tmp_path):
    model, path = randomised(VisionTransformer(**TINY, class_token=False, global_pool="map")).eval(), tmp_path / "m"
    found = export(model, path)
    assert (found["LayerNormalization"], found["Gelu"], found["Attention"], found["Softmax"]) == (4, 2, 1, 1)
    assert_runs_alike(path, model)


@pytest.mark.parametrize("library", ["timm", "transformers"])
@torch.no_grad()
def test_accelerated(library, tmp_path):
    if library == "timm":
        model = import_timm().create_model("vit_tiny_patch16_224", **TINY)
    else:
        sizes = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}
        transformers = import_library("transformers")
        model = transformers.Dinov2Model(transformers.Dinov2Config(**sizes, mlp_ratio=2))
    model, path = randomised(model).eval(), tmp_path / "model.onnx"
    fastvit.accelerate(model)
    found = export(model, path)
    assert (found["LayerNormalization"], found["Gelu"], found["Attention"], found["Softmax"]) == (3, 1, 1, 0)
    fastvit.restore(model)
    assert_runs_alike(path, model)


@pytest.mark.parametrize("mlp", ["SwiGLU", "GluMlp"])
@torch.no_grad()
def test_accelerated_with_a_gate(mlp, tmp_path):
    timm = import_timm()
    layer = functools.partial(getattr(timm.layers, mlp), act_layer=torch.nn.GELU)
    model = timm.create_model("vit_tiny_patch16_224", **TINY, mlp_layer=layer, scale_mlp_norm=True)
    model, path = randomised(model).eval(), tmp_path / "model.onnx"
    assert fastvit.accelerate(model).fused("MLP") == (1, 1)
    found = export(model, path)
    assert (found["LayerNormalization"], found["Gelu"], found["Attention"]) == (4, 1, 1)
    fastvit.restore(model)
    assert_runs_alike(path, model)


@torch.no_grad()
def test_a_program_of_fused_ops_once_it_is_decomposed(tmp_path):
    model, path = randomised(VisionTransformer(**TINY)).eval(), tmp_path / "model.onnx"
    program = torch.export.export(model, (torch.zeros(2, 3, 32, 32),), dynamic_shapes=(BATCH,))
    program = program.run_decompositions(fastvit.export.decompositions())
    torch.onnx.export(program, f=path, opset_version=23, dynamo=True, verbose=False)
    found = nodes(path)
    assert (found["LayerNormalization"], found["Gelu"], found["Attention"]) == (3, 1, 1)
    assert_runs_alike(path, model)


@pytest.mark.parametrize("grad", [True, False])
def test_the_exporter_of_torchscript(grad, tmp_path):
    model, path = randomised(VisionTransformer(**TINY)).eval(), tmp_path / "model.onnx"
    axes = {"input_names": ["image"], "dynamic_axes": {"image": {0: "batch"}}}
    with torch.set_grad_enabled(grad):
        torch.onnx.export(model, (torch.zeros(2, 3, 32, 32),), path, opset_version=17, dynamo=False, **axes)
    assert nodes(path)["LayerNormalization"] == 3
    with torch.no_grad():
        assert_runs_alike(path, model)
