"""What processes tell each other about their devices."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from subbayes.distributed.devices import check_devices
from subbayes.distributed.processes import Processes


class Told(Processes):
    """Processes that have sent what is given."""

    def __init__(self, every):
        super().__init__(0, len(every))
        self.every = every

    def agree(self, facts, remedy):
        assert facts == {"device": "cuda"}

    def gather(self, part, axis=None, call=""):
        assert part == self.every[0]
        return self.every


@pytest.mark.parametrize(
    ("every", "shared"),
    [
        ([("a", 4), ("a", 4), ("b", 4)], r"\[0, 1\] share CUDA devices with others, of 4 devices"),
        ([("a", 4), ("b", 4)], None),
        ([("a", 1), ("a", 1)], None),  # one device, or one that CUDA_VISIBLE_DEVICES names
        ([("a", 1), ("b", 1)], None),
    ],
)
def test_a_shared_cuda_device_beside_others_is_warned_of(every, shared, monkeypatch):
    properties = SimpleNamespace(uuid=every[0][0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: every[0][1])
    expected = pytest.warns(UserWarning, match=shared) if shared else nullcontext()
    with expected:
        check_devices(torch.device("cuda", 0), Told(every))
