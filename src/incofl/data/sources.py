"""The table of data sets."""

from pathlib import Path

import numpy as np
import torch

from incofl.data import characters, images, published, words
from incofl.data.cinic10 import cinic10
from incofl.data.dataset import Data, Source
from incofl.data.pipeline import ImagePipeline, ImageViews, Texts
from incofl.data.svhn import svhn
from incofl.errors import DataError, nearest

# Of the paper's ViTs, at 224 x 224; it mirrors the digits of SVHN too.
_LARGE = ImagePipeline(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), flip=True, crop=True)

DATASETS: dict[str, Source] = {
    "digits": Source(
        summary="1,797 handwritten digits, 8x8, embedded (scikit-learn)",
        classes=10,
        view=ImageViews(
            (1, 8, 8),
            ImagePipeline(maximum=16, mean=(0.3048,), std=(0.3758,)),
            ImagePipeline(maximum=16, mean=(0.3048,), std=(0.3758,)),
        ),
        load=images.digits,
        published=published.DIGITS,
        width=0.25,
        stem="small",
    ),
    "mnist": Source(
        summary="70,000 handwritten digits, 28x28 shown at 32x32 (idx files in data.root/mnist)",
        classes=10,
        view=ImageViews((1, 32, 32), ImagePipeline(resize=32), ImagePipeline(channels=3)),
        load=images.mnist,
        published=published.MNIST,
    ),
    "fashion-mnist": Source(
        summary="70,000 articles of clothing, 28x28 shown at 32x32 (idx files in data.root/fashion-mnist)",
        classes=10,
        view=ImageViews((1, 32, 32), ImagePipeline(resize=32), ImagePipeline(channels=3)),
        load=images.fashion_mnist,
        published=published.FASHION_MNIST,
    ),
    "cifar10": Source(
        summary="60,000 photographs, 32x32 (binary or python version in data.root)",
        classes=10,
        view=ImageViews(
            (3, 32, 32),
            ImagePipeline(
                mean=(0.49139968, 0.48215827, 0.44653124),
                std=(0.24703233, 0.24348505, 0.26158768),
                pad=4,
                flip=True,
                cutout=16,
            ),
            _LARGE,
        ),
        load=images.cifar10,
        published=published.CIFAR10,
    ),
    "cinic10": Source(
        summary="180,000 photographs, 32x32 (folders train and test in data.root/cinic-10)",
        classes=10,
        view=ImageViews(
            (3, 32, 32),
            ImagePipeline(
                mean=(0.47889522, 0.47227842, 0.43047404),
                std=(0.24205776, 0.23828046, 0.25874835),
                pad=4,
                flip=True,
            ),
            _LARGE,
        ),
        load=cinic10,
        published=published.CINIC10,
    ),
    "svhn": Source(
        summary="99,289 digits of house numbers, 32x32 (train_32x32.mat and test_32x32.mat in data.root/svhn)",
        classes=10,
        view=ImageViews((3, 32, 32), ImagePipeline(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), cutout=16), _LARGE),
        load=svhn,
        published=published.SVHN,
    ),
    "shakespeare": Source(
        summary="next character of a play, one client per speaking role (tinyshakespeare.txt in data.root)",
        classes=characters.VOCABULARY,
        view=Texts(characters.WINDOW),
        load=characters.shakespeare,
        vocabulary=characters.VOCABULARY,
        model="lstm",
        sequence=True,
        natural=True,
        published=published.SHAKESPEARE,
        decode=characters.decode,
    ),
    "sst2": Source(
        summary="sentiment of phrases of film reviews, two classes (tsv files in data.root/sst2)",
        classes=2,
        view=Texts(words.SST2_LENGTH),
        load=words.sst2,
        published=published.SST2,
        vocabulary=words.VOCABULARY,
        model="text-transformer",
    ),
    "imdb": Source(
        summary="sentiment of 50,000 film reviews, two classes (reviews.json in data.root/imdb)",
        classes=2,
        view=Texts(words.IMDB_LENGTH),
        load=words.imdb,
        published=published.IMDB,
        vocabulary=words.VOCABULARY,
        model="text-transformer",
    ),
}


def find_source(name: str) -> Source:
    """The data set of that name, or one clear line with the nearest name."""
    if name not in DATASETS:
        raise DataError(f"data.name: got {name!r}{nearest(name, DATASETS)}")
    return DATASETS[name]


def load_dataset(name: str, root: Path, limit: int | None = None, seed: int = 0, side: int | None = None) -> Data:
    """Reads a data set; ``limit`` keeps that many training examples, drawn by ``seed``; images are seen at ``side``."""
    source = find_source(name)
    train, test = source.load(root)
    if limit is not None and limit < len(train):
        keep = torch.from_numpy(np.sort(np.random.default_rng(seed).permutation(len(train))[:limit]))
        train = train.pick(keep)
    return Data(train, test, classes=source.classes, pipeline=source.view(side).pipeline, name=name)
