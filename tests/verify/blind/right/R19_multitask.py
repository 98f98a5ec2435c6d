# multi-task: shared encoder + two heads (three DDP modules), dict outputs, a custom autograd function,
# one loss in float32, and a bf16 weight regulariser
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group(backend="gloo")
R, W = dist.get_rank(), dist.get_world_size()
torch.manual_seed(31)


class ClampSTE(torch.autograd.Function):
    """quantise to 16 levels, gradient passes inside [-1, 1] only"""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.floor(x.clamp(-1, 1) * 8 + 0.5) / 8

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x.abs() <= 1)


class SwishFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, beta):
        s = torch.sigmoid(beta * x)
        ctx.save_for_backward(x, beta, s)
        return x * s

    @staticmethod
    def backward(ctx, g):
        x, beta, s = ctx.saved_tensors
        ds = s * (1 - s)
        return g * (s + x * ds * beta), (g * x * ds * x).sum().reshape(beta.shape)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = nn.Linear(12, 32), nn.Linear(32, 16)
        self.beta = nn.Parameter(torch.ones(1))

    def forward(self, batch):
        h = SwishFn.apply(self.l1(batch["x"]), self.beta)
        z = self.l2(h)
        return {"z": z, "soft": torch.tanh(z)}


class Head(nn.Module):
    def __init__(self, out, quant):
        super().__init__()
        self.fc, self.quant = nn.Linear(16, out), quant

    def forward(self, enc):
        z = ClampSTE.apply(0.05 * enc["z"]) * 20 if self.quant else enc["soft"]
        return {"pred": self.fc(z)}


enc, head_cls, head_reg = DDP(Encoder()), DDP(Head(3, False)), DDP(Head(1, False))
groups = [{"params": enc.parameters(), "lr": 0.02}, {"params": head_cls.parameters(), "lr": 0.05},
          {"params": head_reg.parameters(), "lr": 0.05}]
opt = torch.optim.SGD(groups, lr=0.01, momentum=0.9)

g = torch.Generator().manual_seed(1)
X = torch.randn(1200, 12, generator=g)
YC = (X[:, 0] + X[:, 1] > 0.3).long() + (X[:, 2] > 0.8).long()
YR = X[:, 3] * X[:, 4] + 0.1 * torch.randn(1200, generator=g)


def orthogonality(w):
    w = w.to(torch.bfloat16)
    return (w @ w.T - torch.eye(len(w), dtype=torch.bfloat16)).pow(2).mean().float()


for step in range(30):
    idx = torch.arange(step * 40, (step + 1) * 40).reshape(-1, W)[:, R]
    batch = {"x": X[idx], "cls": YC[idx], "reg": YR[idx]}
    e = enc(batch)
    e["z"] = ClampSTE.apply(e["z"] * 0.1)
    losses = {
        "cls": F.cross_entropy(head_cls(e)["pred"].float(), batch["cls"]),
        "reg": F.huber_loss(head_reg(e)["pred"].squeeze(1), batch["reg"]),
        "act": 1e-2 * e["z"].pow(2).mean(),
        "ortho": 1e-4 * orthogonality(enc.module.l2.weight),
    }
    total = sum(losses.values())
    opt.zero_grad()
    total.backward()
    opt.step()
    if R == 0 and step % 10 == 0:
        print(step, {k: float(f"{v.item():.4g}") for k, v in losses.items()})

if os.environ.get("DUMP"):
    ps = [p for m in (enc, head_cls, head_reg) for p in m.parameters()]
    torch.save([p.detach().double() for p in ps], f"{os.environ['DUMP']}.rank{R}.pt")
dist.destroy_process_group()
