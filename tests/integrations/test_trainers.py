"""Other libraries' training programs with fastvit: one line each, and the losses of the same run without it."""

import pytest
import torch
from library_imports import import_library, import_timm

import fastvit
from fastvit.graph import dynamo

IMAGES, LABELS = torch.randn(24, 3, 32, 32), torch.arange(24) % 3


def test_the_trainer_of_transformers(tmp_path):
    transformers = import_library("transformers")
    pytest.importorskip("accelerate")
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, image_size=32, patch_size=8,
        num_labels=3,
    )  # fmt: skip

    def losses(accelerated: bool) -> list[float]:
        torch.manual_seed(0)
        model = transformers.ViTForImageClassification(config)
        if accelerated:
            assert len(fastvit.accelerate(model).accelerated) == 4  # patches, two blocks, norm
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=8, learning_rate=1e-2, logging_steps=1,
            use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, max_grad_norm=1.0,
        )  # fmt: skip
        data = [{"pixel_values": image, "labels": int(label)} for image, label in zip(IMAGES, LABELS, strict=True)]
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    plain, fused = losses(False), losses(True)
    assert len(plain) == 4
    assert plain[-1] != plain[0]
    assert fused == pytest.approx(plain, abs=2e-4)  # it logs losses rounded to four digits


def test_the_task_of_timms_train_script(monkeypatch, caplog):
    """timm's train.py calls `task.compile(backend=...)` with the value of --torchcompile."""
    timm = import_timm()
    monkeypatch.setattr(dynamo, "default_inner", lambda device: "aot_eager")
    caplog.set_level("INFO", logger="fastvit.graph")
    task_of = pytest.importorskip("timm.task").ClassificationTask

    def losses(compiled: bool) -> list[float]:
        torch.manual_seed(0)
        model = timm.create_model("test_vit", img_size=32, depth=2, num_classes=3)
        task = task_of(model=model, criterion=torch.nn.CrossEntropyLoss())
        if compiled:
            task.compile(backend="fastvit", mode=None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        found = []
        for _ in range(3):
            loss = task(IMAGES, LABELS)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    plain, fused = losses(False), losses(True)
    assert len(set(plain)) == 3
    assert fused == pytest.approx(plain, abs=1e-5)
    assert "fused: attention 2 of 2, MLP 2 of 2" in caplog.text
