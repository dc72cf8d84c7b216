"""Processes for all tests of this folder, since each takes seconds to start."""

import json
import subprocess

import pytest
import torch.distributed as dist

from distributed.launch import WORKER, environment, free_port, start
from subbayes import distributed


@pytest.fixture(scope="session")
def two_processes():
    """For each process the results of cases, which run when a test first asks for them."""
    processes = start(2, [str(WORKER)], stdin=subprocess.PIPE, stderr=None)

    class Results(dict):
        def __missing__(self, case):
            for process in processes:
                print(case, file=process.stdin, flush=True)
            for process, results in zip(processes, every, strict=True):
                line = process.stdout.readline()
                assert line, "a process has ended: see its standard error"
                results[case] = json.loads(line)[1]
            return self[case]

    every = [Results() for _ in processes]
    yield every
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def one_process():
    """The same in this process alone."""

    class Results(dict):
        def __missing__(self, case):
            from distributed.worker import case_of

            name, *arguments = json.loads(case)
            with pytest.MonkeyPatch.context() as patch:
                for variable, value in environment(0, 1, free_port()).items():
                    patch.setenv(variable, value)
                distributed.join()
                try:
                    self[case] = json.loads(json.dumps(case_of(name)(*arguments)))
                finally:
                    distributed.leave()
                    if dist.is_initialized():  # by the case; later tests would join its group
                        dist.destroy_process_group()
            return self[case]

    return Results()
