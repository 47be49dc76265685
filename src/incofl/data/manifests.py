"""What is published of the data sets (``manifests.toml``): places, class names, class counts, checksums."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Published:
    """What is known of a data set before it is read; everything may be unknown."""

    summary: str = ""  # one line for lists of data sets
    files: tuple[str, ...] = ()  # patterns of its files under data.root, the cached copy first; none: it is embedded
    names: tuple[str, ...] = ()  # names of the classes; none: numbers
    train: tuple[int, ...] = ()  # training examples of each class
    test: tuple[int, ...] = ()  # test examples of each class
    hub: dict[str, str] = field(default_factory=dict)  # repository on the Hugging Face Hub, subset and revision
    checksums: dict[str, str] = field(default_factory=dict)  # MD5 by file name

    def found(self, root: Path) -> list[Path]:
        """Those of its files that exist."""
        return [path for pattern in self.files for path in sorted(root.glob(pattern))]


def _read_manifests() -> dict[str, Published]:
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    for name, table in tables.items():
        table |= {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
        if "files" in table:
            table["files"] = (f"{name}.safetensors", *table["files"])
    return {name: Published(**table) for name, table in tables.items()}


PUBLISHED = _read_manifests()
