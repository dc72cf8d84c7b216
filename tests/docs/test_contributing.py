"""The skeletons of CONTRIBUTING.md run as they stand, and the sampler among them is right."""

import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from scipy import stats

from subbayes import InputError

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_the_skeletons_run_and_meet_their_oracle(monkeypatch):
    module = ModuleType("contributed")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    text = GUIDE.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"```python\n(.*?)```", text, re.DOTALL))
    assert len(blocks) == 4
    for block in blocks:
        above = "\n" * text[: block.start(1)].count("\n")  # a failure names the line of the guide
        exec(compile(above + block[1], str(GUIDE), "exec"), vars(module))
    y, eta = torch.linspace(-3.0, 3.0, 5).double(), (torch.tensor(0.5).double(),) * 2
    density = module.LogisticFamily().log_density(y, eta)
    expected = stats.logistic(0.5, math.exp(0.5)).logpdf(y.numpy())
    torch.testing.assert_close(density, torch.from_numpy(expected))
    segment = module.segment(torch.tensor([0.0, 2.0]), torch.tensor([4.0, 2.0]))
    ends = segment.weights(torch.tensor([[-1.0], [1.0]]))
    assert ends.tolist() == [[0.0, 2.0], [4.0, 2.0]]
    with pytest.raises(InputError, match="end: expected another solution than start"):
        module.segment(segment.shift, segment.shift)
