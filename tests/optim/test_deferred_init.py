"""What `deferred_init` records gives the values that the same code gives on the CPU."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.optim import deferred_init as module_under_test
from lockstep.optim.deferred_init import (
    RecordedSource,
    Recording,
    deferred_init,
    find_source,
    forget_sources,
    sources_of,
)

pytestmark = pytest.mark.unit


class Zoo(nn.Module):
    """Initialises its tensors in the ways that models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32) for _ in range(2))
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32), 2, enable_nested_tensor=False
        )
        self.recurrent = nn.LSTM(16, 8, 2)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.words.weight
        self.first = nn.Parameter(torch.randn(1, 1, 16) * 0.02)
        self.gains = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        frequencies = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(5, 5, dtype=torch.bool)))
        self.register_buffer("on_cpu", torch.ones(3, device="cpu").to("cpu"))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        first, second = self.layers
        nn.init.orthogonal_(first.linear1.weight)
        nn.init.trunc_normal_(second.linear1.weight, std=0.02)
        self.apply(self.init)
        for name, parameter in self.named_parameters():
            if name.endswith("linear2.weight"):
                parameter.data.normal_(std=0.001)
        with torch.no_grad():
            self.words.weight[3].fill_(0)
            self.words.weight[4, :] = torch.tensor(range(16)).float()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))

    def init(self, layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear) and layer.weight is not self.words.weight:
            nn.init.normal_(layer.weight, std=0.02)


def both(build: Callable[[], Any], seed: int = 5) -> tuple[Any, Any]:
    """What a function builds on the CPU, and what it builds in the context."""
    torch.manual_seed(seed)
    on_cpu = build()
    torch.manual_seed(seed)
    with deferred_init():
        deferred = build()
    return on_cpu, deferred


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def recorded(model: nn.Module, name: str) -> RecordedSource:
    owner, _, own_name = name.rpartition(".")
    source = find_source(model.get_submodule(owner), own_name, tensors_of(model)[name])
    assert isinstance(source, RecordedSource)
    return source


def computed(
    model: nn.Module, names: Iterable[str], loaded: Iterable[str] = ()
) -> dict[str, Tensor]:
    """The values of some tensors, computed together."""
    sources = {name: recorded(model, name) for name in names}
    recordings = {source.recording for source in sources.values()}
    assert len(recordings) == 1
    values: dict[str, Tensor] = {}

    def deliver(key: int, content: torch.UntypedStorage) -> None:
        for name, source in sources.items():
            if source.view.key == key:
                assert name not in values
                values[name] = source.view.in_memory(content)

    keys = {source.view.key for source in sources.values()}
    others = {recorded(model, name).view.key for name in loaded}
    recordings.pop().replay(keys, others, deliver)
    return values


def assert_equal_bits(values: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in values.items():
        assert torch.equal(value.to(expected[name].dtype), expected[name]), name


def test_values_are_those_of_the_cpu() -> None:
    on_cpu, deferred = both(Zoo)
    expected = tensors_of(on_cpu)
    assert all(tensor.is_meta for tensor in tensors_of(deferred).values())
    assert deferred.rates == on_cpu.rates
    values = computed(deferred, expected)
    assert values.keys() == expected.keys()
    assert_equal_bits(values, expected)
    # Any of them can be computed without keeping the others.
    for names in (["first", "inv_freq"], ["normed.bias"], ["inv_freq", "mask"]):
        assert_equal_bits(computed(deferred, names), expected)


def test_copies_and_conversions_after_the_context_have_the_same_values() -> None:
    on_cpu, deferred = both(Zoo)
    other = copy.deepcopy(deferred).to(torch.bfloat16)
    expected = tensors_of(on_cpu.to(torch.bfloat16))
    assert_equal_bits(computed(other, expected), expected)
    torch.save(deferred.layers, io.BytesIO())  # recordings are not pickled


def test_weights_tied_after_the_context() -> None:
    def build() -> nn.Module:
        return nn.ModuleDict({"head": nn.Linear(4, 4, bias=False), "words": nn.Embedding(4, 4)})

    on_cpu, deferred = both(build)
    for model in (on_cpu, deferred):
        model["head"].weight = model["words"].weight
    assert_equal_bits(computed(deferred, ["head.weight"]), tensors_of(on_cpu))


def test_an_init_function_in_a_later_context() -> None:
    def init(layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight)

    torch.manual_seed(1)
    on_cpu = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).apply(init)
    torch.manual_seed(1)
    with deferred_init():
        deferred = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with deferred_init():  # goes on where the first one ended
        deferred.apply(init)
    expected = tensors_of(on_cpu)
    assert_equal_bits(computed(deferred, expected), expected)


