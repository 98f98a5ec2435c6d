"""Names that people know from torch.distributed, Accelerate, Fabric, Lightning, and other tools.

Whoever converts a script writes `world.get_rank()` or `lockstep.Accelerator()` from habit. Python
suggests names that are spelled alike; these tables name what Lockstep has for the same purpose.
"""

from __future__ import annotations

from lockstep.errors import UnknownNameError

REPLACEMENT_OF_WORLD_NAME = {
    # who this process is
    "get_rank": "world.rank",
    "global_rank": "world.rank",
    "process_index": "world.rank",
    "rank_id": "world.rank",
    "get_world_size": "world.size",
    "world_size": "world.size",
    "num_processes": "world.size",
    "num_ranks": "world.size",
    "nprocs": "world.size",
    "get_local_rank": "world.local_rank",
    "get_node_local_rank": "world.local_rank",
    "local_process_index": "world.local_rank",
    "get_local_size": "world.local_size",
    "local_world_size": "world.local_size",
    "group_rank": "world.node_rank",
    "machine_rank": "world.node_rank",
    "node_id": "world.node_rank",
    "is_main_process": "world.is_main",
    "is_global_zero": "world.is_main",
    "is_rank_zero": "world.is_main",
    "is_world_process_zero": "world.is_main",
    "is_master": "world.is_main",
    "master_process": "world.is_main",
    "is_local_main_process": "world.local_rank == 0",
    "is_local_process_zero": "world.local_rank == 0",
    "local_device": "world.device",
    "root_device": "world.device",
    "distributed_type": "world.strategy",
    # communication
    "all_reduce": "world.sum(x) or world.mean(x)",
    "allreduce": "world.sum(x) or world.mean(x)",
    "reduce": "world.sum(x) or world.mean(x)",
    "all_gather": "world.gather(x)",
    "all_gather_into_tensor": "world.gather(x)",
    "all_gather_object": "world.gather(x)",
    "allgather": "world.gather(x)",
    "gather_for_metrics": "world.gather(x)",
    "gather_object": "world.gather(x)",
    "broadcast_object": "world.broadcast(x)",
    "broadcast_object_list": "world.broadcast(x)",
    "wait_for_everyone": "world.barrier()",
    "monitored_barrier": "world.barrier()",
    "synchronize": "world.barrier()",
    "local_main_process_first": "world.main_process_first()",
    "rank_zero_first": "world.main_process_first()",
    "main_first": "world.main_process_first()",
    "on_main_process": "if world.is_main:",
    "rank_zero_only": "if world.is_main:",
    # the training
    "setup": "world.prepare(model, optimizer, loader)",
    "setup_dataloaders": "world.prepare(loader)",
    "setup_module": "world.prepare(model)",
    "setup_optimizers": "world.prepare(model, optimizer)",
    "prepare_data_loader": "world.prepare(loader)",
    "prepare_model": "world.prepare(model)",
    "prepare_optimizer": "world.prepare(model, optimizer)",
    "accumulate": "lockstep.init(micro_batch_size=...)",
    "gradient_accumulation_steps": "lockstep.init(num_micro_batches=...)",
    "no_backward_sync": "lockstep.init(micro_batch_size=...)",
    "no_sync": "lockstep.init(micro_batch_size=...)",
    "sync_gradients": "world.is_last_micro_batch",
    "autocast": "lockstep.init(precision=...)",
    "mixed_precision": "lockstep.init(precision=...)",
    "clip_gradients": "world.clip_grad_norm_(model, max_norm)",
    "clip_grad_norm": "world.clip_grad_norm_(model, max_norm)",
    "seed_everything": "lockstep.init(seed=...)",
    "set_seed": "lockstep.init(seed=...)",
    "current_epoch": "world.epoch",
    "global_step": "world.step",
    # output
    "print0": "world.print(...)",
    "print_main": "world.print(...)",
    "print_on_main": "world.print(...)",
    "print_once": "world.print(...)",
    "print_rank_0": "world.print(...)",
    "rank_zero_info": "world.print(...)",
    "rank_zero_print": "world.print(...)",
    "log_dict": "world.log(name=value)",
    "log_metrics": "world.log(name=value)",
    "tqdm": "world.progress(loader)",
    # checkpoints
    "load": "world.checkpoint(folder, model=model).resume()",
    "load_checkpoint": "world.checkpoint(folder, model=model).resume()",
    "load_state": "world.checkpoint(folder, model=model).resume()",
    "resume": "world.checkpoint(folder, model=model).resume()",
    "save": "world.checkpoint(folder, model=model).save()",
    "save_checkpoint": "world.checkpoint(folder, model=model).save()",
    "save_state": "world.checkpoint(folder, model=model).save()",
    "save_model": "lockstep.save_weights(model, path)",
    "skip_first_batches": "world.checkpoint(folder, loader=loader).resume()",
    # the end
    "cleanup": "world.close()",
    "destroy": "world.close()",
    "destroy_process_group": "world.close()",
    "end_training": "world.close()",
    "launch": "lockstep.launch(function, nproc=...)",
}
"""What to write instead of a name that a World does not have."""

