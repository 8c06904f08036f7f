"""The data readers of benchmarks/examples/training, on small files in the real formats, and its batches."""

import lzma
import os
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from training_runs import cifar_files, example, image_folder, packed, pickled

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 4, 3072), dtype=np.uint8)


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("form", ["binary", "python"])
@pytest.mark.parametrize("archive", [True, False], ids=["packed", "unpacked"])
def test_cifar(classes, form, archive, tmp_path):
    labels = np.arange(24).reshape(6, 4) * (classes // 10) % classes
    files = cifar_files(classes, form, IMAGES, labels)
    path = packed(files, tmp_path / "cifar.tar.gz") if archive else tmp_path
    if not archive:
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
    data = example("training.data").read(str(path))
    assert data.name == f"CIFAR-{classes}"
    assert data.classes[:2] == ["class0", "class1"]
    assert len(data.classes) == classes
    assert data.train.labels.tolist() == labels[:5].reshape(-1).tolist()
    assert data.test.labels.tolist() == labels[5].tolist()
    np.testing.assert_array_equal(data.train.images, IMAGES[:5].reshape(20, 3, 32, 32))
    np.testing.assert_array_equal(np.asarray(data.test.load(3)), IMAGES[5, 3].reshape(3, 32, 32).transpose(1, 2, 0))
    pixels = IMAGES[:5].reshape(20, 3, 1024) / 255
    np.testing.assert_allclose(data.mean, pixels.mean((0, 2)), atol=1e-4)
    np.testing.assert_allclose(data.std, pixels.std((0, 2)), atol=1e-4)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("made",)


PYTHON = cifar_files(10, "python", IMAGES, np.zeros((6, 4), int))
BINARY = cifar_files(10, "binary", IMAGES, np.zeros((6, 4), int))
FLOATS = {b"labels": [0] * 4, b"data": IMAGES[0].astype(np.float32)}
NO_VALUES = b"\x80\x02}(U\x06labels]K\x00aU\x04datacnumpy\nndarray\n)Ru."
DAMAGED = {
    "a record too short": (BINARY | {"data_batch_2.bin": BINARY["data_batch_2.bin"][:-1]}, "must have records of 3073"),
    "no record": (BINARY | {"test_batch.bin": b""}, "test_batch.bin must have records"),
    "a class too many": (BINARY | {"data_batch_1.bin": b"\x0a" + IMAGES[0, 0].tobytes()}, "classes from 0 to 9, got 1"),
    "a file too few": ({k: v for k, v in BINARY.items() if k != "data_batch_4.bin"}, "is no complete CIFAR"),
    "names too few": (BINARY | {"batches.meta.txt": b"cat\n"}, "names of 10 classes, got 1"),
    "a pickle cut off": (PYTHON | {"data_batch_3": PYTHON["data_batch_3"][:-9]}, "data_batch_3 is no readable pickle"),
    "a call of a function": (PYTHON | {"test_batch": pickled({b"data": Evil()})}, "no CIFAR file has"),
    "an array of floats": (PYTHON | {"test_batch": pickled(FLOATS)}, "of bytes"),
    "labels too few": (PYTHON | {"test_batch": pickled({b"labels": [0], b"data": IMAGES[0]})}, "a class for each"),
    "labels of words": (PYTHON | {"test_batch": pickled({b"labels": ["a"], b"data": IMAGES[0]})}, "the list 'labels'"),
    "an array without values": (PYTHON | {"test_batch": NO_VALUES}, "of bytes"),
    "tuples of tuples": (PYTHON | {"test_batch": b"\x80\x02}(K\x00" + b"\x85" * 99 + b"K\x00u."}, "TUPLE1 where no"),
    "a far memo": (PYTHON | {"test_batch": b"\x80\x02}r\xff\xff\xff\x0f."}, "LONG_BINPUT where no CIFAR"),
    "no dict": (PYTHON | {"test_batch": pickled([1])}, "must have a dict"),
}  # fmt: skip


@pytest.mark.parametrize(("files", "message"), list(DAMAGED.values()), ids=list(DAMAGED))
def test_damaged_cifar(files, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = packed(files, tmp_path / "cifar.tar.gz")
    with pytest.raises(ValueError, match=message) as raised:
        example("training.data").read(str(path))
    assert str(path) in str(raised.value)
    assert not (tmp_path / "made").exists()


def test_damaged_archives(tmp_path):
    read = example("training.data").read
    path = packed(BINARY, tmp_path / "cifar.tar.gz")
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(ValueError, match=r"cifar\.tar\.gz is no readable tar archive"):
        read(str(path))
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(ValueError, match=r"cifar\.tar\.gz is no readable tar archive"):
        read(str(path))
    path.write_bytes(lzma.compress(packed(BINARY, tmp_path / "again.tar.gz").read_bytes())[:-4000])
    with pytest.raises(ValueError, match=r"cifar\.tar\.gz is no readable tar archive"):
        read(str(path))
    with tarfile.open(tmp_path / "other.tar", "w"):
        pass
    with pytest.raises(ValueError, match="it has no file"):
        read(str(tmp_path / "other.tar"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read("nowhere")


def test_folders_of_images(tmp_path):
    read = example("training.data").read
    data = read(str(image_folder(tmp_path / "split")))
    assert data.classes == ["bright", "dark"]
    assert [np.asarray(data.test.load(i)).mean() > 128 for i in (0, -1)] == [True, False]
    assert (data.train.labels == data.test.labels).all()
    whole = read(str(image_folder(tmp_path / "whole", splits=())))
    assert len(whole.train.labels) == 13
    assert len(whole.test.labels) == 3
    assert not {*whole.train.paths} & {*whole.test.paths}

    for name in ("._0.png", ".hidden/0.png"):
        (tmp_path / "split" / "train" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "split" / "train" / name).write_bytes(b"no picture")
    (tmp_path / "split" / "train" / "dark" / "._0.png").write_bytes(b"no picture")
    again = read(str(tmp_path / "split"))
    assert again.classes == data.classes
    assert again.train.paths == data.train.paths

    Image.new("I;16", (20, 20), 1000).save(tmp_path / "split" / "val" / "bright" / "1.png")
    with pytest.raises(ValueError, match=r"bright/1\.png is no readable image: mode I;16 has more than 8 bits"):
        again.test.load(1)
    (tmp_path / "split" / "val" / "dark" / "0.jpg").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"dark/0\.jpg is no readable image"):
        read(str(tmp_path / "split")).test.load(8)
    (tmp_path / "split" / "val").rename(tmp_path / "split" / "other")
    with pytest.raises(ValueError, match="neither val nor test"):
        read(str(tmp_path / "split"))
    (tmp_path / "split" / "other").rename(tmp_path / "split" / "test")
    (tmp_path / "split" / "test" / "dark").rename(tmp_path / "split" / "test" / "night")
    with pytest.raises(ValueError, match="are not the same"):
        read(str(tmp_path / "split"))


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
