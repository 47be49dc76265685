"""The table of data sets."""

import functools
from collections.abc import Callable
from typing import Any

from incofl.data import images, texts
from incofl.data.cache import Reader, read_cache_first
from incofl.data.manifests import PUBLISHED
from incofl.data.pipeline import ImagePipeline, ImageViews, Texts
from incofl.data.source import Source, View
from incofl.errors import DataError, nearest

_DIGITS = ImagePipeline(maximum=16, mean=(0.3048,), std=(0.3758,))
_CIFAR10 = ImagePipeline(
    mean=(0.49139968, 0.48215827, 0.44653124), std=(0.24703233, 0.24348505, 0.26158768), pad=4, flip=True, cutout=16
)
_CINIC10 = ImagePipeline(
    mean=(0.47889522, 0.47227842, 0.43047404), std=(0.24205776, 0.23828046, 0.25874835), pad=4, flip=True
)
_SVHN = ImagePipeline(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), cutout=16)
# For the paper's ViTs, at 224 x 224; it mirrors the digits of SVHN too.
_LARGE = ImagePipeline(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), flip=True, crop=True)
_GREY = ImageViews((1, 32, 32), ImagePipeline(resize=32), ImagePipeline(channels=3))


def _source(name: str, read: Reader, view: Callable[[int | None], View], classes: int = 10, **more: Any) -> Source:
    """Describes a data set: what is published of it, and a reader that prefers the cached copy."""
    published = PUBLISHED[name]
    load = functools.partial(read_cache_first, name, classes, read) if published.files else read
    return Source(published.summary, classes, view, load, published=published, **more)


_SENTIMENT: dict[str, Any] = {"classes": 2, "vocabulary": texts.WORD_TOKENS, "model": "text-transformer"}
DATASETS: dict[str, Source] = {
    "digits": _source("digits", images.digits, ImageViews((1, 8, 8), _DIGITS, _DIGITS), width=0.25, stem="small"),
    "mnist": _source("mnist", functools.partial(images.mnist, ("mnist", "MNIST/raw")), _GREY),
    "fashion-mnist": _source(
        "fashion-mnist", functools.partial(images.mnist, ("fashion-mnist", "FashionMNIST/raw")), _GREY
    ),
    "cifar10": _source("cifar10", images.cifar10, ImageViews((3, 32, 32), _CIFAR10, _LARGE)),
    "cinic10": _source("cinic10", images.cinic10, ImageViews((3, 32, 32), _CINIC10, _LARGE)),
    "svhn": _source("svhn", images.svhn, ImageViews((3, 32, 32), _SVHN, _LARGE)),
    "shakespeare": _source(
        "shakespeare",
        texts.shakespeare,
        Texts(texts.WINDOW),
        classes=texts.CHARACTER_TOKENS,
        vocabulary=texts.CHARACTER_TOKENS,
        model="lstm",
        sequence=True,
        natural=True,
        decode=texts.decode,
    ),
    "sst2": _source("sst2", texts.sst2, Texts(texts.SST2_LENGTH), **_SENTIMENT),
    "imdb": _source("imdb", texts.imdb, Texts(texts.IMDB_LENGTH), **_SENTIMENT),
}


def find_source(name: str) -> Source:
    """The data set of that name, or one clear line with the nearest name."""
    if name not in DATASETS:
        raise DataError(f"data.name: got {name!r}{nearest(name, DATASETS)}")
    return DATASETS[name]
