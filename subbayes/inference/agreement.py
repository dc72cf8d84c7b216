"""Checks that all processes run an engine on the same density with the same settings."""

from __future__ import annotations

from typing import Any

from subbayes.artifacts.tensors import fingerprint
from subbayes.data.data import Data
from subbayes.distributed.devices import check_devices
from subbayes.distributed.divided_rows import SAME_ROWS, agreed_rows
from subbayes.distributed.processes import current
from subbayes.inference.configuration import Sampling
from subbayes.subspace import Subspace


def check_same_run(name: str, posterior: Any, sampling: Sampling) -> None:
    """Check that all processes run the same engine in the same subspace, on the same blocks.

    Args:
        name: of the engine.
        posterior: the density of this process.
        sampling: the settings.

    Raises:
        InputError: in all processes, if they differ.

    Example:
        >>> check_same_run("nuts", None, Sampling())  # a process that works alone
    """
    processes = current()
    if processes is None or processes.count == 1:
        return
    from subbayes.inference.samplers.reparameterisation import ReparameterisedDensity
    from subbayes.networks.validation import check_same_outputs
    from subbayes.posterior import Posterior

    device = getattr(getattr(posterior, "network", None), "device", None)
    if device is not None:
        check_devices(device, processes)
    space, data = getattr(posterior, "subspace", None), getattr(posterior, "data", None)
    facts: dict[str, Any] = {
        "inference": name,
        "seed": sampling.seed,
        "sampling": [sampling.draws, sampling.chains, sampling.warmup, sampling.thin],
        "posterior": [posterior.rank, posterior.temperature, repr(posterior.prior)],
        "block_size": getattr(posterior, "block_size", None),
    }
    if isinstance(space, Subspace):
        facts["subspace"] = fingerprint(space.tensors(), space.config())
    if isinstance(data, Data):
        processes.agree({"data": agreed_rows(data)}, SAME_ROWS)
    remedy = "Give every process the same settings and weights, as by torch.manual_seed(0) before"
    processes.agree(facts, f"{remedy} the module, and the same subspace around them")
    if isinstance(posterior, ReparameterisedDensity):
        posterior = posterior.density
    if isinstance(posterior, Posterior):
        check_same_outputs(posterior.network, posterior.subspace.shift, posterior.data)
