"""FedRolex: HeteroFL with a window of channels that moves on by one in every round.

Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction", NeurIPS 2022. In
round t a level holds the channels (t + j) mod O for j = 0 .. ceil(r O) - 1 of each layer with O channels, so that after
O rounds every channel has been trained equally often.

1. All levels of a round start at the same channel: a narrower window is the beginning of a wider one.
2. Layers of one stage move together, and a layer's inputs are its predecessor's outputs in the same order, so residual
   additions line up, also where the window wraps.
3. Everything else is as in HeteroFL, whose options apply. In round 0 it is HeteroFL.
4. A level is evaluated as the sub-model of the window that it has just trained.
5. With InCo, updates are mixed in the server's coordinates.

Differences: the released code moves backwards (``rolex.direction = "backward"``); the paper rounds r O down and weighs
clients by examples (``aggregate.weighting = "samples"``). The code weighs norm layers and the head by how often a
position was updated before. That number h belongs to the position and is the same for all who hold it, so that
sum_i h x_i / sum_i h is the plain mean: there is nothing to choose. (It counts on within a round by accident, which
favours later clients a little in the first rounds; not copied.) Its other choices, weights by width and offsets that
differ from layer to layer, which break residual additions, are left out. The code evaluates the full model with the
statistics of test batches; here each level's are measured as in HeteroFL.
"""

from typing import Literal

from incofl.method import Method
from incofl.methods.heterofl import HeteroFL, HeteroFLServer
from incofl.options import options
from incofl.split import WidthRule, Window


@options("rolex")
class Rolling(WidthRule):
    """Width splitting with a window that moves.

    Attributes:
        direction: the direction in which the window moves: ``forward`` (the paper) or ``backward`` (its released code).
    """

    direction: Literal["forward", "backward"] = "forward"

    @property
    def window(self) -> Window:
        """Where the channels of a level lie."""
        return "rolling" if self.direction == "forward" else "rolling-back"


fedrolex = Method(
    "fedrolex",
    HeteroFL(),
    HeteroFLServer(buffers="static"),
    Rolling(),
)
