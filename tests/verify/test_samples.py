"""Causes that are seen sample by sample: made up of numbers, and of small scripts for torchrun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm
from test_causes import (
    ALONE,
    ONE,
    OTHER,
    RANDOM,
    THIRD,
    WHOLE,
    codes,
    found,
    taken,
    two,
    update,
    verdict as judged_as,
)

from lockstep.verify.causes import cause_of
from lockstep.verify.divergence import find_divergences, indices_with_other_contents
from lockstep.verify.names import align_names
from lockstep.verify.recording.batches import describe_batch
from lockstep.verify.recording.tensor_values import sample_tensors
from lockstep.verify.tolerance import FLOAT64
from lockstep.verify.training_record import Forward, RankUpdate, ScriptCall, Update

pytestmark = pytest.mark.unit

X, Y = RANDOM.normal(size=(9, 2)), RANDOM.normal(size=(9, 2))
"""Of nine samples what they go in with, and what comes out."""
WRONG = RANDOM.normal(size=(6, 4))
ALL = (0, 1, 2, 3)
HALVES = ((0, 1), (2, 3))


def passed(ids: Sequence[int], **values: Any) -> dict[str, Any]:
    place = list(ids)
    known = {
        "inputs": X[place],
        "outputs": Y[place],
        "output_gradients": Y[place],
        "targets": X[place],
    }
    known |= {"other_inputs": np.zeros((0, 2)), "input_values": X[place], **values}
    return {"forwards": [Forward(model="Net, forward pass 1", shape="f [2]", **known)]}


def ranks(halves: Sequence[Sequence[int]] = HALVES, **values: Any) -> list[RankUpdate]:
    """Two of them, whose gradients nothing explains."""
    return [
        replace(rank, **passed(half), **values)
        for rank, half in zip(two(WRONG), halves, strict=True)
    ]


def alone(ids: Sequence[int] = ALL, **values: Any) -> RankUpdate:
    return replace(update(THIRD, taken(*ALL)), **passed(ids), **values)


@pytest.mark.parametrize(
    ("halves", "draws", "code", "words"),
    [
        (((0, 1), (1, 2)), (), "LS101", "1 inputs of one process were computed by none"),
        (((0, 1), (2,)), (), "LS102", "1 inputs of one process were computed by none"),
        (((0, 1), (2, 5)), (), "LS109", "1 are inputs of another step of one process"),
        (((0, 1), (2, 5)), ("a", "b"), "LS105", "each rank drew an order of its own: train.py:3"),
        (((0, 1), (2, 8)), (), "LS111", "1 are not known from one process"),
        (((0, 1), (2, 8)), ("a", "a"), "LS106", "all ranks drew the same numbers"),
        (((0, 1), (2, 8)), ("a", "b"), "LS308", "random numbers"),
    ],
)
def test_other_inputs_than_on_one_process(
    halves: Sequence[Sequence[int]], draws: Sequence[str], code: str, words: str
) -> None:
    reference = [Update([alone()]), Update([alone((4, 5, 6, 7))])]
    many = ranks(halves)
    for each in (*reference[0], *many):
        each.batches = []
    for rank, drawn in zip(many, draws, strict=False):
        rank.loss_draws = [("train.py:3", drawn)]
    cause = cause_of(find_divergences(reference, [Update(many), reference[1]], FLOAT64)[0])
    assert cause.code == code
    assert any(words in text for text in cause.evidence), cause.evidence


def test_inputs_that_each_rank_has_shifted_and_scaled() -> None:
    one, many = alone(), ranks()
    for each in (one, *many):
        each.batches = []
    rows = RANDOM.normal(size=(6, 3))
    one.forwards[0] = replace(one.forwards[0], inputs=X[:6], input_values=rows)
    for number, rank in enumerate(many):
        part = rows[number::2]  # in turns
        values = (part - part.mean(0)) / part.std(0)
        rank.forwards[0] = replace(rank.forwards[0], inputs=values[:, :2], input_values=values)
    seen = found(many, one)[1].evidence
    assert "each rank's are those of one process, shifted and scaled by numbers of its own" in seen
    many[0].forwards[0].input_values[0, 0] += 1e-3
    assert "6 are not known from one process" in found(many, one)[1].evidence


@pytest.mark.parametrize(
    ("one", "many", "code", "words"),
    [
        (
            {"model_with_coupled_samples": "Net"},
            {},
            "LS208",
            "on one process its output for a sample depends",
        ),
        (
            {"module_tensors": 1.0},
            {"module_tensors": 2.0},
            "LS309",
            "not that of one process: mean",
        ),
        (
            {"module_tensors_before": 1.0},
            {"module_tensors_before": 2.0},
            "LS309",
            "not that of one process: mean",
        ),
        ({}, {}, "LS210", "something else was returned by Net, forward pass 1"),
    ],
)
def test_other_outputs_for_the_same_inputs(
    one: dict[str, Any], many: dict[str, Any], code: str, words: str
) -> None:
    def kept(known: dict[str, Any]) -> dict[str, Any]:
        numbers = {
            k: {"Net/mean": np.array([v, v, 3.0])}
            for k, v in known.items()
            if k != "model_with_coupled_samples"
        }
        return known | numbers

    others = ranks(**kept(many))
    others[1].forwards[0].outputs += 1.0
    cause = found(others, alone(**kept(one)))[1]
    assert cause.code == code
    assert any(words in text for text in cause.evidence), cause.evidence
    if "model_with_coupled_samples" in one:  # statistics that are reduced by hand
        others[0].calls = [ScriptCall(name="all_reduce", line="train.py:4")]
        others[0].losses = [1.0]
        assert found(others, alone(**one))[1].code == "LS210"


@pytest.mark.parametrize(
    ("weights", "code", "words"),
    [
        ((1.0, 2.0, 1.5, 1.0), "LS212", "of its own for each sample, from 1 to 2"),
        ((1.0, 0.0, 1.0, 1.0), "LS212", "1 samples count on one process only, 0 on several only"),
        ((1.0, 1.0, 1.0, 1.0), "LS210", "it is the loss, or later"),
        # No weight turns round what a sample asks for; another target does.
        ((1.0, -1.0, 1.0, 1.0), "LS210", "it is the loss, or later"),
    ],
)
def test_samples_that_weigh_otherwise(weights: Sequence[float], code: str, words: str) -> None:
    many = ranks()
    for rank, half in zip(many, HALVES, strict=True):
        rank.forwards[0].output_gradients = 2 * Y[list(half)] * np.array(weights)[list(half), None]
    cause = found(many, alone())[1]
    assert cause.code == code
    assert any(words in text for text in cause.evidence), cause.evidence


def test_other_targets_and_other_arguments_of_a_loss() -> None:
    many = ranks()
    many[1].forwards[0].targets = X[[3, 2]]
    cause = found(many, alone())[1]
    assert cause.code == "LS112"
    assert "for 2 of 4 samples with the same inputs" in cause.evidence[0]
    options = [{"pos_weight of train.py:5": np.array([v, v])} for v in (1.0, 2.0)]
    cause = found(ranks(loss_options=options[1]), alone(loss_options=options[0]))[1]
    assert cause.code == "LS212"
    assert cause.evidence[0] == "another value than on one process: pos_weight of train.py:5"


def test_inputs_that_differ_by_their_padding() -> None:
    words = np.array([[3.0, 4, 0, 0], [5, 6, 7, 8]])
    one, many = alone(), ranks()
    one.forwards[0] = replace(one.forwards[0], shape="i [4]", input_values=words)
    for rank, width, number in zip(many, (3, 4), (0, 1), strict=True):
        own = words[number : number + 1, :width]
        rank.forwards[0] = replace(rank.forwards[0], shape=f"i [{width}]", input_values=own)
    cause = found(many, one)[1]
    assert cause.code == "LS111"
    assert "the same but for their padding: they have 3 or 4 columns" in cause.evidence[0]
    many[1].forwards[0].input_values = words[:1]
    assert found(many, one)[1].code == "LS210"


CHANGED = ScriptCall(name="all_reduce", line="train.py:9", gradient_of="w", gradient_changed=True)


@pytest.mark.parametrize(
    ("gradient", "values", "code"),
    [
        (THIRD, {"comm_hook_line": "train.py:2"}, "LS213"),
        (THIRD, {"calls": [CHANGED]}, "LS406"),
        (THIRD, {}, "LS210"),
        (0.3 * ONE / np.linalg.norm(ONE) + 0.3 * OTHER / np.linalg.norm(OTHER), {}, "LS404"),
    ],
)
def test_what_is_made_of_gradients_that_are_right(
    gradient: np.ndarray, values: dict[str, Any], code: str
) -> None:
    one = update(np.sign(WHOLE), taken(*ALL), local_gradients=({"w": WHOLE},))
    cause = found(two(gradient, **values), one)[1]
    assert cause.code == code
    assert cause.evidence[0].startswith(
        "what the backward passes left is, on average over the ranks"
    )


def test_parameters_to_which_a_rank_s_backward_passes_do_not_come() -> None:
    both = {"w": WHOLE, "v": WHOLE}
    one = update(WHOLE, taken(*ALL), local_gradients=(both,), gradients=both, unclipped=both)
    many = two(WHOLE, gradients={"w": WHOLE, "v": THIRD})
    many[0].local_gradients = [{"w": ONE, "v": ONE}]
    cause = found(many, one)[1]
    assert (cause.code, cause.names) == ("LS312", ("v",))
    assert cause.evidence[0].startswith("the backward passes of rank 1 left no gradient")


def test_gradients_that_differ_between_ranks() -> None:
    own = two(WHOLE)
    for rank, gradient in zip(own, (ONE, OTHER), strict=True):
        rank.gradients = rank.unclipped = {"w": gradient}
        rank.calls = [replace(CHANGED, gradient_of="v")]
    assert found(own)[1].code == "LS301"  # the script reduces those of others
    own[0].comm_hook_line = "train.py:2"
    assert found(own)[1].code == "LS213"
    noisy = two(WHOLE)
    noisy[1].gradients = noisy[1].unclipped = {"w": WHOLE + 1}
    noisy[1].gradient_draw_line = "train.py:8"
    assert found(noisy)[1].code == "LS308"


def test_the_optimizer_s_options_and_what_it_has_kept_are_compared() -> None:
    other = {"parameters": {"w": THIRD}}
    for values, words in (
        (
            {"group_options": [{"momentum": 0.5}]},
            "momentum of parameter group 1: 0.9 on one process",
        ),
        (
            {"optimizer_state": {"w/step": np.ones(2)}},
            "the optimizer's state before the step differs",
        ),
        (
            {"group_options": [{}, {}], "learning_rates": (0.1, 0.1)},
            "parameter groups of the optimizer: 1 on",
        ),
    ):
        one = replace(update(WHOLE, taken(*ALL)), group_options=[{"momentum": 0.9}])
        cause = found(two(WHOLE, **{"group_options": one.group_options, **other, **values}), one)[1]
        assert cause.code == "LS403"
        assert any(words in text for text in cause.evidence), cause.evidence


def test_a_teacher_of_its_own_on_several_processes() -> None:
    def kept(value: float) -> dict[str, Any]:
        return {"frozen": ["t"], "parameter_sums": {"w": np.ones(2), "t": np.full(2, value)}}

    one = replace(update(WHOLE, taken(*ALL)), **kept(1.0))
    divergence, cause = found(two(WHOLE, **kept(2.0)), one)
    assert (divergence.kind, divergence.names, cause.code) == ("kept", ("t",), "LS309")


def test_what_is_not_finite_on_both_sides_is_no_difference() -> None:
    inf, nan = float("inf"), float("nan")
    same = np.array([nan, inf, -inf, 1.0])
    assert not FLOAT64.differ(same, same.copy(), 1.0)
    for other in ([0.0, inf, -inf, 1.0], [nan, nan, -inf, 1.0], [nan, inf, inf, 1.0]):
        assert FLOAT64.differ(same, np.array(other), 1.0)
    assert FLOAT64.differ(same, np.array([nan, inf, -inf, 1.1]), 1.0)
    assert FLOAT64.differ(np.array([True, False]), np.array([True, True]), 1.0)
    assert not FLOAT64.differ(np.array([True]), np.array([True]), 1.0)


@pytest.mark.parametrize("alike", [True, False])
def test_a_model_and_its_copy_that_were_met_in_another_order(alike: bool) -> None:
    values = [ONE, ONE if alike else OTHER]

    def run(order: Sequence[int], frozen: str, gradient: np.ndarray) -> list[Update]:
        names = ("Net/w", "Net#2/w")
        initial = {name: values[n] for name, n in zip(names, order, strict=True)}
        trained = next(n for n in names if n != frozen)
        rank = RankUpdate(initial=initial, frozen=[frozen], gradients={trained: gradient})
        return [Update([rank])]

    (same,) = align_names(run((0, 1), "Net#2/w", WHOLE), run((1, 0), "Net/w", WHOLE)).updates
    assert (list(same[0].gradients), list(same[0].frozen)) == (["Net/w"], ["Net#2/w"])
    if not alike:  # now it is the other one that is frozen
        (same,) = align_names(run((0, 1), "Net#2/w", WHOLE), run((1, 0), "Net#2/w", WHOLE)).updates
        assert same[0].frozen == ["Net/w"]


@pytest.mark.parametrize("made_by_hand", [WHOLE, ONE])
def test_parameters_that_agree_before_every_next_forward_pass(made_by_hand: np.ndarray) -> None:
    one = [[replace(ALONE, began_with_forward=True)]] * 3
    apart = [
        replace(rank, began_with_forward=True)
        for rank in (update(ONE, taken(0, 1)), update(OTHER, taken(2, 3)))
    ]
    after = [replace(rank, rewritten_parameters={"w": 1 - 0.1 * made_by_hand}) for rank in apart]
    judged = judged_as(one, [apart, after, after])
    assert judged.word == ("EQUAL" if made_by_hand is WHOLE else "DIFFERENT")
    late = [
        apart,
        after,
        [replace(rank, parameter_sums={"w": np.full(2, n)}) for n, rank in enumerate(after)],
    ]
    assert codes(one, late)[0] == ("LS304" if made_by_hand is WHOLE else "LS210")


@pytest.mark.parametrize(("rate", "word"), [(0.2, "EQUAL"), (0.1, "DIFFERENT")])
def test_a_rate_that_makes_good_for_the_scale_of_the_gradients(rate: float, word: str) -> None:
    half = {"w": WHOLE / 2}
    parameters = {"w": 1 - rate * WHOLE / 2}
    batches = taken(0, 1), taken(2, 3)
    values = {
        "learning_rates": (rate,),
        "unclipped": half,
        "parameters": parameters,
        "losses": (0.5,),
    }
    many = [update(WHOLE / 2, batch, **values) for batch in batches]
    judged = judged_as([[ALONE]] * 2, [many] * 2)
    assert judged.word == word
    assert ("make the same parameters" in str(judged.lines())) == (word == "EQUAL")


HEAD = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x, y = torch.randn(48, 6), torch.randint(0, 3, (48,))
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
model = DDP({model})
{made}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.randperm(48).split(12):
    part = batch.chunk(world)[rank]
    data, labels = x[part], y[part]
    {inner}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
PLAIN = "loss = F.cross_entropy(model(data), labels)"
COMMUNICATION = """
def hook(state, bucket):
    kept = bucket.buffer().div_(world).mul_(rank == 0)
    return dist.all_reduce(kept, async_op=True).get_future().then(lambda done: done.value()[0])
