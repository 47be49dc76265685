"""Your own method: FedAvg over slices whose clients hold their weights near zero, with InCo on the server.

The round function does not know that it is new. CONTRIBUTING.md says how to put it into the table of methods.
"""

import torch

import incofl
from incofl.options import options


@options("shrink")
class Shrink(incofl.ClientRule):
    """Local training that shrinks all weights a little after every step.

    Attributes:
        rate: the share of a weight that a step takes away.
    """

    rate: float = 1e-4

    @torch.no_grad()
    def correct(self, local: incofl.Local) -> None:
        """After the optimiser's step."""
        for parameter in local.parameters.values():
            parameter.mul_(1 - self.rate)


shrinkavg = incofl.Method("shrinkavg", client=Shrink())

if __name__ == "__main__":
    for method in (shrinkavg, shrinkavg.then(incofl.InCo(rule="theorem"))):
        result = incofl.run({"rounds": 10}, out=f"runs/own-{method.name}", method=method, resume=True, progress=False)
        print(f"{method.name:14}  accuracy {result['accuracy']:.3f} after {result['rounds']} rounds")
