"""Recorded functions give the results of the functions, whatever changes between calls.

A pretended recording, on the CPU, reads and writes fixed tensors as a CUDA graph does; those of a
device are in `tests/devices`.
"""

import threading

import pytest
import torch

from subbayes.networks.tracing import cuda_graphs
from subbayes.networks.tracing.cuda_graphs import CALLS, LaunchedAtOnce, Recording, can_be_recorded
from subbayes.networks.tracing.private_torch import capture_graph


def function(x, weight):
    return x @ weight, weight.sum()


class Recorder:
    """Records by evaluating the function again on the same tensors."""

    def __init__(self):
        self.count = self.launches = 0

    def __call__(self, function, tensors):
        self.count += 1
        results = tuple(result.clone() for result in function(*tensors))

        def launch():
            self.launches += 1
            for result, new in zip(results, function(*tensors), strict=True):
                result.copy_(new)

        return Recording(launch, results)


def agree(expected, found):
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)


def recorded(recorder, **options):
    options = {"stream": lambda device: 0} | options
    return LaunchedAtOnce(function, agree, record=recorder, **options)


def test_it_is_recorded_after_some_calls_and_launched_afterwards():
    recorder, weight = Recorder(), torch.randn(3, 2)
    call = recorded(recorder)
    for i in range(CALLS + 5):
        x = torch.randn(4, 3)
        agree(function(x, weight), call(x, weight))
        assert recorder.count == (i >= CALLS - 1)
    assert recorder.launches == 6  # one to verify


def test_arguments_are_never_written_to_and_their_new_values_are_read():
    recorder, weight, x = Recorder(), torch.randn(3, 2), torch.randn(4, 3)
    call = recorded(recorder)
    for _ in range(CALLS):
        call(x, weight)
    x.mul_(2)
    weight.add_(1)
    before = x.clone(), weight.clone()
    agree(function(x, weight), call(x, weight))
    other = torch.randn(4, 3)
    agree(function(other, weight), call(other, weight))
    agree(before, (x, weight))


def test_results_are_kept_unless_they_are_lent():
    weight, xs = torch.randn(3, 2), [torch.randn(4, 3) for _ in range(CALLS + 2)]
    for lends in (False, True):
        call = recorded(Recorder(), lends=lends)
        for x in xs[:-2]:
            call(x, weight)
        first, second = (call(x, weight) for x in xs[-2:])
        assert (first[0] is second[0]) == lends
        agree(function(xs[-1], weight), second)
        if not lends:
            agree(function(xs[-2], weight), first)


def test_a_tensor_that_has_moved_in_memory_is_noticed():
    recorder, weight, x = Recorder(), torch.randn(3, 2), torch.randn(4, 3)
    call = recorded(recorder)
    for _ in range(CALLS + 1):
        call(x, weight)
    weight.data = torch.randn(3, 2)
    launches = recorder.launches
    agree(function(x, weight), call(x, weight))
    assert recorder.launches == launches


def test_another_stream_and_another_thread_evaluate_the_function_itself():
    recorder, weight, streams = Recorder(), torch.randn(3, 2), [0]
    call = recorded(recorder, stream=lambda device: streams[0])
    x = torch.randn(4, 3)
    for _ in range(CALLS + 1):
        call(x, weight)
    launches, streams[0] = recorder.launches, 1
    agree(function(x, weight), call(x, weight))
    streams[0] = 0
    with call._lock:
        found = []
        thread = threading.Thread(target=lambda: found.append(call(x, weight)))
        thread.start()
        thread.join()
    agree(function(x, weight), found[0])
    assert recorder.launches == launches


