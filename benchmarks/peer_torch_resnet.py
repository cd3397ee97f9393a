"""ResNet-50 with PyTorch on one device, bfloat16 and channels last, as `gpu.py` trains it: `peer_torch_resnet.py [ROWS SIZE]`."""

from __future__ import annotations

import sys
from typing import Any

import _peers
import torch
import torchvision


def main(num_rows: int = 128, size: int = 224) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True  # it chooses kernels by trying them, as XLA does
    model = torchvision.models.resnet50().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, fused=True)
    pictures = torch.randint(0, 255, (num_rows, 3, size, size), dtype=torch.uint8, device=device)
    pictures = pictures.to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (num_rows,), device=device)

    def step() -> Any:
        with torch.autocast(device, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(pictures.float() / 255), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def run(num_steps: int) -> float:
        for _ in range(num_steps):
            loss = step()
        return loss.item()

    _peers.serve(run)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
