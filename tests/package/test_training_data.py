"""The data readers of benchmarks/examples/training, on small files in the real formats, and its batches."""

import numpy as np
import pytest
import torch
from PIL import Image
from training_runs import example, image_folder


def test_digits_are_grey_and_not_mirrored():
    data = example("training.data").read("digits")
    assert (data.size, data.mirrored, len(data.train.labels), len(data.test.labels)) == (8, False, 1438, 359)
    pixels = np.asarray(data.train.load(0))
    assert pixels.shape == (8, 8, 3)
    assert (pixels[..., 0] == pixels[..., 2]).all()
    every = np.stack([np.asarray(data.train.load(i)) for i in range(1438)]) / 255
    np.testing.assert_allclose(data.mean, every.mean((0, 1, 2)), atol=1e-4)
    np.testing.assert_allclose(data.std, every.std((0, 1, 2)), atol=1e-4)


def test_folders_of_images(tmp_path):
    read, folder = example("training.data").read, image_folder(tmp_path / "split")
    data = read(str(folder))
    assert data.classes == ["bright", "dark"]
    assert [np.asarray(data.test.load(i)).mean() > 128 for i in (0, -1)] == [True, False]
    assert (data.train.labels == data.test.labels).all()
    whole = read(str(image_folder(tmp_path / "whole", splits=())))
    assert (len(whole.train.labels), len(whole.test.labels)) == (13, 3)
    assert not {*whole.train.pictures} & {*whole.test.pictures}

    (folder / "train" / "night").mkdir()
    Image.new("RGB", (4, 4)).save(folder / "train" / "night" / "0.png")
    with pytest.raises(ValueError, match="train and val must have the same classes, only one has night"):
        read(str(folder))


def test_a_batch_depends_on_its_number_alone():
    data, torchvision = example("training.data"), pytest.importorskip("torchvision.transforms")
    digits = data.read("digits")
    transform = torchvision.Compose([torchvision.RandomResizedCrop(8), torchvision.PILToTensor()])

    def collate(samples):
        return torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])

    def batches(parts: int, rank: int, world: int):
        return data.TrainBatches(digits.train, transform, collate, 32, parts, 0, rank, world)

    whole = batches(1, 0, 1)
    steps = whole.steps
    assert steps == len(digits.train.labels) // 32
    images, labels = whole[steps + 3]  # of the second epoch
    assert torch.equal(images, whole[steps + 3][0])
    assert not torch.equal(images, whole[3][0])
    parts = [batches(2, rank, 2)[2 * (steps + 3) + part] for part in range(2) for rank in range(2)]
    assert torch.equal(torch.cat([part for part, _ in parts]), images)
    assert torch.equal(torch.cat([part for _, part in parts]), labels)
    with data.batches(whole, range(steps + 3, steps + 4), 1, torch.device("cpu")) as feed:
        assert torch.equal(next(feed)[0], images)

    epoch = torch.cat([batches(1, 0, 1)[n][1] for n in range(steps)])
    assert epoch.bincount().min() > 100, "an epoch has every class"
    sets = [data.TestBatches(digits.test, transform, 179, rank, 2) for rank in range(2)]
    assert [len(one) for one in sets] == [2, 2], "359 images: processes that call a sharded model do so equally often"
    seen = torch.cat([one[n][1] for one in sets for n in range(2)])
    assert sorted(seen.tolist()) == [-1, *sorted(digits.test.labels.tolist())]
