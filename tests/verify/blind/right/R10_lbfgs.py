# Full-batch fit of a small PINN-like network by L-BFGS, collocation points split over processes
import os
import torch
import torch.distributed as dist

dist.init_process_group(backend="gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)

net = torch.nn.Sequential(torch.nn.Linear(1, 12), torch.nn.Tanh(), torch.nn.Linear(12, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1))
params = list(net.parameters())

N = 101
xs_all = torch.linspace(0, 1, N).unsqueeze(1)
xs = xs_all[rank::world]              # 51 / 50 points: the shards need not be of one size


def residual(x):
    # u'' = -pi^2 sin(pi x), u(0) = u(1) = 0
    x = x.clone().requires_grad_(True)
    u = net(x)
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
    return ddu + torch.pi ** 2 * torch.sin(torch.pi * x)


opt = torch.optim.LBFGS(params, lr=0.5, max_iter=2, history_size=6, line_search_fn="strong_wolfe")
evals = 0


def closure():
    global evals
    evals += 1
    opt.zero_grad()
    interior = residual(xs).pow(2).sum() / N
    loss = interior
    if rank == 0:
        # the two boundary points belong to the first process
        loss = loss + 10 * net(torch.tensor([[0.0], [1.0]])).pow(2).mean()
    loss.backward()
    # sum of the parts = full objective, for the gradient and for the line search
    for p in params:
        if p.grad is None:            # the last bias does not enter u''
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
    value = loss.detach().clone()
    dist.all_reduce(value)
    return value


for epoch in range(24):
    loss = opt.step(closure)
    if rank == 0 and epoch % 6 == 0:
        print(f"step {epoch:2d}  loss {float(loss):.6f}  evaluations {evals}")

if rank == 0:
    with torch.no_grad():
        err = (net(xs_all) - torch.sin(torch.pi * xs_all)).abs().max()
    print("max error", err.item())

out = os.environ.get("DUMP")
if out:
    torch.save([p.detach().clone() for p in params], f"{out}.rank{rank}.pt")
dist.destroy_process_group()
