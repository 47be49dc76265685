"""Components 2 and 3 of the paper: internal cross-layer gradients and the alleviation of their divergence.

Imports only ``tensors``, ``layout`` and ``errors``: a reader of the paper can read this room alone.
"""

from incofl.inco.cross_layer import mix
from incofl.inco.transform import InCo

__all__ = ["InCo", "mix"]
