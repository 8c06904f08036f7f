"""The training loop: steps, evaluation, log, checkpoints."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from timm.utils import distribute_bn
from torch import Tensor, nn

from fastvit.cli import terminal
from fastvit.study.machine import cpu_name

from . import models, recipe
from .data import Data, TestBatches, TrainBatches, batches, seed_all
from .models import Model
from .state import Record, Run


class Trainer:
    """Trains one model on one data set; over several processes each has an object of its own."""

    def __init__(self, args: argparse.Namespace, data: Data, run: Run, device: torch.device) -> None:
        self.args, self.run, self.device = args, run, device
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.data = TrainBatches(
            data.train, recipe.train_transform(args), recipe.collate(args), args.batch, args.seed, self.rank, self.world
        )
        transform, each = recipe.test_transform(args, args.image_size), args.batch // self.world
        self.test = TestBatches(data.test, transform, each, self.rank, self.world)
        if self.data.steps == 0:
            raise ValueError(f"--batch must be at most the {len(data.train.labels)} training images, got {args.batch}")
        self.total = args.steps or self.data.steps * args.epochs

        seed_all(args.seed)
        model = models.build(args, device, args.weights)
        self.teacher = models.teacher(args, device)
        self.about = {
            "name": args.model, "plain": args.plain, "data": data.name, "images": len(data.train.labels),
            "parameters": sum(p.numel() for p in model.module.parameters()),
            "flops": models.flops(model, args.image_size, device),
        }  # fmt: skip
        if self.teacher is not None and hasattr(model.module, "set_distilled_training"):
            model.module.set_distilled_training(True)
        self.model, self.call = model, models.spread(model.module, args, device)
        self.optimizer = recipe.optimizer(args, model.module)
        self.schedule = recipe.schedule(args, self.optimizer, self.total, self.data.steps)
        self.at: Record = {"step": 0, "seconds": 0.0, "losses": [], "of_epoch": 0.0}

    # ---- the run ----

    def fit(self, resume: bool) -> Record:
        """Train to the end. Returns the last evaluation.

        Raises:
            ValueError: a loss that is not finite; an image that cannot be read.
        """
        if resume:
            self.at |= self.run.restore(self.model.module, self.optimizer)
            self.run.forget_after(self.at["step"])
        else:
            self.run.forget_after(-1)
            name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else cpu_name()
            self.run.log("run", **self.about, torch=torch.__version__, device=name, world=self.world)
        first, every = self.at["step"], self.args.save_every or self.data.steps
        last = next((r for r in reversed(self.run.records()) if r["kind"] == "epoch"), {})
        with (
            terminal.progress(self.total - first, "training") as advance,
            batches(self.data, range(first, self.total), self.args.workers, self.device) as feed,
        ):
            for step in range(first, self.total):
                advance(f"epoch {step // self.data.steps + 1}")
                done = step + 1
                ended = done % self.data.steps == 0 or done == self.total
                self._timed_step(step, feed, logs=done % self.args.log_every == 0 or ended)
                if ended:
                    last = self._epoch(step)
                if ended or done % every == 0:
                    self.run.save(self.model.module, self.optimizer, self.at)
        self.run.export(self.model.module)
        if self.world > 1:  # so that no process frees a group whose threads still hold tensors of the last sums
            dist.barrier()
        return last

    def _timed_step(self, step: int, feed: Iterator[tuple[Tensor, ...]], logs: bool) -> None:
        """Take a step, and count its time: waiting for images, computing, and, at a record of the log, for a GPU."""
        start = time.perf_counter()
        self.at["losses"].append(self._step(step, *next(feed)))
        self.at["step"] = step + 1
        if logs:
            self._log_losses(step)
        self.at["seconds"] += time.perf_counter() - start

    def _step(self, step: int, images: Tensor, targets: Tensor) -> Tensor:
        """Take one step of the optimizer. Returns the mean loss of its images, over all processes."""
        self.schedule.step_update(step)
        self.call.train()
        seed_all(self.args.seed, step, 0, self.rank, 2)  # dropout and stochastic depth
        with self._autocast():
            taught = None
            if self.teacher is not None:
                with torch.no_grad():
                    taught = self.teacher.module(self.teacher.prepared(images))
            loss = recipe.loss_of(self.args, self.call(self.model.prepared(images)), targets, taught)
        loss.backward()
        if self.args.clip:
            nn.utils.clip_grad_norm_(self.model.module.parameters(), self.args.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = loss.detach()
        if self.world > 1:
            dist.all_reduce(loss)
        return loss / self.world

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.amp)

    # ---- log and evaluation ----

    def _log_losses(self, step: int) -> None:
        losses = torch.stack([loss.to(self.device) for loss in self.at["losses"]])
        self.at["losses"] = []
        loss, rate = losses.mean().item(), max(group["lr"] for group in self.optimizer.param_groups)
        self.run.log("train", step=step + 1, epoch=step // self.data.steps, loss=loss, lr=rate)
        self.at["of_epoch"] += loss * len(losses)
        if not math.isfinite(loss):
            raise ValueError(f"the loss is {loss} at step {step + 1}: try a smaller --lr, or --clip 1")

    def _epoch(self, step: int) -> Record:
        """Evaluate and log an epoch."""
        if self.world > 1:  # BatchNorm's running statistics are of each process's own images
            distribute_bn(self.model.module, self.world, reduce=True)
        test = self.evaluate(self.model)
        train_loss, self.at["of_epoch"] = self.at["of_epoch"] / (step % self.data.steps + 1), 0.0
        record = {
            "step": step + 1, "epoch": step // self.data.steps, "train_loss": train_loss, **test,
            "seconds": self.at["seconds"], "images_per_second": (step + 1) * self.args.batch / self.at["seconds"],
        }  # fmt: skip
        self.run.log("epoch", **record)
        if self.rank == 0:
            of, speed = -(-self.total // self.data.steps), record["images_per_second"]
            print(
                f"epoch {record['epoch'] + 1}/{of}  loss {train_loss:.3f}  test loss {test['loss']:.3f}  "
                f"accuracy {test['accuracy']:.2%}  {speed:,.0f} images/s",
                flush=True,
            )
        return record

    @torch.no_grad()
    def evaluate(self, model: Model) -> Record:
        """Return loss and accuracy on the test images, over all processes."""
        model.module.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        with batches(self.test, range(len(self.test)), self.args.workers, self.device) as feed:
            for images, labels in feed:
                with self._autocast():
                    logits = model.module(model.prepared(images))
                counted = labels >= 0
                logits, labels = logits[counted].float(), labels[counted]
                loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
                sums += torch.stack([loss, (logits.argmax(1) == labels).sum(), counted.sum()]).double()
        if self.world > 1:
            dist.all_reduce(sums)
        loss, accuracy = (sums[:2] / sums[2]).tolist()
        return {"loss": loss, "accuracy": accuracy, "right": int(sums[1])}
