"""The private names of torch's that Lockstep uses are there, and mean what they meant."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import json
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.agent.server import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

import lockstep
from lockstep import torch_compat
from lockstep.batch.pytree import map_tensors
from lockstep.errors import LockstepWarning, SettingError

pytestmark = pytest.mark.unit


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    """This process is a process group of its own while the test runs."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_what_an_older_torch_lacks_is_left_out():
    def function(known: int) -> None: ...

    assert torch_compat.accepted(function, known=1, newer=2) == {"known": 1}
    assert torch_compat.dtypes_named("float64", "float6") == [torch.float64]


class Unable:
    """A store that cannot tell its keys, as the one of torch 2.9."""


def test_attempts_are_kept_apart_in_a_store_that_cannot_tell_its_keys(monkeypatch):
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(rendezvous, "_create_c10d_store", rendezvous._create_c10d_store)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def connect() -> dist.Store:
        connected, _, _ = next(rendezvous.rendezvous("env://", rank=0, world_size=1))
        return connected

    connect().set("address", "of the first attempt")
    if hasattr(dist.TCPStore, "list_keys"):
        assert [key for key in torch_compat.list_keys(store) if "address" in key]
        torch_compat.separate_attempts(1)
        assert connect().check(["address"])
        monkeypatch.delattr(dist.Store, "list_keys")
    assert torch_compat.list_keys(Unable()) is None
    torch_compat.separate_attempts(1)
    assert not connect().check(["address"])
    connect().set("address", "of the second attempt")
    assert connect().get("address") == b"of the second attempt"
    torch_compat.separate_attempts(2)
    assert not connect().check(["address"])
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    monkeypatch.setenv("MASTER_PORT", "0")
    connect().set("a store of its own", "")  # is not prefixed: the script's own business


def test_ddp_says_which_module_runs():
    assert torch_compat.enclosing_ddp() is None
    assert "_active_ddp_module = self" in inspect.getsource(DistributedDataParallel)


def test_ddp_awaits_a_backward_pass_as_after_a_forward_pass():
    assert hasattr(dist.Reducer, "_rebuild_buckets")
    assert "self.reducer._rebuild_buckets()" in inspect.getsource(
        DistributedDataParallel._pre_forward
    )
    assert "self.reducer.prepare_for_backward(" in inspect.getsource(
        DistributedDataParallel._post_forward
    )


def gradient_of_two_backward_passes():
    module = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    loss = module(torch.ones(1, 2)).sum()
    loss.backward(retain_graph=True)
    torch_compat.await_another_backward(module, [])
    loss.backward()
    return module.module.weight.grad.tolist()


def test_ddp_takes_part_in_a_second_backward_pass_of_one_forward_pass():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert gradient_of_two_backward_passes() == [[2.0, 2.0]]
        # The model goes before the group. After it, it would take the threads of the group along
        # while it holds the interpreter's lock, which they may be waiting for.
        gc.collect()
    finally:
        dist.destroy_process_group()


def test_a_function_that_is_never_compiled_is_called_as_it_is():
    assert torch_compat.never_compiled(lambda x, *, y: x + y)(1, y=2) == 3


def graphs_of(function: Any, *, whole: bool = False) -> list[int]:
    """How many operations each compiled graph of a function of a tensor has."""
    sizes: list[int] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        sizes.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    compiled = torch.compile(function, backend=backend, fullgraph=whole)
    assert torch.equal(compiled(torch.ones(2)), function(torch.ones(2)))
    return sizes


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def around(x: torch.Tensor) -> torch.Tensor:
    return doubled(x + 1)


def a_hook(x: torch.Tensor) -> torch.Tensor:
    return doubled(x + 1)


def test_a_function_that_runs_as_it_is_is_compiled_inside_of_others_only():
    marked = torch_compat.compile_only_callees(around)
    assert marked is around
    assert graphs_of(marked) == [1]  # `doubled` alone
    assert graphs_of(lambda x: marked(x) + 1, whole=True) == [3]
    assert torch_compat.compiler_is_loaded()


