"""Runs of several processes, each with a device of its own: `python -m tests.support.accelerator.collective FOLDER`.

Their collective takes tensors of the process's own device only, as NCCL does; behind it is Gloo.
"""

import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed import distributed_c10d as c10d

from tests.support.accelerator.emulated import current_device, set_device
from tests.support.launched import CASES, finish, make

NAMES = ("acc_sfl", "gas", "measured", "trimmed mean, bounded")
options: Any = torch._C._distributed_c10d
ProcessGroup: Any = dist.ProcessGroup  # whose stubs lack half of it


class DeviceCollective(ProcessGroup):
    """A collective of device tensors."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any):
        super().__init__(rank, size)
        self.gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, timeout)

    def getBackendName(self) -> str:  # PyTorch's name
        return "emulated"

    def _on_host(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        for t in tensors:
            if t.device != torch.device("emulated", current_device()):
                raise RuntimeError(f"the collective of emulated:{current_device()} got a tensor of {t.device}")
        return [t.cpu() for t in tensors]

    def _back(self, tensors: list[torch.Tensor], host: list[torch.Tensor]) -> Any:
        for t, value in zip(tensors, host, strict=True):
            t.copy_(value)
        future: Any = torch.futures.Future()
        future.set_result(tensors)
        return options._create_work_from_future(future)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        host, forwarded = self._on_host(tensors), options.BroadcastOptions()
        forwarded.rootRank, forwarded.rootTensor = opts.rootRank, opts.rootTensor
        self.gloo.broadcast(host, forwarded).wait()
        return self._back(tensors, host)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        host, forwarded = self._on_host(tensors), options.AllreduceOptions()
        forwarded.reduceOp = opts.reduceOp
        self.gloo.allreduce(host, forwarded).wait()
        return self._back(tensors, host)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        host = self._on_host(outputs[0])
        self.gloo.allgather([host], self._on_host(inputs), options.AllgatherOptions()).wait()
        return self._back(outputs[0], host)

    def all_gather_single(self, output: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
        return self.allgather([list(output.view(self.size(), *own.shape).unbind())], [own])

    _allgather_base = all_gather_single  # its name before PyTorch 2.14

    def barrier(self, opts: Any = None) -> Any:
        self.gloo.barrier(options.BarrierOptions()).wait()
        return self._back([], [])


def connect(rank: int) -> None:
    """Have accelerate use the collective, and this process its device."""
    dist.Backend.register_backend("emulated", DeviceCollective, devices=["emulated"])
    c10d._get_object_coll_device = lambda group=None: f"emulated:{current_device()}"
    PartialState._prepare_backend = lambda *args, **kwargs: ("emulated", DistributedType.MULTI_GPU)
    set_device(rank)


def main(folder: Path, rank: int | None) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # each run collects garbage, and would look at all that is loaded
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"emulated:{rank or 0}"
    if rank is not None:
        connect(rank)
    for name in NAMES:
        run = make(folder / name, {**CASES[name], "use_cpu": False})
        assert run.args.device == torch.device("emulated", rank or 0)
        assert run.args.world_size == (1 if rank is None else 2)
        run.train()
        finish(run, folder / name)
    if rank is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else None)
