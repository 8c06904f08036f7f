"""The data readers of benchmarks/examples/training, on small files in the real formats, and its batches."""

import gzip
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from training_runs import example, image_folder

RANDOM = np.random.default_rng(0)
IDX = {
    "train-images-idx3-ubyte": RANDOM.integers(0, 256, (12, 28, 28), dtype=np.uint8),
    "train-labels-idx1-ubyte": np.arange(12, dtype=np.uint8) % 10,
    "t10k-images-idx3-ubyte": RANDOM.integers(0, 256, (10, 28, 28), dtype=np.uint8),
    "t10k-labels-idx1-ubyte": np.arange(10, dtype=np.uint8),
}


def idx(name: str) -> bytes:
    return b"\0\0\x08" + bytes([IDX[name].ndim]) + np.array(IDX[name].shape, ">i4").tobytes() + IDX[name].tobytes()


def test_data_sets_that_torchvision_downloads(tmp_path, monkeypatch):
    read = example("training.data").read
    datasets = pytest.importorskip("torchvision.datasets")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(datasets.CIFAR10, "url", "http://127.0.0.1:9/cifar.tar.gz")  # a port that refuses
    monkeypatch.setattr(datasets.FashionMNIST, "mirrors", ["http://127.0.0.1:9/"])
    for name, advice in {"cifar10": rf"put http\S+ into {tmp_path}/datasets", "fashion-mnist": "as --data"}.items():
        with pytest.raises(ValueError, match=f"^{name} cannot be downloaded into .*; without a network .*{advice}: "):
            read(name)

    cifar, raw = tmp_path / "datasets" / "cifar-10-batches-py", tmp_path / "datasets" / "FashionMNIST" / "raw"
    cifar.mkdir(parents=True)
    pixels = RANDOM.integers(0, 256, (20, 3072), dtype=np.uint8)
    names = [f"class{i}" for i in range(10)]
    for file, content in {
        "data_batch_1": {"data": pixels[:16], "labels": [3] * 16},
        "test_batch": {"data": pixels[16:], "labels": [0, 1, 2, 9]},
        "batches.meta": {"label_names": names},
    }.items():
        (cifar / file).write_bytes(pickle.dumps(content))
    monkeypatch.setattr(datasets.CIFAR10, "train_list", [["data_batch_1", None]])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [["test_batch", None]])
    monkeypatch.setattr(datasets.CIFAR10, "meta", datasets.CIFAR10.meta | {"md5": None})
    data = read("cifar10")
    assert (data.name, data.classes, data.size) == ("cifar10", names, 32)
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([3] * 16, [0, 1, 2, 9])
    np.testing.assert_array_equal(np.asarray(data.test.load(3)), pixels[19].reshape(3, 32, 32).transpose(1, 2, 0))
    channels = pixels[:16].reshape(16, 3, 1024) / 255
    np.testing.assert_allclose(data.mean, channels.mean((0, 2)), atol=1e-4)
    np.testing.assert_allclose(data.std, channels.std((0, 2)), atol=1e-4)

    for name in IDX:
        (raw / name).write_bytes(idx(name))
    data = read("fashion-mnist")
    assert (data.classes[0], data.size, data.mirrored) == ("T-shirt/top", 28, True)
    assert (len(data.train.labels), len(data.test.labels)) == (12, 10)


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files(packed, tmp_path):
    read = example("training.data").read
    path = {name: tmp_path / (f"{name}.gz" if packed else name) for name in IDX}
    pack = gzip.compress if packed else bytes
    for name in IDX:
        path[name].write_bytes(pack(idx(name)))
    data = read(str(tmp_path))
    assert (data.classes, data.size, data.mirrored) == ([str(i) for i in range(10)], 28, False)
    assert data.train.labels.tolist() == IDX["train-labels-idx1-ubyte"].tolist()
    np.testing.assert_array_equal(np.asarray(data.test.load(9))[..., 2], IDX["t10k-images-idx3-ubyte"][9])
    np.testing.assert_allclose(data.mean, [IDX["train-images-idx3-ubyte"].mean() / 255] * 3, atol=1e-4)

    images, labels = path["train-images-idx3-ubyte"], path["train-labels-idx1-ubyte"]
    labels.write_bytes(pack(idx("t10k-labels-idx1-ubyte")))
    with pytest.raises(ValueError, match="12 images and 10 labels"):
        read(str(tmp_path))
    for content in (images.read_bytes()[:-9], b"", pack(b"<html>not found</html>")):
        images.write_bytes(content)
        with pytest.raises(ValueError, match=r"train-images-idx3-ubyte is no readable idx file"):
            read(str(tmp_path))
    labels.unlink()
    images.write_bytes(pack(idx(images.name.removesuffix(".gz"))))
    with pytest.raises(ValueError, match="neither train-labels-idx1-ubyte nor"):
        read(str(tmp_path))