model.register_comm_hook(None, hook)
"""
MEMORY = """
class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.centre = net, torch.zeros(6)
    def forward(self, data):
        self.centre = 0.9 * self.centre.to(data) + 0.1 * data.mean(0)
        return self.net(data - self.centre)
"""
WEIGHING = """
class Weighing(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, data, labels):
        weight = 1 / labels.bincount(minlength=3).clamp(min=1)
        return F.cross_entropy(self.net(data), labels, weight=weight)
"""
NORMED = """
class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, data):
        hidden = self.net[0](data)
        return self.net[2]((hidden - hidden.mean(0)).tanh())
"""
POOLED = """
class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, graphs):
        return torch.stack([self.net(nodes).mean(0) for nodes in graphs])
"""
SCRIPTS = {
    "right": ("net", "", PLAIN, ""),
    "labels": ("net", "", "labels = y[batch][: len(part)]; " + PLAIN, "LS112"),
    "norm": ("net", "", "data = (data - data.mean(0)) / data.std(0); " + PLAIN, "LS111"),
    "slice": (
        "net",
        "",
        "part = (part + rank) % 48; data, labels = x[part], y[part]; " + PLAIN,
        "LS1",
    ),
    "tail": ("net", "", "data, labels = data[rank:], labels[rank:]; " + PLAIN, "LS102"),
    "weights": (
        "net",
        "",
        "w = torch.bincount(labels, minlength=3)[labels]; "
        "loss = (w * F.cross_entropy(model(data), labels, reduction='none')).mean()",
        "LS208",
    ),
    "mask": (
        "net",
        "",
        "m = (data[:, 0] > 0).double(); "
        "loss = (m * F.cross_entropy(model(data), labels, reduction='none')).sum() / m.sum()",
        "LS205",
    ),
    "counted inside": (
        "Weighing()",
        "",
        "loss = model(data, labels)",
        "LS212",
    ),
    "smoothed": (
        "net",
        "",
        "loss = F.cross_entropy(model(data), labels, label_smoothing=0.1 * world)",
        "LS212",
    ),
    "queue": (
        "net",
        "queue = torch.zeros(12, 3)",
        "out = model(data); loss = F.cross_entropy(out - queue.mean(0), labels); "
        "queue = torch.cat([out.detach(), queue])[:12]",
        "LS309",
    ),
    "perturbed": (
        "net",
        "",
        "F.cross_entropy(net(data), labels).backward(); "
        "moved = [p.grad.sign() for p in net.parameters()]; "
        "torch._foreach_add_([p.data for p in net.parameters()], moved); " + PLAIN,
        "LS302",
    ),
    "hook": ("net", COMMUNICATION, PLAIN, "LS213"),
    "memory": ("Centred()", "", PLAIN, "LS309"),
    "coupled": ("Normed()", "", PLAIN, "LS208"),
    "averaged parameters": (
        "net",
        "",
        "[dist.all_reduce(p.data.div_(world)) for p in net.parameters()]; "
        "loss = F.cross_entropy(net(data), labels)",
        "",
    ),
    "parameters of rank 0": (
        "net",
        "",
        "[dist.broadcast(p.data, 0) for p in net.parameters()]; "
        "loss = F.cross_entropy(net(data), labels)",
        "LS302",
    ),
    "nodes": (
        "Pooled()",
        "",
        "part = batch if world == 1 else batch.split(7)[rank]; "
        "data, labels = [x[i, None].repeat(2 + i % 4, 1) for i in part.tolist()], y[part]; "
        + PLAIN,
        "LS205",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_the_kind(name: str, tmp_path: Path) -> None:
    model, made, inner, code = SCRIPTS[name]
    script = tmp_path / "train.py"
    text = HEAD.format(model=model, made=made, inner=inner)
    classes = {"Centred()": MEMORY, "Normed()": NORMED, "Pooled()": POOLED}
    classes |= {"Weighing()": WEIGHING}
    classes = classes.get(model, "")
    if name == "perturbed":
        back = "torch._foreach_sub_([p.data for p in net.parameters()], moved)"
        text = text.replace("loss.backward()", f"loss.backward(); {back}")
    script.write_text(text.replace("model = DDP", f"{classes}\nmodel = DDP"))
    judged = warm.verify(script, nproc=3 if name == "right" else 2)
    verdict, lines = judged.as_json(), judged.lines()
    codes = [finding["code"] for finding in verdict["findings"]]
    assert verdict["verdict"] == ("DIFFERENT" if code else "EQUAL"), verdict["findings"]
    assert not code or codes[0].startswith(code), verdict["findings"]
    agree = "before every next forward pass the parameters agree"
    assert (agree in str(lines)) == (name == "averaged parameters")


def test_an_average_that_leaves_out_what_another_optimizer_has(tmp_path: Path) -> None:
    made = "first = torch.optim.Adam(net[0].parameters())"
    text = HEAD.format(model="net", made=made, inner=PLAIN).replace("DDP(net)", "net")
    text = text.replace("SGD(model.", "SGD(model[2].").replace("optimizer.zero", "model.zero")
    average = "[dist.all_reduce(p.grad.div_(world)) for p in net[2].parameters()]"
    text = text.replace("optimizer.step()", f"{average}; first.step(); optimizer.step()")
    (script := tmp_path / "train.py").write_text(text)
    (finding, *_) = warm.verify(script).as_json()["findings"]
    assert (finding["code"], finding["names"]) == ("LS301", ["0.weight", "0.bias"])


def test_what_a_list_has_of_each_sample_is_not_a_row_of_each() -> None:
    """Of 4 images on one process one has 4 boxes, of 2 on a rank one has 2."""
    num_boxes = {0: 2, 1: 0, 2: 4, 3: 1}

    def batch(ids: Sequence[int]) -> RankUpdate:
        images = torch.stack([torch.full((3, 4, 4), float(image)) for image in ids])
        targets = [{"boxes": torch.full((num_boxes[image], 4), float(image))} for image in ids]
        return RankUpdate(batches=[describe_batch((images, targets), ids=ids)])

    reference, ranks_together = [batch([0, 1, 2, 3])], [batch([0, 2]), batch([1, 3])]
    assert indices_with_other_contents(reference, ranks_together) == []
    assert [record.batches[0].weights for record in ranks_together] == [{"samples": 2.0}] * 2

    # Two views of two samples are a list too, and so are images and labels.
    views = [torch.zeros(2, 3), torch.ones(2, 3)]
    both = describe_batch([views, torch.tensor([0, 1])], ids=[0, 1])
    assert both.shape == "torch.float32 [3]; torch.float32 [3]; torch.int64 []"
    assert (
        describe_batch([views[0], torch.tensor([0, 1])]).shape
        == "torch.float32 [3]; torch.int64 []"
    )


def test_a_list_of_images_has_one_sample_in_each_entry() -> None:
    images = [torch.randn(3, 8, 9) for _ in range(4)]
    stacked = describe_batch((torch.stack(images),))
    assert describe_batch((images,), num_samples=4) == stacked
    assert describe_batch((images,), ids=range(4)).contents == stacked.contents
    assert stacked.weights["samples"] == 4

    # The targets of each image stand beside it, or in the same dictionary.
    targets = [{"boxes": torch.rand(number, 4)} for number in (2, 0, 4, 1)]
    assert describe_batch((images, targets)) == stacked
    both = [{"image": image} | target for image, target in zip(images, targets, strict=True)]
    assert describe_batch((both,)) == stacked
    assert describe_batch(both) == stacked  # as a loader without a `collate_fn` hands them out

    # As many images as channels, and images of other sizes, which are padded as models pad them.
    for_three = describe_batch((images[:3], targets[:3]))
    assert for_three.contents == stacked.contents[:3]
    padded = describe_batch(([torch.ones(1, 5, 7), torch.ones(1, 6, 4)],), num_samples=2)
    assert (len(padded.contents), padded.shape) == (2, "torch.float32 [1, 6, 7]")
    assert sample_tensors((images, targets))[0] == 4
    three_boxes = [{"boxes": torch.rand(3, 4)} for _ in images]  # as many as channels
    assert sample_tensors((images, three_boxes))[0] == 4


def test_what_is_no_list_of_images_keeps_its_rows() -> None:
    texts = torch.randn(3, 5, 6)
    assert describe_batch([texts, texts + 1]).shape == "torch.float32 [5, 6]; torch.float32 [5, 6]"

    # The state of a recurrent layer, which has the samples in its second dimension.
    state = (torch.randn(1, 3, 8), torch.randn(1, 3, 8))
    count, (inputs, *states) = sample_tensors((texts, state))
    assert (count, list(inputs.shape)) == (3, [3, 5, 6])
    assert [list(tensor.shape) for tensor in states] == [[3, 1, 8], [3, 1, 8]]


@pytest.mark.parametrize("size", [1, 3])
def test_a_list_of_batches_is_no_list_of_images(size: int) -> None:
    """Two batches of sequences beside their labels, of which each rank has 1 or 3 samples."""
    first, second, labels = torch.randn(6, 8, 7), torch.randn(6, 8, 5), torch.arange(6)

    def part(rows: slice) -> tuple[list[torch.Tensor], torch.Tensor]:
        return [first[rows], second[rows]], labels[rows]

    together = describe_batch(part(slice(6)), ids=range(6))
    for start in range(0, 6, size):
        rows = slice(start, start + size)
        assert describe_batch(part(rows), ids=range(size)).contents == together.contents[rows]
        assert describe_batch(part(rows)).contents == together.contents[rows]
        assert sample_tensors(part(rows))[0] == size
        assert sample_tensors((part(rows)[0],))[0] == size  # a model is called without the labels

    of_dictionaries = [{"x": x[:size], "labels": labels[:size]} for x in (first, second)]
    assert sample_tensors(of_dictionaries)[0] == size
