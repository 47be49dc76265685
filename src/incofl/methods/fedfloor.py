"""FedFloor: one model in slices, of which the smallest is trained as if everybody trained the smallest.

Ours. It is HeteroAvg with four parts, each of which can be had for any method:

- an identity start (``split.start``): before the first round every level computes the function of the smallest;
- anchoring (``[anchor]``): clients of larger levels train the smallest path of their model, too. The gradient of their
  own loss does not reach its parameters (``share = 0``), so that the smallest level is trained exactly as ``allsmall``
  trains it, bit for bit, and what larger levels learn is added to it. Then come three epochs ``beyond``, in which only
  what the smallest path does not hold learns: without them the largest clients, of whom a cohort has few, would learn
  less than if they were alone;
- statistics of batch norm that levels of one width share (``buffers = by-width``), but for the smallest, whose own come
  from all clients;
- the best path (``eval.best_path``): a device uses the best of the models that it holds, that of its own level or a
  smaller one. So that no device is worse off than with the smallest, also where few large clients have learned little.

A model without residual branches that can be closed starts at random.

Relatives: the sandwich of slimmable networks (Yu and Huang, "Universally Slimmable Networks", ICCV 2019), and residual
branches that start at zero (Goyal et al., "Accurate, Large Minibatch SGD", 2017). Differences: slimmable networks add
the gradients of all widths; here that of a larger level does not reach what the smallest holds.
"""

from incofl.anchor import Anchor
from incofl.method import Method, ServerRule
from incofl.split import SplitRule

fedfloor = Method(
    "fedfloor",
    server=ServerRule(buffers="by-width"),
    split=SplitRule(start="identity-if-possible"),
    anchor=Anchor(share=0, beyond=3),
    best_path=True,
)
