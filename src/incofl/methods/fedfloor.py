"""FedFloor: one model in slices, of which the smallest is trained as if everybody trained the smallest.

Ours. It is HeteroAvg with three parts, each of which can be had for any method:

- an identity start (``split.start``): before the first round every level computes the function of the smallest;
- anchoring (``[anchor]``): clients of larger levels train the smallest path of their model, too. The gradient of their
  own loss does not reach its parameters (``share = 0``), so that the smallest level is trained exactly as ``allsmall``
  trains it, and what larger levels learn is added to it;
- statistics of batch norm that levels of one width share (``buffers = by-width``), but for the smallest, whose own come
  from all clients.

A model without residual branches that can be closed starts at random.
"""

from incofl.anchor import Anchor
from incofl.method import Method, ServerRule
from incofl.split import SplitRule

fedfloor = Method(
    "fedfloor",
    server=ServerRule(buffers="by-width"),
    split=SplitRule(start="identity-if-possible"),
    anchor=Anchor(share=0),
)
