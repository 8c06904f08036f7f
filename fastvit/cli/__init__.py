"""The command `fastvit`, one file for each verb. Nothing imports torch before a verb runs, so `--help` is quick."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import fastvit
from fastvit.cli import terminal

# verb -> description; a verb's file has `configure(parser)` and `run(args)`, which returns the exit status
VERBS = {
    "memory": "what a model needs at every image size, planned or measured",
    "fit": "what to recompute so that a training step fits into a budget",
    "models": "parameters, tokens, FLOPs and activations of every known model",
    "attention": "attention maps and rollout over a picture, or figures by layer",
    "explore": "one page to explore a model: patches, tokens, memory, attention",
    "verify": "compare the fused ops with float64 on this device",
    "warmup": "compile a model's kernels before its first step",
    "doctor": "this machine: devices, versions, and the path of each op",
}
_EXAMPLE = """examples:
  fastvit memory vit_large_patch16_224 --image-size 224,512,1024,2048
  fastvit models 'vit_base_*' --image-size 384
  fastvit VERB --help   has examples of each verb
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, or print its help without arguments. Return the status: 1 if a check failed, 2 for wrong use."""
    if argv is None and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # look there first for module:function, as `python -m` does
    argv = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in argv if word in VERBS), None)
    parser = terminal.Parser("fastvit", "See what a Vision Transformer costs, and what it looks at.", _EXAMPLE)
    parser.add_argument(
        "--version", action="version", version=f"fastvit {fastvit.__version__}", help="the version of fastvit"
    )
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", required=True)
    for verb, line in VERBS.items():
        verb_parser = verbs.add_parser(verb, help=line, description=line[0].upper() + line[1:] + ".")
        if verb == chosen:
            importlib.import_module(f"fastvit.cli.{verb}").configure(verb_parser)
    if not argv:
        parser.print_help()
        return 0
    args = parser.parse_args(argv)
    return terminal.guarded(lambda: importlib.import_module(f"fastvit.cli.{args.verb}").run(args), args.traceback)
