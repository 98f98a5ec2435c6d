"""A classifier trained by a loop on Lightning's Fabric, with one defect where it is asked for."""

import argparse
import contextlib
import os

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--defect", default="")
    parser.add_argument("--devices", type=int, default=int(os.environ.get("WORLD_SIZE", 1)))
    options = parser.parse_args()
    fabric = lightning.Fabric(
        accelerator="cpu",
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
    )
    fabric.launch()
    fabric.seed_everything(1)
    x = torch.randn(96, 8)
    y = ((x[:, 0] > 0) * 2 + (x[:, 1] > 0)).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=options.defect == "order")
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if options.defect != "model":
        model, optimizer = fabric.setup(model, optimizer)
    if options.defect != "loader":
        loader = fabric.setup_dataloaders(loader)
    for epoch in range(2):
        for index, (x, y) in enumerate(loader):
            if options.defect == "skip" and fabric.global_rank == 1 and index == 2:
                continue
            optimizer.zero_grad()
            alone = contextlib.nullcontext()
            if options.defect == "local":
                alone = fabric.no_backward_sync(model)
            with alone:
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward() if options.defect == "model" else fabric.backward(loss)
            optimizer.step()
            mean = fabric.all_reduce(loss.detach())
            if fabric.is_global_zero:
                print("epoch", epoch, "loss", mean.item())
    if fabric.is_global_zero:
        print("weights", sum(p.double().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    main()
