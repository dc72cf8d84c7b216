"""Record the SGD trajectory of a Lightning training, then sample its PCA subspace.

    pip install 'subbayes[lightning]'
    python examples/lightning_callback.py

To use it in your own training, add `SubspaceRecorder` to the trainer's callbacks and keep the
learning rate constant while it records.
"""

from __future__ import annotations

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import subbayes


class SubspaceRecorder(lightning.Callback):
    """Records the weights of a Lightning module after each epoch.

    Args:
        start: first epoch to record, after convergence.
        every: number of epochs between snapshots.
        network: name of the submodule to record; by default the whole module.
        **options: options of `subbayes.training.TrajectoryRecorder`.
    """

    def __init__(self, start: int = 0, every: int = 1, network: str = "", **options):
        self.start, self.every, self.network = start, every, network
        self.recorder = subbayes.training.TrajectoryRecorder(**options)

    def on_train_epoch_end(self, trainer, pl_module):
        """Record a snapshot."""
        past = trainer.current_epoch - self.start
        if past >= 0 and past % self.every == 0:
            self.recorder.update(pl_module.get_submodule(self.network))

    def state_dict(self):
        """Return the snapshots for a Lightning checkpoint, so that recording can be resumed."""
        tensors, config = self.recorder.state()
        return {"tensors": tensors, "config": config}

    def load_state_dict(self, state):
        """Restore the snapshots from a checkpoint."""
        self.recorder = subbayes.training.TrajectoryRecorder.from_state(
            state["tensors"], state["config"], self.recorder.parameters
        )


class Regression(lightning.LightningModule):
    """A small regression network."""

    def __init__(self, noise: float = 0.2):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))
        self.likelihood = subbayes.likelihoods.Gaussian(noise=noise)

    def training_step(self, batch, _):
        """Return the mean negative log-likelihood of a batch."""
        x, y = batch
        loss = -self.likelihood.log_prob(self.net(x), y).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        """Return SGD with a constant learning rate, which explores the region of a solution."""
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


def main(epochs: int = 90, draws: int = 2000) -> subbayes.Predictive:
    """Train, record, sample, predict."""
    torch.manual_seed(0)
    x = torch.rand(200, 1) * 4 - 2
    y = torch.sin(2 * x[:, 0]) + 0.2 * torch.randn(200)
    loader = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)

    module, callback = Regression(), SubspaceRecorder(start=epochs // 3, network="net")
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)

    subspace = callback.recorder.pca(rank=3)
    # The subspace is centred on the mean of the trajectory; BatchNorm layers, if there were any,
    # would get statistics of the training data at these weights.
    network = subbayes.Network(module.net).centred_on(subspace.shift, (x, y))
    posterior = subbayes.Posterior(network, module.likelihood, (x, y), subspace)
    draws = subbayes.inference.EllipticalSlice().sample(posterior, draws=draws, chains=4, seed=0)
    predictive = posterior.predict(draws, torch.linspace(-3, 3, 7)[:, None])
    print(callback.recorder)
    print(draws)
    print(predictive.to_frame().round(3))
    return predictive


if __name__ == "__main__":
    main()
