from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.optim import lr_scheduler

from lockstep.checkpoint.encoding import STORABLE_DTYPES, decode, encode
from lockstep.errors import CheckpointError

pytestmark = pytest.mark.unit


def through(state: Any) -> Any:
    """Encodes, through the very bytes that would be on disk, and decodes."""
    tree, tensors, _ = encode(state)
    text = json.dumps(tree, allow_nan=False)
    return decode(json.loads(text), safetensors.torch.load(safetensors.torch.save(tensors)))


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        )
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


shapes = st.lists(st.integers(0, 3), max_size=3)
tensors = st.builds(
    lambda shape, dtype, seed: torch.randint(
        0, 2, shape, generator=torch.Generator().manual_seed(seed)
    ).to(dtype),
    shapes,
    st.sampled_from([torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64]),
    st.integers(0, 99),
)
arrays = st.builds(
    lambda shape, dtype: np.full(shape, 1, dtype=dtype),
    shapes,
    st.sampled_from(["bool", "int8", "uint32", "uint64", "float16", "complex64", "complex128"]),
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | tensors
    | arrays
    | st.sampled_from([np.float32(2.5), np.int64(-3), np.bool_(True)])
    | st.sampled_from([torch.float32, torch.device("cuda:1"), torch.Size([2, 3])])
)
keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
nests = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(st.sampled_from(["$tensor", "$dict", "a.b", "a", "b"]), inner)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=200)
@given(nests)
def test_decode_returns_what_was_encoded(state: Any) -> None:
    assert same(state, through(state))


def test_the_comparison_of_these_tests_can_fail() -> None:
    assert not same({"a": 1}, {"a": True})
    assert not same([0.0], [-0.0])
    assert not same(torch.zeros(2), torch.zeros(2, 1))


def test_a_counter_is_decoded_as_a_counter() -> None:
    assert same(through(Counter({3: 2, 7: 1})), Counter({3: 2, 7: 1}))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", sorted(STORABLE_DTYPES, key=str), ids=str)
def test_every_storable_dtype_is_encoded_and_decoded(dtype: torch.dtype) -> None:
    count = 3 * dtype.itemsize
    values = torch.arange(1, count + 1, dtype=torch.uint8)
    if dtype is torch.bool:
        values %= 2
    # The odd byte before it would put it at an address that its dtype cannot have.
    state = {"odd": torch.ones(1, dtype=torch.uint8), "value": values.view(dtype)}
    back = through({**state, "none": torch.empty(0, 2).to(dtype), "one": values.view(dtype)[0]})
    assert back["value"].dtype == dtype
    assert torch.equal(back["value"].view(torch.uint8), values)
    assert back["none"].shape == (0, 2)
    assert back["one"].shape == ()
    assert torch.equal(back["one"].reshape(1).view(torch.uint8), values[: dtype.itemsize])


def test_tensors_stored_as_bytes_are_aligned_again(tmp_path: Path) -> None:
    values = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128)
    tree, stored, _ = encode({"a": torch.ones(3, dtype=torch.uint8), "b": values})
    safetensors.torch.save_file(stored, tmp_path / "t.safetensors")
    mapped = safetensors.torch.load_file(tmp_path / "t.safetensors")
    assert mapped["b"].data_ptr() % 8 != 0, "or this shows nothing"
    back = decode(tree, mapped)["b"]
    assert torch.equal(back, values)
    assert back.data_ptr() % 8 == 0


def test_views_are_decoded_as_tensors_of_their_own() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "all": base,
        "flat": base.view(-1),
        "transposed": base.t(),
        "part": base[1:3, ::2],
        "row": base[0],
        "expanded": base[0, :1].expand(5),
        "channels_last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "scalar": torch.tensor(3),
    }
    back = through(state)
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_tied_tensors_are_stored_once_and_tied_again() -> None:
    weight = nn.Parameter(torch.rand(3, 3))
    tree, stored, _ = encode({"first": weight, "second": [weight.data], "view": weight.data[:2]})
    assert sorted(stored) == ["first", "view"]
    back = decode(tree, stored)
    assert back["first"] is back["second"][0]
    assert torch.equal(back["view"], weight[:2])


def test_a_plain_tensor_is_not_copied() -> None:
    value = torch.rand(4)
    assert encode({"a": value})[1]["a"].data_ptr() == value.data_ptr()


