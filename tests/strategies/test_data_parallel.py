"""Strategy dp: the weights of one device, over replicas on the CPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import Augmented, difference, mean_loss, mlp, tensors, weights
from ranks import RankFailed, run_ranks
from torch import nn
from torch.utils.data import DataLoader

import lockstep
from lockstep.errors import SettingError, UsageError
from lockstep.strategies import DP
from lockstep.strategies.data_parallel.module import DataParallel

pytestmark = pytest.mark.ranks

BATCH = 16
CASES: dict[str, dict[str, Any]] = {
    "even": {"samples": 48},
    "short last batch, fewer samples than replicas": {"samples": 49},
    "BatchNorm": {"samples": 54, "batch_norm": True},
    "3 micro-batches": {"samples": 54, "batch_norm": True, "largest": {1: 6, 2: 3, 3: 2}},
    "shares": {"samples": 54, "batch_norm": True, "uneven": True},
    "clipping": {"samples": 50, "clip": 0.05},
    "bf16": {
        "samples": 48,
        "batch_norm": True,
        "precision": "bf16",
        "dtype": torch.float32,
    },
    "all together": {
        "samples": 54,
        "batch_norm": True,
        "augment": True,
        "uneven": True,
        "largest": {1: 8, 2: 6, 3: 3},
        "clip": 0.5,
        "weighted": True,
    },
}
SHARES = {1: None, 2: "1:2", 3: "2:3:3"}


def train(
    replicas: int,
    *,
    samples: int,
    batch_norm: bool = False,
    augment: bool = False,
    uneven: bool = False,
    largest: dict[int, int] | None = None,
    clip: float | None = None,
    weighted: bool = False,
    precision: str = "fp32",
    dtype: torch.dtype = torch.float64,
) -> dict[str, torch.Tensor]:
    """20 steps; what comes out must not depend on the number of replicas."""
    strategy = "single" if replicas == 1 else DP(replicas=replicas)
    shares = SHARES[replicas] if uneven else None
    seen: list[int] = []
    with lockstep.init(strategy, seed=5, shares=shares, precision=precision) as world:
        model = mlp(batch_norm, dtype)
        model[0].register_forward_hook(lambda m, args, out: seen.append(len(out)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = world.prepare(model, optimizer)
        most = largest[replicas] if largest else None
        loader = world.loader(
            Augmented(samples, dtype) if augment else tensors(samples, dtype),
            BATCH,
            shuffle=True,
            micro_batch_size=most,
            weight=(lambda batch: (batch[1] + 1).sum()) if weighted else None,
        )
        assert loader.micro_batches == (-(-BATCH // largest[1]) if largest else 1)
        while world._run.step.number < 20:
            for x, y in loader:
                if weighted:
                    each = F.cross_entropy(model(x), y, reduction="none")
                    loss = (each * (y + 1)).sum() / (y + 1).sum()
                else:
                    loss = mean_loss(model, (x, y))
                world.backward(loss)
                if clip is not None:
                    world.clip_grad_norm_(model, clip)
                optimizer.step()
                optimizer.zero_grad()
                if world._run.step.number == 20:
                    break
        assert most is None or most - 1 <= max(seen) <= most
        return weights(model)


def train_all() -> dict[int, dict[str, dict[str, torch.Tensor]]]:
    return {n: {name: train(n, **case) for name, case in CASES.items()} for n in (1, 2, 3)}


@pytest.fixture(scope="module")
def results() -> dict[int, dict[str, dict[str, torch.Tensor]]]:
    return run_ranks(train_all, 1)[0]


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_weights_do_not_depend_on_the_number_of_replicas(results, case, replicas):
    limit = 2e-2 if case == "bf16" else 1e-9
    assert difference(results[1][case], results[replicas][case]) < limit


def by_batch_norm(sync: bool) -> dict[str, torch.Tensor]:
    with lockstep.init(DP(replicas=2), sync_batchnorm=sync) as world:
        model = mlp(batch_norm=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(tensors(), batch_size=10)
        model, optimizer, loader = world.prepare(model, optimizer, loader)
        for x, y in loader:
            world.backward(mean_loss(model, (x, y)))
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)


def like_torch() -> dict[str, torch.Tensor]:
    """nn.DataParallel's BatchNorm by hand: each half by itself, the first one's statistics stay."""
    model = mlp(batch_norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(tensors(), batch_size=10):
        others = {name: buffer.clone() for name, buffer in model.named_buffers()}
        first, second = model(x[:5]), torch.func.functional_call(model, others, x[5:])
        F.cross_entropy(torch.cat([first, second]), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_batch_norm_can_be_torchs():
    expected = like_torch()
    assert difference(expected, by_batch_norm(sync=False)) < 1e-9
    assert difference(expected, by_batch_norm(sync=True)) > 1e-3


def test_what_is_said(capsys):
    for sync in (True, False):
        by_batch_norm(sync)
        text = capsys.readouterr().out
        assert re.search(r"strategy +dp +set in the script", text)
        assert re.search(r"replicas +2 +on cpu, as set: they share the parameters", text)
        line = "1 synchronised +statistics of the samples of all devices, as on one"
        if not sync:
            line = r"per device +sync_batchnorm=False; the first device's statistics stay"
        assert re.search(f"batchnorm +{line}", text)
    with lockstep.init("dp", device="cpu") as world:
        model = world.prepare(mlp())
        assert isinstance(model, DataParallel)
        assert model.num_replicas == 1
    text = capsys.readouterr().out
    assert re.search(r"replicas +1 +no GPU; strategy=lockstep\.strategies\.DP\(replicas=2\)", text)
    with lockstep.init(DP(replicas=3), shares="2:3:3") as world:
        world.prepare(mlp())
    assert re.search(r"shares +2:3:3 +how every micro-batch is divided", capsys.readouterr().out)


def test_sizes_for_each_device():
    with lockstep.init(DP(replicas=3), shares="2:3:3", micro_batch_size=3) as world:
        assert world.loader(tensors(), 16).micro_batches == 2
        assert world.loader(tensors(), 16, micro_batch_size=6).micro_batches == 1
        assert world.loader(tensors(), batch_size_per_device=4).batch_size == 12
        with pytest.raises(SettingError, match="micro_batch_size=0"):
            world.loader(tensors(), 16, micro_batch_size=0)


def test_shares_are_set_between_batches():
    with lockstep.init(DP(replicas=2)) as world:
        model, seen = mlp(), []
        model[0].register_forward_hook(lambda m, args, out: seen.append(len(out)))
        model = world.prepare(model)
        model(tensors()[:6][0])
        model.set_shares("1:2")
        model(tensors()[:6][0])
        assert seen == [3, 3, 2, 4]
        with pytest.raises(SettingError, match="3 shares for 2 devices"):
            model.set_shares((1, 1, 1))


def continued(folder: str, replicas: int, steps: int) -> dict[str, torch.Tensor]:
    """Trains to `steps`, taking up what is in the folder."""
    with lockstep.init(DP(replicas=replicas), seed=3) as world:
        model = mlp(batch_norm=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(tensors(), batch_size=10, shuffle=True)
        model, optimizer, loader = world.prepare(model, optimizer, loader)
        checkpoint = world.checkpoint(folder, model=model, optimizer=optimizer, loader=loader)
        checkpoint.resume()
        for _epoch in world.epochs(9):
            for x, y in loader:
                world.backward(mean_loss(model, (x, y)))
                optimizer.step()
                optimizer.zero_grad()
                if world._run.step.number == steps:
                    checkpoint.save()
                    checkpoint.wait()
                    return weights(model)
    raise AssertionError("too few batches")


def test_a_checkpoint_fits_another_number_of_replicas(tmp_path: Path):
    continued(str(tmp_path / "a"), 2, 7)
    found = continued(str(tmp_path / "a"), 3, 12)
    assert difference(continued(str(tmp_path / "b"), 1, 12), found) < 1e-9
    model = DataParallel(mlp(batch_norm=True), replicas=2)
    lockstep.save_weights(model, tmp_path / "weights.safetensors")
    plain = mlp(batch_norm=True)
    nn.init.zeros_(plain[0].weight)
    lockstep.load_weights(plain, tmp_path / "weights.safetensors")
    assert difference(weights(plain), weights(model)) == 0


def test_balanced_data_parallel_in_a_prepared_loop():
    """Under `single`, with the module of its own: 2+3+3 in each of two micro-batches."""
    seen: list[int] = []
    with lockstep.init("single", micro_batch_size=8, device="cpu") as world:
        model = mlp()
        model[0].register_forward_hook(lambda m, args, out: seen.append(len(out)))
        balanced = lockstep.BalancedDataParallel(2, model, replicas=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(tensors(16), batch_size=16)
        balanced, optimizer, loader = world.prepare(balanced, optimizer, loader)
        for x, y in loader:
            world.backward(mean_loss(balanced, (x, y)))
            optimizer.step()
    plain = mlp()
    mean_loss(plain, tensors(16)[:]).backward()
    assert seen == [2, 3, 3, 2, 3, 3]
    assert torch.allclose(model[0].weight.grad, plain[0].weight.grad, rtol=0, atol=1e-12)


def start(strategy: Any, **settings: Any) -> None:
    lockstep.init(strategy, device="cpu", **settings).close()


def test_several_processes_are_refused():
    with pytest.raises(RankFailed, match="world size 2: dp is one process") as caught:
        run_ranks(start, 2, "dp")
    assert any("use strategy='ddp'" in text for text in caught.value.errors.values())


@pytest.mark.parametrize(
    ("strategy", "settings", "text"),
    [
        (DP(replicas=0), {}, "replicas=0"),
        (DP(replicas=2), {"shares": "1:2:3"}, "3 shares for 2 devices"),
        ("dp", {"shares": "1:2"}, "2 shares for 1 device"),
        (DP(device_ids=[0], replicas=2), {}, "give one of them"),
        (DP(device_ids=[900]), {}, "they name GPUs, each once"),
    ],
)
def test_wrong_options(strategy, settings, text):
    with pytest.raises(SettingError) as caught:
        start(strategy, **settings)
    assert text in str(caught.value)


def test_a_module_that_is_wrapped_already():
    balanced = lockstep.BalancedDataParallel(1, mlp(), replicas=2)
    match = "the strategy wraps the module itself"
    with lockstep.init("dp", device="cpu") as world, pytest.raises(UsageError, match=match):
        world.prepare(balanced)


GPUS = torch.cuda.device_count()


def on_gpus(strategy: Any, shares: str | None = None) -> dict[str, torch.Tensor]:
    with lockstep.init(strategy, seed=2, shares=shares) as world:
        model = mlp(batch_norm=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(tensors(), batch_size=16)
        model, optimizer, loader = world.prepare(model, optimizer, loader)
        for _epoch in world.epochs(3):
            for x, y in loader:
                world.backward(mean_loss(model, (x, y)))
                optimizer.step()
                optimizer.zero_grad()
        return {name: value.cpu() for name, value in weights(model).items()}


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
def test_replicas_on_one_gpu():
    [expected] = run_ranks(on_gpus, 1, "single")
    [found] = run_ranks(on_gpus, 1, DP(replicas=3), "1:2:1")
    assert difference(expected, found) < 1e-9


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, {GPUS} are visible")
@pytest.mark.parametrize("shares", [None, "1:2", "0:1"])
def test_two_gpus(shares):
    [expected] = run_ranks(on_gpus, 1, "single")
    [found] = run_ranks(on_gpus, 1, DP(device_ids=[0, 1]), shares)
    assert difference(expected, found) < 1e-9