REPLACEMENT_OF_MODULE_NAME = {
    "Accelerator": "lockstep.init()",
    "Fabric": "lockstep.init()",
    "init_process_group": "lockstep.init()",
    "initialize": "lockstep.init()",
    "setup": "lockstep.init()",
    "DDP": "lockstep.strategies.DDP",
    "DistributedDataParallel": "lockstep.strategies.DDP",
    "FSDP": "lockstep.strategies.FSDP",
    "FullyShardedDataParallel": "lockstep.strategies.FSDP",
    "DataParallel": "lockstep.strategies.DP",
    "DiLoCo": "lockstep.strategies.DiLoCo",
    "Pipeline": "lockstep.strategies.Pipeline",
    "convert_sync_batchnorm": "lockstep.SyncBatchNorm",
    "load": "lockstep.load_weights(model, path)",
    "load_checkpoint": "lockstep.load_weights(model, path)",
    "load_state_dict": "lockstep.load_weights(model, path)",
    "save": "lockstep.save_weights(model, path)",
    "save_checkpoint": "lockstep.save_weights(model, path)",
    "save_model": "lockstep.save_weights(model, path)",
    "init_empty_weights": "lockstep.deferred_init()",
    "notebook_launcher": "lockstep.launch(function, nproc=...)",
    "spawn": "lockstep.launch(function, nproc=...)",
    "seed_everything": "lockstep.init(seed=...)",
    "set_seed": "lockstep.init(seed=...)",
    "LARS": "lockstep.optim.LARS",
    "LAMB": "lockstep.optim.LAMB",
}
"""What to write instead of a name that the module `lockstep` does not have."""

ARGUMENT_OF_WORD = {
    "amp": "precision",
    "dtype": "precision",
    "mixed_precision": "precision",
    "accumulate": "num_micro_batches",
    "accumulation_steps": "num_micro_batches",
    "gradient_accumulation_steps": "num_micro_batches",
    "dist_backend": "backend",
    "dist_url": "init_method",
    "timeout": "collective_timeout",
}
"""The argument of `lockstep.init` that an argument of another library means."""

ADVICE_FOR_FLAG = {
    # Accelerate and DeepSpeed
    "num-processes": "use --nproc, which counts the processes of each machine, not all of them",
    "num-machines": "--nnodes",
    "num-nodes": "--nnodes",
    "machine-rank": "--node-rank",
    "main-process-ip": "--master-addr",
    "main-process-port": "--master-port",
    "mixed-precision": "--precision",
    "gradient-accumulation-steps": "--num-micro-batches",
    "num-gpus": "--nproc",
    "gpu-ids": "set CUDA_VISIBLE_DEVICES and --nproc instead",
    "num-cpu-threads-per-process": "set OMP_NUM_THREADS instead",
    "config-file": "use --launch-file instead; its keys are the options of lockstep run",
    "hostfile": "use --hosts instead, which also takes the path of a hostfile",
    "multi-gpu": "use --nproc gpu instead, which starts a process for each GPU",
    "cpu": "use --device cpu instead",
    "use-fsdp": "--strategy fsdp",
    "use-deepspeed": "use --strategy fsdp instead, which shards the model as ZeRO does",
    # mpirun, srun
    "n": "--nproc",
    "np": "--nproc",
    "N": "--nnodes",
    "H": "--hosts",
    "host": "--hosts",
    "ntasks": "--nproc",
    "ntasks-per-node": "--nproc",
    # torch.multiprocessing
    "nprocs": "--nproc",
    "world-size": "--nproc",
}
"""What to use instead of a flag of another launcher: a flag, or a sentence of advice.

The keys are without the hyphens at the start, and with `-` in place of `_`."""

