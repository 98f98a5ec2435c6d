"""Loads what `checkpoints.py` has saved, and saves for all of them.

lockstep run --nproc 2 checkpoints_with_lockstep.py
"""

import torch
from images import Net

import lockstep

WEIGHTS = ("single", "data_parallel", "ddp", "ddp_module", "with_epoch")
WHOLE_MODELS = ("whole", "whole_data_parallel")

world = lockstep.init(seed=0)
model = world.prepare(Net())
for name in WEIGHTS:
    lockstep.load_weights(model, f"{name}.pt")  # with or without "module."
for name in WHOLE_MODELS:
    lockstep.load_weights(model, f"{name}.pt", trust=True)  # unpickling runs code: say so
lockstep.save_weights(model, "for_all.safetensors")
world.barrier()

bare = Net()  # on one GPU
lockstep.load_weights(bare, "for_all.safetensors")
if world.is_main:
    torch.save(bare.state_dict(), "plain.pt")  # for torch.load, without "module."
world.close()
