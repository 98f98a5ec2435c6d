"""A classifier trained by Lightning's Trainer, with one defect where it is asked for."""

import argparse
import os

import lightning
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self, defect):
        super().__init__()
        self.defect = defect
        layers = [torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)]
        if defect == "batchnorm":
            layers.insert(1, torch.nn.BatchNorm1d(32))
        self.net = torch.nn.Sequential(*layers)
        self.trained = []

    def training_step(self, batch, index):
        x, y = batch
        if self.defect == "skip" and self.global_rank == 1 and index == 1:
            return None
        if self.defect == "sum":
            loss = torch.nn.functional.cross_entropy(self.net(x), y, reduction="sum")
        else:
            loss = torch.nn.functional.cross_entropy(self.net(x), y)
        mean = loss.detach().clone()
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(mean)
        self.trained.append(mean.item() / self.trainer.world_size)
        return loss

    def configure_optimizers(self):
        rate = 0.1 * self.trainer.world_size if self.defect == "rate" else 0.1
        return torch.optim.SGD(self.parameters(), lr=rate, momentum=0.9)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--defect", default="")
    parser.add_argument("--devices", type=int, default=int(os.environ.get("WORLD_SIZE", 1)))
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    lightning.seed_everything(1)
    x = torch.randn(options.samples, 8)
    y = (x[:, 0] > 0) * 2 + (x[:, 1] > 0)
    data = TensorDataset(x, y.long())
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        max_epochs=options.epochs,
        accumulate_grad_batches=options.accumulate,
        use_distributed_sampler=options.defect == "order",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if options.defect in ("order", "sampler"):
        loader = DataLoader(data, batch_size=8)  # for training, Lightning shuffles it nevertheless
    else:
        sampler = DistributedSampler(data, trainer.world_size, trainer.global_rank)
        loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = Classifier(options.defect)
    trainer.fit(model, loader)
    if trainer.is_global_zero:
        for step, loss in enumerate(model.trained, start=1):
            print("step", step, "loss", loss)
        print("weights", sum(p.double().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    main()
