"""Dense Jacobians, one row at a time, and the networks they are computed for."""

import torch
from torch import nn

import subbayes
from subbayes import Network
from subbayes.curvature.jacobian import curvature_root
from subbayes.utils.trees import n_rows, take


def dense(network: Network, inputs) -> torch.Tensor:
    """The Jacobian (N, C, D), one row at a time, by autograd in the whole weight vector."""
    jacobians = []
    for n in range(n_rows(inputs)):
        row, w = take(inputs, slice(n, n + 1)), network.weights.clone().requires_grad_()
        f = network(w, row)[0]
        jacobians.append(torch.stack([torch.autograd.grad(v, w, retain_graph=True)[0] for v in f]))
    return torch.stack(jacobians)


def dense_rows(network, likelihood, inputs, y) -> torch.Tensor:
    """V: (N R, D), each row's root times its Jacobian."""
    J = dense(network, inputs)
    outputs = network(network.weights, inputs).detach()
    return torch.einsum("ncr,ncd->nrd", curvature_root(likelihood, outputs, y), J).flatten(0, 1)


def dense_product_rows(network, likelihood, inputs, y) -> torch.Tensor:
    """V as products have it, (N C, D): with roots in closed form where there are some."""
    J, outputs = dense(network, inputs), network(network.weights, inputs).detach().double()
    each = torch.eye(outputs.shape[1]).double()[:, None].expand(-1, len(outputs), -1)
    own = likelihood.for_targets(y)
    R = own.curvature_blocks(outputs).root().times(each).permute(1, 2, 0)
    torch.testing.assert_close(R @ R.mT, own.curvature(outputs), rtol=1e-9, atol=1e-12)
    return torch.einsum("ncr,ncd->nrd", R, J.double()).flatten(0, 1)


class Many(nn.Module):
    """One of each kind that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 6, 3, padding="same", dilation=2, groups=2)
        self.batch = nn.BatchNorm1d(6)
        self.second = nn.Conv1d(6, 4, 2, stride=2, padding=1, padding_mode="circular")
        self.group, self.layer = nn.GroupNorm(2, 4), nn.LayerNorm([4, 4])
        self.images = nn.Conv2d(1, 2, (2, 3), stride=(1, 2), bias=False)
        self.head = nn.Linear(6, 3)
        self.batch.running_mean.uniform_(-1, 1)
        self.batch.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu_(self.batch(self.first(x)))
        x = self.layer(self.group(self.second(x)).sin_())
        return self.head(torch.tanh(self.images(x[:, None])).flatten(1)[:, :6])


def problem(seed: int, classes: int = 1, width: int = 6, n: int = 15):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    new = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    net = Network(subbayes.MLP(3, (width,), classes, "tanh", seed=seed).double())
    if classes > 1:
        return net, subbayes.likelihoods.Categorical(), (x, torch.arange(n) % classes), new
    return net, subbayes.likelihoods.Gaussian(0.3), (x, x[:, 0]), new
