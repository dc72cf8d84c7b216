"""The installed version of torch, for tests of what older versions cannot do."""

import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
