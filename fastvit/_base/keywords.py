"""Answer keyword arguments that a function does not take with the name that was meant."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# Arguments of timm, transformers, flash-attention and PyTorch whose names here are not the most similar ones.
# A function takes at most one of the names that stand for one.
_ELSEWHERE = {
    "softmax_scale": "scale", "bias": "attn_mask", "key_padding_mask": "attn_mask", "alibi_slopes": "attn_mask",
    "max_seqlen_q": "max_seqlen", "p": "dropout_p", "dropout": "dropout_p drop_rate proj_drop drop",
    "hidden_size": "embed_dim dim", "dim": "embed_dim", "embed_dim": "dim", "num_layers": "depth",
    "num_hidden_layers": "depth", "mlp_dim": "mlp_ratio hidden_features",
    "intermediate_size": "mlp_ratio hidden_features",
}  # fmt: skip
_SENTENCES = {
    "pretrained": "use create_model(name, weights=True), with timm's tag in the name",
    "checkpoint_path": "use create_model(name, weights=...)",
    **dict.fromkeys(("features_only", "out_indices"), "use the model's forward_intermediates"),
    "window_size": "use attn_mask, or attention_windows for windows of a grid",
    "enable_gqa": "k and v may have fewer heads without it",
    "deterministic": "every call is deterministic",
    **dict.fromkeys(("return_attn_probs", "need_weights"), "fastvit.study.attention_maps returns the weights"),
}


def check_known(given: Iterable[str], known: Sequence[str], what: str) -> None:
    """Check the names of keyword arguments of `what`. The error names the argument that was meant."""
    for name in given:
        if name not in known:
            meant = [new for new in _ELSEWHERE.get(name, "").split() if new in known]
            meant += difflib.get_close_matches(name, known, 1, cutoff=0.5)
            more = f" and {len(known) - 9} more" if len(known) > 9 else ""
            near = f"did you mean {meant[0]}?" if meant else f"it takes {', '.join(known[:9])}{more}"
            advice = _SENTENCES.get(name, near)
            raise TypeError(f"{name} is not an argument of {what}: {advice}")


def check_no_others(others: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Raise TypeError for keyword arguments that a function does not take."""
    known = inspect.signature(function).parameters.values()
    check_known(others, [p.name for p in known if p.kind is not p.VAR_KEYWORD], function.__name__)
