"""Federated averaging, and what becomes of it when clients are unequal.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017; in the
forms that the InCo paper (Chan et al., ICLR 2024) compares:

- ``fedavg``: without splitting; each architecture is averaged with itself only.
- ``heteroavg``: with splitting; every position of the server model is averaged over the clients that hold it.
- ``incoavg``: heteroavg, with InCo Aggregation on the server.
- ``allsmall``, ``alllarge``: everybody trains the smallest, or the largest, level of the split in use. The second
  ignores what devices can afford: an upper bound that a real fleet cannot reach.
- ``largestonly``: only the clients that can hold the largest level take part, on the same partition; a cohort has as
  many of them as there are, at most the configured number.

``fedavg``, ``allsmall`` and ``largestonly`` are what one can do without splitting: the baselines of every comparison.

Differences: clients weigh equally by default, as in InCo's released code (``aggregate.weighting = "samples"`` for
McMahan's rule and NIID-Bench's); batch-norm statistics follow the ``buffers`` policy. The paper's AllSmall is the
narrowest model of width splitting (``split.kind = "hetero"``), which is no member of its fleet.
"""

from incofl.method import Method, ServerRule

fedavg = Method("fedavg", server=ServerRule(separate=True))
heteroavg = Method("heteroavg")
allsmall = Method("allsmall", level="smallest")
alllarge = Method("alllarge", level="largest")
largestonly = Method("largestonly", level="largest-only")
