from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.verify.recording.batches import describe_batch
from lockstep.verify.recording.determinism import Determinism
from lockstep.verify.recording.function_mode import FunctionMode
from lockstep.verify.recording.loss_calls import terms_of
from lockstep.verify.recording.marks import STATISTIC, mark, marks_of, remove_local_marks
from lockstep.verify.recording.models import Models
from lockstep.verify.recording.optimizers import ParameterGroup
from lockstep.verify.recording.sample_coupling import compares_samples
from lockstep.verify.recording.tensor_values import copy_arrays, digest

pytestmark = pytest.mark.unit


def function_mode() -> FunctionMode:
    return FunctionMode(Determinism(double=False))


def test_what_was_recorded_can_be_freed() -> None:
    gathered = torch.ones(3, dtype=torch.float64)
    digest(gathered)
    arrays = copy_arrays([("weight", gathered)])
    gathered.untyped_storage().resize_(0)  # as FSDP does
    assert arrays["weight"].tolist() == [1.0, 1.0, 1.0]


def test_names_of_modules_are_without_a_wrapper_s() -> None:
    norm, alone = nn.BatchNorm1d(4), nn.BatchNorm1d(2)
    wrapped = nn.DataParallel(nn.Sequential(nn.Linear(4, 4), nn.Sequential(norm)))
    models = Models()
    models.add(wrapped)
    models.add(alone)
    names = {id(module): name for name, module in models.modules()}
    assert (names[id(norm)], names[id(alone)]) == ("Sequential/1.0", "BatchNorm1d/")


def test_a_view_of_a_parameter_is_not_kept_by_itself() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))
            self.half = self.weight.narrow(0, 0, 2)
            self.state = [self.weight[:1], torch.ones(2), torch.zeros(2)]

    models = Models()
    models.add(Net())
    assert list(models.plain_attributes()) == ["Net/state[1]", "Net/state[2]"]


def test_known_summaries_of_parameters_are_not_computed_again() -> None:
    models = Models()
    models.add(nn.Linear(2, 3))
    known = {"Linear/bias": np.zeros(2), "Net/weight": np.zeros(2)}
    summaries = models.summaries_of_parameters(known)
    assert list(summaries) == ["Linear/weight", "Linear/bias"]
    assert summaries["Linear/bias"] is known["Linear/bias"]
    assert summaries["Linear/weight"].all()


def contrast(one: Tensor, other: Tensor) -> Tensor:
    return F.cross_entropy(one @ other.T, torch.arange(len(one)))


def far(codes: Tensor) -> Tensor:
    return (codes[:, None] - codes).square().sum(2).clamp(min=1e-9).sqrt()


@pytest.mark.parametrize(
    ("loss", "compares"),
    [
        (lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long)), False),
        (lambda x: x.square().mean() + x.exp().sum(), False),
        (lambda x: x.square().mean().sqrt(), True),
        (lambda x: contrast(x, x), True),
        (lambda x: (x - x.mean(0)).square().mean(), True),
        (lambda x: F.softplus(far(x).amax(1)).mean(), True),
        (lambda x: x.sum(), False),
        # What has no second derivative, or none at zero, but is known to compare.
        (lambda x: F.softplus(torch.cdist(x.repeat(6, 1), x.repeat(6, 1)).amax(1)).mean(), True),
        (lambda x: F.softplus(torch.cdist(x, x).amax(1)).mean(), True),
        (lambda x: torch.cdist(x, torch.ones(2, 3, dtype=x.dtype)).mean(), False),
        (lambda x: torch.cdist(x, nn.Parameter(torch.ones(2, 3, dtype=x.dtype))).mean(), False),
    ],
)
def test_a_loss_that_compares_samples_is_known(
    loss: Callable[[Tensor], Tensor], compares: bool
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    outputs = torch.randn(6, 4, dtype=torch.float64) @ weight
    made = loss(outputs)
    assert compares_samples(made, [outputs], 6) is compares
    made.backward()  # nothing was taken from it
    assert weight.grad is not None


def test_samples_are_compared_between_two_outputs_too() -> None:
    one, other = (torch.randn(5, 4, requires_grad=True) * 1 for _ in range(2))
    assert compares_samples(contrast(one, other), [one, other], 5)
    assert not compares_samples((one * other).square().mean(), [one, other], 5)
    assert not compares_samples(one.sum(), [], 5)


def test_what_a_model_compares_is_not_the_loss_s_doing() -> None:
    hidden = torch.randn(6, 4, requires_grad=True) * 1
    outputs = nn.BatchNorm1d(4)(hidden)
    assert not compares_samples(outputs.exp().mean(), [hidden, outputs], 6)


def test_what_has_no_second_derivative_is_not_known() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.square().sum()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, gradient):
            return gradient * torch.ones(5, 4)

    outputs = torch.randn(5, 4, requires_grad=True) * 1
    assert not compares_samples(Once.apply(outputs), [outputs], 5)


