"""Networks of a semi-structured model that read images or other tensors from a Dataset."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from subbayes import InputError, Training
from subbayes.inference.configuration import Sampling
from subbayes.semistructured import SemiStructuredRegression, SemiStructuredSubspace

SHORT = Training(epochs=5, batch_size=None, weight_decay=1e-4, clip_norm=None)
QUICK = {
    "inference": "elliptical-slice",
    "sampling": Sampling(draws=10, chains=2, warmup=5, progress=False, mode="eager"),
    "training": SHORT,
}


def table(n=20):
    rng = np.random.default_rng(0)
    return pd.DataFrame({name: rng.normal(size=n) for name in ("x", "u", "y")})


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))


class Items(Dataset):
    """A map-style Dataset of a list, which counts what is read."""

    def __init__(self, items):
        self.items, self.read = items, []

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        self.read.append(i)
        return self.items[i]


def test_a_dataset_is_read_as_the_tensor_of_its_items():
    frame = table()
    frame.loc[[3, 5], "x"] = np.nan
    tensor = torch.tensor(frame[["u"]].to_numpy(), dtype=torch.float32)
    labelled = Items([(row.double().numpy(), 7) for row in tensor])
    kept, own = frame.dropna().reset_index(drop=True), tensor[torch.tensor(frame.x.notna())]
    model = SemiStructuredRegression("y ~ x + net(net)", networks={"net": net()})
    for given in (labelled, tensor.numpy(), TensorDataset(tensor, torch.zeros(20))):
        with pytest.warns(UserWarning, match="2 of 20 rows"):
            found = model.specification.prepare(frame, {"net": given})
        assert torch.equal(found.inputs["deep net"], own)
    assert labelled.read == list(range(20))
    model.fit(kept, inputs={"net": Items(list(own))}, **QUICK, subspace=SemiStructuredSubspace(2))
    np.testing.assert_array_equal(
        model.score_samples(kept, inputs={"net": TensorDataset(own)}),
        model.score_samples(kept, inputs={"net": own}),
    )
    pd.testing.assert_frame_equal(
        model.contributions(kept, {"net": TensorDataset(own)}),
        model.contributions(kept, {"net": own}),
    )


def test_a_dataset_of_another_length_raises():
    class Endless(Dataset):
        def __getitem__(self, i):
            return torch.zeros(1)

    class Stream(IterableDataset):
        def __len__(self):
            return 20

        def __iter__(self):
            return iter(zeros)

    frame, zeros = table(), [torch.zeros(1)] * 20
    for given, said in (
        (Items(zeros[1:]), r"inputs\['net'\]: expected 20 rows, as the data frame has, got 19"),
        (Endless(), "a map-style Dataset, with a length, got Endless"),
        (Stream(), "a map-style Dataset, with a length, got Stream"),
        (
            Items([*zeros[1:], torch.zeros(2)]),
            r"inputs\['net'\]\[19\]: expected shape \(1,\) and torch.float32 as in the first entry",
        ),
        (Items([*zeros[1:], torch.zeros(1, dtype=torch.uint8)]), "got shape .* and torch.uint8"),
        (Items(["a.png"] * 20), r"inputs\['net'\]\[0\]: expected a tensor or an array"),
    ):
        with pytest.raises((InputError, TypeError), match=said):
            SemiStructuredRegression("y ~ x + net(net)", networks={"net": net()}).fit(
                frame, inputs={"net": given}, **QUICK
            )
