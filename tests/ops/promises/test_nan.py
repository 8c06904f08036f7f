"""A NaN reaches what is computed from it, and nothing else; what is hidden or dropped changes nothing."""

import torch
from op_cases import function, made, on_both

ROWS_OF_X = ("x", (1, 2, 3), (1, 2))
# by row: the tensor and the place of the NaN, and what becomes NaN
PLACES = {
    "layer_norm": ROWS_OF_X,
    "rms_norm": ROWS_OF_X,
    "add_layer_norm": ("branch", (1, 2, 3), (1, 2)),
    "linear gelu": ROWS_OF_X,
    "layer_norm_linear": ROWS_OF_X,
    "mlp gelu": ROWS_OF_X,
    "layer_norm_mlp gated": ROWS_OF_X,
    "dropout": ("x", (1, 2), (1, 2)),  # 0 * NaN is NaN, in eager too
    "rotary halves": ("x", (1, 7, 1), (1, 7, 1)),
    "rotary_qkvpacked interleaved": ("qkv", (1, 7, 0, 1), (1, 7, 0, 1)),
    "qk_norm": ("qkv", (1, 7, 1, 0, 5), (1, 7, 0)),
    "attention_qkvpacked": ("qkv", (0, 2, 0, 1, 3), (0, 2, 1)),  # a query
    "attention mask": ("k", (1, 7, 0, 3), (1,)),  # a key: all queries of the heads that share it
    "attention_varlen": ("k", (20, 0, 3), (slice(17, 36),)),  # all of its sequence
    "attention_windows relative": ("qkv", (1, 5, 7, 1, 0, 3), (1, slice(4, 8), slice(6, 12), 0)),
    "patch_embed": ("image", (1, 1, 0, 0), (1, 1)),
}


INTERPRETED = ["layer_norm", "linear gelu", "layer_norm_mlp gated", "rotary_qkvpacked interleaved", "qk_norm"]
INTERPRETED += ["attention_qkvpacked", "attention_varlen", "attention_windows relative", "patch_embed"]


@on_both("name", PLACES, INTERPRETED)
def test_nan_stays_in_its_place(name, backend, device):
    key, place, region = PLACES[name]
    tensors = {key: t.detach() for key, t in made(name, 2, 18, device).items()}
    runs = []
    for value in (None, torch.nan):
        given = tensors[key].clone()
        if value is not None:
            given[place] = value
        torch.manual_seed(4)
        result = function(name)(**tensors | {key: given})
        runs.append((result[-1] if isinstance(result, tuple) else result).clone())
    clean, dirty = runs
    assert dirty[region].isnan().all()
    dirty[region] = clean[region]
    assert torch.equal(dirty, clean)