@pytest.mark.parametrize(
    "fill",
    [
        nn.init.orthogonal_,
        nn.init.trunc_normal_,
        nn.init.kaiming_normal_,
        nn.init.xavier_uniform_,
        nn.init.eye_,
        lambda tensor: nn.init.sparse_(tensor, 0.5),
        lambda tensor: tensor.copy_(torch.rand(16, 32) * torch.full((1, 32), 2.0)),
        lambda tensor: tensor.copy_(torch.bernoulli(torch.full((16, 32), 0.5))),
        lambda tensor: tensor.copy_(torch.randperm(512).view(16, 32)),
        lambda tensor: tensor.set_(torch.randn(32, 16).t().contiguous()),
        lambda tensor: tensor.normal_(generator=torch.Generator().manual_seed(7)),
    ],
)
def test_ways_to_draw(fill: Callable[[Tensor], Any]) -> None:
    def build() -> nn.Module:
        model = nn.Module()
        values = torch.empty(16, 32)
        fill(values)
        model.register_buffer("values", values)
        model.register_buffer("next", torch.randn(3))  # the stream is where it is on the CPU
        return model

    on_cpu, deferred = both(build)
    assert_equal_bits(computed(deferred, ["values"]), tensors_of(on_cpu))
    assert_equal_bits(computed(deferred, ["next"]), tensors_of(on_cpu))


def test_what_is_loaded_is_not_drawn() -> None:
    def build(*, whole: bool) -> nn.Module:
        model = nn.Module()
        model.base = nn.Linear(4, 4) if whole else nn.Identity()
        model.head = nn.Linear(4, 2)
        return model

    torch.manual_seed(3)
    head_alone = build(whole=False)
    _, deferred = both(lambda: build(whole=True), seed=3)
    names = ["head.weight", "head.bias"]
    values = computed(deferred, names, loaded=["base.weight", "base.bias"])
    assert_equal_bits(values, tensors_of(head_alone))


def test_a_tensor_is_freed_after_its_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constructor draws each layer, `apply` draws them again, and a clone is made of one."""
    num_layers = 20
    most_bytes = 0
    original: Any = module_under_test._Replay._call

    def call(replay: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal most_bytes
        original(replay, *args, **kwargs)
        most_bytes = max(most_bytes, sum(s.nbytes() for s in replay._memory.values()))

    monkeypatch.setattr(module_under_test._Replay, "_call", call)
    # Reading a value would draw all layers before it.
    monkeypatch.setattr(Recording, "compute", None)

    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(num_layers)))
        for layer in model:
            nn.init.trunc_normal_(layer.weight)
        return model

    on_cpu, deferred = both(build)
    expected = tensors_of(on_cpu)
    assert_equal_bits(computed(deferred, expected), expected)
    layer_bytes = 64 * 64 * 4
    assert layer_bytes <= most_bytes <= 4 * layer_bytes  # trunc_normal_ has three at a time


def test_random_streams() -> None:
    """What is drawn later are other numbers, and computing values changes no stream."""
    torch.manual_seed(0)
    with deferred_init():
        model = nn.Linear(8, 8)
    state = torch.get_rng_state()
    later = torch.empty(64).uniform_(-1, 1)
    weight = computed(model, ["weight"])["weight"].flatten()
    assert not torch.isclose(later / 8**0.5, weight[:, None], rtol=1e-6, atol=0.0).any()
    torch.set_rng_state(state)
    computed(model, ["bias"])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_seed_inside_the_context() -> None:
    def build() -> nn.Module:
        first = nn.Linear(3, 3)
        torch.manual_seed(11)
        return nn.Sequential(first, nn.Linear(3, 3))

    on_cpu, deferred = both(build)
    expected = tensors_of(on_cpu)
    assert_equal_bits(computed(deferred, expected), expected)
    assert_equal_bits(computed(deferred, ["1.bias"]), expected)


def test_memory_that_nothing_writes_has_no_source() -> None:
    with deferred_init():
        model = nn.Module()
        model.weight = nn.Parameter(torch.empty(3))
    assert find_source(model, "weight", model.weight) is None


def test_a_device_is_chosen_later() -> None:
    """`model.to(device)` does nothing in the context; tensors of other devices are left alone."""
    with deferred_init():
        model = nn.Linear(2, 2).to("cuda:0").cuda().to(torch.bfloat16)
        assert not model.weight.is_meta
        assert model.weight.device == torch.device("cpu")
        assert torch.zeros_like(model.weight, device="cpu").sum().item() == 0
        assert torch.ones(2).tolist() == [1.0, 1.0]
        assert torch.equal(torch.ones(2), torch.tensor([1.0, 1.0]))
        nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))  # checks itself by allclose
    assert model.weight.is_meta
    assert model.weight.dtype == torch.bfloat16
    sources = sources_of(model)
    assert set(sources) == {"weight", "bias"}
    forget_sources(model)
    assert not vars(model).keys() & {module_under_test.SOURCES_ATTRIBUTE}


def test_an_error_ends_the_context() -> None:
    with pytest.raises(ZeroDivisionError), deferred_init():
        _ = 1 / 0
    assert not torch.ones(2).is_meta
    assert isinstance(module_under_test._latest_recording, Recording)
