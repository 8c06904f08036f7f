"""Other libraries' training programs with fastvit: one line each, and the losses of the same run without it."""

from pathlib import Path

import pytest
import torch
from library_imports import import_library
from library_models import hugging_face, vit

import fastvit
from fastvit.graph import dynamo

IMAGES, LABELS = torch.randn(24, 3, 32, 32), torch.arange(24) % 3


def losses_of_transformers(fused: bool, folder: Path) -> list[float]:
    transformers = import_library("transformers")
    pytest.importorskip("accelerate")
    model = hugging_face("ViTForImageClassification", num_labels=3)
    if fused:
        assert len(fastvit.accelerate(model).accelerated) == 4  # patches, two blocks, norm
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=8, learning_rate=1e-2, logging_steps=1,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, max_grad_norm=1.0,
    )  # fmt: skip
    data = [{"pixel_values": image, "labels": int(label)} for image, label in zip(IMAGES, LABELS, strict=True)]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def losses_of_timm(fused: bool, folder: Path) -> list[float]:
    """timm's train.py calls `task.compile(backend=...)` with the value of --torchcompile."""
    model = vit(num_classes=3)
    task = pytest.importorskip("timm.task").ClassificationTask(model=model, criterion=torch.nn.CrossEntropyLoss())
    if fused:
        task.compile(backend="fastvit", mode=None)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
    for _ in range(3):
        loss = task(IMAGES, LABELS)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("losses_of", [losses_of_transformers, losses_of_timm])
def test_losses_are_those_without_fastvit(losses_of, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(dynamo, "default_inner", lambda device: "aot_eager")
    caplog.set_level("INFO", logger="fastvit.graph")
    losses = []
    for fused in (False, True):
        torch.manual_seed(0)
        losses.append(losses_of(fused, tmp_path))
    assert losses[0][-1] != losses[0][0]
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)  # transformers logs losses rounded to four digits
    assert losses_of is losses_of_transformers or "fused: attention 2 of 2, MLP 2 of 2" in caplog.text
