"""A tracer gives the eager results, says how it evaluates, and falls back with one warning."""

import copy
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch

from subbayes.networks.tracing import private_torch
from subbayes.networks.tracing import tracer as tracers
from subbayes.networks.tracing.private_torch import (
    capture_graph,
    count_bytes,
    in_backward_pass,
    interpret_graph,
    is_traced,
)
from subbayes.networks.tracing.tracer import Tracer
from subbayes.networks.tracing.vectorised import Vectorised


def density(weights, x):
    """Reads nothing through Python."""
    return torch.tanh(x @ weights["a"]).sum(), (weights["b"] * 2,)


def arguments(seed=0, rows=6):
    generator = torch.Generator().manual_seed(seed)
    a, x = torch.randn(3, 4, generator=generator), torch.randn(rows, 3, generator=generator)
    return {"a": a, "b": a.sum()}, x


def check_equal(found, expected):
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1][0], expected[1][0])


@pytest.fixture
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("no_warnings")
def test_a_traced_function_gives_the_eager_result_for_every_shape():
    traced = Tracer(density, "the density")
    for rows in (6, 2, 6):
        for seed in range(4):
            given = arguments(seed, rows)
            check_equal(traced(*given), density(*given))
            assert (traced.status, traced.reason) == ("traced", None)


@pytest.mark.usefixtures("no_warnings")
def test_the_first_calls_of_a_shape_are_eager():
    traced = Tracer(density, "the density", traced_after=2)
    found = []
    for seed in range(3):
        traced(*arguments(seed))
        found.append(traced.status)
    assert found == ["eager", "eager", "traced"]


def test_eager_mode_never_traces(monkeypatch):
    monkeypatch.setattr(tracers, "capture_graph", None)
    eager = Tracer(density, "the density", "eager")
    check_equal(eager(*arguments()), density(*arguments()))
    assert (eager.status, eager.reason) == ("eager", None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_function_gives_the_eager_result():
    compiled = Tracer(density, "the density", "compile")
    for seed in range(3):
        check_equal(compiled(*arguments(seed)), density(*arguments(seed)))
        assert (compiled.status, compiled.reason) == ("compiled", None)
    before = torch.distributions.Normal(0.0, 1.0)._validate_args
    assert before


def test_without_a_compiler_functions_are_traced_with_one_warning(monkeypatch):
    def fail(*_):
        raise RuntimeError("no C++\ncompiler")

    monkeypatch.setattr(tracers, "compile_graph", fail)
    function = Tracer(density, "the density", "compile")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (6, 2):
            given = arguments(0, rows)
            check_equal(function(*given), density(*given))
    assert [str(w.message) for w in caught] == [f"{function.reason}; it is traced instead"]
    assert function.status == "traced"
    assert function.reason == "compiling the density failed (no C++ compiler)"


def through_numpy(weights, x):
    return weights * torch.from_numpy(np.sin(x.numpy()))


def by_sign(weights, x):
    return weights * (x if x.sum() > 0 else -x)


def by_shape(weights, x):
    above = torch.where(x > 0)[0]
    return weights * (x[above] + torch.ones(len(above))).sum()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (through_numpy, "its result differs on other data"),
        (by_sign, "tracing the density failed"),
        (by_shape, "replaying the density failed"),
    ],
)
def test_untraceable_functions_are_evaluated_eagerly_with_one_warning(function, reason):
    traced = Tracer(function, "the density")
    weights = torch.tensor(2.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(5):
            x = torch.randn(8, generator=torch.Generator().manual_seed(seed))
            torch.testing.assert_close(traced(weights, x), function(weights, x))
    assert [str(w.message).partition(";")[0] for w in caught] == [traced.reason]
    assert reason in traced.reason
    assert traced.status == "eager"


def test_function_with_a_state_is_detected():
    calls = []

    def counting(weights, x):
        calls.append(1)
        return weights * x * len(calls)

    traced = Tracer(counting, "the step", verify_always=True)
    x = torch.ones(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            traced(torch.tensor(1.0), x)
    assert len(caught) == 1
    assert "its result differs" in traced.reason
    assert traced.status == "eager"


def test_errors_of_the_function_raise_without_a_warning():
    traced = Tracer(lambda weights, x: weights @ x, "the density")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="size mismatch|shapes cannot"):
            traced(torch.ones(2, 2), torch.ones(3, 3))


def test_unvectorisable_functions_are_not_traced():
    function = Vectorised(lambda row, x: row * x if row.sum() > 0 else x)
    traced = Tracer(function, "the density")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced(torch.ones(2, 3), torch.ones(3))
        traced(torch.ones(4, 3), torch.ones(3))
    assert len(caught) == 1
    assert "vectorising over weights failed" in str(caught[0].message)
    assert traced.status == "eager"
    assert traced.reason == function.reason


def gradient(weights, x):
    return torch.func.grad_and_value(lambda w: torch.tanh(x @ w).square().sum())(weights)


def test_interpreted_graphs_give_the_same_bits_in_every_call():
    weights, x = arguments()[0]["a"], arguments()[1]
    graph = capture_graph(gradient, [weights, x])
    call = interpret_graph(graph, [weights, x])
    assert call is not graph.forward
    for seed in range(3):
        weights = arguments(seed)[0]["a"]
        with torch.no_grad():
            found, again = call(weights, x), call(weights, x)
        for a, b, expected in zip(found, again, gradient(weights, x), strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, expected)


def test_python_runs_graphs_that_torchscript_rejects(monkeypatch):
    monkeypatch.setattr(private_torch, "_same_bits", None)  # calling it fails
    traced = Tracer(density, "the density")
    check_equal(traced(*arguments()), density(*arguments()))
    assert (traced.status, traced.reason) == ("traced", None)


@pytest.mark.usefixtures("no_warnings")
def test_without_private_torch_functions_are_evaluated_eagerly(monkeypatch):
    monkeypatch.setenv("SUBBAYES_PRIVATE_TORCH", "0")
    for mode in ("trace", "compile"):
        function = Tracer(density, "the density", mode)
        check_equal(function(*arguments()), density(*arguments()))
        assert function.status == "eager"
        assert "disabled" in function.reason
    assert not in_backward_pass()
    assert not is_traced()
    x = torch.ones(4, 5)
    assert count_bytes(lambda: (x + 1).exp()) == 2 * 80
    assert count_bytes(lambda: (x + 1).view(-1, 1).T[:1].exp()) == 2 * 80


def test_bytes_of_all_operations_are_counted():
    x = torch.ones(4, 5)
    assert count_bytes(lambda: torch.nn.functional.mse_loss(x + 1, x)) >= 80 + 4


def test_threads_share_a_tracer():
    traced = Tracer(density, "the density")
    errors = []

    def work(seed):
        try:
            for rows in (2, 3, 4):
                given = arguments(seed, rows)
                check_equal(traced(*given), density(*given))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert traced.status == "traced"


def test_copies_trace_separately():
    traced = Tracer(density, "the density")
    traced(*arguments())
    for other in (copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        check_equal(other(*arguments()), density(*arguments()))
        assert other.status == "traced"
