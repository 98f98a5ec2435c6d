from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lockstep.batch import device_copy
from lockstep.batch.device_copy import to_device
from lockstep.batch.pytree import (
    all_dense,
    bytes_to_pin,
    cut_to_rows,
    join_trees,
    map_tensors,
    move,
    pin,
)
from lockstep.distributed.streams import side_stream
from lockstep.errors import DataError

pytestmark = pytest.mark.unit

META = torch.device("meta")
Pair = namedtuple("Pair", ["x", "text"])


class Checked(namedtuple("Checked", ["x"])):
    """A named tuple whose constructor is its own."""

    def __new__(cls, *, value: Any) -> Checked:
        return super().__new__(cls, value)


@dataclass
class Open:
    x: Any
    text: str = "a"


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any

    def __post_init__(self) -> None:
        if not isinstance(self.x, Tensor) or float(self.x.sum()) != 2:
            raise ValueError("not the numbers it was made for")


class Named(dict):  # type: ignore[type-arg]
    """Items and attributes are the same dictionary."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.__dict__ = self


class Encoding(UserDict):  # type: ignore[type-arg]
    """Like a tokenizer's: further attributes, and `.to`."""

    def __init__(self, data: Any, lengths: list[int]) -> None:
        super().__init__(data)
        self.lengths = lengths

    def to(self, device: Any) -> Any:
        raise AssertionError("walked, so that it can be copied ahead")


class Sealed(dict):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        raise RuntimeError("sealed")


class Held(MutableMapping[str, Any]):
    """A shallow copy of it shares `held`."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class Unmakeable(Held):
    def __init__(self) -> None:
        super().__init__({"x": torch.ones(2)})


class Keyed(list[Any]):
    key = "none"


class Graph:
    """Like a graph batch: moves itself, and hides its tensors."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: Any) -> Graph:
        return Graph(str(device))


class GraphMapping(Held):
    """A mapping that is no dictionary and moves itself, as tensor dictionaries do."""

    def to(self, device: Any) -> Any:
        return ("moved", str(device))


ONES = torch.ones(2)
CASES: list[tuple[Any, Any, type]] = [
    (ONES, lambda b: b, Tensor),
    (torch.tensor(1.0), lambda b: b, Tensor),
    ([ONES, "a"], lambda b: b[0], list),
    ((ONES, "a"), lambda b: b[0], tuple),
    (Keyed([ONES]), lambda b: b[0], Keyed),
    (Pair(ONES, "a"), lambda b: b.x, Pair),
    (Checked(value=ONES), lambda b: b.x, Checked),
    (torch.max(torch.rand(2, 2), dim=0), lambda b: b.values, torch.return_types.max),
    ({"a": {"x": ONES}}, lambda b: b["a"]["x"], dict),
    (OrderedDict(x=ONES), lambda b: b["x"], OrderedDict),
    (defaultdict(list, x=ONES), lambda b: b["x"], defaultdict),
    (UserDict(x=ONES), lambda b: b["x"], UserDict),
    (Encoding({"x": ONES}, [2]), lambda b: b["x"], Encoding),
    (Named({"x": ONES}), lambda b: b.x, Named),
    (Held({"x": ONES}), lambda b: b["x"], Held),
    (Sealed(x=ONES), lambda b: b["x"], dict),
    (Unmakeable(), lambda b: b["x"], dict),
    (MappingProxyType({"x": ONES}), lambda b: b["x"], MappingProxyType),
    (Open(ONES), lambda b: b.x, Open),
    (Open([ONES]), lambda b: b.x[0], Open),
    (Frozen(ONES), lambda b: b.x, Frozen),
]  # fmt: skip


@pytest.mark.parametrize(("batch", "of", "kind"), CASES, ids=lambda v: type(v).__name__)
def test_every_container_is_walked_keeps_its_type_and_is_not_written_to(batch, of, kind):
    before = of(batch)
    changed = map_tensors(batch, lambda tensor: tensor + 1)
    assert type(changed) is kind
    assert torch.equal(of(changed), before + 1)
    assert of(batch) is before
    assert of(move(batch, META)).device == META
    assert all_dense(batch)

    empty = cut_to_rows(batch)
    assert type(empty) is kind
    assert of(empty).shape == before[:0].shape if before.dim() else of(empty) == before
    assert of(batch) is before


