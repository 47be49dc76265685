"""FedNova where clients hold different parts of the model."""

import pytest
import torch

from incofl.client import Upload
from incofl.methods import METHODS
from incofl.models import ModelOptions, make_model
from incofl.server import Server
from incofl.split import Splitter

MODEL = make_model("tiny-resnet", ModelOptions(width=0.25, shape=(1, 8, 8)))  # two channels in stage 1
SPLITTER = Splitter((0.5, 1.0), ((1, 1), (1, 1)))


def upload(level: int, update: list[float], buffer: list[float], examples: int, length: float) -> Upload:
    """Of one weight and one running mean, of as many channels as the level has."""
    piece = SPLITTER.slice(MODEL.layout, level, 0)
    values = {"bn1.weight": torch.tensor(update)}, {"bn1.running_mean": torch.tensor(buffer)}
    return Upload(level, level, piece, *values, examples, 1, 0.0, normaliser=length)


def test_lengths_and_shares_are_those_of_the_holders_and_buffers_have_no_length() -> None:
    """A narrow client of 1 example and 2 steps, a wide one of 3 examples and 6 steps.

    Channel 0, which both hold: (1/4 * 2 + 3/4 * 6) (1/4 * 4/2 + 3/4 * 12/6) = 5 * 2 = 10. Channel 1 is the wide one's
    alone: 6 * 18/6 = 18; with the mean length of all clients it would be 5 * 3 = 15. Statistics are the plain mean
    weighted by examples, (1 + 3 * 5) / 4 = 4; normalised they would be 5 (1/4 * 1/2 + 3/4 * 5/6) = 3.75.
    """
    server = Server(MODEL.layout, MODEL.initial)
    uploads = [upload(0, [4.0], [1.0], 1, 2.0), upload(1, [12.0, 18.0], [5.0, 7.0], 3, 6.0)]
    after = server.advance(METHODS["heteronova"].server.aggregate(server, [uploads]))
    moved = after.shared["bn1.weight"] - server.shared["bn1.weight"]
    assert moved.tolist() == pytest.approx([10.0, 18.0])
    assert after.shared["bn1.running_mean"].tolist() == pytest.approx([4.0, 7.0])
