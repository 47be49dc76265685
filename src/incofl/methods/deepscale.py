"""A control for InCo: the update of every layer that it mixes, times a constant."""

from typing import Annotated

from annotated_types import Gt

from incofl.options import options
from incofl.tensors import Tensors
from incofl.transform import Context, Record, Stateless


@options("deepscale")
class DeepScale(Stateless):
    """Multiplies the update of the layers that InCo mixes."""

    factor: Annotated[float, Gt(0)] = 0.7  # 1: nothing changes

    name = "deepscale"
    needs_shared_model = True

    def __call__(self, update: Tensors, state: Tensors, context: Context) -> tuple[Tensors, Tensors, Record]:
        for name in context.layout.shallow.keys() & update.keys() if self.factor != 1 else ():
            update[name].mul_(self.factor)
        return update, state, {}
