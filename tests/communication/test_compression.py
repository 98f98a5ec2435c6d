from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problems import FEATURES, difference, mean_loss, mlp, tensors, weights
from ranks import as_on_machines, in_gloo_group, run_ranks
from torch import Tensor, nn

import lockstep
from lockstep.communication import compressed_means, low_rank_sum, quantize
from lockstep.communication.low_rank_sum import LowRankSum
from lockstep.communication.quantize import BLOCK, decode, encode
from lockstep.communication.quantized_sum import QuantizedSum
from lockstep.communication.traffic import traffic
from lockstep.errors import SettingError, UsageError
from lockstep.strategies import DDP

pytestmark = pytest.mark.ranks

METHODS = "bf16", "int8", "int4"
LENGTH, ROUNDS = 3_000, 4
SIZES = (1, 1), (2,), (3,), (2, 2)
"""Ranks on each machine."""


def decoded(sent: Tensor, method: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    of_value = {"bf16": 2, "int8": 1 + 4 / BLOCK, "int4": 0.5 + 4 / BLOCK}[method]
    empty = torch.empty(len(sent), round(sent.shape[1] / of_value), dtype=dtype)
    return decode(sent, method, empty)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("method", "of_value", "error"),
    [("bf16", 2, 2**-8), ("int8", 1 + 4 / BLOCK, 0.5 / 127), ("int4", 0.5 + 4 / BLOCK, 0.5 / 7)],
)
def test_numbers_come_back_as_far_as_their_bytes_tell(
    method: Any, of_value: float, error: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    scales = 10.0 ** torch.arange(-30, 30, dtype=dtype).repeat_interleave(BLOCK)
    given = torch.randn(2, len(scales), generator=generator, dtype=dtype) * scales
    given[0, :BLOCK] = 0.0
    sent = encode(given, method)
    assert sent.shape == (2, of_value * len(scales))
    found = decoded(sent, method, dtype)
    lost = torch.full_like(given, torch.nan)
    assert torch.equal(encode(given, method, lost), sent)
    if method != "bf16":
        assert torch.equal(lost, given - found)
    largest = given.abs() if method == "bf16" else given.view(2, -1, BLOCK).abs().amax(2, True)
    lost = (found - given).abs().view(2, -1, BLOCK) / largest.view(2, len(scales) // BLOCK, -1)
    assert float(lost.nan_to_num(0.0).max()) <= error * 1.001
    assert float(lost.nan_to_num(0.0).max()) > error * 0.7
    assert torch.equal(decoded(encode(-given, method), method, dtype), -found)


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_long_vectors_are_encoded_as_their_parts_are(method: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(2, 3 * quantize.VALUES_IN_CACHE + BLOCK, generator=generator)
    lost, short = torch.empty_like(given), 2 * quantize.VALUES_IN_CACHE
    found = decoded(encode(given, method, lost), method)
    for part in (slice(0, short), slice(short, None)):
        own = given[:, part].contiguous()
        assert torch.equal(decoded(encode(own, method), method), found[:, part])
    assert torch.equal(lost, given - found)


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_short_floating_point_is_encoded_by_longer_one(method: Any) -> None:
    given = torch.randn(1, 4 * BLOCK, generator=torch.Generator().manual_seed(0)).bfloat16()
    lost = torch.empty_like(given)
    sent = encode(given, method, lost)
    assert torch.equal(sent, encode(given.float(), method))
    assert torch.equal(decoded(sent, method, torch.bfloat16), decoded(sent, method).bfloat16())
    assert torch.equal(lost, (given.float() - decoded(sent, method)).bfloat16())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_finite_stays_so(method: Any, value: float) -> None:
    given = torch.ones(1, 3 * BLOCK)
    given[0, BLOCK + 5] = value
    found = decoded(encode(given, method), method)[0]
    assert not found[BLOCK : 2 * BLOCK].isfinite().all()
    assert torch.equal(found[:BLOCK], torch.ones(BLOCK))
    assert torch.equal(found[2 * BLOCK :], torch.ones(BLOCK))


def given_by(rank: int, turn: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randn(LENGTH, generator=generator) * torch.linspace(0.1, 2, LENGTH)


def naive(method: Any, machines: list[list[int]], rounds: int) -> list[Tensor]:
    """The sums one after another, of peers that are machines, on one process."""
    size = len(machines)
    step = BLOCK * sum(map(len, machines))
    padded = -(-LENGTH // step) * step
    of_slice = padded // len(machines[0])
    owner = torch.arange(padded) % of_slice // (of_slice // size)
    lost = [torch.zeros(padded) for _ in machines]

    def arrives(values: Tensor) -> Tensor:
        return decoded(encode(values.view(1, -1), method), method)[0]

    found = []
    for turn in range(rounds):
        total = torch.zeros(padded)
        for number, ranks in enumerate(machines):
            own = torch.zeros(padded)
            for rank in ranks:
                own[:LENGTH] += given_by(rank, turn)
            own += lost[number]
            sent = torch.where(owner == number, own, arrives(own))
            lost[number] = own - sent
            total += sent
        sums = arrives(total)
        for number in range(size):
            lost[number] = torch.where(owner == number, total - sums, lost[number])
            if method == "bf16":
                lost[number].zero_()
        found.append(sums[:LENGTH])
    return found


@in_gloo_group
def beside_own_messages() -> float:
    """What arrives by a receive that was begun before gradients are sent."""
    came, rank = torch.zeros(1), dist.get_rank()
    work = dist.irecv(came, 1 - rank)
    gradients = QuantizedSum(LENGTH, came, "int8")
    gradients.values.fill_(1.0)
    gradients.start()
    gradients.advance()
    gradients.end()
    assert torch.allclose(gradients.values, torch.tensor(2.0), atol=0.01)
    dist.send(torch.tensor([5.0 + rank]), 1 - rank)
    assert work is not None
    work.wait()
    return float(came)


def test_a_users_own_messages_are_not_taken_for_gradients() -> None:
    assert run_ranks(beside_own_messages, 2) == [6.0, 5.0]


def one_after_another(pair: list[Any], rank: int) -> list[list[Tensor]]:
    """What two sums give that are sent at a time; the second gets it in reverse."""
    found: list[list[Tensor]] = [[], []]
    for turn in range(ROUNDS):
        for own, flipped in zip(pair, (False, True), strict=True):
            values = given_by(rank, turn)
            own.values.copy_(values.flip(0) if flipped else values)
            own.start()
        for own in pair:
            own.advance()
        for own, sums in zip(pair, found, strict=True):
            own.end()
            sums.append(own.values.clone())
    return found


def quantized(sizes: tuple[int, ...]) -> dict[str, list[list[Tensor]]]:
    as_on_machines(sizes)
    with lockstep.init(device="cpu") as world:
        like = torch.zeros(1)
        return {
            method: one_after_another(
                [QuantizedSum(LENGTH, like, method), QuantizedSum(LENGTH, like, method)], world.rank
            )
            for method in METHODS
        }


@pytest.mark.parametrize("sizes", SIZES)
def test_a_quantized_sum_is_the_naive_one_on_every_rank(sizes: tuple[int, ...]) -> None:
    size = sum(sizes)
    alone = [[rank] for rank in range(size)]
    machines = [[0, 1], [2, 3]] if sizes == (2, 2) else alone
    found = run_ranks(quantized, size, sizes)
    for method in METHODS:
        expected = naive(method, machines, ROUNDS)
        for one in found:
            assert all(map(torch.equal, one[method][0], expected))
            assert all(map(torch.equal, one[method][1], found[0][method][1]))


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_what_is_lost_in_one_step_comes_in_the_next(method: str) -> None:
    rounds, machines = 60, [[0], [1]]
    exact = sum(given_by(r, t) for t in range(rounds) for r in range(2))
    found = naive(method, machines, rounds)
    each = [(f - given_by(0, t) - given_by(1, t)).norm() for t, f in enumerate(found)]
    assert float((sum(found) - exact).norm()) < 2 * float(max(each))


def after_one_that_is_not_finite(value: float) -> dict[str, list[Tensor]]:
    """Four sums, the second of a vector that is not finite where it ends, beside padding."""
    found: dict[str, list[Tensor]] = {}
    with lockstep.init(device="cpu") as world:
        like = torch.zeros(1, dtype=torch.float64)
        sums = {method: QuantizedSum(60, like, method) for method in METHODS}
        powersgd = LowRankSum([torch.Size((6, 10))], like, rank=1, start=0)
        for name, own in {**sums, "powersgd": powersgd}.items():
            for turn in range(4):
                own.values.copy_(given_by(world.rank, turn)[:60])
                if turn == 1 and world.rank == 0:
                    own.values[-1] = value
                for step in (own.start, own.advance, own.end):
                    step()
                found.setdefault(name, []).append(own.values.clone())
    return found


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_seen_and_does_not_come_again(value: float) -> None:
    for found in run_ranks(after_one_that_is_not_finite, 2, value):
        for method, sums in found.items():
            finite = [bool(each.isfinite().all()) for each in sums]
            assert finite == [True, False, True, True], method


def test_parameters_without_elements_are_no_obstacle() -> None:
    assert run_ranks(sums_of_nothing, 2) == [None, None]


def sums_of_nothing() -> None:
    with lockstep.init(device="cpu"):
        like, shapes = torch.zeros(1), [torch.Size((0, 3)), torch.Size((3, 0)), torch.Size((0,))]
        empty = LowRankSum(shapes, like, rank=1, start=0)
        for own in (*(QuantizedSum(0, like, method) for method in METHODS), empty):
            for step in (own.start, own.advance, own.end):
                step()
            assert not own.values.numel()


SHAPES = [torch.Size(shape) for shape in ((40, 50), (7,), (10, 4, 3, 5), (), (2, 3))]


def matrices(rank: int, turn: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randn(sum(s.numel() for s in SHAPES), generator=generator, dtype=torch.float64)


def low_rank(sizes: tuple[int, ...], rank: int) -> list[Tensor]:
    as_on_machines(sizes)
    with lockstep.init(device="cpu") as world:
        own = LowRankSum(SHAPES, torch.zeros(1, dtype=torch.float64), rank=rank, start=2)
        found = []
        for turn in range(6):
            own.values.copy_(sum(matrices(r, turn) for r in range(world.rank, 12, world.size)))
            for step in (own.start, own.advance, own.end):
                step()
            found.append(own.values.clone())
        return found


def test_matrices_of_one_shape_are_decomposed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    shapes = [(9, 2), (5, 2), (9, 2), (9, 1), (9, 2)]
    matrices = [torch.randn(shape) for shape in shapes]
    matrices[2][3, 1] = torch.nan
    decompose = torch.linalg.qr
    expected = [decompose(matrix).Q for matrix in matrices]
    stacked: list[tuple[int, ...]] = []

    def noted(matrix: Tensor) -> Any:
        stacked.append(tuple(matrix.shape))
        return decompose(matrix)

    monkeypatch.setattr(torch.linalg, "qr", noted)
    found = low_rank_sum._orthonormal_bases(matrices)
    assert stacked == [(3, 9, 2), (1, 5, 2), (1, 9, 1)]
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_low_rank_sums_do_not_depend_on_who_gives_what() -> None:
    results = {sizes: run_ranks(low_rank, sum(sizes), sizes, 2) for sizes in ((2,), (3,), (2, 2))}
    expected = results[(2,)][0]
    for found in results.values():
        for one in found:
            for own, other, first in zip(one, expected, found[0], strict=True):
                torch.testing.assert_close(own, other, rtol=0, atol=1e-9)
                assert torch.equal(own, first)
    whole = [sum(matrices(r, turn) for r in range(12)) for turn in range(6)]
    for turn, (own, exact) in enumerate(zip(expected, whole, strict=True)):
        parts = own.split([s.numel() for s in SHAPES]), exact.split([s.numel() for s in SHAPES])
        for shape, part, true in zip(SHAPES, *parts, strict=True):
            if turn < 2 or shape.numel() < 100:
                torch.testing.assert_close(part, true, rtol=0, atol=1e-9)
            else:
                assert torch.linalg.matrix_rank(part.view(shape[0], -1)) == 2
    # From the third on: the sum of what is lost is what is kept.
    first = slice(0, SHAPES[0].numel())
    lost = sum(whole[2:])[first] - sum(expected[2:])[first]
    assert float(lost.norm()) < 2.5 * float(whole[0][first].norm())


def trained(options: dict[str, Any], sizes: tuple[int, ...] = (2,)) -> tuple[Any, str, int]:
    """Weights after 40 steps, what was printed, and the bytes that were sent."""
    as_on_machines(sizes)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), lockstep.init(DDP(**options), device="cpu") as world:
        model = nn.Sequential(nn.Linear(FEATURES, 200), nn.Tanh(), nn.Linear(200, 4))
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
        model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = world.loader(tensors(dtype=torch.float32), 10, shuffle=True)
        for _ in world.epochs(8):
            for batch in loader:
                world.backward(mean_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
        found = weights(model)
    return found, out.getvalue(), traffic.sent


def all_trained(sizes: tuple[int, ...]) -> dict[str, tuple[Any, str, int]]:
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "bf16": {"compress": "bf16"},
        "int8": {"compress": "int8"},
        "small buckets": {"compress": "int8", "bucket_cap_mb": 0.001, "static_graph": True},
        "powersgd": {"compress": "powersgd", "powersgd_start": 3},
    }
    return {name: trained(options, sizes) for name, options in cases.items()}


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((2,), marks=pytest.mark.thorough),
        pytest.param((1, 1, 1), marks=pytest.mark.thorough),
        (2, 2),
    ],
)
def test_models_train_with_compressed_gradients(sizes: tuple[int, ...]) -> None:
    results = run_ranks(all_trained, sum(sizes), sizes)
    peers = 2 if sizes == (2, 2) else sum(sizes)
    between = "2 machines" if sizes == (2, 2) else f"{peers} ranks"
    first = results[0]
    for name, allowed in {"bf16": 0.01, "int8": 0.02, "powersgd": 0.5}.items():
        assert 0 < difference(first["plain"][0], first[name][0]) < allowed
        assert f"gradients between {between};" in " ".join(first[name][1].split())
    assert "compression" not in first["plain"][1]
    assert difference(first["int8"][0], first["small buckets"][0]) == 0
    count = sum(each.numel() for each in first["plain"][0].values())
    of_rank = 2 * (peers - 1) / sum(sizes) * count * 40  # numbers, in 40 steps
    in_memory = sizes == (2,)
    expected = {"plain": 0 if in_memory else 4, "bf16": 2, "int8": 1 + 4 / BLOCK}
    for name, of_number in expected.items():
        assert first[name][2] == pytest.approx(of_number * of_rank, rel=0.2)
        assert ("by rank 0 to other ranks" in first[name][1]) is (of_number > 0)
    assert in_memory is (first["powersgd"][2] == 0)
    assert first["powersgd"][2] < 0.4 * 4 * of_rank
    for found in results[1:]:
        for name, (own, *_) in found.items():
            assert difference(own, first[name][0]) == 0


def resumed(folder: str, sizes: tuple[int, ...], method: Any, resume: bool) -> Any:
    """Weights after 8 steps, of which the last 4 may be those of a run that is resumed."""
    as_on_machines(sizes)
    options = DDP(compress=method, powersgd_start=1, bucket_cap_mb=0.001)
    out = io.StringIO()
    with contextlib.redirect_stderr(out), lockstep.init(options, device="cpu") as world:
        inner = nn.Sequential(nn.Linear(FEATURES, 40), nn.Tanh(), nn.Linear(40, 4))
        model, optimizer = world.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
        loader = world.loader(tensors(dtype=torch.float32), 12)
        checkpoint = world.checkpoint(folder, model=model, optimizer=optimizer, loader=loader)
        assert checkpoint.resume() is resume
        for _ in world.epochs(2):
            for batch in loader:
                world.backward(mean_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                if world.step == 4 and not resume:
                    checkpoint.save()
        checkpoint.wait()
        return weights(model), out.getvalue()


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("bf16", marks=pytest.mark.thorough),
        pytest.param("int8", marks=pytest.mark.thorough),
        "powersgd",
    ],
)
def test_what_is_not_sent_yet_is_in_checkpoints(tmp_path: Any, method: str) -> None:
    expected = run_ranks(resumed, 4, str(tmp_path), (2, 2), method, False)
    for weights_of, said in run_ranks(resumed, 4, str(tmp_path), (2, 2), method, True):
        assert difference(weights_of, expected[0][0]) == 0
        assert said == ""
    found = run_ranks(resumed, 2, str(tmp_path), (1, 1), method, True)
    assert difference(found[0][0], expected[0][0]) < (1e-5 if method == "powersgd" else 0.01)
    assert ("does not fit" in found[0][1]) is (method == "int8")
    assert found[1][1] == ""


def refused() -> list[str]:
    found = []
    with lockstep.init(DDP(compress="int8"), device="cpu") as world:
        for model in (nn.EmbeddingBag(3, 2, sparse=True), mlp()):
            try:
                model = world.prepare(model)
                model.register_comm_hook(None, print)
            except (SettingError, UsageError) as error:
                found.append(str(error))
    return found


def test_what_cannot_be_compressed_is_refused() -> None:
    for sparse, hook in run_ranks(refused, 2):
        assert "sparse gradients" in sparse
        assert "register_comm_hook of a model that was prepared with DDP(compress=...)" in hook
    with pytest.raises(SettingError, match="compressions are bf16, int8, powersgd"):
        DDP(compress="int9")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="powersgd_rank=0"):
        DDP(powersgd_rank=0)


def test_gradients_are_put_together_in_the_order_in_which_they_come() -> None:
    made = [torch.zeros(2**20), torch.zeros(3), torch.zeros(2**20), torch.zeros(2**20)]
    made.append(torch.zeros(5, dtype=torch.float64))
    found = compressed_means._divide_into_units(made)
    assert [list(map(len, unit)) for unit in found] == [[5], [2**20], [2**20], [3, 2**20]]
    small = [torch.zeros(64, 256) for _ in range(12)]
    assert [len(unit) for unit in compressed_means._divide_into_units(small)] == [3, 3, 3, 3]
    assert len(compressed_means._divide_into_units(small[:2])) == 1
