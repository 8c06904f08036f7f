"""The tiny ViT worked by hand that benchmarks/examples/worked_example.py computes."""

import pytest
import torch

from benchmarks.examples import worked_example


# the kernels have no float64
def test_program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong number is named and makes the exit status 1."""
    monkeypatch.setattr("sys.argv", ["worked_example.py"])
    assert worked_example.main() == 0
    assert "\nbird   0.7773      0.7773\n" in capsys.readouterr().out
    expected = worked_example.EXAMPLE["expected"]
    monkeypatch.setitem(expected, "mlp", (torch.tensor(expected["mlp"], dtype=torch.float64) + 2e-6).tolist())
    assert worked_example.main() == 1
    assert capsys.readouterr().out.endswith("off by more than 1e-06: MLP of the attended tokens\n")
