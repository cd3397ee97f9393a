"""The step with PyTorch's DistributedDataParallel over gloo: one process for each replica, this one is the first."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from typing import Any

import _peers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _workloads import LEARNING_RATE, WORKLOADS
from torch.nn.parallel import DistributedDataParallel


class Model(torch.nn.Module):
    """The model of a workload; `forward(x, y)` is the mean loss of this replica's examples."""

    def __init__(self, name: str) -> None:
        """Take the initial parameters; convolutions from HWIO to OIHW, channels last."""
        super().__init__()
        self._logits = {"W1": self._linear, "W2": self._mlp, "W3": self._conv}[name]
        for key, array in WORKLOADS[name].parameters().items():
            tensor = torch.from_numpy(array)
            if tensor.ndim == 4:
                tensor = tensor.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)
            self.register_parameter(key, torch.nn.Parameter(tensor))

    def forward(self, x: Any, y: Any) -> Any:
        """Return the mean loss."""
        return F.cross_entropy(self._logits(x), y)

    def _linear(self, x: Any) -> Any:
        return torch.addmm(self.b, x, self.w)

    def _mlp(self, x: Any) -> Any:
        x = torch.addmm(self.b0, x, self.w0).relu()
        x = torch.addmm(self.b1, x, self.w1).relu()
        return torch.addmm(self.b2, x, self.w2)

    def _conv(self, x: Any) -> Any:
        x = F.conv2d(x, self.w0, self.b0, padding=1).relu()
        for weight, bias in ((self.w1, self.b1), (self.w2, self.b2)):
            x = F.conv2d(F.pad(x, (0, 1, 0, 1)), weight, bias, stride=2).relu()  # SAME at stride 2 pads at the end
        return torch.addmm(self.b, x.mean((2, 3)), self.w)


def main(name: str, num_replicas: int, rank: int, folder: str) -> None:
    workload = WORKLOADS[name]
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_replicas))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=num_replicas)
    model = Model(name)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, fused=True)
    distributed = DistributedDataParallel(model, gradient_as_bucket_view=True)
    size = workload.batch // num_replicas
    own = slice(rank * size, (rank + 1) * size)
    batches = itertools.cycle([(_tensor(x[own]), torch.from_numpy(y[own]).long()) for x, y in workload.batches()])

    def run(num_steps: int) -> float:
        dist.broadcast(torch.tensor(num_steps), 0)
        return take_steps(num_steps)

    def take_steps(num_steps: int) -> float:
        for x, y in itertools.islice(batches, num_steps):
            optimizer.zero_grad(set_to_none=True)
            loss = distributed(x, y)
            loss.backward()
            optimizer.step()
        mean = loss.detach() / num_replicas
        dist.all_reduce(mean)
        return float(mean)

    if rank == 0:
        _peers.serve(run)
        dist.broadcast(torch.tensor(0), 0)
    else:
        request = torch.tensor(0)
        dist.broadcast(request, 0)
        while request > 0:
            take_steps(int(request))
            dist.broadcast(request, 0)
    dist.destroy_process_group()


def _tensor(x: Any) -> torch.Tensor:
    tensor = torch.from_numpy(x)
    return tensor.permute(0, 3, 1, 2) if tensor.ndim == 4 else tensor  # NHWC in memory, seen as NCHW


def start(name: str, num_replicas: int) -> None:
    """Start the other replicas, and be the first."""
    with tempfile.TemporaryDirectory() as folder:
        others = [
            subprocess.Popen([sys.executable, __file__, name, str(num_replicas), str(rank), folder], stdin=subprocess.DEVNULL)
            for rank in range(1, num_replicas)
        ]
        main(name, num_replicas, 0, folder)
        for process in others:
            process.wait()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        start(sys.argv[1], int(sys.argv[2]))
    else:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
