"""Data sets of the table, read from a folder."""

from pathlib import Path

from incofl.data import Data, find_source


def load_dataset(name: str, root: Path) -> Data:
    source = find_source(name)
    train, test = source.load(root)
    return Data(train, test, classes=source.classes, pipeline=source.view(None).pipeline, name=name)
