"""Memory that the C library keeps or gives back."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import re, sys
import torch
from subbayes.networks.tracing.memory import return_memory, reuse_memory

def resident():
    return int(re.findall(r"VmRSS:\\s+(\\d+) kB", open("/proc/self/status").read())[0]) / 1024

if sys.argv[1] == "return":
    return_memory()
reuse_memory()
before, kept, freed = resident(), [], []
for _ in range(20):
    freed.append(torch.ones(2**20))
    kept.append(torch.ones(2**15))  # which keeps the heap from shrinking
del freed
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_parameters_are_given_back():
    found = [
        float(subprocess.check_output([sys.executable, "-c", PROGRAM, which]))
        for which in ("return", "reuse")
    ]
    assert found[0] < 10 < 60 < found[1], found