@pytest.mark.parametrize("leaf", ["text", b"x", 3, None, torch.float32, Graph, {1, 2}, object()])
def test_plain_data_stays(leaf):
    assert map_tensors([leaf], lambda tensor: tensor + 1)[0] is leaf
    assert move({"a": leaf}, META)["a"] is leaf
    assert cut_to_rows({"a": leaf})["a"] is leaf
    assert all_dense([leaf])


def test_further_attributes_stay():
    encoding = move(Encoding({"x": ONES}, [2]), META)
    assert encoding.lengths == [2]
    keyed = Keyed([ONES])
    keyed.key = "mine"
    assert move(keyed, META).key == "mine"
    assert move(defaultdict(list, x=ONES), META)["other"] == []


def test_opaque_objects_move_themselves_wherever_they_are():
    moved = move([Graph(), {"g": Graph()}, Pair(Graph(), "a"), ONES], META)
    assert [moved[0].device, moved[1]["g"].device, moved[2].x.device] == ["meta"] * 3
    assert moved[3].device == META
    assert move(Graph(), META).device == "meta"
    assert move(GraphMapping({"x": ONES}), META) == ("moved", "meta")
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert move([packed], META)[0].data.device == META
    assert move(packed, META).batch_sizes.device.type == "cpu"  # the class insists on it


@pytest.mark.parametrize(
    "leaf",
    [
        Graph(),
        GraphMapping({"x": ONES}),
        torch.eye(2).to_sparse(),
        pack_sequence([torch.ones(3), torch.ones(2)]),
    ],
)
def test_what_streams_cannot_share_is_found_at_any_depth(leaf):
    for batch in (
        leaf,
        [ONES, leaf],
        {"a": (ONES, Pair(leaf, "a"))},
        Open(leaf),
        Held({"a": leaf}),
    ):
        assert not all_dense(batch)


@pytest.mark.parametrize("trees", [[{}, 5], [{"x": 1}, {}], [[1], {"x": 1}], [[1, 2], [1]]])
def test_trees_of_different_kinds_are_not_joined(trees):
    assert join_trees([{"x": [1, 2]}, {"x": [3, 4]}], sum) == {"x": [4, 6]}
    with pytest.raises(DataError, match="they are of different kinds: "):
        join_trees(trees, sum)


def test_text_and_sparse_tensors_become_empty():
    coo = torch.eye(3).to_sparse()
    batch = [torch.ones(3, 2), ("a", "b"), ["c", "d"], {"n": [1, 2]}, coo, (3, 4)]
    x, first, second, named, sparse, size = cut_to_rows(batch)
    assert x.shape == (0, 2)
    assert (first, second, named, size) == ((), [], {"n": []}, (3, 4))
    assert sparse.layout == coo.layout
    assert sparse.shape == (0, 3)
    assert sparse.dtype == coo.dtype


def test_an_empty_batch_keeps_no_memory_of_the_full_one():
    assert cut_to_rows(torch.ones(1000)).untyped_storage().nbytes() == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Graph, "Graph"),
        (lambda: (ONES, Graph()), "Graph"),
        (lambda: [Graph(), Graph()], "Graph"),
        (lambda: pack_sequence([ONES]), "PackedSequence"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse_csr"),
    ],
)
def test_batches_that_cannot_be_emptied_say_so(make, name):
    with pytest.raises(DataError, match=f"(?s){name}.*cannot be made.*drop_last=True.*collate"):
        cut_to_rows(make())


def test_only_dense_tensors_on_the_cpu_are_pinned(monkeypatch):
    pinned: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", note)
    graph = Graph()
    elsewhere, sparse = torch.ones(2, device="meta"), torch.eye(2).to_sparse()
    mixed = {"x": ONES, "on device": elsewhere, "sparse": sparse, "graph": graph}
    assert bytes_to_pin(mixed) == ONES.nbytes
    batch = pin(mixed)
    assert len(pinned) == 1
    assert pinned[0] is ONES
    assert batch["graph"] is graph
    assert batch["sparse"] is sparse


