"""Recorded functions give the results of the functions, whatever changes between calls.

A pretended recording, on the CPU, reads and writes fixed tensors as a CUDA graph does; those of a
device are in `tests/devices`.
"""

import threading

import pytest
import torch

from subbayes.networks.tracing import cuda_graphs
from subbayes.networks.tracing.cuda_graphs import CALLS, LaunchedAtOnce, Recording, with_cuda_graph


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


def test_tensors_that_stayed_the_same_and_change_are_recorded_anew():
    recorder = Recorder()
    call = recorded(recorder)
    for weight in torch.randn(3, 3, 2):
        for _ in range(2 * CALLS + 2):
            x = torch.randn(4, 3)
            agree(function(x, weight), call(x, weight))
    assert recorder.count == 3


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


def test_functions_on_the_cpu_stay_as_they_are(monkeypatch):
    assert with_cuda_graph(function, [torch.randn(2)], agree) is function
    on_device = torch.empty(2, device="meta")
    assert with_cuda_graph(function, [on_device, torch.randn(2)], agree) is function
