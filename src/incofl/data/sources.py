"""The table of data sets."""

import dataclasses
import tomllib
from pathlib import Path

from incofl.data import images, texts
from incofl.data.pipeline import ImagePipeline, Tokens
from incofl.data.source import Source
from incofl.errors import DataError, nearest

_DIGITS = ImagePipeline(maximum=16, mean=(0.3048,), std=(0.3758,))
_GREY, _GREY_LARGE = ImagePipeline(resize=32), ImagePipeline(channels=3)
_CIFAR10 = ImagePipeline(
    mean=(0.49139968, 0.48215827, 0.44653124), std=(0.24703233, 0.24348505, 0.26158768), pad=4, flip=True, cutout=16
)
_CINIC10 = ImagePipeline(
    mean=(0.47889522, 0.47227842, 0.43047404), std=(0.24205776, 0.23828046, 0.25874835), pad=4, flip=True
)
_SVHN = ImagePipeline(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), cutout=16)
# For the paper's ViTs, at 224 x 224; it mirrors the digits of SVHN too.
_LARGE = ImagePipeline(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), flip=True, crop=True)

_SOURCES = (
    Source("digits", (1, 8, 8), _DIGITS, large=_DIGITS, width=0.25, stem="small"),
    Source("mnist", (1, 32, 32), _GREY, images.mnist, large=_GREY_LARGE),
    Source("fashion-mnist", (1, 32, 32), _GREY, images.mnist, large=_GREY_LARGE),
    Source("cifar10", (3, 32, 32), _CIFAR10, images.cifar10, large=_LARGE),
    Source("cinic10", (3, 32, 32), _CINIC10, images.cinic10, large=_LARGE),
    Source("svhn", (3, 32, 32), _SVHN, images.svhn, large=_LARGE),
    Source(
        "shakespeare",
        (texts.WINDOW,),
        Tokens(),
        texts.shakespeare,
        classes=texts.CHARACTER_TOKENS,
        vocabulary=texts.CHARACTER_TOKENS,
        model="lstm",
        sequence=True,
        clients=0,
        decode=texts.decode,
    ),
    *(
        Source(name, (length,), Tokens(), read, 2, vocabulary=texts.WORD_TOKENS, model="text-transformer")
        for name, length, read in (("sst2", texts.SST2_LENGTH, texts.sst2), ("imdb", texts.IMDB_LENGTH, texts.imdb))
    ),
)
_MANIFESTS = tomllib.loads(Path(__file__).with_name("manifests.toml").read_text(encoding="utf-8"))
DATASETS = {source.name: dataclasses.replace(source, **_MANIFESTS[source.name]) for source in _SOURCES}


def find_source(name: str) -> Source:
    """Returns the data set of that name; an unknown one is one line with the nearest name."""
    if name not in DATASETS:
        raise DataError(f"data.name: got {name!r}{nearest(name, DATASETS)}")
    return DATASETS[name]