COMMANDS_OF_WORD: dict[str, dict[str, tuple[str, ...]]] = {
    "lockstep": {
        **dict.fromkeys(
            ("exec", "launch", "python", "resume", "start", "torchrun", "train"), ("run",)
        ),
        **dict.fromkeys(("equal", "same", "validate"), ("verify",)),
        **dict.fromkeys(("check", "test"), ("verify", "doctor")),
        **dict.fromkeys(("debug", "devices", "diagnose", "env", "info", "ping"), ("doctor",)),
        **dict.fromkeys(("dashboard", "log", "logs", "monitor", "page", "plot"), ("report",)),
        **dict.fromkeys(("profile", "stats", "status", "summary", "trace", "view"), ("report",)),
        **dict.fromkeys(("coverage", "data", "samples"), ("ledger",)),
        **dict.fromkeys(("bits", "hash", "hashes"), ("journal show",)),
        **dict.fromkeys(("cmp", "diff"), ("checkpoint diff", "journal diff")),
        "compare": ("checkpoint diff", "journal diff", "verify"),
        **dict.fromkeys(("consolidate", "convert", "export"), ("checkpoint convert",)),
        **dict.fromkeys(("merge", "merge-weights"), ("checkpoint convert",)),
        **dict.fromkeys(("inspect", "list", "ls", "show"), ("checkpoint inspect", "report")),
        **dict.fromkeys(("fix", "repair"), ("checkpoint repair",)),
        **dict.fromkeys(("checkpoints", "ckpt", "weights"), ("checkpoint",)),
        **dict.fromkeys(("code", "codes", "describe", "error", "why"), ("explain",)),
        **dict.fromkeys(("config", "init"), ("run --help",)),
        "help": ("--help",),
        "version": ("--version",),
    },
    "lockstep checkpoint": {
        **dict.fromkeys(("cmp", "compare", "equal"), ("diff",)),
        **dict.fromkeys(("cat", "check", "describe", "dump", "info", "list", "ls"), ("inspect",)),
        **dict.fromkeys(
            ("open", "print", "show", "stat", "validate", "verify", "view"), ("inspect",)
        ),
        **dict.fromkeys(
            ("cast", "consolidate", "copy", "export", "extract", "merge"), ("convert",)
        ),
        **dict.fromkeys(("save", "split", "transform", "unshard"), ("convert",)),
        **dict.fromkeys(("clean", "fix", "prune", "recover", "rescue", "restore"), ("repair",)),
        "help": ("--help",),
    },
    "lockstep journal": {
        **dict.fromkeys(("cmp", "compare", "verify"), ("diff",)),
        **dict.fromkeys(("cat", "head", "info", "inspect", "list", "log", "ls"), ("show",)),
        **dict.fromkeys(("print", "tail", "view"), ("show",)),
        "help": ("--help",),
    },
}
"""For each group of commands: the commands that a word of other tools may mean, below the group."""

STRATEGY_OF_WORD = {
    "dataparallel": "dp",
    "distributeddataparallel": "ddp",
    "distributed": "ddp",
    "dataparalleldistributed": "ddp",
    "horovod": "ddp",
    "fullyshardeddataparallel": "fsdp",
    "fullyshard": "fsdp",
    "fsdp1": "fsdp",
    "fsdp2": "fsdp",
    "deepspeed": "fsdp",
    "deepspeedstage2": "fsdp",
    "deepspeedstage3": "fsdp",
    "sharded": "fsdp",
    "zero": "fsdp",
    "zero1": "fsdp",
    "zero2": "fsdp",
    "zero3": "fsdp",
    "hybridshard": "hsdp",
    "hybridshardeddataparallel": "hsdp",
    "localsgd": "diloco",
    "gpipe": "pipeline",
    "pp": "pipeline",
    "pipelineparallel": "pipeline",
    "none": "single",
    "no": "single",
}
"""The strategy that a word of PyTorch, DeepSpeed or Lightning means, in lower case and without
spaces, hyphens and underscores."""

NAMES_OF_WORLD = (
    *("backward", "barrier", "broadcast", "clip_grad_norm_", "close", "device", "epoch", "epochs"),
    *("gather", "is_last_micro_batch", "is_main", "is_repeated_micro_batch", "loader"),
    *("local_rank", "local_size", "log", "loss", "main_process_first", "max", "mean", "means"),
    *("memory", "min", "node_rank", "prepare", "print", "progress", "rank", "size", "state_dict"),
    *("step", "strategy", "sum"),
)
"""Names that a World has, and that somebody may look for in the module."""


def error_of_world_name(name: str) -> UnknownNameError | None:
    """Returns the error for a name that a World does not have; None if there is no replacement."""
    replacement = REPLACEMENT_OF_WORLD_NAME.get(name)
    if replacement is None:
        return None
    return UnknownNameError(
        f"world.{name}", f"a World has no attribute {name!r}", f"use {replacement} instead"
    )


def error_of_module_name(name: str) -> UnknownNameError | None:
    """Returns the error for a name that the module does not have; None without a replacement."""
    if name in REPLACEMENT_OF_MODULE_NAME:  # of another library: `Accelerator` is `lockstep.init()`
        replacement = REPLACEMENT_OF_MODULE_NAME[name]
    elif name in NAMES_OF_WORLD:  # an attribute of a World: `rank` is `world.rank`
        replacement = f"world.{name}"
    elif name in REPLACEMENT_OF_WORLD_NAME:  # `all_reduce` of torch is `world.sum(x)`
        replacement = REPLACEMENT_OF_WORLD_NAME[name]
    else:
        return None

    do = f"use {replacement} instead"
    if "world." in replacement:
        do = f"use {replacement} instead, where world = lockstep.init()"
    return UnknownNameError(
        f"lockstep.{name}", f"the module lockstep has no attribute {name!r}", do
    )
