"""Training on some of the patches (Li et al. 2023, FLIP, arXiv:2212.00794)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastvit.modules.arguments import check_integers, check_rates


class PatchDropout(nn.Module):
    """In training, each sample keeps a random subset of its patches, in random order: (B, P + n, D) ->
    (B, P + max(1, int(n * (1 - prob))), D). In evaluation all stay. timm's arguments and draws.

    Args:
        prob: the share that is dropped, in [0, 1).
        num_prefix_tokens: P, the tokens in front of the patches, which stay.
    """

    def __init__(self, prob: float = 0.5, num_prefix_tokens: int = 1) -> None:
        super().__init__()
        check_rates(prob=prob)
        check_integers(0, num_prefix_tokens=num_prefix_tokens)
        self.prob = prob
        self.num_prefix_tokens = num_prefix_tokens

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.prob == 0.0:
            return x
        (B, N, D), P = x.shape, self.num_prefix_tokens
        count = max(1, int((N - P) * (1.0 - self.prob)))
        rows = torch.randn(B, N - P, device=x.device).argsort(dim=-1)[:, :count] + P
        if P:
            rows = torch.cat([torch.arange(P, device=x.device).expand(B, P), rows], dim=1)
        return x.gather(1, rows[:, :, None].expand(-1, -1, D))

    def extra_repr(self) -> str:
        return f"prob={self.prob:g}, num_prefix_tokens={self.num_prefix_tokens}"
