"""The problem of the benchmark of subnetworks, and its bars where the peer is not installed."""

import torch

from benchmarks import laplace_subnetwork as benchmark


def test_the_network_has_the_size_it_claims():
    assert sum(p.numel() for p in benchmark.residual_cnn().parameters()) == 622_058


def test_masks_are_the_largest_variances_and_weights_at_random():
    variance = torch.rand(2000, generator=torch.Generator().manual_seed(0))
    found = benchmark.masks(variance)
    assert set(found) == {"100 selected", "100 at random", "1000 selected", "1000 at random"}
    assert found["100 selected"].tolist() == sorted(variance.topk(100).indices.tolist())
    assert all(len(mask.unique()) == len(mask) for mask in found.values())


def test_bars_that_could_not_be_measured_do_not_hold_and_say_so():
    bars = benchmark._absent()
    assert len(bars) == 7
    assert not any(bar["holds"] for bar in bars)
    assert all("laplace-torch is not installed" in bar["what"] for bar in bars)


def test_images_without_the_data_are_stripes_of_ten_widths(tmp_path):
    x, y = benchmark.images(30, str(tmp_path))
    assert x.shape == (30, 1, 28, 28)
    assert y.dtype == torch.int64
    assert int(y.max()) <= 9
