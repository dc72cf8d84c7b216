"""The example callback records what a Lightning training passes, and resumes from a checkpoint."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning")

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_callback.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("lightning_callback", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(module, callbacks, folder, epochs, checkpoint=None):
    x = torch.linspace(-2, 2, 40)[:, None]
    loader = DataLoader(TensorDataset(x, torch.sin(x[:, 0])), batch_size=10)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=callbacks,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with torch.random.fork_rng(devices=[]):
        trainer.fit(module, loader, ckpt_path=checkpoint)
    trainer.save_checkpoint(folder / "last.ckpt")


@pytest.mark.filterwarnings("ignore")
def test_it_records_each_epoch_and_resumes(example, tmp_path):
    seen = []

    class Spy(lightning.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            weights = [p.detach().reshape(-1) for p in pl_module.net.parameters()]
            seen.append(torch.cat(weights).clone())

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start = example.Regression().state_dict()
    recorders = []
    for stops in ([7], [4, 7]):
        checkpoint = None
        for epochs in stops:
            module = example.Regression()
            module.load_state_dict(start)
            callback = example.SubspaceRecorder(start=1, every=2, network="net", max_snapshots=5)
            spies = [Spy()] if stops == [7] else []
            run(module, [*spies, callback], tmp_path, epochs, checkpoint)
            checkpoint = tmp_path / "last.ckpt"
        recorders.append(callback.recorder)
    whole, resumed = recorders
    assert whole.n == 3
    assert torch.allclose(whole.mean, torch.stack(seen[1::2]).mean(0), atol=1e-7)
    assert torch.equal(whole.mean, resumed.mean)
    assert torch.equal(whole.deviations, resumed.deviations)


@pytest.mark.filterwarnings("ignore")
def test_the_example_runs(example, capsys):
    with torch.random.fork_rng(devices=[]):
        predictive = example.main(epochs=12, draws=50)
    assert np.isfinite(predictive.mean).all()
    assert "TrajectoryRecorder(n=8" in capsys.readouterr().out
