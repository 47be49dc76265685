"""What is published of the data sets: class names, class counts and checksums of the files.

Checksums are MD5, as their publishers and the libraries that fetch them state; of unpacked files too where known.
"""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Published:
    """What is known of a data set besides its files; all of it may be unknown.

    Attributes:
        files: where its files lie under ``data.root``, as patterns; none: it is embedded.
        names: of the classes.
        train: examples of each class for training.
        test: likewise for testing.
        checksums: MD5 by file name.
    """

    files: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    train: tuple[int, ...] = ()
    test: tuple[int, ...] = ()
    checksums: dict[str, str] = field(default_factory=dict)

    def found(self, root: Path) -> list[Path]:
        """Those of its files that there are."""
        return [path for pattern in self.files for path in sorted(root.glob(pattern))]


NUMERALS = tuple("0123456789")
OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

DIGITS = Published(
    names=NUMERALS,
    train=(143, 146, 142, 147, 145, 146, 145, 144, 140, 144),
    test=(35, 36, 35, 36, 36, 36, 36, 35, 34, 36),
)

MNIST = Published(
    files=("mnist/*-ubyte*", "MNIST/raw/*-ubyte*"),
    names=NUMERALS,
    train=(5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
    test=(980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
    checksums={
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
)

FASHION_MNIST = Published(
    files=("fashion-mnist/*-ubyte*", "FashionMNIST/raw/*-ubyte*"),
    names=(
        *("T-shirt", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
    train=(6000,) * 10,
    test=(1000,) * 10,
    checksums={
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
)

CIFAR10 = Published(
    files=(
        *("cifar-10-batches-bin/*_batch*", "cifar10/cifar-10-batches-bin/*_batch*"),
        *("cifar-10-batches-py/*_batch*", "cifar10/cifar-10-batches-py/*_batch*"),
        *("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"),
    ),
    names=OBJECTS,
    train=(5000,) * 10,
    test=(1000,) * 10,
    checksums={
        "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
        "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
)

SVHN = Published(
    files=("svhn/*_32x32.mat", "train_32x32.mat", "test_32x32.mat"),
    names=NUMERALS,
    train=(4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
    test=(1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
    checksums={
        "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
        "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
    },
)

CINIC10 = Published(
    files=(
        *("cinic-10/*/airplane", "CINIC-10/*/airplane", "cinic10/*/airplane"),
        *("train/airplane", "test/airplane"),
    ),
    names=OBJECTS,
    train=(9000,) * 10,
    test=(9000,) * 10,
    checksums={"CINIC-10.tar.gz": "6ee4d0c996905fe93221de577967a372"},
)

SHAKESPEARE = Published(files=("tinyshakespeare.txt", "shakespeare.txt", "shakespeare/input.txt"))
SST2 = Published(files=("sst2/*.tsv",), names=("negative", "positive"))
IMDB = Published(files=("imdb/reviews.json",), names=("negative", "positive"))
