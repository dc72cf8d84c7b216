"""The benchmark of sparse networks: what a step is compared with."""

from __future__ import annotations

from benchmarks import sparse


def test_steps_are_compared_with_an_eager_plain_step(monkeypatch):
    """Seconds are made up: 2 of an eager plain step, 1 of a compiled one, 6 of a sparse one."""
    monkeypatch.setattr(
        sparse, "plain_seconds", lambda *_, compiled=False: 1.0 if compiled else 2.0
    )
    monkeypatch.setattr(sparse, "sparse_seconds", lambda *_: 6.0)
    said = []
    found, bars = sparse.steps(True, said.append)
    assert found["ratios"]["plain, compile"] == 0.5
    assert {bar["what"]: bar["measured"] for bar in bars} == {
        f"(a) step of {name}, compiled, in eager plain steps": 3.0 for name in sparse.BARS
    }
    assert all("eager plain steps" in line for line in said)