class PassesOn(torch_compat.TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("runs_eagerly", [False, True])
def test_what_has_run_in_a_mode_is_compiled_afterwards_only_if_it_ran_eagerly(runs_eagerly: bool):
    """The first case tells when torch begins to compile in a mode, or after it."""
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(lambda x: x + 1, backend=backend)
    in_context = torch_compat.compiled_code_runs_eagerly() if runs_eagerly else nullcontext()
    with in_context, PassesOn():
        compiled(torch.ones(2))
    assert graphs == []
    compiled(torch.ones(2))
    assert len(graphs) == int(runs_eagerly)


def test_a_hook_outside_of_compiled_code_ends_the_graph():
    hook = torch_compat.outside_compiled_code(a_hook)
    assert graphs_of(hook) == []
    assert graphs_of(lambda x: hook(x + 1) + 1) == [1, 1]
    assert hook.__name__ == "a_hook"


@pytest.mark.usefixtures("one_process_group")
def test_an_fsdp_model_has_a_root_and_lets_go_of_its_groups():
    torch_compat.share_meshes_with_copies()
    mesh = init_device_mesh("cpu", (1,))
    model = fully_shard(torch.nn.Linear(2, 2), mesh=mesh)
    torch_compat.make_fsdp_root(model)
    assert copy.deepcopy(mesh) is mesh
    state = model._get_fsdp_state()
    assert state._is_root
    shards = torch_compat.shards_in_reduction_order(model)
    assert [id(shard) for shard in shards] == [id(model.weight), id(model.bias)]
    torch_compat.drop_fsdp_groups([model], mesh)
    assert not getattr(mesh, "_pg_registry", {})
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    assert "process_group" in repr(list(vars(groups[0].mesh_info)))


@pytest.mark.usefixtures("one_process_group")
def test_whole_parameters_of_an_fsdp_unit_are_made_without_memory():
    policy = MixedPrecisionPolicy(torch.bfloat16)
    model = torch.nn.Linear(3, 2)
    weight = model.weight.detach().clone()
    model.bias.requires_grad_(False)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    torch_compat.make_fsdp_root(model)
    with torch.inference_mode():
        pairs = torch_compat.make_whole_parameters(model)
    assert [id(shard) for shard, _ in pairs] == [id(model.weight), id(model.bias)]
    whole = [parameter for _, parameter in pairs]
    assert [parameter.shape for parameter in whole] == [(2, 3), (2,)]
    assert [parameter.requires_grad for parameter in whole] == [True, False]
    for parameter in whole:
        assert parameter.dtype == torch.bfloat16
        assert not parameter.is_inference()
        assert parameter.untyped_storage().nbytes() == 0
    model.unshard()
    assert [id(parameter) for parameter in whole] == [id(model.weight), id(model.bias)]
    assert torch.equal(whole[0], weight.bfloat16())


@pytest.mark.usefixtures("one_process_group")
def test_a_tensor_that_gathers_itself_is_gathered():
    model = torch.nn.Linear(3, 2, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    local = model.weight.to_local()

    def gathered_as_doubles(outputs, metadata, dtype, *, out=None):
        return outputs[0].view(2, 3).double(), ()

    local.fsdp_pre_all_gather = lambda mesh: ((local,), None)
    local.fsdp_post_all_gather = gathered_as_doubles
    with patch.object(type(model.weight), "_local_tensor", local):
        torch_compat.make_fsdp_root(model)
        [(_, whole)] = torch_compat.make_whole_parameters(model)
    assert whole.dtype == torch.float64


class TwoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])

    def forward(self, x, number):
        return self.layers[number](x)


@pytest.mark.usefixtures("one_process_group")
def test_gradients_of_shards_and_others_are_unscaled_together():
    mesh = init_device_mesh("cpu", (1,))
    assert torch_compat.can_ignore_fsdp_parameters()
    for number in range(2):  # a second call changes nothing
        torch_compat.unscale_shards_with_others()
        whole = nn.Parameter(torch.tensor(1.0))
        sharded = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Shard(0)]))
        whole.grad = torch.tensor(8.0)
        sharded.grad = distribute_tensor(
            torch.full((3,), 16.0 if number else torch.inf), mesh, [Shard(0)]
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))  # it makes the scale
        optimizer = torch.optim.SGD([whole, sharded], lr=1.0)
        scaler.unscale_(optimizer)
        assert whole.grad == 2.0
        scaler.step(optimizer)
        assert whole == (-1.0 if number else 1.0)  # with an infinite gradient there is no step


@pytest.mark.usefixtures("one_process_group")
def test_a_backward_pass_through_a_tensor_gathers_an_fsdp_unit():
    model = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    gathered = []
    model._get_fsdp_state()._pre_backward = gathered.append
    tensor = torch.ones(1, 2, requires_grad=True) * 2
    torch_compat.gather_in_backward_of([tensor], model)
    assert gathered == []
    tensor.sum().backward()
    assert [gradient.tolist() for gradient in gathered] == [[[1.0, 1.0]]]


