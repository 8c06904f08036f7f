"""Images and classes: torchvision's data sets, folders of images, scikit-learn's digits. Batches of them.

A batch is a function of the seed and its number alone: every image is augmented with random numbers of its own, drawn
from (seed, epoch, image). So a resumed run, another number of workers and another number of processes see the same
augmented images.
"""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fastvit.study.pictures import read_rgb

DIGITS = "digits"
DOWNLOADED = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "fashion-mnist": "FashionMNIST"}  # torchvision's classes
HELD_OUT = 0.2  # share of a data set without a test set of its own
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# With patch_init="kaiming", `make training` ended at 84 % instead of 93 %: positions are small next to such patches
_SMALL_VIT = {"embed_dim": 96, "depth": 4, "num_heads": 3, "patch_init": ""}  # for images smaller than CIFAR's


@dataclass
class Images:
    """Images and their classes.

    Attributes:
        pictures: arrays (H, W, 3) or grey (H, W), uint8, or paths of files.
        labels: (n,) int64.
    """

    pictures: Sequence[Any] | np.ndarray
    labels: np.ndarray

    def load(self, index: int) -> Image.Image:
        picture = self.pictures[index]
        if not isinstance(picture, str):
            return Image.fromarray(np.ascontiguousarray(picture)).convert("RGB")
        try:
            return read_rgb(picture)
        except OSError as error:
            raise ValueError(f"{picture} cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class Data:
    """A data set.

    Attributes:
        size: side of the images in pixels.
        mean, std: of the training images by channel, in [0, 1].
        mirrored: whether an image and its mirror image are of one class.
        crop: least area that RandomResizedCrop keeps.
        rand_augment: magnitude of RandAugment that suits the data.
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
    """Read "digits", a name of DOWNLOADED, or a folder of images.

    Raises:
        ValueError, OSError, ImportError: it cannot be read; the message names the file.
    """
    if source == DIGITS:
        return _digits()
    if source in DOWNLOADED:
        return _downloaded(source)
    if Path(source).is_dir():
        return _folder(Path(source))
    names = ", ".join([DIGITS, *DOWNLOADED])
    raise ValueError(f"--data must be {names}, or a folder that exists, got {source}")


def _of_arrays(name: str, train: Images, test: Images, classes: list[str], **options: Any) -> Data:
    images = np.asarray(train.pictures)
    size = max(images.shape[1:3])
    if size < 32:
        options |= {"crop": 0.7, "options": _SMALL_VIT | {"patch_size": max(size // 4, 1)}}
    if size < 16:
        options |= {"rand_augment": 5}
    channels = images.reshape(-1, images.shape[3] if images.ndim == 4 else 1) / 255
    mean, std = (np.broadcast_to(f(channels, axis=0), 3).round(4).tolist() for f in (np.mean, np.std))
    return Data(name, train, test, classes, size, tuple(mean), tuple(std), "vit_cifar_small", "resnet18", **options)


def _digits() -> Data:
    """Return scikit-learn's 1,797 handwritten digits, (8, 8) and grey."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    train, test = (Images(images[part], digits.target[part]) for part in _split(len(images)))
    return _of_arrays(DIGITS, train, test, [str(name) for name in digits.target_names], mirrored=False)


def _split(count: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng(0).permutation(count)
    held_out = max(int(count * HELD_OUT), 1)
    return order[held_out:], order[:held_out]


def _downloaded(name: str) -> Data:
    """Return a data set by torchvision, which downloads it if it is not in the cache, and checks what it downloads."""
    from torchvision import datasets

    kind = getattr(datasets, DOWNLOADED[name])
    folder = Path(torch.hub.get_dir()).parent / "datasets"  # next to what torch.hub downloads: ~/.cache/torch
    try:
        train, test = (kind(folder, train=train, download=True) for train in (True, False))
    except Exception as error:  # a failing download and a damaged archive raise many kinds of errors
        files = (
            kind.url if name != "fashion-mnist" else f"{', '.join(f for f, _ in kind.resources)} of {kind.mirrors[0]}"
        )
        place = folder / "FashionMNIST/raw" if name == "fashion-mnist" else folder
        raise ValueError(f"{name} cannot be downloaded: put {files} into {place} yourself. {error}") from None
    arrays = [Images(np.asarray(each.data), np.asarray(each.targets)) for each in (train, test)]
    return _of_arrays(name, arrays[0], arrays[1], [str(name) for name in train.classes])


def _folder(path: Path) -> Data:
    """Return the images in path/train/<class> and path/val/<class> (or test), or those in path/<class>, split."""
    if (path / "train").is_dir():
        other = next((path / name for name in ("val", "test") if (path / name).is_dir()), None)
        if other is None:
            raise ValueError(f"{path} has the folder train, but neither val nor test")
        (train, classes), (test, others) = _files(path / "train"), _files(other)
        if classes != others:
            only = ", ".join(sorted({*classes} ^ {*others})[:3])
            raise ValueError(f"{path}: train and {other.name} must have the same classes, only one has {only}")
    else:
        whole, classes = _files(path)
        parts = _split(len(whole.pictures))
        train, test = (Images([whole.pictures[i] for i in part], whole.labels[part]) for part in parts)
    name = path.resolve().name
    return Data(name, train, test, classes, 224, *IMAGENET, vit="vit_small_patch16_224", resnet="resnet50")


def _files(path: Path) -> tuple[Images, list[str]]:
    """Return the images of a folder and its classes, the names of the folders in it."""
    from torchvision.datasets import ImageFolder

    try:
        folder = ImageFolder(path)
    except FileNotFoundError as error:
        raise ValueError(f"{error} (images go into {path}/CLASS/)") from None
    paths, labels = zip(*folder.samples, strict=True)
    return Images(paths, np.array(labels)), folder.classes


# ---- batches ----


def seed_all(*numbers: int) -> None:
    """Seed torch, numpy and random, which transforms draw from, with numbers that name what is drawn."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class TrainBatches(Dataset[tuple[Tensor, Tensor]]):
    """Batches of one process by number: images (b, 3, S, S) uint8 and targets (b, classes).

    An epoch is a new order of all images, less the rest that fills no step. A step takes the next `size` of them,
    an equal part for each of the `world` processes.

    Args:
        collate: makes a batch of a list of (image, label); draws from numpy.
    """

    def __init__(
        self, images: Images, transform: Callable[[Image.Image], Tensor], collate: Callable[[list[Any]], Any],
        size: int, seed: int, rank: int, world: int,
    ) -> None:  # fmt: skip
        self.images, self.transform, self.collate = images, transform, collate
        self.size, self.seed, self.rank, self.world = size, seed, rank, world
        self.steps = len(images.labels) // size  # of an epoch
        self._order: tuple[int, np.ndarray] | None = None

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        epoch, step = divmod(number, self.steps)
        if self._order is None or self._order[0] != epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.images.labels))
            self._order = epoch, order
        each = self.size // self.world
        first = step * self.size + self.rank * each
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the main process ends its workers
    torch.set_num_threads(1)
