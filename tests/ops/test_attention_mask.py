"""The gradient of an additive mask: how many programs compute it, and which share a tile. Needs triton."""

import pytest
import torch

pytest.importorskip("triton")

from fastvit.ops.attention import launch as attention_launch
from fastvit.ops.runtime import device as devices
from fastvit.ops.runtime import launch


@pytest.mark.parametrize(
    ("images", "mask", "parts", "programs"),
    [
        ((128 * 64, 49, 3, 32), (1, 3), 88, 264),  # Swin-T, stage 1: windows of 128 images
        ((256, 197, 12, 64), (1, 1), 33, 528),  # 17 parts would make 272 programs, of which 8 wait for the others
        ((256, 197, 12, 64), (1, 12), 4, 768),  # three rounds of 64 samples; one part would take a round of 256
        ((2, 197, 12, 64), (2, 1), 6, 192),  # two heads each; one each would make two rounds
        ((8, 197, 12, 64), (8, 12), 1, 1536),  # nothing to add up
        ((256, 1025, 16, 64), (1, 16), 1, 4624),
    ],
)
def test_gradients_of_masks_fill_a_gpu(images, mask, parts, programs, monkeypatch):
    """The grid on a GPU of 132 multiprocessors, each with room for two programs."""
    monkeypatch.setattr(devices, "without_gpu", 132)
    launched = []
    q = torch.empty(images, dtype=torch.bfloat16, device="meta")
    B, N, H, _ = images
    lse = torch.empty(B, H, 2, N, device="meta")
    with launch.launching(lambda kernel, programs, tensors, *_: launched.append((kernel.__name__, programs, tensors))):
        bias = torch.empty(*mask, N, N, dtype=torch.bfloat16, device="meta")
        *_, dmask = attention_launch.attention_bwd(q, q, q, q, bias, q, lse, None, 0.125, 0.0, False, True)
    assert (dmask.shape, dmask.dtype) == (bias.shape, bias.dtype)
    (_, grid, tensors), *sums = launched[2:]
    assert grid == programs
    assert tensors[-1].shape == (parts, mask[0] * mask[1], N, -(-N // 16) * 16)
    assert tensors[-1].dtype is (torch.bfloat16 if parts == 1 else torch.float32)
    assert [name for name, *_ in sums] == ["column_sum_kernel"] * (parts > 1)