def test_folders_of_images(tmp_path, capsys):
    read = example("training.data").read
    data = read(str(image_folder(tmp_path / "split")))
    assert data.classes == ["bright", "dark"]
    assert [np.asarray(data.test.load(i)).mean() > 128 for i in (0, -1)] == [True, False]
    assert (data.train.labels == data.test.labels).all()
    whole = read(str(image_folder(tmp_path / "whole", splits=())))
    assert len(whole.train.labels) == 13
    assert len(whole.test.labels) == 3
    assert not {*whole.train.paths} & {*whole.test.paths}

    train, val = tmp_path / "split" / "train", tmp_path / "split" / "val"
    for name in ("._0.png", ".hidden/0.png", "dark/._0.png", "dark/.hidden/0.png", "dark/README", "dark/labels.csv"):
        (train / name).parent.mkdir(exist_ok=True)
        (train / name).write_bytes(b"no picture")
    (train / "dark" / "circle").symlink_to(train / "dark")
    assert capsys.readouterr().err == ""
    again = read(str(tmp_path / "split"))
    assert (again.classes, again.train.paths) == (data.classes, data.train.paths)
    assert (
        f"left out 2 files that are no images: {train}/dark/README, {train}/dark/labels.csv" in capsys.readouterr().err
    )
    (tmp_path / "more").mkdir()
    (val / "dark" / "0.jpg").rename(tmp_path / "more" / "0.JPG")
    (val / "dark" / "more").symlink_to(tmp_path / "more")
    assert f"{val}/dark/more/0.JPG" in read(str(tmp_path / "split")).test.paths


def test_folders_of_images_with_a_mistake(tmp_path):
    read, folder = example("training.data").read, image_folder(tmp_path / "data", count=2)
    train, val = folder / "train", folder / "val"

    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            read(str(folder))

    (val / "bright" / "1.png").write_bytes(b"no picture")
    refused(f"{val}/bright/1.png is no picture that Pillow reads")
    (val / "bright" / "1.png").unlink()
    (val / "bright" / "1.png").symlink_to("nowhere")
    refused(f"{val}/bright/1.png cannot be read: No such file")
    (val / "bright" / "1.png").unlink()
    (train / "night").mkdir()
    refused(f"{train}/night has no image, which is a file named .avif")
    Image.new("F", (4, 4)).save(train / "night" / "0.tiff")
    refused("train and val must have the same classes, only one has night")
    (val / "night").symlink_to(train / "night")
    refused(f"{train}/night/0.tiff is no picture that Pillow reads: pixels of mode F")
    val.rename(folder / "other")
    refused("neither val nor test")
    train.rename(folder / "training")
    (folder / "other").rename(tmp_path / "other")
    refused(f"{folder} must have a folder for each of at least two classes, got training")


def test_large_folders_are_checked_at_equal_distances(tmp_path, monkeypatch):
    data, (folder,) = example("training.data"), [image_folder(tmp_path / "data", splits=())]
    images, _ = data._files(folder)
    monkeypatch.setattr(data, "CHECKED", 6)  # of 16: every third
    for i, path in enumerate(images.paths):
        if i % 3:
            open(path, "w").close()
    images.check()
    open(images.paths[15], "w").close()
    with pytest.raises(ValueError, match="is no picture"):
        images.check()


def test_photographs_are_upright_and_without_transparency(tmp_path):
    """`test_cli_attention` has the modes of pixels; the same function reads them here."""
    data, pixels = example("training.data"), RANDOM.integers(0, 65536, (8, 12)).astype(np.uint16)
    turned = Image.Exif()
    turned[0x112] = 6
    paths = [str(tmp_path / name) for name in ("turned.png", "clear.png", "damaged.png")]
    Image.fromarray(pixels).save(paths[0], exif=turned)
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(paths[1])
    Image.new("RGB", (8, 8), "white").save(paths[2], exif=b"Exif\0\0damaged")
    images = data.FileImages(paths, np.zeros(3, int))
    np.testing.assert_array_equal(np.asarray(images.load(0))[..., 1], np.rot90(pixels >> 8, -1))
    assert (np.asarray(images.load(1)) == 255).all()
    assert (np.asarray(images.load(2)) == 255).all(), "EXIF data that are damaged do not matter"


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
