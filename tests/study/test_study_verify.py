"""`fastvit verify`: right ops pass, and wrong ones fail."""

import json

import pytest
import torch
from library_imports import import_library

from fastvit import layers, ops
from fastvit.cli import main
from fastvit.ops.runtime import backend as backends
from fastvit.study import verify
from fastvit.study.accuracy import rule, verification

QUICK = {"dtypes": ["float32"], "head_dims": [32], "device": "cpu"}


def test_every_public_op_is_verified_and_right():
    verdicts = list(verify(**QUICK))
    assert {verdict.name.split()[0] for verdict in verdicts} == set(verification.OPS)
    assert not [verdict for verdict in verdicts if not verdict.passed]
    for verdict in verdicts:
        assert 0 < verdict.output <= 2
        assert 0 < verdict.gradient <= 3
        assert verdict.path == "ATen"


def test_kernels_of_triton_are_verified(triton_backend):
    (verdict,) = verify(names=["dropout"], **QUICK)
    assert verdict.passed
    assert verdict.path in ("Triton", "interpreter")


def test_gradients_of_everything_are_compared(monkeypatch):
    seen = []
    ratio = rule.errors
    monkeypatch.setattr(rule, "errors", lambda *triple: seen.append(triple[0].shape) or ratio(*triple))
    list(verify(names=["add_layer_norm"], **QUICK))
    tokens = (2, 197, 192)
    assert seen == [tokens, tokens, tokens, tokens, (192,), (192,), (192,)]  # two outputs, five gradients
    with pytest.raises(ValueError, match="nothing would be verified"):
        verify(names=[])


# ---- ops that are wrong ----


def wrong(monkeypatch, name, change):
    real = getattr(ops, name)
    monkeypatch.setattr(ops, name, lambda *args, **options: change(real(*args, **options)))


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * (1 + 1e-4)


def test_a_wrong_gradient_fails(monkeypatch):
    wrong(monkeypatch, "layer_norm", _WrongBackward.apply)
    (verdict,) = verify(names=["layer_norm"], **QUICK)
    assert not verdict.passed
    assert verdict.output <= 2


def test_a_wrong_op_is_named_and_the_status_is_1(monkeypatch, capsys):
    """An op that raises fails, and the others go on."""
    words = ["verify", "--ops", "layer_norm,dropout", "--dtype", "fp32", "--device", "cpu"]
    with monkeypatch.context() as patch:
        wrong(patch, "layer_norm", lambda out: out * (1 + 1e-4))
        assert main(words) == 1
    out, err = capsys.readouterr()
    assert sorted(line.split()[-1] for line in out.splitlines()[2:4]) == ["FAIL", "PASS"]
    assert "FAIL  layer_norm float32, width 192, 197 tokens, ATen: " in err
    wrong(monkeypatch, "layer_norm", lambda out: out[:, :, :0] @ out)
    assert main([*words, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    dropout, norm = report["verdicts"]
    assert (report["passed"], dropout["passed"], norm["passed"], norm["output"]) == (False, True, False, None)
    assert norm["note"].startswith("RuntimeError: ")


@pytest.mark.parametrize("factor", [1, 0])
def test_a_dropout_that_drops_none_or_all_fails(factor, monkeypatch):
    monkeypatch.setattr(ops, "dropout", lambda x, p: x * factor)
    (verdict,) = verify(names=["dropout"], **QUICK)
    assert not verdict.passed
    assert "of all elements" in verdict.note


def test_what_triton_cannot_take_is_noted_and_verified_on_aten(triton_backend, monkeypatch):
    real = ops.layer_norm

    def refused(*args, **options):
        if backends.settings()[1]:
            raise backends.KernelUnsupported("rows of more than 65536 elements")
        with ops.use_backend("aten"):
            return real(*args, **options)

    monkeypatch.setattr(ops, "layer_norm", refused)
    (verdict,) = verify(names=["layer_norm"], **QUICK)
    assert (verdict.passed, verdict.path, verdict.note) == (True, "ATen", "rows of more than 65536 elements")


# ---- whole models ----


def test_a_model_is_verified_with_the_sizes_of_its_ops(capsys):
    assert main(["verify", "vit_cifar_small", "--depth", "1", "--ops", "attention", "--dtype", "fp32", "--json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    assert {(row["head_dim"], row["width"]) for row in verdicts} == {(64, 192)}
    assert {row["name"].split()[0] for row in verdicts} == {"attention", "vit_cifar_small"}
    assert verdicts[-1]["worst"].startswith(("blocks.0.", "patch_embed.", "norm.", "head.", "pos_embed", "cls_token"))


def test_a_wrong_model_fails(monkeypatch, capsys):
    monkeypatch.setattr(layers.Block, "forward", lambda self, x, **_: x + self.mlp(self.norm2(x)))
    arguments = ["vit_cifar_small", "--depth", "1", "--ops", "linear", "--dtype", "fp32"]
    assert main(["verify", *arguments]) == 1
    assert "FAIL  vit_cifar_small float32" in capsys.readouterr().err


def test_a_model_of_transformers_whose_keys_have_a_bias(tmp_path):
    """The gradient of that bias is zero, and both sides have rounding errors only."""
    import_library("transformers")
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    path.write_text(json.dumps({"model_type": "vit", "image_size": 64, "patch_size": 16, **sizes}))
    *_, verdict = verify(str(path), dtypes=["float32"], names=["linear"], depth=1, device="cpu")
    assert verdict.passed, verdict
    assert "k_proj.bias" not in verdict.worst


def test_nothing_outside_is_changed():
    def flags() -> tuple[object, ...]:
        deterministic = torch.are_deterministic_algorithms_enabled()
        filled = torch.utils.deterministic.fill_uninitialized_memory
        return torch.backends.cudnn.allow_tf32, backends.settings(), deterministic, filled

    state, before = torch.get_rng_state(), flags()
    list(verify(names=["dropout"], **QUICK))
    assert torch.equal(torch.get_rng_state(), state)
    assert flags() == before
