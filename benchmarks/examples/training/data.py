"""Images and classes from CIFAR archives, folders of images, and scikit-learn's digits; batches of them.

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
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from . import cifar

DIGITS = "digits"
HELD_OUT = 0.2  # share of a data set without a test set of its own
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Images(Protocol):
    """Images and their classes, `labels` (n,)."""

    labels: np.ndarray

    def load(self, index: int) -> Image.Image: ...


@dataclass
class ArrayImages:
    """images: (n, 3, S, S) uint8."""

    images: np.ndarray
    labels: np.ndarray

    def load(self, index: int) -> Image.Image:
        return Image.fromarray(np.ascontiguousarray(self.images[index].transpose(1, 2, 0)))


@dataclass
class FileImages:
    paths: list[str]
    labels: np.ndarray

    def load(self, index: int) -> Image.Image:
        path = self.paths[index]
        try:
            with Image.open(path) as image:
                if image.mode.startswith(("I", "F")):
                    raise ValueError(f"mode {image.mode} has more than 8 bits")
                return image.convert("RGB")
        except Exception as error:  # decoders of damaged files raise many kinds of errors
            raise ValueError(f"{path} is no readable image: {error}") from None


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
    """Read "digits", a CIFAR archive, or a folder of images.

    Raises:
        ValueError, OSError, ImportError: it cannot be read; the message names the file.
    """
    if source == DIGITS:
        return _digits()
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(2, "No such file or folder", source)
    if not cifar.holds_cifar(path):
        return _folder(path)
    found = cifar.read(path)
    train, test = ArrayImages(*found.train), ArrayImages(*found.test)
    return Data(found.name, train, test, found.classes, cifar.SIDE, *_statistics(found.train.images),
                vit="vit_cifar_small", resnet="resnet18")  # fmt: skip


def _statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    counts = np.stack([np.bincount(images[:, c].reshape(-1), minlength=256) for c in range(images.shape[1])])
    levels = np.arange(256) / 255
    mean = counts @ levels / counts.sum(1)
    std = np.sqrt(counts @ levels**2 / counts.sum(1) - mean**2)
    return tuple(mean.round(4).tolist()), tuple(std.round(4).tolist())


def _digits() -> Data:
    """Return scikit-learn's 1,797 handwritten digits, (8, 8) and grey, as RGB."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = np.rint(found.images * (255 / 16)).astype(np.uint8)[:, None].repeat(3, axis=1)
    train, test = _split(len(images))
    # With patch_init="kaiming", `make training` ended at 84 % instead of 93 %: positions are small next to such patches
    options = {"patch_size": 2, "embed_dim": 96, "depth": 4, "num_heads": 3, "patch_init": ""}
    return Data(
        "digits", ArrayImages(images[train], found.target[train]), ArrayImages(images[test], found.target[test]),
        [str(name) for name in found.target_names], 8, *_statistics(images[train]),
        vit="vit_cifar_small", resnet="resnet18", mirrored=False, crop=0.7, rand_augment=5, options=options,
    )  # fmt: skip


def _split(count: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng(0).permutation(count)
    held_out = max(int(count * HELD_OUT), 1)
    return order[held_out:], order[:held_out]


def _folder(path: Path) -> Data:
    """Return the images in path/train/<class> and path/val/<class> (or test), or those in path/<class>, split."""
    if (path / "train").is_dir():
        other = next((path / name for name in ("val", "test") if (path / name).is_dir()), None)
        if other is None:
            raise ValueError(f"{path} has the folder train, but neither val nor test")
        sets = [_visible(path / "train"), _visible(other)]
        if sets[0].classes != sets[1].classes:
            raise ValueError(f"{path}: the folders of classes in train and in {other.name} are not the same")
        train, test = (_files(found.samples) for found in sets)
    else:
        sets = [_visible(path)]
        every = _files(sets[0].samples)
        train, test = (FileImages([every.paths[i] for i in part], every.labels[part])
                       for part in _split(len(every.paths)))  # fmt: skip
    return Data(path.name, train, test, sets[0].classes, 224, *IMAGENET, vit="vit_small_patch16_224", resnet="resnet50")


def _visible(path: Path) -> Any:
    """Return torchvision's ImageFolder without hidden files and folders."""
    from torchvision.datasets.folder import IMG_EXTENSIONS, ImageFolder, has_file_allowed_extension

    class Visible(ImageFolder):
        def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
            names = [name for name in super().find_classes(directory)[0] if not name.startswith(".")]
            return names, {name: i for i, name in enumerate(names)}

    def allowed(file: str) -> bool:
        return not Path(file).name.startswith(".") and has_file_allowed_extension(file, IMG_EXTENSIONS)

    return Visible(str(path), is_valid_file=allowed)


def _files(samples: Sequence[tuple[str, int]]) -> FileImages:
    return FileImages([file for file, _ in samples], np.array([label for _, label in samples]))


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
