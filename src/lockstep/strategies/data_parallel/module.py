"""`DataParallel`: one process with several devices, each of which computes a part of the batch.

The parameters are on the first device, called *home*. Each forward pass splits the inputs
(`scatter_gather`), copies the module to the other devices (`replicate`), runs these *replicas*
(`parallel_apply`) and joins their outputs at home. Autograd brings the gradients back. This works
like `torch.nn.DataParallel`, but the parts may differ in size, and the results are those of one
device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.batch.plan import part_sizes
from lockstep.batch.pytree import join_trees, map_tensors, tensors
from lockstep.errors import SettingError, UsageError, add_note_once
from lockstep.language import translate
from lockstep.settings import is_auto, parse_shares
from lockstep.strategies.data_parallel.batchnorm import BatchNormOverReplicas, synchronise_batchnorm
from lockstep.strategies.data_parallel.devices import parse_device_ids, parse_output_device
from lockstep.strategies.data_parallel.divergence import (
    forward_state,
    is_loss_term,
    warn_of_lists,
    warn_of_state,
)
from lockstep.strategies.data_parallel.parallel_apply import parallel_apply
from lockstep.strategies.data_parallel.replicate import (
    attributes,
    copy_state_back,
    parameters_and_buffers,
    replicate,
)
from lockstep.strategies.data_parallel.scatter_gather import count_samples, gather_leaf, scatter
from lockstep.strategies.sync_batchnorm import BatchNormNames
from lockstep.torch_compat import never_compiled
from lockstep.wording import describe_type


class DataParallel(nn.DataParallel[nn.Module]):
    """`torch.nn.DataParallel` with parts of any size, and with the results of a single device.

    Inputs: tensors, also in lists, tuples, dictionaries and dataclasses, are split along `dim`,
    where all of them must have the same size. Tensors without that dimension, tensors of size 1 in
    it, and everything that is not a tensor are passed to every replica. Replicas without samples do
    not run.

    Outputs: tensors are concatenated along `dim` on `output_device`, in containers of the types
    that the first replica returned. A floating-point tensor without dimensions, a Python float, or
    a tensor of shape (1,) computed from several samples is taken for a mean over the replica's
    samples, such as a loss that is computed inside the module. It becomes the mean over the batch,
    in which the replicas' values are weighted by their numbers of samples. (torch returns a vector,
    whose mean is a different number if the parts differ in size.) A parameter or buffer of the
    module is returned as it is. Anything else must be equal on all replicas.

    Whatever forward passes leave in the first replica that runs, such as buffers and attributes,
    stays in the module. What they leave in other replicas is lost; a warning is given if it
    differs.

    Args:
        module: the module, which must be on the first device before it is called. If there are
            several replicas and `sync_batchnorm` is True, its BatchNorm layers get a new forward
            (`BatchNormOverReplicas`).
        device_ids: the GPUs, the first of which holds the parameters; None for all visible GPUs.
        output_device: the device on which the outputs are joined; None for the first device.
        dim: the dimension of the samples.
        replicas: the number of replicas on the module's own device, which share its parameters; for
            trials without GPUs. None without GPUs means 1.
        shares: how a batch is divided, as one whole number per device; None for equal parts.
        sync_batchnorm: True if BatchNorm computes its statistics over the samples of all replicas.
            If False, each replica has its own statistics, and the running statistics of the first
            one are kept.

    Raises:
        SettingError: settings contradict each other or do not fit the machine.
        UsageError: there are several replicas, and a part of the module is a DataParallel.
        DataError: in forward, if inputs cannot be split or outputs differ in structure.
        UsageError: in forward, if the module is on another device or cannot be copied, or if
            outputs cannot be joined.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        *,
        replicas: int | None = None,
        shares: str | Sequence[int] | None = None,
        sync_batchnorm: bool = True,
    ) -> None:
        nn.Module.__init__(self)  # the constructor of torch's DataParallel needs GPUs
        self._gpus, self.num_replicas = parse_device_ids(device_ids, replicas)
        self.device_ids = [device.index for device in self._gpus]
        self._output_device = parse_output_device(output_device)
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise SettingError(f"dim={dim!r}", "it is a whole number", "give that of the samples")

        self.dim = dim
        self.set_shares(shares)
        self.module = module
        self._has_checked_inputs = False
        self._has_checked_state = False
        self.returned_mean = False
        """True if the latest forward pass returned a mean with a gradient, joined from replicas."""
        self.batchnorms = BatchNormNames([], [])
        """The BatchNorm layers with statistics over all replicas, and those that cannot have them.
        """

        if self.num_replicas > 1:
            self._check_not_nested()
            if sync_batchnorm:
                self.batchnorms = synchronise_batchnorm(module)

    def _check_not_nested(self) -> None:
        """Raises UsageError if a part of the module already is a DataParallel."""
        for name, part in self.module.named_modules():
            if isinstance(part, nn.DataParallel):
                raise UsageError(
                    f"{type(self).__name__} over {self.num_replicas} replicas",
                    f"{name or 'the module'} is {describe_type(part)} already, which would "
                    "divide each part of a batch once more",
                    "wrap the whole model once",
                )

    @property
    def devices(self) -> list[torch.device]:
        """The device of each replica."""
        return self._devices_for(parameters_and_buffers(self.module), batch=())

    def _devices_for(self, tensors_of_module: Sequence[Tensor], batch: Any) -> list[torch.device]:
        """Returns the device of each replica.

        Args:
            tensors_of_module: the parameters and buffers of the module. Without GPUs, replicas run
                on the device of these tensors.
            batch: the inputs. Replicas run on the device of the inputs if the module has no
                parameters and buffers.
        """
        if self._gpus:
            return self._gpus

        device = torch.device("cpu")
        if tensors_of_module:
            device = tensors_of_module[0].device
        else:
            inputs = tensors(batch)
            if inputs:
                device = inputs[0].device

        return [device] * self.num_replicas

    def set_shares(self, shares: str | Sequence[int] | None) -> None:
        """Changes how batches are divided, from the next forward pass on.

        Args:
            shares: one whole number for each device, such as `"2:3:3"` or `(2, 3, 3)`; None for
                equal parts.

        Raises:
            SettingError: the shares are invalid.
        """
        if is_auto(shares):
            raise SettingError(
                "shares='auto' of a module",
                "they are measured in a run, in the first global batch that is trained on",
                "give it to lockstep.init('dp', shares='auto') and prepare the bare module",
            )
        self.shares = parse_shares(shares, self.num_replicas, of="device")

    def sizes(self, count: int) -> list[int]:
        """Returns how many samples each replica computes.

        Args:
            count: the number of samples in the batch.
        """
        return part_sizes(count, self.shares)

    @contextmanager
    def only_on(self, device: int) -> Iterator[None]:
        """A context in which the replica with this number computes every batch as a whole."""
        shares_before = self.shares
        shares = [0] * self.num_replicas
        shares[device] = 1
        self.shares = tuple(shares)
        try:
            yield
        finally:
            self.shares = shares_before

    # Replicas are new objects in each forward pass, so code would be compiled again each time.
    @partial(never_compiled, recursive=True)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module's forward pass on all replicas, and joins their outputs.

        Afterwards the module has the buffers and attributes that the pass has left in the first
        replica that ran. The first training pass on several replicas warns if the pass has left
        other buffers or attributes in other replicas.
        """
        replicas = self._make_replicas((inputs, kwargs))

        # Normally the first replica is the module itself, and all others are copies. But if the
        # first device gets no samples, the first replica that runs is a copy. What the forward pass
        # leaves in it must then be copied to the module.
        first = replicas[0]
        with self._state_checked(replicas), self._state_copied_back(first):
            outputs = self._run(replicas)

        output_device = first.home if self._output_device is None else self._output_device
        return self._join_outputs(replicas, outputs, output_device)

    @contextmanager
    def _state_copied_back(self, first: Replica) -> Iterator[None]:
        """A context for a forward pass, at whose end the module has the state of a replica.

        Args:
            first: the first replica that runs. If this is the module itself, nothing is copied.
        """
        if first.module is self.module:
            yield
            return

        attributes_before = attributes(first.module)  # to find the new ones
        yield
        copy_state_back(self.module, first.module, attributes_before, first.home)

    @contextmanager
    def _state_checked(self, replicas: Sequence[Replica]) -> Iterator[None]:
        """A context for a forward pass, which warns of state that then differs between replicas.

        The check is made once, in the first training pass.
        """
        is_training_pass = torch.is_grad_enabled()
        if len(replicas) == 1 or not is_training_pass or self._has_checked_state:
            yield
            return

        state_before = forward_state(replicas[0].module)
        yield
        self._has_checked_state = True
        warn_of_state([replica.module for replica in replicas], state_before)

    def _make_replicas(self, batch: Any) -> list[Replica]:
        """Splits a batch, and returns the replicas that have samples of it.

        Args:
            batch: the positional and the keyword arguments of the forward pass.
        """
        tensors_of_module = parameters_and_buffers(self.module)
        devices = self._devices_for(tensors_of_module, batch)  # one for each replica
        home = devices[0]  # where the parameters are
        self._check_is_on(home, tensors_of_module)
        num_samples = count_samples(batch, self.dim, self.num_replicas)

        # `sizes` has the number of samples of every replica; `running_numbers` are the numbers of
        # the replicas that run.
        if num_samples > 0:
            sizes = self.sizes(num_samples)
            running_numbers = [number for number, size in enumerate(sizes) if size > 0]
        else:
            # The inputs have no samples to split. The first replica gets all of them.
            sizes = [0] * self.num_replicas
            running_numbers = [0]

        modules = self._modules_of_replicas(running_numbers, devices, tensors_of_module)

        # Lists are not split. Warn once of a list with one entry per sample.
        if len(running_numbers) > 1 and not self._has_checked_inputs:
            self._has_checked_inputs = True
            warn_of_lists(len(running_numbers), batch, num_samples)

        replicas: list[Replica] = []
        for number, module in zip(running_numbers, modules, strict=True):
            device = devices[number]
            begin = sum(sizes[:number])
            end = begin + sizes[number]
            args, kwargs = scatter(batch, self.dim, num_samples, begin, end, device)
            error_note = ""

            if num_samples > 0 and self.num_replicas > 1:
                error_note = translate(
                    f"in replica {number} on {device}, which has {sizes[number]} of {num_samples} "
                    "samples"
                )

            replicas.append(Replica(module, device, home, sizes[number], args, kwargs, error_note))

        return replicas

    def _modules_of_replicas(
        self,
        running_numbers: Sequence[int],
        devices: Sequence[torch.device],
        tensors_of_module: Sequence[Tensor],
    ) -> list[nn.Module]:
        """Returns the module of each replica: the module itself for number 0, else a copy.

        Args:
            running_numbers: the numbers of the replicas that run, in ascending order.
            devices: the devices of all replicas, including those that do not run.
            tensors_of_module: the parameters and buffers, which are copied to the other devices.
        """
        devices_of_copies = [devices[number] for number in running_numbers if number != 0]
        home = devices[0]  # the device of the module
        copies = replicate(self.module, tensors_of_module, home, devices_of_copies)

        module_itself_runs = running_numbers[0] == 0
        if module_itself_runs:
            return [self.module, *copies]
        return copies

    def _check_is_on(self, home: torch.device, tensors_of_module: Sequence[Tensor]) -> None:
        """Raises UsageError if a parameter or buffer is not on the first device."""
        for tensor in tensors_of_module:
            if tensor.device != home:
                unique_devices = dict.fromkeys(self.devices)
                where = ", ".join(str(device) for device in unique_devices)
                raise UsageError(
                    f"{type(self).__name__} over {where}",
                    f"the module has tensors on {tensor.device}; all belong on the first device",
                    f"call module.to('{home}') first",
                )

    def _run(self, replicas: Sequence[Replica]) -> list[Any]:
        """Runs the replicas, and returns their outputs.

        Threads are only used if necessary: if there are several devices, or if replicas wait for
        each other in a BatchNorm layer. The reason is that not every mode of torch can be passed on
        to a thread.
        """
        devices = [replica.device for replica in replicas]
        on_several_devices = len(set(devices)) > 1
        if len(replicas) > 1 and (on_several_devices or self._replicas_meet()):
            return parallel_apply([replica.run for replica in replicas], devices)
        return [replica.run() for replica in replicas]

    def _replicas_meet(self) -> bool:
        """Returns True if a layer of the module computes statistics over all replicas."""
        for part in self.module.modules():
            forward = vars(part).get("forward")
            if isinstance(forward, BatchNormOverReplicas) and forward.uses_batch_statistics:
                return True
        return False

    def _join_outputs(
        self, replicas: Sequence[Replica], outputs: Sequence[Any], device: torch.device
    ) -> Any:
        """Joins the outputs of the replicas into one output on `device`.

        Whatever the outputs contain at the same place of their containers is joined into one value
        (`scatter_gather.gather_leaf`). A single number of each replica, such as a loss, is taken
        for a mean over the samples of the replica; the result is the mean over all samples. If such
        a number has a gradient, `returned_mean` is set to True, and the strategy may warn that a
        mean is wrong for samples with weights.
        """
        self.returned_mean = False
        if len(outputs) == 1:
            return map_tensors(outputs[0], lambda tensor: tensor.to(device))

        join_leaf = partial(
            gather_leaf,
            sizes=[replica.num_samples for replica in replicas],
            dim=self.dim,
            device=device,
            # To recognise a parameter or buffer that every replica returns unchanged.
            state_numbers=[_number_state(replica.module) for replica in replicas],
        )
        output = join_trees(outputs, join_leaf)
        self.returned_mean = any(_is_computed_loss(tensor) for tensor in tensors(output))
        return output


def _number_state(module: nn.Module) -> dict[int, int]:
    """Numbers the parameters and buffers of a replica: `{id(weight): 0, id(bias): 1}`.

    All replicas have them in the same order, so copies of one parameter have the same number. If
    replicas return parameters as a part of their outputs, the numbers show whether all have
    returned the same one.
    """
    tensors_of_module = parameters_and_buffers(module)
    return {id(tensor): number for number, tensor in enumerate(tensors_of_module)}


def _is_computed_loss(tensor: Tensor) -> bool:
    """Returns True for a single number with a gradient, unless it is a parameter itself."""
    was_computed = tensor.grad_fn is not None  # a parameter was not
    return was_computed and is_loss_term(tensor)


@dataclass(frozen=True, eq=False, slots=True)
class Replica:
    """One replica in a forward pass: the module or a copy of it, with its part of the batch."""

    module: nn.Module
    device: torch.device
    home: torch.device
    """The first device, which holds the parameters and the outputs."""
    num_samples: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    error_note: str
    """A note for errors that says which replica raised them; empty if there is only one."""

    def run(self) -> Any:
        """Runs the forward pass of this replica."""
        try:
            is_cuda = self.device.type == "cuda"
            on_device = torch.cuda.device(self.device) if is_cuda else nullcontext()
            with on_device:
                return self.module(*self.args, **self.kwargs)
        except Exception as error:
            if self.error_note:
                add_note_once(error, "replica", self.error_note)
            raise