@pytest.mark.usefixtures("one_process_group")
def test_an_fsdp_unit_in_half_precision_adds_up_gradients_in_fp32():
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    model = TwoLayers()
    model.requires_grad_(False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert torch_compat.gathered_dtype(model) == torch.bfloat16
    torch_compat.make_fsdp_root(model)
    [parameters] = torch_compat.fsdp._parameter_groups(model)
    torch_compat.set_dtypes_of_frozen_unit(model)
    if hasattr(parameters, "_orig_dtype"):  # before torch 2.15
        assert (parameters._orig_dtype, parameters._reduce_dtype) == (torch.float32,) * 2
    [weight, *_] = parameters.fsdp_params
    torch_converts_late_gradients = torch_compat.fsdp._torch_accumulates_in_grad(weight)
    model.requires_grad_(True)
    x = torch.ones(1, 2)

    model.set_requires_gradient_sync(False)
    model(x, 0).sum().backward()
    shapes = [tuple(p.shape) for p in torch_compat.parameters_with_accumulated_gradient(model)]
    assert shapes == [(2, 2), (2,)]
    torch_compat.drop_accumulated_gradients(model)
    assert torch_compat.parameters_with_accumulated_gradient(model) == []

    for zeros_if_unused in (False, True):
        model.set_requires_gradient_sync(False)
        model(x, 0).sum().backward()
        model.set_requires_gradient_sync(True)
        hooks = torch_compat.accumulate_late_gradients(model, zeros_if_unused=zeros_if_unused)
        assert len(hooks) == (0 if zeros_if_unused or torch_converts_late_gradients else 2)
        model(x, 1).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad.to_local().tolist() == torch.ones(parameter.shape).tolist()
            parameter.grad = None
        for hook in hooks:
            hook.remove()
    torch_compat.drop_fsdp_groups([model], mesh)


@pytest.mark.usefixtures("one_process_group")
def test_a_forward_pass_that_has_failed_leaves_gradients():
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    model = TwoLayers()
    fully_shard(model, mesh=mesh, mp_policy=policy)
    x = torch.ones(1, 2)
    model(x, 0).sum().backward()
    model.set_requires_gradient_sync(False)
    model(x, 0).sum().backward()
    with pytest.raises(IndexError):
        model(x, 2)

    if hasattr(model, "reset_iter_state"):
        assert torch_compat.reset_after_failed_forward([model])
        [first, _] = model.layers
        assert first.weight.grad.to_local().tolist() == [[1, 1], [1, 1]]
        model.set_requires_gradient_sync(True)
        model(x, 0).sum().backward()
        assert first.weight.grad.to_local().tolist() == [[3, 3], [3, 3]]
    else:
        assert not torch_compat.reset_after_failed_forward([model])
    torch_compat.drop_fsdp_groups([model], mesh)


def test_default_groups_are_told_of_when_they_are_opened(monkeypatch):
    c10d, opened = dist.distributed_c10d, []
    monkeypatch.setattr(c10d, "_update_default_pg", c10d._update_default_pg)  # set back at the end
    torch_compat.call_on_new_default_group(opened.append)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert opened == [dist.group.WORLD]
    dist.destroy_process_group()
    assert len(opened) == 1


def test_a_state_dict_has_metadata_that_copies_lose():
    state = torch.nn.BatchNorm1d(2).state_dict()
    metadata = torch_compat.state_dict_metadata(state)
    assert metadata[""]["version"] == 2
    copied = state.copy()
    assert torch_compat.state_dict_metadata(dict(state)) is None
    torch_compat.set_state_dict_metadata(copied, metadata)
    assert torch_compat.state_dict_metadata(copied) is metadata


@pytest.mark.usefixtures("one_process_group")
def test_a_shard_has_a_box():
    mesh = init_device_mesh("cpu", (1,))
    tensor = distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)])
    assert torch_compat.local_box(tensor) == ((0, 0), (3, 2))
    assert torch_compat.is_sharded(tensor)
    assert torch_compat.to_local(tensor).data_ptr() == tensor.to_local().data_ptr()


def test_a_reference_to_a_storage_knows_its_views_and_when_it_is_freed():
    tensor = torch.zeros(3)
    view = tensor[1:]
    reference = torch_compat.storage_reference(tensor)
    assert {reference: 1}[torch_compat.storage_reference(view)] == 1
    assert reference != torch_compat.storage_reference(torch.zeros(3))
    del tensor
    assert not reference.expired()
    del view
    assert reference.expired()


def test_hooks_on_gradients_are_counted():
    parameter = torch.nn.Parameter(torch.ones(2))
    assert torch_compat.count_gradient_hooks(parameter) == 0
    parameter.register_hook(lambda gradient: gradient)
    parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    assert torch_compat.count_gradient_hooks(parameter) == 2


def test_views_are_known():
    tensor = torch.ones(4)
    assert torch_compat.is_view(tensor[:2])
    assert not torch_compat.is_view(tensor)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("BatchNorm", nn.BatchNorm2d),
        ("NormBase", nn.InstanceNorm1d),
        ("DropoutNd", nn.Dropout2d),
    ],
)
def test_layers_have_the_base_classes_of_torch(name: str, kind: type) -> None:
    assert issubclass(kind, getattr(torch_compat, name))


