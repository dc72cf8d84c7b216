"""Global generators: seeded for a time, restored, and shared by threads in turns."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from subbayes import MLP, Training
from subbayes.baselines import mc_dropout
from subbayes.likelihoods import Gaussian
from subbayes.training import train, train_many
from subbayes.utils.seeding import TorchLock, fork_rng, give_way, torch_lock


def numbers(seed: int, n: int = 20) -> list[float]:
    """Numbers of a seed, one at a time, with turns of other threads between them."""
    drawn = []
    with fork_rng(seed):
        for _ in range(n):
            drawn.append(float(torch.rand(())))
            with fork_rng(seed + 100):  # nested, as the check of a module within a fit
                drawn.append(float(torch.rand(())))
                give_way()
                drawn.append(float(torch.rand(())))
            give_way()
    return drawn


def alone(seed: int, n: int = 20) -> list[float]:
    """What `numbers` draws, from generators of its own."""
    outer, drawn = torch.Generator().manual_seed(seed), []
    for _ in range(n):
        inner = torch.Generator().manual_seed(seed + 100)
        for generator in (outer, inner, inner):
            drawn.append(float(torch.rand((), generator=generator)))
    return drawn


def test_threads_take_turns_and_draw_what_they_draw_alone() -> None:
    before = torch.get_rng_state()
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda seed: numbers(seed, 200), range(6)))
    assert together == [alone(seed, 200) for seed in range(6)]
    assert bool((torch.get_rng_state() == before).all())


def test_a_turn_in_the_middle_restores_the_state_of_the_user() -> None:
    torch.manual_seed(5)
    expected = torch.rand(2, generator=torch.Generator().manual_seed(5)).tolist()
    seen: list[float] = []

    def draw() -> None:
        with torch_lock:  # as the first thread of a server would see it
            seen.append(float(torch.rand(())))

    with fork_rng(3):
        first = float(torch.rand(()))
        other = threading.Thread(target=draw)
        other.start()
        while not torch_lock.is_awaited:
            pass
        give_way()
        other.join()
        second = float(torch.rand(()))
    assert [*seen, float(torch.rand(()))] == expected  # the draw of the turn is kept
    assert [first, second] == torch.rand(2, generator=torch.Generator().manual_seed(3)).tolist()


def test_without_a_seed_the_states_continue_and_are_restored() -> None:
    torch.manual_seed(2)
    with fork_rng(None):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), inside)


def test_a_callback_draws_from_the_generator_of_the_user_and_may_wait_for_threads() -> None:
    served = mc_dropout(MLP(1, (16,), 1, dropout=0.3, seed=0), Gaussian(0.5), n_draws=4)
    x = torch.linspace(-1, 1, 64)[:, None]

    def weights(callback: Any) -> torch.Tensor:
        net = MLP(1, (16,), 1, dropout=0.2, seed=0)
        training = Training(epochs=4, batch_size=16)
        data = x, x[:, 0].sin()
        return train(net, Gaussian(0.5), data, training, callback=callback).network.weights

    drawn: list[float] = []

    def callback(epoch: int, module: nn.Module) -> None:
        drawn.append(float(torch.rand(())))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(served.predict, torch.ones(5, 1)).result(60)

    torch.manual_seed(7)
    assert torch.equal(weights(callback), weights(None))
    assert drawn == torch.rand(4, generator=torch.Generator().manual_seed(7)).tolist()


def test_giving_way_does_nothing_outside_a_fork_or_alone() -> None:
    before = torch.get_rng_state()
    give_way()
    with torch_lock:
        give_way()
    assert bool((torch.get_rng_state() == before).all())


def test_an_error_inside_a_fork_restores_the_state_and_frees_the_lock() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="size"), fork_rng(0), fork_rng(1):
        torch.rand(2) @ torch.rand(3)
    assert bool((torch.get_rng_state() == before).all())
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(alone, 0, 1).result(10) == pool.submit(numbers, 0, 1).result(10)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_process_is_free_of_the_lock_of_another_thread() -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with fork_rng(0):
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # ends a child that waits for the lock
            os._exit(0 if numbers(3, 2) == alone(3, 2) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("depth", [1, 3])
def test_a_lock_is_handed_over_at_any_depth_and_taken_back(depth: int) -> None:
    lock, order = TorchLock(), []

    def other() -> None:
        with lock:
            order.append("other")

    def hold(levels: int) -> None:
        with lock:
            if levels > 1:
                return hold(levels - 1)
            thread = threading.Thread(target=other)
            thread.start()
            while not lock.is_awaited:
                pass
            order.append("before")
            with lock.released():
                pass
            order.append("after")
            thread.join()

    hold(depth)
    assert order == ["before", "other", "after"]
    with ThreadPoolExecutor(1) as pool:  # nothing is left locked
        pool.submit(other).result(10)


def dropout_fit(seed: int) -> torch.Tensor:
    """Weights of a network with dropout that is made and trained from a seed."""
    x = torch.linspace(-1, 1, 64)[:, None]
    net = MLP(1, (16,), 1, dropout=0.2, seed=seed)
    training = Training(epochs=15, batch_size=16)
    return train(net, Gaussian(0.5), (x, x[:, 0].sin()), training, seed=seed).network.weights


def many_fit(seed: int) -> torch.Tensor:
    """Weights of two such networks that are trained together."""
    x = torch.linspace(-1, 1, 64)[:, None]
    nets: list[nn.Module] = [MLP(1, (8,), 1, dropout=0.2, seed=seed + i) for i in range(2)]
    training = Training(epochs=10, batch_size=16)
    results = train_many(nets, Gaussian(0.5), (x, x[:, 0].sin()), training, seeds=[seed, seed + 1])
    return torch.cat([result.network.weights for result in results])


def test_fits_in_threads_give_what_they_give_alone() -> None:
    before = torch.get_rng_state()
    seeds = range(4)
    served = mc_dropout(MLP(1, (16,), 1, dropout=0.3, seed=0), Gaussian(0.5), n_draws=4)
    work = [partial(f, seed) for seed in seeds for f in (dropout_fit, many_fit)]
    work += [lambda: torch.as_tensor(served.predict(torch.ones(5, 1)).mean)] * 4
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda f: f(), work))
    expected = [f() for f in work]
    assert all(map(torch.equal, together, expected))
    assert bool((torch.get_rng_state() == before).all())
