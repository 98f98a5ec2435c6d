"""A large batch under DDP: the learning rate grows with it, after a warm-up.

torchrun --standalone --nproc_per_node=2 large_batch.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from images import Net, make_images
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

BASE_BATCH_SIZE, BASE_LR, WARMUP_EPOCHS, EPOCHS = 12, 0.05, 1, 3

dist.init_process_group("gloo")
torch.manual_seed(0)
train_set = make_images(96, seed=1)
sampler = DistributedSampler(train_set)
train = DataLoader(train_set, batch_size=12, sampler=sampler)
model = DistributedDataParallel(Net())
total_batch_size = 12 * dist.get_world_size()
peak = BASE_LR * total_batch_size / BASE_BATCH_SIZE
optimizer = torch.optim.SGD(model.parameters(), lr=peak, momentum=0.9)
warmup_steps, steps = WARMUP_EPOCHS * len(train), EPOCHS * len(train)
schedule = torch.optim.lr_scheduler.SequentialLR(
    optimizer,
    [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warmup_steps),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warmup_steps),
    ],
    milestones=[warmup_steps],
)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for images, labels in train:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: lr {optimizer.param_groups[0]['lr']:.4f}, loss {loss.item():.4f}")
dist.destroy_process_group()
