"""The devices on which several processes compute."""

from __future__ import annotations

import torch

from subbayes.distributed.processes import Processes
from subbayes.utils.warning import warn_user


def check_devices(device: torch.device, processes: Processes) -> None:
    """Check that all processes compute on the same kind of device.

    Blocks of rows are larger on an accelerator, so that processes of both kinds would divide the
    rows differently. All processes have to call this.

    Args:
        device: that of the network in this process.
        processes: all processes.

    Raises:
        InputError: in all processes, if the kind of one differs.

    Warns:
        UserWarning: CUDA devices that several processes share while others may be idle.

    Example:
        >>> check_devices(torch.device("cpu"), Processes())
    """
    remedy = "Move the module to the same kind of device in every process"
    processes.agree({"device": device.type}, remedy)
    if device.type != "cuda":
        return
    own = str(torch.cuda.get_device_properties(device).uuid), torch.cuda.device_count()
    every = processes.gather(own)
    names = [name for name, _ in every]
    shared = [r for r, (name, seen) in enumerate(every) if seen > 1 and names.count(name) > 1]
    if shared:
        warn_user(
            f"device: processes {shared} share CUDA devices with others, of {every[shared[0]][1]} "
            "devices that they see; call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) "
            "before module.to('cuda')"
        )
