"""Files of one GPU and of several: saved bare, from DataParallel or DDP, whole or as weights."""

import torch
import torch.distributed as dist
from images import Net
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def save_all(folder):
    """Saves a model as tutorials do; the process group must be open. Returns the weights."""
    torch.manual_seed(0)
    net = Net()
    on_several_gpus = nn.DataParallel(net)
    in_ddp = DistributedDataParallel(net)
    torch.save(net.state_dict(), f"{folder}/single.pt")
    torch.save(on_several_gpus.state_dict(), f"{folder}/data_parallel.pt")  # "module." in the names
    torch.save(in_ddp.state_dict(), f"{folder}/ddp.pt")  # "module." in the names
    torch.save(in_ddp.module.state_dict(), f"{folder}/ddp_module.pt")
    torch.save({"model": net.state_dict(), "epoch": 3}, f"{folder}/with_epoch.pt")
    torch.save(net, f"{folder}/whole.pt")
    torch.save(on_several_gpus, f"{folder}/whole_data_parallel.pt")
    return net.state_dict()


def load_by_hand(path):
    """Loads any of the files with weights into a bare model, with `module.` stripped by hand."""
    saved = torch.load(path, map_location="cpu")
    weights = saved.get("model", saved)
    stripped = {name.removeprefix("module."): tensor for name, tensor in weights.items()}
    net = Net()
    net.load_state_dict(stripped)
    return net.state_dict()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    save_all(".")
    dist.barrier()
    for name in ("single", "data_parallel", "ddp", "ddp_module", "with_epoch"):
        load_by_hand(f"{name}.pt")
    dist.destroy_process_group()