class Streams:
    """Stands for `torch.cuda`, and notes on which stream and in which thread things happen."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = "main"
        self.streams: list[str] = []
        self.devices: dict[str, Any] = {}

    def Stream(self, device: Any) -> str:
        self.streams.append(f"side {len(self.streams)}")
        return self.streams[-1]

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.now = stream
        yield
        self.now = "main"

    def Event(self) -> SimpleNamespace:
        event = SimpleNamespace(stream=None)
        event.record = lambda stream: setattr(event, "stream", stream)
        return event

    def current_stream(self, device: Any) -> SimpleNamespace:
        return SimpleNamespace(wait_event=lambda event: self.log.append(f"wait {event.stream}"))

    def set_device(self, device: Any) -> None:
        self.devices[threading.current_thread().name] = device


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    made_up = Streams()
    monkeypatch.setattr(torch, "cuda", made_up)
    side_stream.cache_clear()
    yield made_up
    side_stream.cache_clear()


GPU = torch.device("cuda", 1)


def test_dense_batches_are_copied_ahead_and_others_on_the_present_stream(monkeypatch, streams):
    class Noted(Graph):
        def to(self, device: Any) -> Graph:
            streams.log.append(f"graph on {streams.now}")
            return super().to(device)

    def noted_move(batch: Any, device: torch.device) -> Any:
        streams.log.append(f"move on {streams.now}")
        return move(batch, META)

    def batches() -> Iterator[Any]:
        for number, batch in enumerate([[ONES], (ONES, Noted()), Noted(), [ONES]]):
            streams.log.append(f"read {number}")
            yield batch

    monkeypatch.setattr(device_copy, "move", noted_move)
    monkeypatch.setattr(device_copy, "pin", lambda batch: batch)  # needs a driver
    found = []
    for number, batch in to_device(enumerate(batches()), GPU):
        assert number == len(found)
        streams.log.append("use")
        found.append(batch)
    assert streams.log == [
        "read 0", "move on side 0",
        "read 1", "wait side 0", "use",
        "read 2", "move on main", "graph on main", "use",
        "read 3", "move on side 0", "move on main", "graph on main", "use",
        "wait side 0", "use",
    ]  # fmt: skip
    assert [found[0][0].device, found[1][0].device, found[3][0].device] == [META] * 3
    assert [found[1][1].device, found[2].device] == ["meta"] * 2


LARGE = torch.ones(device_copy.MIN_BYTES_FOR_THREAD // 4)


def test_large_batches_are_pinned_in_a_thread_that_ends_with_the_pass(monkeypatch, streams):
    pinned: list[tuple[int, str]] = []
    reused = LARGE.clone()

    def noted_pin(batch: Any) -> Any:
        pinned.append((int(batch["x"][0]), threading.current_thread().name))
        return {"x": batch["x"].clone()}

    def batches() -> Iterator[Any]:
        """Every batch is read into the same memory."""
        for number in range(4):
            yield {"x": reused.fill_(number)}

    monkeypatch.setattr(device_copy, "pin", noted_pin)
    monkeypatch.setattr(device_copy, "move", lambda batch, device: batch)
    for _ in range(3):
        for number, batch in to_device(enumerate(batches()), GPU):
            assert batch["x"].eq(number).all()
    [thread] = {name for _, name in pinned}
    assert thread.startswith("lockstep-pin")
    assert streams.devices == {thread: GPU}
    assert [number for number, _ in pinned] == [0, 1, 2, 3] * 3
    assert len(streams.streams) == 1, "each pass has a stream of its own"

    small = [{"x": ONES}, {"x": ONES}]
    pinned.clear()
    assert len(list(to_device(enumerate(small), GPU))) == 2
    assert {name for _, name in pinned} == {threading.current_thread().name}

    left_early = to_device(enumerate(batches()), GPU)
    next(left_early)
    left_early.close()
    assert [t.name for t in threading.enumerate() if t.name.startswith("lockstep-pin")] == []


def test_what_fails_in_the_thread_that_pins_is_raised_by_the_loader(monkeypatch, streams):
    def fails(batch: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(device_copy, "pin", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        next(to_device(enumerate([LARGE, LARGE]), GPU))


def test_without_cuda_nothing_is_read_ahead():
    read = []

    def batches() -> Iterator[Mapping[str, Any]]:
        for number in range(2):
            read.append(number)
            yield {"x": ONES, "graph": Graph()}

    moved = to_device(enumerate(batches()), META)
    _, first = next(moved)
    assert read == [0]
    assert first["x"].device == META
    assert first["graph"].device == "meta"
