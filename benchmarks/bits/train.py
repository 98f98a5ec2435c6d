"""Trains programs one after the other under `lockstep run`, and writes a hash of each.

A program whose hash is there already is left out; one that was broken off goes on from its
checkpoint. With `--kill` a rank ends itself by SIGKILL at a random moment of each program, once.

    lockstep run --nproc 2 --virtual-ranks 8 benchmarks/bits/train.py FOLDER [--stop-at 3]
        [--kill SEED] [--programs mlp,lora]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import lockstep

sys.path.insert(0, str(Path(__file__).parent))
from programs import BATCH_SIZE, PROGRAMS, Program

EPOCHS = 2
STEPS = 2 * 6
MAX_DELAY_S = 0.05
"""A rank is killed at most this long after a step began, which may be some steps later."""


class Losses:
    """The losses of the steps so far, a part of the checkpoint."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


class Kill:
    """Ends one rank at a random moment, unless that has been done for this program before.

    Args:
        marker: a file that says that it was done.
        seed: decides the moment and the rank.
        world: of the run.
    """

    def __init__(self, marker: Path, seed: int | None, world: lockstep.World) -> None:
        self.marker = marker
        self.step = -1
        if seed is None or marker.exists():
            return
        drawn = random.Random(f"{seed} {marker.stem}")
        rank = drawn.randrange(world.size)
        self.step = drawn.randrange(1, STEPS) if rank == world.rank else -1
        self.delay_s = drawn.uniform(0, MAX_DELAY_S)

    def begin_step(self, step: int) -> None:
        if step != self.step:
            return
        self.step = -1
        timer = threading.Timer(self.delay_s, self._kill)
        timer.daemon = True
        timer.start()

    def _kill(self) -> None:
        self.marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def digest_of(*states: Any) -> str:
    """Returns a hash of all tensors and numbers in some states, whole ones of shards."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key in value:
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        elif isinstance(value, Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            flat = whole.detach().cpu().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(value).encode())

    for state in states:
        add(state)
    return digest.hexdigest()


def train(program: Program, name: str, folder: Path, stop_at: int | None, kill: int | None) -> None:
    """Trains a program to a step, or to its end, where its hash is written."""
    # None is what the other programs are given: statistics of each virtual rank.
    sync_batchnorm = True if program.sync_batchnorm else None
    with lockstep.init(precision=program.precision, sync_batchnorm=sync_batchnorm, seed=1) as world:
        torch.manual_seed(3)
        net = program.model()
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        optimizer = program.optimizer(iter(trained))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        model, optimizer, scheduler = world.prepare(net, optimizer, scheduler)
        loader = world.loader(program.data(), BATCH_SIZE, shuffle=True, **program.loader)
        losses = Losses()
        checkpoint = world.checkpoint(
            folder / name,
            every=1,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            loader=loader,
            losses=losses,
        )
        checkpoint.resume()
        killed = Kill(folder / f"{name}.killed", kill, world)
        for _ in world.epochs(EPOCHS):
            for batch in loader:
                killed.begin_step(world.step)
                loss = program.loss(model, batch)
                world.backward(loss)
                if program.max_norm is not None:
                    world.clip_grad_norm_(model, program.max_norm)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                if not world.is_last_micro_batch:
                    # Saved in the middle of a global batch, which then begins anew.
                    if stop_at is not None and world.step == stop_at and stop_at % 2 == 0:
                        checkpoint.save()
                        return
                    continue
                mean = world.loss()
                assert mean is not None
                losses.values.append(mean)
                if world.step == stop_at and stop_at % 2 == 1:
                    checkpoint.save()
                    return
                if kill is not None:
                    checkpoint.step()
            losses.values.append(float(torch.rand(())))  # drawn outside of the training loop
        digest = digest_of(net.state_dict(), optimizer.state_dict()["state"], losses.values)
        digests = world.gather(digest)
        if world.is_main:
            text = digest if len(set(digests)) == 1 else f"ranks differ: {digests}"
            (folder / f"{name}.hash").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--stop-at", type=int)
    parser.add_argument("--kill", type=int)
    options = parser.parse_args()
    for name in options.programs.split(","):
        if not (options.folder / f"{name}.hash").exists():
            train(PROGRAMS[name], name, options.folder, options.stop_at, options.kill)


if __name__ == "__main__":
    main()
