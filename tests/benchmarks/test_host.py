"""`python -m benchmarks.host` without a GPU. What it prints: tests/pretended_cuda/test_host.py."""

import pytest
import torch

pytest.importorskip("triton")


def test_without_a_device_it_says_what_it_needs(monkeypatch, capsys):
    from benchmarks.host.__main__ import main

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main() == 1
    assert "python tests/pretended_cuda/run.py -m benchmarks.host" in capsys.readouterr().err