def test_many_threads_get_their_own_results():
    weight, call = torch.randn(3, 2), recorded(Recorder())
    wrong = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(100):
            x = torch.randn(4, 3, generator=generator)
            if not torch.equal(call(x, weight)[0], function(x, weight)[0]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("what", ["fails", "declines", "differs", "copies"])
def test_what_cannot_be_recorded_is_evaluated_as_it_is(what, monkeypatch):
    recorder, count = Recorder(), 0

    def record(function, tensors):
        nonlocal count
        count += 1
        if what == "fails":
            raise RuntimeError("operation not permitted when stream is capturing")
        found = recorder(function, tensors)
        if what == "differs":
            return Recording(found.results[0].zero_, found.results)
        return None if what == "declines" else found

    if what == "copies":
        monkeypatch.setattr(cuda_graphs, "_MOST_BYTES", 8)
    call = recorded(record)
    weight = torch.randn(3, 2)
    for _ in range(3 * CALLS):
        x = torch.randn(4, 3)
        agree(function(x, weight), call(x, weight))
    assert count == (what != "copies")
    assert not call.is_recordable


def test_a_recording_of_inference_mode_serves_calls_outside():
    weight, x = torch.randn(3, 2), [torch.randn(4, 3) for _ in range(CALLS + 1)]
    call = recorded(Recorder())
    with torch.inference_mode():
        for one in x[:-1]:
            call(one, weight)
    agree(function(x[-1], weight), call(x[-1], weight))


def test_a_difference_on_other_values_is_noticed():
    recorder, weight = Recorder(), torch.randn(3, 2)

    def record(function, tensors):
        found = recorder(function, tensors)
        results = found.results
        return Recording(lambda: None, results)  # never again evaluated

    call = recorded(record)
    for _ in range(CALLS + 3):
        x = torch.randn(4, 3)
        agree(function(x, weight), call(x, weight))
    assert (recorder.count, call.is_recordable) == (1, False)


def test_tensors_that_change_now_and_then_are_copied_in_the_second_recording():
    recorder = Recorder()
    call = recorded(recorder)
    for weight in torch.randn(10, 3, 2):
        for _ in range(3 * CALLS):
            x = torch.randn(4, 3)
            agree(function(x, weight), call(x, weight))
    assert recorder.count == 2


def test_streams_that_alternate_end_the_recording():
    recorder, weight, streams = Recorder(), torch.randn(3, 2), [0]
    call = recorded(recorder, stream=lambda device: streams[0])
    for i in range(20 * CALLS):
        streams[0] = i // (3 * CALLS)
        x = torch.randn(4, 3)
        agree(function(x, weight), call(x, weight))
    assert (recorder.count, call.is_recordable) == (4, False)


def test_a_call_beside_another_recording_is_recorded_later():
    recorder, weight, x = Recorder(), torch.randn(3, 2), torch.randn(4, 3)
    call = recorded(recorder)
    with cuda_graphs._one_at_a_time:
        for _ in range(CALLS + 3):
            call(x, weight)
    assert (recorder.count, call.is_recordable) == (0, True)
    call(x, weight)
    assert recorder.count == 1


# --- what can be recorded ------------------------------------------------------------------------


def graph_of(own, device="cpu"):
    tensors = [torch.rand(3, 3) + torch.eye(3), torch.rand(3)]
    return capture_graph(lambda *given: (own(*given),), tensors), [t.to(device) for t in tensors]


CONSTANT = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("own", "stays"),
    [
        (lambda a, b: (a @ b).tanh() * CONSTANT, True),
        (lambda a, b: a[torch.tensor([0, 2])].sum() + b, True),
        (lambda a, b: (a @ b).sum() + torch.zeros((), device="cpu"), False),
        (lambda a, b: torch.linalg.cholesky(a @ a.T) @ b, False),
        (lambda a, b: torch.linalg.solve(a, b), False),
        (lambda a, b: torch.linalg.eigh(a @ a.T)[0] * b, False),
        (lambda a, b: torch.linalg.inv(a) @ b, False),
        (lambda a, b: torch.logdet(a) * b, False),
        (lambda a, b: torch.linalg.solve_triangular(a, a, upper=True) @ b, True),
        (lambda a, b: (a @ b).relu_().sqrt() + torch.linalg.vector_norm(b), True),
        (lambda a, b: torch.nn.functional.gelu(a) @ torch.nn.functional.silu(b), True),
    ],
)
def test_operations_that_leave_a_device_or_wait_are_found(own, stays):
    graph, tensors = graph_of(own, "meta")
    assert cuda_graphs.stays_on(torch.device("meta"), graph, tensors) == stays


def test_masks_wait_for_their_number_of_entries():
    graph, tensors = graph_of(lambda a, b: a[b > -1.0].sum() + b)
    assert not cuda_graphs.stays_on(torch.device("cpu"), graph, tensors)
    graph, tensors = graph_of(lambda a, b: a[b.argsort()].sum() + b)
    assert cuda_graphs.stays_on(torch.device("cpu"), graph, tensors)


def test_constants_are_moved_unless_the_graph_needs_them_elsewhere():
    graph, tensors = graph_of(lambda a, b: (a @ b) * CONSTANT, "meta")
    names = [n.target for n in graph.graph.nodes if n.op == "get_attr"]
    assert names
    assert cuda_graphs.stays_on(torch.device("meta"), graph, tensors)
    assert all(getattr(graph, name).is_meta for name in names)
    graph, tensors = graph_of(lambda a, b: (a @ b) * CONSTANT)
    assert not cuda_graphs.stays_on(torch.device("meta"), graph, tensors)  # on two devices
    assert not any(getattr(graph, name).is_meta for name in names)


def test_functions_on_the_cpu_are_not_recorded():
    graph, tensors = graph_of(lambda a, b: a @ b)
    assert not can_be_recorded(graph, tensors)
    assert not can_be_recorded(graph, [tensors[0].to("meta"), tensors[1]])
