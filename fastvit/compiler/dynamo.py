"""The backend that Dynamo calls: rewrite the graph, and compile it with an inner backend."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fastvit.blocks.submodules import CannotFuse
from fastvit.compiler.match.rewriter import GraphRewriter
from fastvit.compiler.rewrites import (
    add_norm,
    attention,
    attention_half,
    epilogue,
    identities,
    mlp,
    norm_linear,
    patch_embed,
    rms_norm,
)
from fastvit.ops.runtime.backend import HAVE_TRITON
from fastvit.report import Entry, Report

_log = logging.getLogger("fastvit.compiler")

# The order matters, because a rewrite finds what earlier ones have written, and loses what they have taken:
# - identities removes calls that would interrupt a pattern, and writes nn.MultiheadAttention out;
# - rms_norm turns every spelling of RMSNorm into one call, which all later rewrites take for a norm;
# - patch_embed takes the sum with the positions, before add_norm could;
# - attention turns every spelling of attention into `ops.attention`, where attention_half starts;
# - attention_half and mlp take norm, linear layers and residual sum as one op, the best that can become of each;
# - norm_linear, add_norm and epilogue share what is left: a norm joins the layers after it if it can, else the sum
#   before it; a linear layer takes a residual sum that no norm has.
_REWRITES = (identities, rms_norm, patch_embed, attention, attention_half, mlp, norm_linear, add_norm, epilogue)


def rewrite(gm: GraphModule) -> Report:
    """Put fastvit's ops into a graph of torch functions from Dynamo, and into the graphs that it checkpoints."""
    start = time.perf_counter()
    rewritten = [_rewrite(graph) for graph in _graphs(gm)]
    entries = tuple(entry for of_graph, _ in rewritten for entry in of_graph)
    left = tuple(reason for _, reason in rewritten if reason)
    return Report(entries, route="compile", seconds=time.perf_counter() - start, left=left)


def _rewrite(gm: GraphModule) -> tuple[list[Entry], str]:
    """Return what was found, and the reason if the graph is left as a whole, otherwise ""."""
    untouched = copy.deepcopy(gm.graph)
    for node, copied in zip(gm.graph.nodes, untouched.nodes, strict=True):
        vars(copied).update({name: value for name, value in vars(node).items() if name not in vars(copied)})
    entries: dict[Node, Entry] = {}
    reason = ""
    try:
        rewriter = GraphRewriter(gm)
        if rewriter.refusal or not rewriter.fakes:
            return [], rewriter.refusal
        entries = rewriter.entries
        for module in _REWRITES:
            for node in list(gm.graph.nodes):
                with contextlib.suppress(CannotFuse):  # nothing for the report
                    module.rewrite(rewriter, node)
            rewriter.propagate_strides()
        gm.graph.lint()
    except Exception as error:  # an unforeseen graph compiles without us, and the log says so
        gm.graph = untouched
        _log.warning("a graph was left as it was", exc_info=True)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        entries = {node: replace(entry, status="skipped", detail="the whole graph") for node, entry in entries.items()}
    gm.recompile()
    return [entries[site] for site in sorted(entries, key=lambda node: rewriter.position[node])], reason


def _graphs(gm: GraphModule) -> list[GraphModule]:
    """Return gm and the bodies of all checkpoints in it."""
    graphs = [gm]
    for node in gm.graph.nodes:
        if getattr(node.target, "__name__", "") == "tag_activation_checkpoint":
            body = getattr(gm, str(node.args[0].target))
            if body not in graphs:
                graphs += _graphs(body)
    return graphs


def compile_graph(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    inner: str | Callable[..., Any] | None = None,
    on_report: Callable[[Report], None] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Compile a graph as `fastvit.compiler.backend` does.

    Args:
        inner: the backend for the rewritten graph, or None for `default_inner`.
        on_report: called with the report.
    """
    report = rewrite(gm)
    device = next((t.device.type for t in inputs if isinstance(t, torch.Tensor)), "cpu")
    compiled = _compile_rest(inner or default_inner(device), gm, inputs, **options)
    _log.info("%s", report)  # only now, because Dynamo may trace a graph more than once
    if on_report is not None:
        on_report(report)
    return compiled


@cache
def default_inner(device: str) -> str:
    """Return "inductor" if it can build for that device, otherwise "aot_eager" with one warning."""
    if device == "cpu":
        missing = None if _has_compiler() else "no C++ compiler"
    else:
        missing = None if HAVE_TRITON else f"no Triton for {device}"
    if missing:
        warnings.warn(f"fastvit compiles with aot_eager: inductor has {missing} here", stacklevel=2)
    return "aot_eager" if missing else "inductor"


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++", "cl"))


def _compile_rest(
    inner: str | Callable[..., Any],
    gm: GraphModule,
    inputs: Sequence[Any],
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    if inner == "inductor" and (mode or options):
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        patches = {**list_mode_options(mode or "default"), **(options or {})}
        return compile_fx(gm, list(inputs), config_patches=patches)  # type: ignore[return-value]
    function: Any = torch._dynamo.lookup_backend(inner) if isinstance(inner, str) else inner
    given = {name: value for name, value in (("mode", mode), ("options", options)) if value}
    return function(gm, inputs, **given)
