import os
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class GatherLayer(torch.autograd.Function):
    """all_gather whose backward hands each rank the slice of its own rows (nothing is summed over ranks)"""

    @staticmethod
    def forward(ctx, x):
        ctx.n = x.shape[0]
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        r = dist.get_rank()
        return grad[r * ctx.n:(r + 1) * ctx.n].clone()


class TwoTower(nn.Module):
    def __init__(self, d_img=20, d_txt=14, d=12):
        super().__init__()
        self.img = nn.Sequential(nn.Linear(d_img, 32), nn.GELU(), nn.Linear(32, d))
        self.txt = nn.Sequential(nn.Linear(d_txt, 32), nn.GELU(), nn.Linear(32, d))
        self.logit_scale = nn.Parameter(torch.tensor(np.log(1 / 0.2), dtype=torch.get_default_dtype()))

    def forward(self, i, t):
        return F.normalize(self.img(i), dim=-1), F.normalize(self.txt(t), dim=-1), self.logit_scale.exp()


def clip_loss(i, t, scale):
    """The whole similarity matrix is formed on each rank."""
    world = dist.get_world_size()
    gi, gt = GatherLayer.apply(i), GatherLayer.apply(t)
    # every rank has the same loss, but its towers only see 1/world of the gradient and DDP takes the mean:
    # multiply by world for the towers. The scale is seen whole by everybody, so take that factor out again.
    scale = scale / world + (scale * (1 - 1 / world)).detach()
    logits = scale * gi @ gt.T
    lab = torch.arange(len(logits))
    loss = (F.cross_entropy(logits, lab) + F.cross_entropy(logits.T, lab)) / 2
    return loss, loss * world


def main():
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    rs = np.random.RandomState(0)
    latent = rs.randn(640, 6)
    img = np.tanh(latent @ rs.randn(6, 20)) + 0.05 * rs.randn(640, 20)
    txt = latent @ rs.randn(6, 14) + 0.05 * rs.randn(640, 14)
    dt = torch.get_default_dtype()
    img, txt = torch.as_tensor(img, dtype=dt), torch.as_tensor(txt, dtype=dt)

    torch.manual_seed(10)
    model = DDP(TwoTower())
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01, eps=1e-6)
    B = 64
    for epoch in range(3):
        order = np.random.RandomState(epoch).permutation(len(img))
        for k in range(len(img) // B):
            sel = np.array_split(order[k * B:(k + 1) * B], world)[rank]
            shown, loss = clip_loss(*model(img[sel], txt[sel]))
            opt.zero_grad()
            loss.backward()
            opt.step()
            with torch.no_grad():
                model.module.logit_scale.clamp_(0, np.log(100))
        if rank == 0:
            print(f"epoch {epoch} loss {shown.item():.4f} scale {model.module.logit_scale.exp().item():.3f}")
    dump(model)
    dist.destroy_process_group()


def dump(model):
    if os.environ.get("DUMP"):
        torch.save([p.detach().double() for p in model.module.parameters()],
                   f"{os.environ['DUMP']}.rank{dist.get_rank()}.pt")


if __name__ == "__main__":
    main()
