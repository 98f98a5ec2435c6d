"""All patches that `lockstep verify` applies to torch and Lockstep, with the reason for each.

To *patch* a function is to replace it, for the rest of the process, by one that calls the original
and also informs the `Recorder`. Torch's public hooks are used where there are any.

Patched in `comparable`, for within a tolerance unless it says otherwise:

- `torch.set_default_dtype`, `torch.autocast`: everything is computed in float64, where sums in
  another order differ by next to nothing
- `torch.utils.checkpoint.checkpoint`: what it computes again must be in float64 too
- `torch.compile` (by bits too): it would trace through the hooks of the recorder
- Lockstep's `Checkpoint` (by bits too): each run would resume from the run before

Patched in `training`:

- `torch.autograd.backward`: the loss, and the gradients that each backward pass leaves
- `torch.nn.utils.clip_grad_norm_` and others: the gradients before they are clipped
- `Optimizer.add_param_group`: new optimizers, and the line that sets a learning rate
- `PreparedOptimizer`: optimizers that were forgotten in `World.prepare`
- `step` of schedulers: a scheduler that is called more often on several processes
- `torch.manual_seed`, `DistributedSampler.set_epoch`: equal seeds, and orders that repeat
- `Tensor.register_hook`, `register_post_accumulate_grad_hook`: a hook that changes gradients
- `World.__init__` (by bits only): the settings of the script

Patched in `distributed`:

- collectives of torch and `World`: what ranks exchange, and gathers that lose the gradient
- `DistributedDataParallel`: which modules it wraps, and communication hooks
- the start of processes (by bits too): ranks of the script's own would not be recorded

Patched in `loaders`:

- `DataLoader.__iter__`: the batches, as they are handed out
- iterators of DataLoaders: the indices of the samples of each batch
- `Loader.__iter__` (by bits too): float64, and the end of the script after enough steps
- `DataLoader.__init__`, with `--batch-per-process`: larger batches for one process
- `DataLoader.__init__` and `__len__`, with `--same-samples`: the batches of the other run

`saved_files` and `restored_files` patch how files are opened and saved, since the script is run
several times, and should leave the user's files as they were.
"""

from __future__ import annotations

from pathlib import Path

from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lockstep.session.extension import add_to_every_run
from lockstep.verify.feed import BatchReader, BatchWriter
from lockstep.verify.recording.bit_recorder import BitRecorder
from lockstep.verify.recording.determinism import Determinism
from lockstep.verify.recording.function_mode import FunctionMode
from lockstep.verify.recording.patches import comparable, distributed, loaders, training
from lockstep.verify.recording.recorder import Recorder
from lockstep.verify.recording.saved_files import SavedFiles
from lockstep.verify.restored_files import FilesBefore
from lockstep.verify.run_config import RunConfig


def install(
    recorder: Recorder,
    mode: FunctionMode,
    config: RunConfig,
    folder: Path,
    kept_batches: BatchWriter | BatchReader | None = None,
) -> None:
    """Applies all patches to this process.

    Args:
        recorder: recorder that is informed of everything.
        mode: function mode, which is entered here and then sees every call of torch's functions.
        config: settings of the run.
        folder: folder for the files that the script saves.
        kept_batches: writer that keeps the batches of this run, or reader that replaces them with
            the batches of another run.
    """
    distributed.forbid_own_ranks(recorder.note_own_process, config.nproc)

    # To observe the training.
    recorder.state.branches.install()
    add_to_every_run(recorder)  # the recorder is an extension, which sees Lockstep's steps
    register_optimizer_step_pre_hook(recorder.optimizers.before_step)
    register_optimizer_step_post_hook(recorder.optimizers.after_step)
    register_module_forward_pre_hook(recorder.forwards.enter_module)
    register_module_forward_hook(recorder.forwards.leave_module, always_call=True)
    training.watch_backward_passes(recorder)
    distributed.watch_collectives(recorder)
    distributed.watch_ddp(recorder, mode.determinism)
    training.watch_gradient_clipping(recorder)
    training.watch_optimizers(recorder)
    training.watch_schedulers(recorder)
    training.watch_seeds_and_epochs(recorder)
    training.watch_tensor_hooks(recorder)

    # To observe or replace batches.
    loaders.record_sample_indices(mode)
    if kept_batches is not None:
        loaders.number_loaders(kept_batches)
    if isinstance(kept_batches, BatchReader):
        loaders.replace_lengths(kept_batches)
    loaders.watch_loaders(recorder, mode, kept_batches)
    if config.batch_size_factor > 1:
        loaders.enlarge_batches(recorder, config.batch_size_factor)

    # To make runs comparable.
    if mode.determinism.double:
        comparable.compute_in_float64(mode)
    comparable.disable_compile(mode.determinism)
    comparable.disable_saved_checkpoints(mode.determinism)
    SavedFiles(folder).patch(mode.determinism)
    FilesBefore(folder.parent).watch()  # to restore the user's files after the run

    # The mode is never exited: from here on, it sees all calls of torch's functions.
    mode.__enter__()  # type: ignore[no-untyped-call]


def install_for_bits(
    recorder: BitRecorder, determinism: Determinism, config: RunConfig, folder: Path
) -> None:
    """Applies the few patches that are needed to compare runs bit by bit.

    Nothing that the script computes is changed, except that `torch.compile` is switched off.

    Args:
        recorder: recorder that listens to Lockstep's steps as an extension.
        determinism: object that counts what is switched off, to report it with the verdict.
        config: settings of the run.
        folder: folder for the files that the script saves, within the folder of the run.
    """
    # Refuse scripts that cannot be compared: those that start ranks by themselves, and those that
    # call `optimizer.step()` without Lockstep.
    distributed.forbid_own_ranks(recorder.note_own_process, config.nproc)
    register_optimizer_step_pre_hook(recorder.end_script_without_lockstep)

    # The recorder is an extension, which Lockstep calls at every batch and step.
    add_to_every_run(recorder)
    training.watch_settings(recorder)
    loaders.end_after_enough_steps(recorder.state)

    # To make runs comparable.
    comparable.disable_compile(determinism)
    comparable.disable_saved_checkpoints(determinism)

    # To keep the files of the user: the script writes elsewhere.
    SavedFiles(folder).patch(determinism)
    run_folder = folder.parent
    FilesBefore(run_folder).watch()  # to restore the user's files after the run
