"""`World.memory`: the memory that each device needs for a model, counted and measured.

*Counted* are the bytes of the tensors that the strategy leaves on a device: a shard counts as a
shard, and a view not at all. *Measured* is the peak of some training steps, with their time. A
*row* has the figures of one device, or of one *replica*: a copy of the model in a process that
has several. The rows of the ranks are exchanged once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.batch.loader import Loader
from lockstep.extensions.memory_steps import make_training_steps
from lockstep.extensions.memory_table import REPLICA_PREFIX, DeviceMemory, Memory
from lockstep.extensions.memory_tensors import bytes_by_device, state_bytes, storages
from lockstep.strategies.data_parallel.module import DataParallel
from lockstep.torch_compat import gathered_dtype, to_local
from lockstep.training.prepare import Preparer


def measure(
    preparer: Preparer,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    loader: Loader | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
) -> Memory:
    """Returns what each device holds for a model; with `loader` and `loss` also what a step needs.

    With these, a few training steps are taken on the loader's next batches. Afterwards weights,
    optimizer, loader, loss scaler, counters and random streams are restored, but not what else
    `loss` changes, and gradients are cleared. `print(world.memory(...))` shows a table. All ranks
    have to call it.

    Args:
        preparer: the preparer of the run.
        model: prepared.
        optimizer: prepared. None leaves its state out.
        loader: prepared; together with `loss`.
        loss: computes the loss from the model and a batch, the mean over its samples, as for
            `world.backward`.

    Returns:
        The figures of all ranks, on every rank.

    Raises:
        UsageError: a part is missing or not prepared, or the loader is in use or empty.
    """
    run = preparer.run

    # Attributes of `DeviceMemory` that differ between the rows of this process, such as
    # {"parameters": {cuda:0: 4096}}, and those that all rows share, such as {"rank": 0}.
    bytes_by_attribute_and_device = _bytes_of_model(model, run.device)
    values_of_all_rows: dict[str, Any] = {"rank": run.topology.rank}
    if loader is not None or loss is not None:
        steps = make_training_steps(preparer, model, optimizer, loader, loss)
        bytes_by_attribute_and_device |= steps.measure()
        values_of_all_rows["samples"] = steps.samples
        values_of_all_rows["step_s"] = steps.seconds
    elif optimizer is not None:
        state_by_device = state_bytes(optimizer)
        if state_by_device is None:  # it cannot be counted without a step
            values_of_all_rows["state"] = None
        else:
            bytes_by_attribute_and_device["state"] = state_by_device

    rows = _make_rows(run.device, bytes_by_attribute_and_device, values_of_all_rows)
    if isinstance(model, DataParallel):
        rows = _rows_of_replicas(rows, model, values_of_all_rows.get("samples"))

    rows_of_ranks = run.collectives.exchange([asdict(row) for row in rows])
    all_rows: list[DeviceMemory] = []
    for rows_of_rank in rows_of_ranks:
        all_rows += [DeviceMemory(**row) for row in rows_of_rank]

    # In a pipeline, several ranks hold stages of one model, and only one of them has data.
    num_ranks_with_data = run.collectives.data_parallel.size
    has_stages = num_ranks_with_data < run.topology.size
    return Memory(strategy=preparer.strategy.name, devices=tuple(all_rows), stages=has_stages)


def _bytes_of_model(
    model: nn.Module, device_of_rank: torch.device
) -> dict[str, dict[torch.device, int]]:
    """Returns the bytes of a model on each device, by the attribute of `DeviceMemory`."""
    from torch.distributed.fsdp import FSDPModule  # slow to import, and rarely needed

    # A unit of FSDP is a module whose parameters are gathered together.
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.reshard()  # an evaluation may have left it gathered

    gradients: Counter[torch.device] = Counter()
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.is_meta:
            gradients[parameter.device] += to_local(parameter).nbytes

    return {
        "gathered": {device_of_rank: _gathered_bytes(units)},
        "parameters": bytes_by_device(storages(model.parameters())),
        "buffers": bytes_by_device(storages(model.buffers())),
        "gradients": gradients,
    }


def _make_rows(
    device_of_rank: torch.device,
    bytes_by_attribute_and_device: Mapping[str, Mapping[torch.device, int]],
    values_of_all_rows: Mapping[str, Any],
) -> list[DeviceMemory]:
    """Returns a row for each device that holds something, the device of this rank first.

    Args:
        device_of_rank: the device of this rank, which has a row in any case.
        bytes_by_attribute_and_device: for attributes of `DeviceMemory`, the bytes on each device,
            such as `{"parameters": {cuda:0: 4096}}`.
        values_of_all_rows: values that all rows have, by the attribute of `DeviceMemory`.
    """
    other_devices: set[torch.device] = set()
    for sizes in bytes_by_attribute_and_device.values():
        other_devices.update(sizes)
    other_devices.discard(device_of_rank)

    # "cuda" without a number is sorted as "cuda:0".
    sorted_devices = sorted(other_devices, key=lambda device: (device.type, device.index or 0))
    rows: list[DeviceMemory] = []
    for device in [device_of_rank, *sorted_devices]:
        values = dict(values_of_all_rows)
        for attribute, sizes in bytes_by_attribute_and_device.items():
            if device in sizes:
                values[attribute] = sizes[device]
        rows.append(DeviceMemory(device=str(device), **values))
    return rows


def _rows_of_replicas(
    rows: list[DeviceMemory], model: DataParallel, samples: int | None
) -> list[DeviceMemory]:
    """Returns the rows of a process with replicas, with the samples of each replica in a step.

    Args:
        rows: one for each device, the first for the device that has the parameters.
        model: the model, with its replicas.
        samples: how many samples this process has; None if no steps were measured.
    """
    samples_of_replica: list[int | None] = [None] * model.num_replicas
    if samples is not None:
        samples_of_replica = list(model.sizes(samples))  # how the replicas divide them

    each_has_a_device = len(set(model.devices)) == model.num_replicas
    if each_has_a_device:
        return _rows_of_devices_of_replicas(rows, model.devices, samples_of_replica)
    return _rows_of_sharing_replicas(rows[0], samples_of_replica)


def _rows_of_devices_of_replicas(
    rows: Sequence[DeviceMemory],
    devices: Iterable[torch.device],
    samples_of_replica: Iterable[int | None],
) -> list[DeviceMemory]:
    """Returns the rows of several devices, each of which computes one replica, completed.

    When a step has ended, only the first device still holds gradients. The other replicas computed
    with copies of the parameters, which are gone by then, and their gradients with them. These
    were as large as those of the first device. For example, a model of 100 bytes has two replicas:

        gradients in `rows`         cuda:0 100 bytes, cuda:1 0 bytes
        gradients in the result     cuda:0 100 bytes, cuda:1 100 bytes

    Args:
        rows: one for each device that holds something, the first for that of the first replica.
        devices: the device of each replica.
        samples_of_replica: samples that each replica computes; None if no steps were measured.
    """
    names_of_devices = [str(device) for device in devices]
    samples_of_device = dict(zip(names_of_devices, samples_of_replica, strict=True))
    gradients_of_replica = rows[0].gradients
    completed_rows: list[DeviceMemory] = []
    for row in rows:
        if row.device in samples_of_device:
            samples = samples_of_device[row.device]
            completed_row = replace(row, samples=samples, gradients=gradients_of_replica)
        else:  # no replica computes on this device, but it holds something, such as the loss
            completed_row = replace(row, samples=None)
        completed_rows.append(completed_row)
    return completed_rows


def _rows_of_sharing_replicas(
    shared: DeviceMemory, samples_of_replica: Sequence[int | None]
) -> list[DeviceMemory]:
    """Returns a row for each of several replicas that share one device.

    Each row says what a replica would hold on a device of its own: the first one the parameters,
    each other one a copy of them. Figures that cannot be divided, such as the measured peak, stand
    in the row of the first replica. For example, two replicas of a model of 100 bytes:

        replica 0   parameters=100, copies=0, state=200, peak=500
        replica 1   parameters=0, copies=100, state=0, peak=None

    Args:
        shared: the row of the device, with the bytes of all replicas.
        samples_of_replica: samples that each replica computes; None if no steps were measured.
    """
    steps_were_measured = None not in samples_of_replica
    row_of_first_replica = shared
    row_of_other_replica = replace(
        shared,
        parameters=0,
        copies=shared.parameters,
        state=0,
        loss=0 if steps_were_measured else None,
        peak=None,
    )

    rows: list[DeviceMemory] = []
    for number, samples in enumerate(samples_of_replica):
        row = replace(
            row_of_first_replica if number == 0 else row_of_other_replica,
            device=f"{REPLICA_PREFIX}{number}",
            samples=samples,
            activations=_activations_of_replica(shared, samples, samples_of_replica),
        )
        rows.append(row)
    return rows


def _activations_of_replica(
    shared: DeviceMemory, samples: int | None, samples_of_replica: Sequence[int | None]
) -> int | None:
    """Returns a replica's part of the activations on a device, in bytes.

    They are divided in proportion to the samples, because layers that the replicas compute
    together, such as BatchNorm, save tensors for all of them.

    Args:
        shared: the row of the device. Its activations are None if the steps have kept none.
        samples: the samples of the replica; None if no steps were measured.
        samples_of_replica: the samples of each replica; all None if no steps were measured.

    Returns:
        The bytes; None if no steps were measured.
    """
    if samples is None:
        return None
    total_samples = sum(number for number in samples_of_replica if number is not None)
    activations_of_all = shared.activations or 0
    return activations_of_all * samples // max(1, total_samples)


def _gathered_bytes(units: Sequence[nn.Module]) -> int:
    """Returns the bytes that FSDP needs for a moment for the largest of its units.

    These are the gathered parameters, their gradients, and the buffer that gradients are sent in.

    Args:
        units: modules whose parameters FSDP gathers together, the outermost first. Each of them is
            an `FSDPModule`, too.
    """
    counted_ids: set[int] = set()
    largest = 0

    # A parameter belongs to the innermost unit that has it. So the inner units come first.
    unit: Any
    for unit in reversed(units):
        own_parameters = [each for each in unit.parameters() if id(each) not in counted_ids]
        counted_ids.update(id(parameter) for parameter in own_parameters)

        dtype = gathered_dtype(unit)
        is_outermost = unit is units[0]
        bytes_of_unit = 0
        for parameter in own_parameters:
            bytes_of_unit += _bytes_while_gathered(parameter, dtype, stays_gathered=is_outermost)
        largest = max(largest, bytes_of_unit)
    return largest


def _bytes_while_gathered(
    parameter: nn.Parameter, dtype_when_gathered: torch.dtype | None, *, stays_gathered: bool
) -> int:
    """Returns the bytes that FSDP needs for a moment for one parameter.

    For example, a parameter of 1000 values in float32 is gathered in bf16:

        the gathered parameter, in bf16        2000 bytes; 0 if it stays gathered
        its gradient, in bf16                  2000 bytes
        the gradient as it is sent, in float32 4000 bytes

    Args:
        parameter: the parameter, of which this rank has a shard.
        dtype_when_gathered: its dtype while it is gathered; None: its own.
        stays_gathered: True for a parameter of the outermost unit, which is gathered for the whole
            step. What is gathered is then counted among the copies of parameters instead.
    """
    # `numel` and `nbytes` of a sharded parameter are those of the whole parameter.
    gathered_bytes = parameter.nbytes
    if dtype_when_gathered is not None and parameter.is_floating_point():
        gathered_bytes = parameter.numel() * dtype_when_gathered.itemsize

    num_bytes = 0 if stays_gathered else gathered_bytes
    if parameter.requires_grad:
        gradient_bytes = gathered_bytes
        sent_gradient_bytes = parameter.nbytes  # in the dtype of the parameter itself
        num_bytes += gradient_bytes + sent_gradient_bytes
    return num_bytes
