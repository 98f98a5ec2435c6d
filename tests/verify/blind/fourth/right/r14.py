import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Series(Dataset):
    def __init__(self, n=84):
        g = torch.Generator().manual_seed(14)
        self.rows = []
        for _ in range(n):
            t = int(torch.randint(4, 16, (1,), generator=g))
            x = torch.randn(t, 3, generator=g)
            self.rows.append((x, (x[:, 0].sum() > 0).float()))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    xs, ys = zip(*rows)
    return pad_sequence(xs, batch_first=True), torch.tensor([len(x) for x in xs]), torch.stack(ys)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 16, batch_first=True)
        self.fc = nn.Linear(16, 1)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.rnn(packed)
        return self.fc(h[-1]).squeeze(1)


def reduce_hook(state, bucket):
    buf = bucket.buffer()
    fut = dist.all_reduce(buf, async_op=True).get_future()
    return fut.then(lambda f: f.value()[0].div_(state["world"]))


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = Classifier()
    if world > 1:
        model = DDP(model)
        model.register_comm_hook({"world": world}, reduce_hook)
    ds = Series()
    loader = DataLoader(ds, 12 // world, sampler=DistributedSampler(ds, world, rank, shuffle=False), collate_fn=collate)
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    correct = torch.zeros(2)
    for step, (x, lengths, y) in enumerate(loader):
        logit = model(x, lengths)
        loss = nn.functional.binary_cross_entropy_with_logits(logit, y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        opt.step()
        correct += torch.tensor([((logit > 0) == (y > 0.5)).sum().item(), len(y)])
        if rank == 0:
            print("step", step, "loss", round(loss.item(), 4))
    if world > 1:
        dist.all_reduce(correct)
    if rank == 0:
        print("train accuracy", (correct[0] / correct[1]).item())
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
