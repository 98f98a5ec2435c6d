"""A classifier trained by a loop on Accelerate, with one defect where it is asked for."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--defect", default="")
    parser.add_argument("--samples", type=int, default=96)
    options = parser.parse_args()
    same_order = DataLoaderConfiguration(use_seedable_sampler=options.defect != "order")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=same_order)
    set_seed(1)
    x = torch.randn(options.samples, 8)
    y = ((x[:, 0] > 0) * 2 + (x[:, 1] > 0)).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer = accelerator.prepare(optimizer)
    if options.defect == "schedule":
        scheduler = accelerator.prepare(scheduler)  # it steps once for each process
    if options.defect != "model":
        model = accelerator.prepare(model)
    if options.defect != "loader":
        loader = accelerator.prepare(loader)
    for epoch in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients and options.defect == "clip":
                    norm = accelerator.process_index + 0.05
                    accelerator.clip_grad_norm_(model.parameters(), norm)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
            mean = accelerator.reduce(loss.detach(), "mean")
            accelerator.print("epoch", epoch, "loss", mean.item())
    accelerator.print("weights", sum(p.double().sum().item() for p in model.parameters()))
    accelerator.end_training()


if __name__ == "__main__":
    main()
