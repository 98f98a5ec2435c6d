"""Models that a script calls for the first time after its first step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import warm

from lockstep.verify.late_models import with_names_of_models, without_models_met_by_one_run
from lockstep.verify.names import AlignedRun, align_names
from lockstep.verify.training_record import RankUpdate, Update

pytestmark = pytest.mark.launcher

SUMS = {model: np.array([3.0 + number, 1.0]) for number, model in enumerate("abcde")}
"""Two numbers for the weight of each of five models of one class."""

SCRIPT = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x, y = torch.randn(48, 6), torch.randint(0, 3, (48,))


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return self.scale * self.layer(x)


models = [nn.Sequential(nn.Linear(6, 3)), Probe(), Probe(), Probe()]
if {wraps} and size > 1:
    models = [DistributedDataParallel(model, find_unused_parameters=True) for model in models]
optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)

# The last probe is never called.
for batch, called in zip(torch.arange(48).split(8), {called}):
    part = batch.chunk(size)[rank]
    order = called[::-1] if rank == 1 and not {wraps} else called  # in an order of its own
    loss = sum(F.cross_entropy(models[number](x[part]), y[part]) for number in order)
    optimizer.zero_grad()
    loss.backward()
    if not {wraps}:
        for number in called:
            for parameter in models[number].parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= size
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("wraps", "called"), [(True, [[0], [2], [1], [2, 1]]), (False, [[0], [1, 2], [2, 1]])]
)
def test_models_that_are_first_called_after_the_first_step(
    wraps: bool, called: list[list[int]], tmp_path: Path
) -> None:
    text = SCRIPT.replace("{wraps}", str(wraps)).replace("{called}", str(called))
    (script := tmp_path / "train.py").write_text(text)
    verdict = warm.verify(script, steps=50)
    assert verdict.word == "EQUAL", verdict.lines()
    assert len(verdict.reference.updates) == len(called)


MET_BY_SOME = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x, y = torch.randn(32, 6), torch.randint(0, 3, (32,))


class AveragingSGD(torch.optim.SGD):
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= size
        super().step()


class Wrapped(nn.Linear):
    pass


class Early(nn.Linear):
    pass


class Teacher(nn.Linear):
    pass


net, wrapped, early, teacher = nn.Linear(6, 3), Wrapped(6, 3), Early(6, 3), Teacher(6, 3)
if size > 1:
    DistributedDataParallel(wrapped)
trained = [*net.parameters(), *wrapped.parameters(), *early.parameters()]
optimizer = AveragingSGD(trained, lr=0.1)
for number, batch in enumerate(torch.arange(32).split(8)):
    part = batch.chunk(size)[rank]
    optimizer.zero_grad()
    F.cross_entropy(net(x[part]), y[part]).backward()
    optimizer.step()
    if rank == 0 and number == 1:
        with torch.no_grad():
            early(x)
if rank == 0:
    with torch.no_grad():
        teacher(x)
"""


def test_models_that_only_some_processes_meet_and_nobody_trains(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(MET_BY_SOME)
    verdict = warm.verify(script, steps=50)
    assert verdict.word == "EQUAL", verdict.lines()
    assert verdict.accepted_difference.startswith("where an optimizer's step begins")


def run(*models_of_ranks: str) -> list[Update]:
    """Two updates; the models are known before the second one.

    Args:
        *models_of_ranks: for each rank the models by their numbers: "ab" if `Net` is a and
            `Net#2` is b.
    """
    records = []
    for rank, models in enumerate(models_of_ranks):
        roots = [f"Net#{number}" if number > 1 else "Net" for number in range(1, len(models) + 1)]
        sums = {f"{root}/w": SUMS[model] for root, model in zip(roots, models, strict=True)}
        records.append(RankUpdate(rank=rank, parameter_sums=sums, gradients=dict(sums)))
    return [Update(RankUpdate(rank=record.rank) for record in records), Update(records)]


@pytest.mark.parametrize(
    ("reference", "ranks"),
    [("ab", ("ab", "ba")), ("ab", ("ba", "ba")), ("ab", ("a", "b")), ("b", ("ab", "ab"))],
)
def test_late_models_have_the_names_of_the_reference(
    reference: str, ranks: tuple[str, ...]
) -> None:
    reference_run = run(reference)
    names_by_model = {sums[0]: name for name, sums in reference_run[1][0].gradients.items()}
    for rank, record in enumerate(align_names(reference_run, run(*ranks)).updates[1]):
        assert len(record.gradients) == len(ranks[rank])  # no two have the same name
        for name, gradient in record.gradients.items():
            assert names_by_model.get(gradient[0], name) == name


def test_a_model_that_the_reference_does_not_have_keeps_its_name_if_it_can() -> None:
    (_, update) = align_names(run("abc"), run("dea")).updates
    names = {gradient[0]: name for name, gradient in update[0].gradients.items()}
    assert [names[SUMS[model][0]] for model in "dea"] == ["Net#3/w", "Net#2/w", "Net/w"]


def test_a_parameter_has_the_name_of_its_model_before_the_model_is_called() -> None:
    def trains(name: str) -> Update:
        return Update([RankUpdate(optimizer_parameters=[name], initial={name: np.ones(2)})])

    later = [trains("/parameter 1 of optimizer 1"), trains("Net/w")]
    never = [trains("/parameter 1 of optimizer 1")]
    final_sums = [{"/parameter 1 of optimizer 1": np.ones(2)}]
    named = AlignedRun(later, final_sums), AlignedRun(never, final_sums)
    for run in (with_names_of_models(named[0]), with_names_of_models(named[1], later)):
        assert [list(update[0].initial) for update in run.updates] == [["Net/w"]] * len(run.updates)
        assert [list(sums) for sums in run.final_sums] == [["Net/w"]]

    # Without another run that knows more, the parameter keeps its place as its name.
    assert with_names_of_models(named[1]) == named[1]
    assert with_names_of_models(AlignedRun([], [])) == AlignedRun([], [])


def test_a_parameter_gets_no_name_that_the_rank_has_already() -> None:
    place = "/parameter 1 of optimizer 1"
    has_both = RankUpdate(optimizer_parameters=[place], parameter_sums={"Net/w": np.ones(2)})
    run = AlignedRun([Update([has_both])], [])
    other_run = [Update([RankUpdate(optimizer_parameters=["Net/w"])])]
    assert with_names_of_models(run, other_run) == run


def test_only_models_that_are_not_trained_may_be_unknown_to_one_run() -> None:
    both = {"Net/w": np.ones(2)}
    more = both | {"Probe/w": np.ones(2), "/parameter 1 of optimizer 1": np.ones(2)}
    one_run = [Update([RankUpdate(initial=both)])]
    other_run = [Update([RankUpdate(initial=more, buffers={"Probe/scale": np.ones(1)})] * 2)]
    ((one,), (other,)) = without_models_met_by_one_run(one_run, other_run)
    assert list(one[0].initial) == ["Net/w"]
    assert list(other[1].initial) == ["Net/w", "/parameter 1 of optimizer 1"]
    assert other[1].buffers == {}

    trained = [Update([RankUpdate(initial=more, gradients=more)])]
    assert without_models_met_by_one_run(one_run, trained)[1] == trained