def test_equal_names_get_numbers() -> None:
    state = {
        "a": {"b": torch.tensor(1)},
        "a.b": torch.tensor(2),
        "__metadata__": torch.tensor(3),
        "": torch.tensor(4),
    }
    tree, stored, _ = encode(state)
    assert len(stored) == 4
    assert same(decode(tree, stored), state)


def test_the_versions_of_modules_are_kept() -> None:
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    assert through(state)._metadata == state._metadata
    assert through(state)._metadata["0"]["version"] == 2


class Odd:
    pass


Pair = namedtuple("Pair", "a b")
loop: list[Any] = []
loop.append(loop)
shared = [1]

REFUSED = [
    ({"scheduler": {"lr_lambdas": [len, abs]}}, "scheduler.lr_lambdas[0] is a builtin_function"),
    ({"a": {3: {"odd key!": Odd()}}}, "a[3]['odd key!'] is an Odd"),
    ({"a": [(1, {2, 3})]}, "a[0][1] is a set"),
    ({"a": b"raw"}, "a is a bytes"),
    ({"a": Pair(1, 2)}, "a is a Pair"),
    ({"a": defaultdict(int)}, "a is a defaultdict"),
    ({"a": {Odd(): 1}}, "a has a key that is an Odd"),
    ({"a": loop}, "a[0] contains itself"),
    ({"a": np.array(["x"])}, "a is a numpy value of dtype <U1"),
    ({"a": np.array([1], dtype=">i4")}, "a is a numpy value of dtype >i4"),
    ({"a": np.array([Odd()])}, "a is a numpy value of dtype object"),
    ({"a": np.longdouble(1)}, "a is a numpy value of dtype"),
    ({"a": torch.empty(2, device="meta")}, "a is a tensor on the meta device"),
    ({"a": torch.eye(2).to_sparse()}, "a is a tensor of layout torch.sparse_coo"),
    ({"a": torch.empty(2, dtype=torch.bits8)}, "a is a tensor of dtype torch.bits8"),
]


@pytest.mark.parametrize(("state", "found"), REFUSED, ids=[found for _, found in REFUSED])
def test_errors_name_the_value_that_cannot_be_stored(state: Any, found: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        encode(state)
    assert caught.value.found.startswith(found)


def test_a_lazy_parameter_is_refused() -> None:
    with pytest.raises(CheckpointError, match="weight is a parameter without a shape yet"):
        encode(nn.LazyLinear(2).state_dict())


def test_a_list_that_is_there_twice_is_no_cycle() -> None:
    assert through([shared, shared]) == [[1], [1]]


def test_errors_begin_with_the_name_of_the_state() -> None:
    with pytest.raises(CheckpointError) as caught:
        encode({"x": Odd()}, name="model")
    assert caught.value.found == "model.x is an Odd"


def test_decode_names_missing_tensors_and_unknown_tags() -> None:
    with pytest.raises(CheckpointError, match="names the tensor 'gone'"):
        decode({"$tensor": "gone"}, {})
    with pytest.raises(CheckpointError, match="kind 'hologram'"):
        decode([{"$hologram": 1}], {})


def _optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    weights = list(model.parameters())
    groups = [{"params": weights[:1], "lr": 0.1}, {"params": weights[1:]}]
    return [
        torch.optim.SGD(weights, lr=0.1, momentum=0.9),
        torch.optim.AdamW(groups, lr=1e-3, amsgrad=True),
        torch.optim.Adam(weights, lr=torch.tensor(1e-3)),
        torch.optim.Adagrad(weights),
        torch.optim.RMSprop(weights, momentum=0.1, centered=True),
        torch.optim.Rprop(weights),
        torch.optim.LBFGS(weights, max_iter=2),
    ]


@pytest.mark.parametrize("which", range(7))
def test_the_state_of_torchs_optimizers(which: int) -> None:
    model = nn.Linear(3, 2)
    optimizer = _optimizers(model)[which]

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(torch.ones(4, 3)).square().mean()
        value.backward()
        return value

    for _ in range(2):
        optimizer.step(loss)
    state = optimizer.state_dict()
    back = through(state)
    assert same(state, back)
    _optimizers(nn.Linear(3, 2))[which].load_state_dict(back)


SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o)]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_state_of_torchs_schedulers(name: str) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step(1.0) if name == "plateau" else scheduler.step()
    state = scheduler.state_dict()
    assert same(state, through(state))