def test_the_pytree_and_the_dispatch_mode_of_torch():
    leaves, spec = torch_compat.pytree.tree_flatten({"a": [1, 2]})
    assert torch_compat.pytree.tree_unflatten(leaves, spec) == {"a": [1, 2]}
    assert torch_compat.pytree.treespec_loads(torch_compat.pytree.treespec_dumps(spec)) == spec
    seen = []

    class Mode(torch_compat.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2).add_(1)
    assert torch.ops.aten.add_.Tensor in seen


def test_subclasses_of_tensor_can_be_asked_nothing():
    asked = []

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            asked.append(function)
            return super().__torch_function__(function, types, args, kwargs)

    tensor = torch.ones(2).as_subclass(Asked)
    asked.clear()
    with torch_compat.DisableTorchFunctionSubclass():
        assert tensor.shape == (2,)
    assert asked == []
    assert tensor.sum() == 2
    assert asked


def test_lists_of_tensors_are_added_multiplied_and_copied_in_place():
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)]
    torch_compat.add_to_each(tensors, [torch.tensor([0.5, 0.5]), torch.tensor(1.0)])
    torch_compat.multiply_each(tensors, 2.0)
    assert tensors[0].tolist() == [3.0, 5.0]
    assert tensors[1].item() == 8.0
    torch_compat.copy_to_each(tensors, [torch.tensor([7.0, 9.0]), torch.tensor(1.0)])
    assert tensors[0].tolist() == [7.0, 9.0]
    assert tensors[1].item() == 1.0


def test_a_store_is_known_by_its_answer():
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=600)
    )
    with socket.create_connection(("127.0.0.1", store.port), timeout=600) as connection:
        assert torch_compat.answers_as_store(connection)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.create_connection(silent.getsockname(), timeout=0.05) as connection,
    ):
        assert not torch_compat.answers_as_store(connection)


def test_the_process_groups_of_this_rank(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        (group,) = torch_compat.process_groups()
        assert group["ranks"] == [0]
        assert group["name"]
    finally:
        dist.destroy_process_group()
    assert torch_compat.process_groups() == []


def test_collectives_are_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "10")
    assert torch_compat.num_collectives() == 0
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = dist.group.WORLD
    try:
        assert torch_compat.num_collectives() == 0
        dist.barrier()
        dist.barrier(group=dist.new_group())
        assert torch_compat.num_collectives() == 2
    finally:
        dist.destroy_process_group()
    assert not torch_compat.has_not_communicated([group])

    class Uncounted:
        def _get_sequence_number_for_group(self):
            raise RuntimeError("MPI does not count")

    monkeypatch.setattr(
        torch_compat.recorder, "flight_record", lambda stacks: '[{"version": "2.10"}]'
    )
    assert torch_compat.has_not_communicated([])
    assert not torch_compat.has_not_communicated([Uncounted()])
    monkeypatch.setattr(
        torch_compat.recorder, "flight_record", lambda stacks: '[{"entries": [{}]}]'
    )
    assert not torch_compat.has_not_communicated([])
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    assert not torch_compat.has_not_communicated([])


def test_whether_init_process_group_is_running_is_seen(monkeypatch):
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(rendezvous, "_create_c10d_store", rendezvous._create_c10d_store)
    is_running = []

    def create(original, *given):
        is_running.append(torch_compat.is_in_init_process_group())
        return original(*given)

    torch_compat.replace_store_creation(create)
    next(rendezvous.rendezvous("tcp://127.0.0.1:0", rank=0, world_size=1))
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    dist.destroy_process_group()
    assert is_running == [False, True]


def test_another_function_creates_the_store(monkeypatch):
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    original = rendezvous._create_c10d_store
    monkeypatch.setattr(rendezvous, "_create_c10d_store", original)
    calls = []

    def create(*given):
        calls.append(given[:5])
        return given[0](*given[1:])

    torch_compat.replace_store_creation(create)
    store, _, _ = next(rendezvous.rendezvous("tcp://127.0.0.1:0", rank=0, world_size=1))
    assert store.port != 0
    assert calls == [(original, "127.0.0.1", 0, 0, 1)]


def test_a_store_elsewhere_serves_an_address(monkeypatch):
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(rendezvous, "_create_c10d_store", rendezvous._create_c10d_store)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch_compat.redirect_store(from_port=1, to_port=store.port)
    for method in ("env", "tcp"):
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "1")
        url = {"env": "env://", "tcp": "tcp://127.0.0.1:1"}[method]
        found, rank, size = next(rendezvous.rendezvous(url, rank=0, world_size=1))
        assert (found.port, rank, size) == (store.port, 0, 1)
        found.set(method, "set")
        assert store.get(method) == b"set"
    own, _, _ = next(rendezvous.rendezvous("tcp://127.0.0.1:0", rank=0, world_size=1))
    assert own.port != store.port


def test_the_flight_recorder_is_there():
    import torch._C._distributed_c10d as c10d

    for name in torch_compat.recorder.RECORDERS[:1]:
        assert hasattr(c10d, name)
        assert hasattr(c10d, f"{name}_json")
    for record in json.loads(torch_compat.flight_record(stacks=False)):
        assert "version" in record


