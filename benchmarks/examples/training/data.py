"""Images and classes: torchvision's data sets, idx files, folders of images, scikit-learn's digits. Batches of them.

A batch is a function of the seed and its number alone: every image is augmented with random numbers of its own, drawn
from (seed, epoch, image). So a resumed run, another number of workers and another number of processes see the same
augmented images.
"""

from __future__ import annotations

import contextlib
import difflib
import gzip
import os
import random
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fastvit._output import write_file
from fastvit.study.pictures import check_header, read_rgb

DIGITS = "digits"
DOWNLOADED = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "fashion-mnist": "FashionMNIST"}  # torchvision's classes
HELD_OUT = 0.2  # share of a data set without a test set of its own
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CHECKED = 10_000  # files of a folder whose headers are read before training
_SUFFIXES = (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_IDX_NAMES = [f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
# With patch_init="kaiming", `make training` ended at 84 % instead of 93 %: positions are small next to such patches
_SMALL_VIT = {"embed_dim": 96, "depth": 4, "num_heads": 3, "patch_init": ""}  # for images smaller than CIFAR's
_PATIENCE = 30  # seconds without an answer after which a download fails


class Images(Protocol):
    """Images and their classes, `labels` (n,) int64."""

    labels: np.ndarray

    def load(self, index: int) -> Image.Image: ...


@dataclass
class ArrayImages:
    """images: (n, H, W, 3) or grey (n, H, W), uint8."""

    images: np.ndarray
    labels: np.ndarray

    def load(self, index: int) -> Image.Image:
        return Image.fromarray(np.ascontiguousarray(self.images[index])).convert("RGB")


@dataclass
class FileImages:
    paths: list[str]
    labels: np.ndarray

    def load(self, index: int) -> Image.Image:
        return _named(read_rgb, self.paths[index])

    def check(self) -> None:
        """Read the headers of all files; of more than CHECKED files, of as many at equal distances. A file with a good
        header may still fail when it is decoded. Raises ValueError with the path of a file that is no image."""
        for path in self.paths[:: -(-len(self.paths) // CHECKED)]:
            _named(check_header, path)


def _named(read: Callable[[str], Any], path: str) -> Any:
    """Call `read`; whatever is wrong with the file is a ValueError with its path."""
    try:
        return read(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class Data:
    """A data set.

    Attributes:
        size: side of the images in pixels.
        mean, std: of the training images by channel, in [0, 1].
        mirrored: whether an image and its mirror image are of one class.
        crop, rand_augment: augmentation that suits the data, as --crop and --rand-augment.
        vit, resnet: the models that --model vit and --model resnet stand for; `options` are arguments of that ViT.
    """

    name: str
    train: Images
    test: Images
    classes: list[str]
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    vit: str
    resnet: str
    mirrored: bool = True
    crop: float = 0.3
    rand_augment: int = 9
    options: dict[str, Any] = field(default_factory=dict)


def read(source: str) -> Data:
    """Read "digits", a name of DOWNLOADED, or a folder of images or of idx files.

    Raises:
        ValueError, OSError, ImportError: it cannot be read; the message names the file.
    """
    if source == DIGITS:
        return _digits()
    if source in DOWNLOADED:
        return _downloaded(source)
    path = Path(source)
    if path.is_dir():
        return _idx(path) if any(path.glob(f"{_IDX_NAMES[0]}*")) else _folder(path)
    names = [DIGITS, *DOWNLOADED]
    near = difflib.get_close_matches(source.lower(), names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    if path.name in ("cifar-10-python.tar.gz", "cifar-100-python.tar.gz"):
        hint = f"; put this archive into {_cache()}, and give {path.name[:-14].replace('-', '')}"
    raise ValueError(f"--data must be {', '.join(names)}, or a folder that exists, got {source}{hint}")


def _of_arrays(name: str, train: ArrayImages, test: ArrayImages, classes: list[str], **options: Any) -> Data:
    size = max(train.images.shape[1:3])
    if size < 32:
        options |= {"crop": 0.7, "options": _SMALL_VIT | {"patch_size": max(size // 4, 1)}}
    if size < 16:
        options |= {"rand_augment": 5}
    return Data(name, train, test, classes, size, *_statistics(train.images), "vit_cifar_small", "resnet18", **options)


def _statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    channels = [images] * 3 if images.ndim == 3 else [images[..., c] for c in range(3)]
    counts = np.stack([np.bincount(channel.reshape(-1), minlength=256) for channel in channels])
    levels = np.arange(256) / 255
    mean = counts @ levels / counts.sum(1)
    std = np.sqrt(counts @ levels**2 / counts.sum(1) - mean**2)
    return tuple(mean.round(4).tolist()), tuple(std.round(4).tolist())


def _digits() -> Data:
    """Return scikit-learn's 1,797 handwritten digits, (8, 8) and grey."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = np.rint(found.images * (255 / 16)).astype(np.uint8)
    train, test = (ArrayImages(images[part], found.target[part]) for part in _split(len(images)))
    return _of_arrays(DIGITS, train, test, [str(name) for name in found.target_names], mirrored=False)


def _split(count: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng(0).permutation(count)
    held_out = max(int(count * HELD_OUT), 1)
    return order[held_out:], order[:held_out]


def _cache() -> Path:
    """Return the folder of downloaded data sets: next to what torch.hub downloads, for example ~/.cache/torch."""
    return Path(torch.hub.get_dir()).parent / "datasets"


def _downloaded(name: str) -> Data:
    """Return a data set by torchvision, which downloads it if it is not in the cache, and checks what it downloads."""
    from torchvision import datasets

    kind, folder, timeout = getattr(datasets, DOWNLOADED[name]), _cache(), socket.getdefaulttimeout()
    socket.setdefaulttimeout(_PATIENCE)
    try:
        train, test = (kind(folder, train=train, download=True) for train in (True, False))
    except Exception as error:  # a failing download and a damaged archive raise many kinds of errors
        by_hand = f"put {kind.url} into {folder}" if hasattr(kind, "url") else ""
        by_hand = by_hand or f"give a folder with the four files of {kind.mirrors[0]} as --data"
        raise ValueError(f"{name} cannot be downloaded into {folder}; without a network {by_hand}: {error}") from None
    finally:
        socket.setdefaulttimeout(timeout)
    arrays = [ArrayImages(np.asarray(found.data), np.asarray(found.targets)) for found in (train, test)]
    return _of_arrays(name, arrays[0], arrays[1], [str(name) for name in train.classes])


def _idx(path: Path) -> Data:
    """Return the images of a folder of MNIST's format: four files, unpacked or `.gz`. Classes are numbers, and images
    are not mirrored, because they may be digits."""
    from torchvision.datasets import mnist

    tensors = []
    with tempfile.TemporaryDirectory() as folder:
        for name in _IDX_NAMES:
            file, packed = path / name, path / f"{name}.gz"
            if not file.exists() and not packed.exists():
                raise ValueError(f"{path} has idx files, but neither {name} nor {name}.gz")
            read_file = mnist.read_image_file if "images" in name else mnist.read_label_file
            try:
                if not file.exists():
                    file = Path(folder, name)
                    write_file(file, gzip.decompress(packed.read_bytes()))
                tensors.append(np.asarray(read_file(str(file))))
            except Exception as error:  # damaged files raise many kinds of errors
                raise ValueError(f"{path / name} is no readable idx file: {error!r}") from None
    train, test = ArrayImages(*tensors[:2]), ArrayImages(*tensors[2:])
    for one in (train, test):
        if not len(one.images) == len(one.labels) > 0:
            raise ValueError(f"{path} has {len(one.images)} images and {len(one.labels)} labels, which must be as many")
    count = 1 + max(train.labels.max(), test.labels.max())
    return _of_arrays(path.resolve().name, train, test, [str(i) for i in range(count)], mirrored=False)


def _folder(path: Path) -> Data:
    """Return the images in path/train/<class> and path/val/<class> (or test), or those in path/<class>, split."""
    if (path / "train").is_dir():
        other = next((path / name for name in ("val", "test") if (path / name).is_dir()), None)
        if other is None:
            raise ValueError(f"{path} has the folder train, but neither val nor test")
        (train, classes), (test, others) = _files(path / "train"), _files(other)
        if classes != others:
            only = sorted({*classes} ^ {*others})
            raise ValueError(f"{path}: train and {other.name} must have the same classes, only one has {_few(only)}")
    else:
        whole, classes = _files(path)
        train, test = (FileImages([whole.paths[i] for i in part], whole.labels[part])
                       for part in _split(len(whole.paths)))  # fmt: skip
    for images in (train, test):
        images.check()
    name = path.resolve().name
    return Data(name, train, test, classes, 224, *IMAGENET, vit="vit_small_patch16_224", resnet="resnet50")


def _files(path: Path) -> tuple[FileImages, list[str]]:
    """Return the images of a folder and its classes, the names of the folders in it. Hidden files and folders do not
    count, and files that are no images by their name are left out."""
    classes = sorted(each.name for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
    if len(classes) < 2:
        raise ValueError(f"{path} must have a folder for each of at least two classes, got {_few(classes) or 'none'}")
    paths: list[str] = []
    labels: list[int] = []
    left_out: list[str] = []
    for label, name in enumerate(classes):
        every = sorted(_walk(path / name))
        images = [file for file in every if file.lower().endswith(_SUFFIXES)]
        left_out += [file for file in every if not file.lower().endswith(_SUFFIXES)]
        if not images:
            raise ValueError(f"{path / name} has no image, which is a file named {', '.join(_SUFFIXES)}")
        paths += images
        labels += [label] * len(images)
    if left_out and os.environ.get("RANK", "0") == "0":
        print(f"{path}: left out {len(left_out)} files that are no images: {_few(left_out)}", file=sys.stderr)
    return FileImages(paths, np.array(labels)), classes


def _walk(path: Path) -> Iterator[str]:
    """Yield all files of a folder except hidden ones. Links to folders are followed, but not in circles."""
    entered = set()
    for folder, folders, names in os.walk(path, followlinks=True):
        entered.add(os.path.realpath(folder))
        folders[:] = [name for name in folders if not name.startswith(".")
                      and os.path.realpath(os.path.join(folder, name)) not in entered]  # fmt: skip
        yield from (os.path.join(folder, name) for name in names if not name.startswith("."))


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ---- batches ----


def seed_all(*numbers: int) -> None:
    """Seed torch, numpy and random, which transforms draw from, with numbers that name what is drawn."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class TrainBatches(Dataset[tuple[Tensor, Tensor]]):
    """Batches of one process by number: images (b, 3, S, S) uint8 and targets (b, classes).

    An epoch is a new order of all images, less the rest that fills no step. A step takes the next `size` of them:
    `parts` batches, one after another, of each of the `world` processes.

    Args:
        collate: makes a batch of a list of (image, label); draws from numpy.
    """

    def __init__(
        self, images: Images, transform: Callable[[Image.Image], Tensor], collate: Callable[[list[Any]], Any],
        size: int, parts: int, seed: int, rank: int, world: int,
    ) -> None:  # fmt: skip
        self.images, self.transform, self.collate = images, transform, collate
        self.size, self.parts, self.seed, self.rank, self.world = size, parts, seed, rank, world
        self.steps = len(images.labels) // size  # of an epoch
        self._order: tuple[int, np.ndarray] | None = None

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        step, part = divmod(number, self.parts)
        epoch, step = divmod(step, self.steps)
        if self._order is None or self._order[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.images.labels))
            self._order = epoch, order
        each = self.size // (self.parts * self.world)
        first = step * self.size + (part * self.world + self.rank) * each
        samples = []
        for index in self._order[1][first : first + each].tolist():
            seed_all(self.seed, epoch, index)
            samples.append((self.transform(self.images.load(index)), int(self.images.labels[index])))
        seed_all(self.seed, epoch, first, 1)
        return self.collate(samples)


class TestBatches(Dataset[tuple[Tensor, Tensor]]):
    """Batches of the test set by number: images (b, 3, S, S) uint8 and classes (b,).

    A process has every world-th image, from its rank on. All have the same number of images, because with FSDP they
    must call the model together; what fills the last ones up has the class -1.
    """

    def __init__(
        self, images: Images, transform: Callable[[Image.Image], Tensor], size: int, rank: int, world: int
    ) -> None:
        self.images, self.transform, self.size = images, transform, size
        self.indices = range(len(images.labels) + -len(images.labels) % world)[rank::world]

    def __len__(self) -> int:
        return -(-len(self.indices) // self.size)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        chosen, labels = self.indices[number * self.size : (number + 1) * self.size], self.images.labels
        images = [self.transform(self.images.load(index % len(labels))) for index in chosen]
        return torch.stack(images), torch.tensor([labels[i] if i < len(labels) else -1 for i in chosen])


@contextlib.contextmanager
def batches(
    dataset: Dataset[Any], numbers: range, workers: int, device: torch.device
) -> Iterator[Iterator[tuple[Tensor, ...]]]:
    """Yield an iterator over these batches, on the device. So many processes prepare them, and end with the context.

    Raises:
        ValueError: an image that cannot be read, also by one of the processes.
    """
    iterator = iter(
        DataLoader(
            dataset, batch_size=None, sampler=numbers, num_workers=workers, pin_memory=device.type == "cuda",
            worker_init_fn=_worker,
        )
    )  # fmt: skip
    try:
        yield (tuple(tensor.to(device, non_blocking=True) for tensor in batch) for batch in iterator)
    except ValueError as error:  # a worker's has its traceback in its text, and its own words last
        raise ValueError(str(error).strip().splitlines()[-1].removeprefix("ValueError: ")) from None
    finally:  # an exception would keep the iterator, and so the workers, which no signal ends
        getattr(iterator, "_shutdown_workers", lambda: None)()


def _worker(_: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # may go to the whole group; the main process decides when to stop
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
