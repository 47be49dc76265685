"""Federated averaging, and what becomes of it when clients are unequal.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017; in the
forms that the InCo paper (Chan et al., ICLR 2024) compares:

- ``fedavg``: without splitting; each architecture is averaged with itself only.
- ``heteroavg``: with splitting; every position of the server model is averaged over the clients that hold it.
- ``incoavg``: heteroavg, with InCo Aggregation on the server.
- ``allsmall`` and ``alllarge``: everybody trains the smallest, or the largest, level: what one does without splitting.

Differences: clients weigh equally by default, as in InCo's released code (``aggregate.weighting = "samples"`` for
McMahan's rule and NIID-Bench's); batch-norm statistics follow the ``buffers`` policy. AllSmall is, as in the paper, the
narrowest model of hetero splitting unless ``split.kind`` says otherwise.
"""

from incofl.method import Method, ServerRule

fedavg = Method("fedavg", "FedAvg: each size is averaged with itself only", server=ServerRule(separate=True))
heteroavg = Method("heteroavg", "FedAvg over slices of one server model", extensible=True)
allsmall = Method("allsmall", "FedAvg where everybody trains the smallest size", level="smallest", split="hetero")
alllarge = Method("alllarge", "FedAvg where everybody trains the largest size", level="largest")