def test_a_thread_takes_the_gpu_that_the_default_group_is_bound_to():
    assert "bound_device_id" in dir(dist.ProcessGroup)
    assert hasattr(dist.distributed_c10d.GroupMember, "WORLD")
    assert torch_compat.gpu_of_default_group() is None  # no group is open
    torch_compat.take_gpu()  # without a GPU it does nothing


class AgentOfOneRank(SimpleElasticAgent):
    """torch elastic's agent with a worker that ends in given states, one after the other."""

    def __init__(self, states: list[WorkerState], max_restarts: int = 0) -> None:
        store = dist.HashStore()
        address = RendezvousStoreInfo("127.0.0.1", 1)
        handler = Mock(spec=RendezvousHandler)
        handler.next_rendezvous.return_value = RendezvousInfo(store, 0, 1, address)
        handler.num_nodes_waiting.return_value = 1
        handler.get_run_id.return_value = "run"
        handler.get_backend.return_value = "static"
        spec = WorkerSpec(
            "trainer",
            1,
            handler,
            entrypoint="train.py",
            max_restarts=max_restarts,
            monitor_interval=0.01,
        )
        super().__init__(spec)
        self._states = iter(states)
        self.group_states_when_stopped: list[WorkerState] = []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return {0: 0}

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        self.group_states_when_stopped.append(worker_group.state)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return RunResult(next(self._states), return_values={0: None})

    def _shutdown(self, death_sig: Any = None, timeout: int = 0) -> None:
        pass


def test_torch_elastics_agent_can_skip_its_exit_barrier(monkeypatch):
    barriers = []
    monkeypatch.setattr(
        "torch.distributed.elastic.utils.store.barrier",
        lambda *_, **named: barriers.append(named),
    )
    AgentOfOneRank([WorkerState.SUCCEEDED]).run()
    assert len(barriers) == 1
    agent = AgentOfOneRank([WorkerState.SUCCEEDED])
    torch_compat.skip_exit_barrier(agent)
    assert agent.run().state == WorkerState.SUCCEEDED
    assert len(barriers) == 1


def test_torch_elastics_agent_stops_its_workers_before_each_restart_and_after_the_last_failure():
    """By the group's state and a count of failures, `_stop_workers` can tell the two apart."""
    failed, changed = WorkerState.FAILED, WorkerState.HEALTHY  # HEALTHY, with a node that waits
    agent = AgentOfOneRank([failed, changed, failed, failed], max_restarts=2)
    assert agent.run().state == failed
    assert agent.group_states_when_stopped == [failed, changed, failed, failed]


def test_torchs_binding_to_processors_takes_what_it_is_given():
    with pytest.raises(SettingError, match="--numa-binding node"):
        torch_compat.bound_to_processors(("python",), 10**6, "node")
    binding = pytest.importorskip("torch.numa.binding", reason="torch 2.9 does not have it")
    if not hasattr(binding, "_maybe_wrap_command_args_with_numa_binding"):
        pytest.skip("torch 2.10 binds threads and not commands")
    parameters = inspect.signature(binding._maybe_wrap_command_args_with_numa_binding).parameters
    assert {"numa_options"} < set(parameters)
    assert {"gpu_index", "device_index"} & set(parameters)


def test_a_loader_worker_can_be_without_its_worker_info(monkeypatch):
    info = object()
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", info)
    assert torch.utils.data.get_worker_info() is info
    with torch_compat.without_worker_info():
        assert torch.utils.data.get_worker_info() is None
    assert torch.utils.data.get_worker_info() is info


def test_a_shallow_copy_is_torchs_and_shares_no_list_of_weights():
    linear, lstm = nn.Linear(2, 4), nn.LSTM(2, 4)
    new, theirs = torch_compat.shallow_copy(linear), linear._replicate_for_data_parallel()
    assert type(new) is nn.Linear
    set_later = {"_parameters", "_buffers", "_modules"}
    assert {k: v for k, v in vars(new).items() if k not in set_later} == {
        k: v for k, v in vars(theirs).items() if k not in set_later
    }
    assert torch_compat.shallow_copy(lstm)._flat_weights is not lstm._flat_weights


def test_writes_to_tensors_are_counted():
    written, read = torch.zeros(2), torch.zeros(2)
    before = torch_compat.write_counts([written, read])
    written.add_(1)
    read.add(1)
    after = torch_compat.write_counts([written, read])
    assert [after[0] - before[0], after[1] - before[1]] == [1, 0]
    assert torch_compat.write_count(written) == after[0]


