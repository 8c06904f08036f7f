"""The tiny ViT worked by hand that benchmarks/examples/worked_example.py computes: on both backends, and as printed."""

import pytest
import torch

from benchmarks.examples import worked_example


# the kernels have no float64
@pytest.mark.parametrize(
    ("backend", "dtype"), [("aten", torch.float64), ("triton", torch.float32)], indirect=["backend"], ids=str
)
def test_fused_ops(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    got = worked_example.compute(worked_example.tensors("inputs", dtype=dtype, device=device))
    summands = got["tokens"], got["mlp"]
    if dtype is torch.float32:
        # The first row has a spread of 0.02 around 0.27, which enlarges the rounding of its float32 values to 1.2e-6.
        # So this stage starts from the given values, less the mean of each row, which LayerNorm ignores.
        given = worked_example.tensors("expected", dtype=torch.float64, device=device)
        summands = tuple((t - t.mean(1, keepdim=True)).float() for t in (given["tokens"], given["mlp"]))
    got["normalised_residual"] = worked_example.normalised(*summands)
    assert got.keys() == worked_example.EXAMPLE["expected"].keys()
    for name, difference in worked_example.differences(got).items():
        assert difference <= 1e-6, name


def test_program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong number is named and makes the exit status 1."""
    monkeypatch.setattr("sys.argv", ["worked_example.py"])
    assert worked_example.main() == 0
    assert "\nbird   0.7773      0.7773\n" in capsys.readouterr().out
    expected = worked_example.EXAMPLE["expected"]
    monkeypatch.setitem(expected, "mlp", (torch.tensor(expected["mlp"], dtype=torch.float64) + 2e-6).tolist())
    assert worked_example.main() == 1
    assert capsys.readouterr().out.endswith("off by more than 1e-06: MLP of the attended tokens\n")
