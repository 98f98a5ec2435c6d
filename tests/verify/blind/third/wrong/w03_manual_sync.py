import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits

BATCH, STEPS = 80, 6


def sync_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)


def sync_weights(model):
    for t in model.state_dict().values():
        dist.broadcast(t, src=0)


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    X = torch.tensor(digits.data, dtype=torch.float32) / 16
    Y = torch.tensor(digits.target)

    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    sync_weights(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    loss_fn = nn.CrossEntropyLoss()
    per = BATCH // size
    perm = torch.randperm(len(X), generator=torch.Generator().manual_seed(5))

    for step in range(STEPS):
        chunk = perm[step * BATCH:(step + 1) * BATCH]
        mine = chunk[rank * per:(rank + 1) * per]
        opt.zero_grad()
        loss = loss_fn(model(X[mine]), Y[mine])
        loss.backward()
        sync_gradients(model)
        opt.step()

        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item() / size:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