def test_a_change_of_a_modules_members_registers_them():
    layer = nn.BatchNorm1d(2, affine=False)
    layer.add_module("inside", nn.Linear(1, 1))
    found = torch_compat.members(layer)
    assert found.parameters == {"weight": None, "bias": None}
    assert list(found.buffers) == ["running_mean", "running_var", "num_batches_tracked"]
    assert found.modules == {"inside": layer.inside}
    found.buffers["running_mean"] = torch.ones(2)
    assert dict(layer.named_buffers())["running_mean"].tolist() == [1, 1]
    weight = nn.Parameter(torch.ones(2))
    torch_compat.set_members(layer, torch_compat.Members({"weight": weight}, {}, {}))
    assert dict(layer.named_parameters()) == {"weight": weight}
    assert list(layer.buffers()) == list(layer.children()) == []


def test_what_moves_a_module_can_be_replaced():
    layer = nn.Linear(1, 1)
    changed = []

    def apply(change):
        changed.append(change(torch.ones(1)).dtype)
        return layer

    torch_compat.replace_apply(layer, apply)
    assert layer.half() is layer
    assert layer.to(torch.float64) is layer
    assert changed == [torch.float16, torch.float64]
    assert layer.weight.dtype == torch.float32


def test_an_optimizer_answers_torchs_grad_scaler():
    class Asked(torch.optim.SGD):
        pass

    asked = []
    torch_compat.answer_grad_scaler(Asked, lambda optimizer: bool(asked.append(optimizer)))
    weight = nn.Parameter(torch.ones(1))
    optimizer = Asked([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    assert asked == [optimizer]
    assert weight.item() == 0.0
    assert torch_compat.unscales_gradients(torch.optim.Adam([weight], fused=True))
    assert not torch_compat.unscales_gradients(torch.optim.Adam([weight]))


def test_a_module_says_that_it_was_compiled():
    layer = nn.Linear(1, 1)
    assert not torch_compat.is_compiled_in_place(layer)
    assert not torch_compat.is_compiled(layer)
    around = torch.compile(layer, backend="eager")
    assert torch_compat.is_compiled(around)
    assert dict(around.named_children()) == {torch_compat.COMPILED_CHILD_NAME: layer}
    assert torch_compat.without_compile(around) is layer
    assert torch_compat.without_compile(layer) is layer
    assert not torch_compat.is_compiled_in_place(around)
    layer.compile(backend="eager")
    assert torch_compat.is_compiled_in_place(layer)
    assert torch_compat.is_compiled(layer)


def test_a_compiled_module_that_is_compiled_again_keeps_its_hooks_and_its_forward():
    called = []
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh())
    compiled = torch.compile(model, backend="eager")
    torch_compat.let_compile_again(nn.Sequential(compiled))
    for name, module in (("wrapper", compiled), ("model", model)):
        module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    vars(model)["forward"] = lambda x: type(model).forward(model, x) * 2
    again = torch.compile(compiled, backend="eager")
    assert isinstance(again, nn.Module)
    x = torch.ones(1, 1)
    assert torch.equal(again(x), model[1](model[0](x)) * 2)
    assert called == ["wrapper", "model"]


def test_a_backward_pass_is_seen():
    seen = []
    x = torch.ones((), requires_grad=True)
    x.register_hook(lambda gradient: seen.append(torch_compat.in_backward_pass()))
    (x * 2).backward()
    assert seen == [True]
    assert not torch_compat.in_backward_pass()


def test_a_loss_function_that_sums_says_over_how_many_rows():
    scores = torch.rand(4, 3, requires_grad=True)
    labels, targets = torch.tensor([0, 1, 2, 0]), torch.rand(4, 3)
    assert torch.nn._reduction.get_enum("sum") == 2
    assert torch.nn._reduction.get_enum("mean") == 1
    for function, target in [
        (functional.cross_entropy, labels),
        (functional.mse_loss, targets),
        (functional.binary_cross_entropy, targets),
        (functional.binary_cross_entropy_with_logits, targets),
        (functional.smooth_l1_loss, targets),
        (functional.huber_loss, targets),
    ]:
        summed = function(scores, target, reduction="sum")
        assert torch_compat.rows_summed_by_loss_function(summed.grad_fn) == 4, function
        mean = function(scores, target)
        assert torch_compat.rows_summed_by_loss_function(mean.grad_fn) == 0, function
        assert torch_compat.rows_summed_by_loss_function((summed / 4).grad_fn) == 0
        assert torch_compat.is_mean_of_loss_function(mean.grad_fn), function
        assert not torch_compat.is_mean_of_loss_function(summed.grad_fn), function
        node = summed.grad_fn
        summed.backward()
        assert torch_compat.rows_summed_by_loss_function(node) == 0


def test_the_number_that_a_loss_is_divided_by_is_known():
    loss = torch.rand(3, requires_grad=True).sum()
    for scaled, factor in [
        (loss / 4, 0.25),
        (loss * 0.25, 0.25),
        (2 * loss, 2),
        (loss.div(torch.tensor(8)), 0.125),
        (loss + 4, None),
        (loss / 0, None),
        (loss / loss, None),
        (loss * torch.ones(2, requires_grad=True)[0], None),
    ]:
        assert torch_compat.scalar_factor(scaled.grad_fn) == factor
    scaled = loss / 4
    node = scaled.grad_fn
    scaled.backward()
    assert torch_compat.scalar_factor(node) is None


def test_a_function_that_is_transformed_is_seen():
    assert not torch_compat.in_function_transform()
    seen = []
    torch.func.grad(lambda x: (seen.append(torch_compat.in_function_transform()), x)[1])(
        torch.ones(())
    )
    assert seen == [True]


def test_the_indices_of_batches_are_seen_as_they_are_drawn(monkeypatch):
    from torch.utils.data import dataloader

    for name in ("_next_index", "_reset"):
        plain = getattr(dataloader._BaseDataLoaderIter, name)
        monkeypatch.setattr(dataloader._BaseDataLoaderIter, name, plain)
    seen, begun = [], []

    def drawn(running, draw):
        seen.append(draw())
        return seen[-1]

    torch_compat.watch_indices(drawn, begun.append)
    batches = [[4, 1], [0], [2, 3]]
    loader = torch.utils.data.DataLoader(range(5), batch_sampler=batches)
    running = iter(loader)
    assert [batch.tolist() for batch in running] == batches == seen
    assert begun == []
    running._reset(loader)  # as workers that persist begin another pass
    assert begun == [running]


def test_iterations_that_a_rank_that_has_joined_shadows_are_counted(monkeypatch):
    from torch.distributed.algorithms.join import Join

    left = iter([2, 1, 0])
    monkeypatch.setattr(Join, "_get_num_nonjoined_procs", lambda self: next(left))
    seen = []
    torch_compat.on_shadowed_iteration(lambda: seen.append("an iteration"))
    assert [Join._get_num_nonjoined_procs(None) for _ in range(3)] == [2, 1, 0]
    assert len(seen) == 2
    assert "self._get_num_nonjoined_procs()" in inspect.getsource(Join.__exit__)


def test_a_running_profiler_is_known():
    assert not torch_compat.profiler_is_running()
    with torch.profiler.profile():
        assert torch_compat.profiler_is_running()
    with torch.autograd.profiler.profile():
        assert torch_compat.profiler_is_running()
    assert not torch_compat.profiler_is_running()


def test_every_function_has_a_test():
    functions = [
        name
        for name, value in vars(torch_compat).items()
        if inspect.isfunction(value)
        and value.__module__.startswith(f"{torch_compat.__name__}.")
        and not name.startswith("_")
    ]
    text = Path(__file__).read_text()
    assert [name for name in functions if f"torch_compat.{name}(" not in text] == []


def test_batches_of_data_loaders_are_seen():
    seen: list[tuple[Any, ...]] = []
    end = torch_compat.watch_data_loaders(lambda *told: seen.append(told))
    data = [1, 2, 3]
    try:
        for loader, sampler in (
            (DataLoader(data, batch_size=2), SequentialSampler),
            (DataLoader(data, batch_size=None, shuffle=True), RandomSampler),
            (DataLoader(data, batch_sampler=[[0, 2], [1]]), list),
        ):
            iterator = iter(loader)
            batches = list(iterator)
            told = [batch for *_, batch in seen]
            assert told[-1] is torch_compat.END_OF_PASS
            assert [map_tensors(b, Tensor.tolist) for b in told[:-1]] == [
                map_tensors(b, Tensor.tolist) for b in batches
            ]
            assert {id(each[0]) for each in seen} == {id(iterator)}
            assert all(each[1] is data for each in seen)
            assert {type(each[2]) for each in seen} == {sampler}
            seen.clear()
    finally:
        end()
    list(DataLoader(data))
    assert not seen


def test_gpus_are_counted_and_cuda_is_known_to_be_refused_without_initialising_it(monkeypatch):
    for version, name in ((None, "_device_count_nvml"), ("6.4", "_device_count_amdsmi")):
        assert callable(getattr(torch.cuda, name))
        monkeypatch.setattr(torch.version, "hip", version)
        for told, expected in ((2, 2), (0, 0), (-1, None)):
            monkeypatch.setattr(torch.cuda, name, lambda told=told: told)
            assert torch_compat.count_gpus_without_cuda() == expected
    assert "_is_in_bad_fork()" in inspect.getsource(torch.cuda._lazy_init)
    assert torch_compat.cuda_is_refused_in_this_copy() is False


def test_the_group_that_a_thread_is_making_is_read_from_its_frame():
    def _new_group_with_tag(use_local_synchronization: bool) -> Any:  # named as torch's
        group_name = "7"
        ranks = [0, 2]
        backend = "gloo"
        found = inner()
        assert found == {**found, "name": group_name, "ranks": ranks, "backend": backend}
        return found

    def inner() -> Any:
        return torch_compat.group_being_made(sys._getframe())

    expected = {"name": "7", "ranks": [0, 2], "backend": "gloo", "members_only": True}
    assert _new_group_with_tag(True) == expected
    assert torch_compat.group_being_made(sys._getframe()) is None
    made = dist.distributed_c10d._new_group_with_tag.__code__
    assert {"group_name", "ranks", "backend", "use_local_synchronization"} <= {*made.co_varnames}
    assert dist.distributed_c10d._is_barrier_after_init() in (0, 1)


def test_parameters_are_converted_and_stay_the_same_objects():
    model = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    model.add_module("tied", nn.Linear(2, 2))
    model.tied.weight = model[0].weight
    before = list(model.parameters())
    torch_compat.convert_tensors(model, lambda tensor: tensor.to(torch.float64))
    for parameter, same in zip(model.parameters(), before, strict=True):
        assert parameter is same
        assert parameter.dtype == torch.float64
    assert model.tied.weight is model[0].weight
    model[1](torch.ones(1, 2, dtype=torch.float64))  # it keeps a list of its weights
    torch_compat.convert_tensors(model, lambda tensor: tensor.float(), recurse=False)
    assert model[0].weight.dtype == torch.float64
    assert not torch.__future__.get_swap_module_params_on_conversion()


def test_tensors_of_one_memory_have_one_key():
    for device in ("cpu", "meta"):
        tensor, other = torch.ones(4, device=device), torch.ones(4, device=device)
        assert torch_compat.storage_key(tensor) == torch_compat.storage_key(tensor[2:].detach())
        assert torch_compat.storage_key(tensor) != torch_compat.storage_key(other)


def test_which_arguments_an_operation_writes():
    x, y = torch.ones(2), torch.ones(2)
    written = torch_compat.written_arguments(torch.ops.aten.copy_.default, (x, y), {})
    assert [tensor is x for tensor in written] == [True]
    assert torch_compat.written_arguments(torch.ops.aten.add.Tensor, (x, y), {}) == []
    written = torch_compat.written_arguments(torch.ops.aten.add.out, (x, x), {"out": y})
    assert [tensor is y for tensor in written] == [True]


class Operations(torch_compat.TorchDispatchMode):
    """Notes which operations torch calls."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func)
        return func(*args, **(kwargs or {}))


def test_operations_that_read_numbers_and_copy():
    with Operations() as operations:
        torch.ones(1).item()
        bool(torch.ones(1))
        torch.equal(torch.ones(1), torch.ones(1))
        torch.allclose(torch.ones(1), torch.ones(1))
        torch.ones(1).to(torch.float64)
    assert sum(torch_compat.reads_number(each) for each in operations.called) == 4
    assert operations.called.count(torch_compat.copy_operation()) == 1


def test_functions_that_make_tensors_on_the_device_of_a_context():
    constructors = torch_compat.device_constructors()
    assert {torch.empty, torch.randn, torch.tensor, torch.arange} <= constructors
    assert torch.zeros_like not in constructors


def test_a_truncated_normal_is_drawn_by_a_function_that_can_be_replaced():
    calls = []

    def draw(original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append((args, set(kwargs)))
        return original(tensor, *args, **kwargs)

    torch.manual_seed(0)
    with torch_compat.replacing_trunc_normal(draw):
        drawn = nn.init.trunc_normal_(torch.empty(20), std=2.0)
    assert calls == [((0.0, 2.0, -2.0, 2.0), {"generator"})]
    torch.manual_seed(0)
    assert torch.equal(nn.init.trunc_normal_(torch.empty(20), std=2.0), drawn)
    assert len(calls) == 1


def test_methods_that_draw_parameters_anew():
    assert torch_compat.reset_method(nn.ReLU()) is None
    for layer in (
        nn.Linear(2, 2),
        nn.MultiheadAttention(4, 1),
        nn.Transformer(4, 2, 1, 1, 4, batch_first=True),
    ):
        before = [parameter.clone() for parameter in layer.parameters()]
        torch_compat.reset_method(layer)()
        after = list(layer.parameters())
        assert not all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_process_of_spawn_knows_its_number_and_is_warned_that_it_trains_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = sys.modules["torch.multiprocessing.spawn"]
    monkeypatch.setattr(module, "_prctl_pr_set_pdeathsig", Mock())
    numbers = []

    def main(rank: int) -> None:
        numbers.append((rank, torch_compat.number_among_spawned()))
        lockstep.init().close()

    assert torch_compat.number_among_spawned() is None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module._wrap(main, 0, (), "")
    assert not [w for w in caught if "trains alone" in str(w.message)]
    with pytest.warns(LockstepWarning, match="each of the processes trains alone"):
        module._wrap(main, 1, (), "")
    assert numbers == [(0, 0), (1, 1)]
