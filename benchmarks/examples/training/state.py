"""The folder of a run: its settings, its log, and the checkpoint from which it continues."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from fastvit._base.output import not_writable, write_file

SETTINGS = "settings.json"
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_TO_ALL = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
Record = dict[str, Any]


class Run:
    """The folder `out`: settings.json, log.jsonl, checkpoint.pt and model.safetensors.

    Files are written by one of several processes.
    """

    def __init__(self, out: Path, writes: bool) -> None:
        self.out, self.writes = out, writes
        self.checkpoint, self.weights = out / "checkpoint.pt", out / "model.safetensors"
        self._settings, self._log = out / SETTINGS, out / "log.jsonl"

    def check_new(self) -> None:
        """Raise ValueError if the folder has a run already, or if it cannot be written."""
        if self._settings.exists():
            raise ValueError(f"{self.out} has a run: `train.py resume {self.out}` continues it; or take another --out")
        if reason := not_writable(self.out):
            raise ValueError(f"--out: {reason}")

    def begin(self, args: argparse.Namespace) -> None:
        """Write the settings of a new run."""
        self.out.mkdir(parents=True, exist_ok=True)
        found = {name: value for name, value in vars(args).items() if name not in ("out", "verb")}
        write_file(self._settings, json.dumps(found, indent=1) + "\n")

    def kept(self) -> str:
        """Say what is left of an interrupted run, and how to go on."""
        if not self._settings.exists():
            return "nothing was saved"
        done = torch.load(self.checkpoint, mmap=True)["at"]["step"] if self.checkpoint.exists() else 0
        return f"{self.out} has the run up to step {done}; `train.py resume {self.out}` goes on from there"

    def settings(self) -> Record:
        """Return the settings of the run. Raises ValueError if there are none."""
        try:
            found = json.loads(self._settings.read_text())
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict) or not {"model", "name", "classes", "mean", "std"} <= found.keys():
            raise ValueError(f"{self.out} has no run: there is no readable {self._settings.name}")
        return found

    def records(self) -> list[Record]:
        """Return the log, a line a record; a line that a killed process did not finish is left out."""
        found = []
        for line in self._log.read_text().splitlines() if self._log.exists() else ():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [record for record in found if isinstance(record, dict) and "kind" in record]

    def log(self, kind: str, **values: Any) -> None:
        if self.writes:
            with self._log.open("a") as file:
                file.write(json.dumps({"kind": kind, **values}) + "\n")

    def forget_after(self, step: int) -> None:
        """Remove from the log what is done again after the checkpoint of this step."""
        if self.writes:
            kept = [record for record in self.records() if record.get("step", 0) <= step]
            write_file(self._log, "".join(json.dumps(record) + "\n" for record in kept))

    def save(self, module: nn.Module, optimizer: torch.optim.Optimizer, at: Record) -> None:
        """Write a checkpoint of all processes' parameters and of the place in the run."""
        state = {
            "model": get_model_state_dict(module, options=_WHOLE),
            "optimizer": get_optimizer_state_dict(module, optimizer, options=_WHOLE),
            "at": at,
        }
        if self.writes:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            write_file(self.checkpoint, buffer.getvalue())

    def restore(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Record:
        """Read the checkpoint, and return the place in the run.

        Raises:
            ValueError: it is damaged, or of another model.
        """
        try:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            options = _TO_ALL if dist.is_initialized() else StateDictOptions(full_state_dict=True)
            set_model_state_dict(module, state["model"], options=options)
            set_optimizer_state_dict(module, optimizer, state["optimizer"], options=options)
            at: Record = state["at"]
        except (RuntimeError, LookupError, TypeError, AttributeError, EOFError, pickle.UnpicklingError):
            raise ValueError(f"{self.checkpoint} is damaged, or of another run") from None
        return at

    def export(self, module: nn.Module) -> None:
        """Write the weights as model.safetensors, which `fastvit.create_model(weights=)` reads."""
        from safetensors.torch import save

        tensors: dict[str, Any] = get_model_state_dict(module, options=_WHOLE)
        if self.writes:
            write_file(self.weights, save({name: tensor.contiguous() for name, tensor in tensors.items()}))
