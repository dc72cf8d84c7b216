"""The benchmark of linearised Laplace for loaders and last layers, without the peer."""

from benchmarks import laplace_serve as benchmark


def test_bars_without_the_peer_do_not_hold_and_say_so(monkeypatch):
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(benchmark, "_ours", lambda form, data, new: (1.0, 1.0, new))
    results, bars = benchmark.last_layer(True, lambda line: None)
    assert len(bars) == 4
    assert not any(bar["holds"] for bar in bars)
    assert all("laplace-torch is not installed" in bar["what"] for bar in bars)
    assert results["last layer, kfac: fit"] == {"subbayes": 1.0}
