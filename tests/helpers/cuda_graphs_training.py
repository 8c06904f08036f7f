"""Models for the tests of `fastvit.graphs` in training."""

import copy
from typing import Any

from library_models import output_of
from torch import Tensor, nn

import fastvit

DROPOUT: dict[str, Any] = {
    "pos_drop_rate": 0.1, "proj_drop_rate": 0.2, "attn_drop_rate": 0.2, "drop_path_rate": 0.5
}  # fmt: skip


def ours(**options: Any) -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
    return fastvit.VisionTransformer(**sizes, init_values=0.1, **options)  # type: ignore[arg-type]


class TwoHeads(nn.Module):
    """Returns a dict with a tensor twice, a number, an output without gradient, and one that no loss reads. One layer
    is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.read, self.unread = nn.Linear(3072, 8), nn.Linear(8, 5), nn.Linear(8, 5)
        self.norm, self.unused = nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        x = self.norm(self.body(x.flatten(1))) * scale
        out = self.read(x)
        unread, fixed = self.unread(x), out.detach() + 1
        return {"logits": out, "again": [out], "unread": unread, "most": out.argmax(1), "rows": len(x), "fixed": fixed}


def logits(out: Any) -> Tensor:
    return out["logits"] if isinstance(out, dict) and "logits" in out else output_of(out)


def pair(model: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """A model, and a copy of it with graphs."""
    graphed = copy.deepcopy(model.train())
    return model, graphed, fastvit.graphs(graphed, **options)
