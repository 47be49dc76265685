"""FedRolex: HeteroFL with a window of channels that moves by one in every round.

Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction", NeurIPS 2022. In
round t a level holds the channels (t + j) mod O, j = 0 .. ceil(r O) - 1, of each layer with O channels.

Differences: the released code moves backwards (``rolex.direction``); the paper rounds r O down and weighs by examples.
The code weighs some layers by how often a position was updated before, which all its holders share: it cancels in the
mean. Its weights by width, offsets per layer and statistics of test batches are left out.
"""

from typing import Literal

from incofl.method import Method
from incofl.methods.heterofl import HeteroFL, HeteroFLServer
from incofl.options import options
from incofl.split import WidthRule, Window


@options("rolex")
class Rolling(WidthRule):
    """Width splitting with a window that moves."""

    # the direction in which the window moves: ``forward`` (the paper) or ``backward`` (its released code)
    direction: Literal["forward", "backward"] = "forward"

    @property
    def window(self) -> Window:
        return "rolling" if self.direction == "forward" else "rolling-back"


fedrolex = Method("fedrolex", HeteroFL(), HeteroFLServer(buffers="static"), Rolling())