def test_labels_are_counted_as_a_shifted_loss_counts_them() -> None:
    labels = torch.tensor([[5, 6, -100], [-100, 7, 8]])
    tokens = torch.tensor([[4, 5, 1], [1, 1, 1]])  # 1 is padding
    found = describe_batch((labels, tokens)).weights
    assert found["labels in tensor 0"] == 4
    assert found["labels in tensor 0 without its first column"] == 3
    assert found["values but 1 in tensor 1"] == 2


def test_the_terms_of_a_loss_are_known() -> None:
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    with function_mode():
        one, two = x.mean(), x.square().sum()
        loss = (one + 0.5 * two - x.sum()) / 2
        total = sum([one, two])
        total += one
        product = one * two
    assert terms_of(loss) == [1.0, 2.5, -2.0]
    assert terms_of(total) == [2.0, 10.0, 2.0]
    assert terms_of(product) == [20.0]


def test_what_is_made_of_a_gather_is_known() -> None:
    quiet = function_mode()
    mine, theirs = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3)
    mark([theirs], gather="train.py:7")
    with quiet:
        everything = torch.cat([mine, theirs])
        loss = F.mse_loss(everything, torch.zeros(4, 3))
        own = mine.sum()
        drawn = [mine * torch.rand(()), mine * torch.randn(2, 3)]
    assert marks_of(loss) == {"gather": "train.py:7"}
    assert marks_of(own) == {}
    (first, line, *_), (second, _, other) = (marks_of(t)["draw"] for t in drawn)
    assert first < second
    assert line.endswith("torch.randn(2, 3)]")
    assert marks_of([drawn, loss]) == {"gather": "train.py:7", "draw": (2, line, other)}


def test_a_model_that_nothing_averages_is_bare() -> None:
    models, bare, prepared = Models(), nn.Linear(2, 1), nn.Linear(2, 1)
    models.add(bare)
    models.prepared_ids.add(id(prepared))
    models.add(prepared)
    assert models.unwrapped_parameters() == ["Linear/weight", "Linear/bias"]
    models.ddp_parameter_ids[id(bare)] = {id(p) for p in bare.parameters()}
    assert models.unwrapped_parameters() == []


def test_a_parameter_group_knows_where_its_rate_was_set() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    group = optimizer.param_groups[0] = ParameterGroup(optimizer.param_groups[0])
    assert "ParameterGroup(" in group.line
    group["lr"] = 0.3  # by hand
    assert group.line.endswith("# by hand")
    group["momentum"] = 0.5
    assert group.line.endswith("# by hand")
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    schedule.step()  # by the schedule
    assert group.line.endswith("# by the schedule")


def test_a_statistic_over_samples_is_known_until_it_is_exchanged() -> None:
    x, outputs = torch.arange(12.0).view(4, 3), torch.ones(4, requires_grad=True)
    with function_mode():
        mean = x.mean(0)
        made = [x.max(), x[:, 0].softmax(0), x.sort(0)[1], x.norm(2, 0), F.normalize(x, dim=0)]
        made += [x[:, 0].topk(2).values, outputs.topk(2).values, torch.zeros(4)]
        made[-1][1:] = (x[:, 0] - mean[0])[1:]
        rows = [x.mean(1), x.max(dim=1).values, x.norm(dim=1), x.topk(2)[0], F.normalize(x)]
        rows += [x[:1].sum(0), torch.maximum(x, -x), outputs.mean()]
        remove_local_marks(mean)
    kinds = [[*marks_of(each)] for each in made]
    assert all(len(own) == 1 and own[0].startswith(STATISTIC) for own in kinds), kinds
    assert [marks_of(each) for each in (mean, *rows)] == [{}] * (len(rows) + 1)
