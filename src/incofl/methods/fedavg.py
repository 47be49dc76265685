"""FedAvg, and what becomes of it when clients are unequal.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017. ``fedavg``
averages each size with itself only, ``heteroavg`` every position of one server model over the clients that hold it.

Differences: clients weigh equally, as in InCo's released code; by examples in the paper and in NIID-Bench
(``aggregate.weighting``). InCo's AllSmall is the narrowest model of width splitting, which is no member of its fleet.
"""

from incofl.method import Method, ServerRule

fedavg = Method("fedavg", server=ServerRule(separate=True))
heteroavg = Method("heteroavg")
allsmall = Method("allsmall", level="smallest")
alllarge = Method("alllarge", level="largest")
largestonly = Method("largestonly", level="largest-only")
