"""Networks of images whose outputs are averaged over an image and its mirror image."""

from __future__ import annotations

from torch import Tensor, nn

from subbayes.networks.network import Network
from subbayes.networks.outputs import as_outputs
from subbayes.utils.types import OutputFunction


class Mirrored(nn.Module):
    r"""The average $\tfrac12 (f(x) + f(\text{mirror image of } x))$ of the outputs of a module.

    A network that was trained without mirror images is better with them, where left and right do
    not matter (Krizhevsky et al. 2012 average predictions of ten views of an image).

    Args:
        module: takes images, whose last dimension is their width.
        output: picks the tensor out of what the module returns, as for `Network`.
    """

    def __init__(self, module: nn.Module, output: OutputFunction | None = None) -> None:
        super().__init__()
        self.module = module
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of shape (N, C)."""
        each = [as_outputs(self.module(view), view, self.output) for view in (x, x.flip(-1))]
        return (each[0] + each[1]) / 2

    @classmethod
    def network(cls, network: Network) -> Network:
        """The network that averages the outputs of another one."""
        return Network(cls(network.module_with(), network.output).eval(), copy_module=False)
