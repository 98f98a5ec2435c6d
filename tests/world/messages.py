"""What Lockstep says to each wrong use of test_wrong_uses.py, word for word."""

from __future__ import annotations

MESSAGES: dict[str, str] = {
    "results in another order": (
        "optimizer, model = world.prepare(model, optimizer)\n"
        "  found: the result for a Linear would go to the variable that holds an SGD\n"
        "  do:    unpack the results in the order in which the objects are given"
    ),
    "too few variables for the results": (
        "model, optimizer = world.prepare(model, optimizer, train)\n"
        "  found: there are 2 variables for the results of 3 objects\n"
        "  do:    unpack one result for each object"
    ),
    "batch size 0": (
        "batch_size=0\n"
        "  found: a global batch holds a whole number of samples, at least 1\n"
        "  do:    give the number of samples of one optimizer step over all devices"
    ),
    "batch size of a fraction": (
        "batch_size=2.5\n"
        "  found: a global batch holds a whole number of samples, at least 1\n"
        "  do:    give the number of samples of one optimizer step over all devices"
    ),
    "no batch size": (
        "batch_size=None, batch_size_per_device=None\n"
        "  found: exactly one of them says how large the global batch is\n"
        "  do:    give batch_size: the samples of one optimizer step over all devices"
    ),
    "two batch sizes": (
        "batch_size=4, batch_size_per_device=2\n"
        "  found: exactly one of them says how large the global batch is\n"
        "  do:    give batch_size: the samples of one optimizer step over all devices"
    ),
    "dataset without length": (
        "a NoLength without a length\n"
        "  found: len() does not work on it, so an epoch cannot be cut into global batches\n"
        "  do:    give it a __len__ that returns the number of samples (batches for a batch sampler)"
    ),
    "stream": (
        "shuffle=True for the stream Stream\n"
        "  found: a stream is read in its own order\n"
        "  do:    shuffle inside its __iter__ (whose random streams are seeded alike on all ranks), or with the stream's own .shuffle(...)"
    ),
    "not a dataset": (
        "data of type int\n"
        "  found: it has no __getitem__\n"
        "  do:    pass a torch Dataset, or a DataLoader"
    ),
    "DataLoader without batch size": (
        "a DataLoader with batch_size=None\n"
        "  found: without a batch size there is no global batch\n"
        "  do:    give the DataLoader a batch_size"
    ),
    "DistributedSampler": (
        "a DataLoader with a DistributedSampler\n"
        "  found: it is already sharded; Lockstep would shard each shard again\n"
        "  do:    leave the sampler out and pass shuffle=True: every rank gets its part of the batch\n"
        "  more:  [LS102: lockstep explain LS102]"
    ),
    "DataLoader and batch size": (
        "world.loader of a DataLoader with batch_size or loader options\n"
        "  found: the DataLoader has these already\n"
        "  do:    set them in the DataLoader, or pass its dataset"
    ),
    "more shares than ranks": (
        "shares='1:2'\n"
        "  found: 2 shares for a world size of 1\n"
        "  do:    leave shares out: there is one rank, which gets the whole batch"
    ),
    "shares of nothing": (
        "shares='0'\n"
        "  found: shares are at least 0, and one is above 0\n"
        "  do:    give one whole number for each rank; 1:2 gives the second of two twice as much"
    ),
    "shares of words": (
        "shares='half'\n"
        "  found: these are not whole numbers\n"
        "  do:    give one whole number for each rank; 1:2 gives the second of two twice as much"
    ),
    "micro-batch of nothing": (
        "micro_batch_size=0\n"
        "  found: a micro-batch holds at least one sample on each rank\n"
        "  do:    give the number of samples one device computes at a time, or leave it out"
    ),
    "unknown strategy": (
        "strategy='pipelin'\n"
        "  found: strategies are single, dp, ddp, fsdp, hsdp, pipeline, diloco\n"
        "  do:    did you mean 'pipeline'?"
    ),
    "unknown precision": (
        "precision='bf61'\n"
        "  found: precisions are fp32, bf16, fp16, fp64\n"
        "  do:    did you mean 'bf16'?"
    ),
    "nccl on the CPU": (
        "backend='nccl'\n"
        "  found: the device is cpu; NCCL moves data of GPUs only\n"
        "  do:    use 'gloo', which serves GPUs too, slower"
    ),
    "unknown device": (
        "device='gpu'\n"
        "  found: Lockstep computes on CPUs and on CUDA devices, which those of ROCm are too\n"
        "  do:    use cpu, cuda or cuda:0"
    ),
    "rank without world size": (
        "rank=0, world_size=None\n"
        "  found: only one of them was given\n"
        "  do:    give both, or neither under a launcher"
    ),
    "timeout below zero": (
        "join_timeout=-1\n  found: it is not a time above 0\n  do:    give seconds, or a timedelta"
    ),
    "timeout without an end": (
        "collective_timeout=inf\n"
        "  found: it is not a time above 0\n"
        "  do:    give seconds, or a timedelta"
    ),
    "seed of words": (
        "seed='lucky'\n  found: a seed is a whole number from 0 to 2**64 - 1\n  do:    pass a whole number from 0 to 2**64 - 1"
    ),
    "foreign parameters": (
        "world.prepare of SGD\n"
        "  found: 4 of its 4 parameters belong to no prepared module\n"
        "  do:    build the optimizer from model.parameters() of the very model you prepare, and give both to world.prepare(model, optimizer)"
    ),
    "prepare twice": (
        "world.prepare of a Sequential that is prepared already\n"
        "  found: preparing it again would cut, average or step twice\n"
        "  do:    call world.prepare once for each object and use what it returns"
    ),
    "prepare an optimizer twice": (
        "world.prepare of a PreparedOptimizer that is prepared already\n"
        "  found: preparing it again would cut, average or step twice\n"
        "  do:    call world.prepare once for each object and use what it returns"
    ),
    "prepare a dataset": (
        "world.prepare of a TensorDataset\n"
        "  found: it takes modules, optimizers, learning-rate schedulers and DataLoaders\n"
        "  do:    give a dataset to world.loader(dataset, batch_size=...); leave the rest out"
    ),
    "DDP around it": (
        "a prepared model in DistributedDataParallel\n"
        "  found: both average the gradients, so they would come out too small\n"
        "  do:    leave DistributedDataParallel out: call the object that world.prepare returned"
    ),
    "DDP by hand": (
        "world.prepare of a model in DistributedDataParallel\n"
        "  found: the model averages its gradients itself; here they would be averaged twice, and not weighted\n"
        "  do:    leave DistributedDataParallel out: world.prepare wraps the plain model"
    ),
    "DataParallel on several processes": (
        "world.prepare of a model in DataParallel on 2 processes\n"
        "  found: each process would compute on 2 GPUs, which are those of other processes as well\n"
        "  do:    leave it out: world.prepare wraps the plain model for one GPU per process; one process for several GPUs is lockstep run --strategy dp"
    ),
    "prepare nothing": (
        "world.prepare()\n  found: nothing was given\n  do:    pass the model, ..."
    ),
    "scheduler without its optimizer": (
        "world.prepare of StepLR\n"
        "  found: the optimizer it drives is not prepared\n"
        "  do:    give both to world.prepare(model, optimizer, scheduler)"
    ),
    "parameters added after prepare": (
        "optimizer.add_param_group after world.prepare\n"
        "  found: gradients of parameters that came later would not be averaged over the ranks\n"
        "  do:    add all parameters first (frozen ones may be in it), then call world.prepare\n"
        "  more:  [LS303: lockstep explain LS303]"
    ),
    "loss that is a number": (
        "world.backward of a float\n"
        "  found: a loss is a tensor of one element\n"
        "  do:    pass the loss itself, not .item() of it or a tuple"
    ),
    "loss that is not a scalar": (
        "world.backward of a loss of shape (4,)\n"
        "  found: exact weighting needs one number: the mean over this rank's samples\n"
        "  do:    take its .mean(), or leave reduction='none' out of the loss function"
    ),
    "loss without gradient": (
        "world.backward of a loss without gradient\n"
        "  found: it does not depend on any parameter that is trained, or was computed under torch.no_grad()\n"
        "  do:    compute it from the output of the prepared model, with gradients enabled"
    ),
    "loss that is NaN": (
        "world.backward(loss)\n"
        "  found: the loss of step 1 is NaN on this rank\n"
        "  do:    look at the batch of this step, lower the learning rate, or clip the gradients (world.clip_grad_norm_)"
    ),
    "weight that is no number": (
        "weight=<lambda>\n"
        "  found: it gave 'many' for a batch\n"
        "  do:    return one number that is at least 0, such as the number of tokens that count"
    ),
    "loss.backward() of a part": (
        "optimizer.step() without world.backward for this batch\n"
        "  found: this rank's part is 4 of 8 samples, so its mean counts as much as others only when weighted\n"
        "  do:    call world.backward(loss), which weighs the loss exactly, in place of loss.backward() or torch.autograd.grad\n"
        "  more:  [LS206: lockstep explain LS206]"
    ),
    "sum of an object": (
        "a collective on a type\n"
        "  found: collectives take tensors, numbers, text (gather and broadcast) and nests of them\n"
        "  do:    convert it first, for example with torch.as_tensor"
    ),
    "init twice": (
        "lockstep.init\n"
        "  found: this process is in a run already\n"
        "  do:    call lockstep.init once, and nothing else that opens a process group; world.close() leaves the run"
    ),
    "prepare after close": (
        "world.prepare after world.close()\n"
        "  found: the run was left\n"
        "  do:    close at the very end"
    ),
    "contradiction": (
        "precision='fp16' in the script and LOCKSTEP_PRECISION=bf16 outside it\n"
        "  found: they contradict each other\n"
        "  do:    set it in one place"
    ),
    "variable that does not parse": (
        "LOCKSTEP_MICRO_BATCH_SIZE=few\n  found: it is not a valid whole number or auto\n  do:    correct or unset it"
    ),
    "forward through .module": (
        "a training forward pass through .module\n"
        "  found: DDP averages the gradients of its own forward passes only; these would stay here\n"
        "  do:    call the object that world.prepare returned; .module is for reading and for evaluation under torch.no_grad()\n"
        "  more:  [LS302: lockstep explain LS302]"
    ),
    "layers of .module": (
        "a backward pass whose forward pass did not go through the prepared model\n"
        "  found: its gradients stayed on this rank: they were not averaged\n"
        "  do:    call the object that world.prepare returned, not its .module or a method of it\n"
        "  more:  [LS302: lockstep explain LS302]"
    ),
    "unused parameters": (
        "an optimizer step while some parameters have no gradient\n"
        "  found: 2 of 4 were not used for the loss: spare.weight, spare.bias; DDP waits for them, so others may not be averaged either\n"
        "  do:    use them, freeze them with requires_grad_(False) before world.prepare, or pass strategy=lockstep.strategies.DDP(find_unused_parameters=True)\n"
        "  more:  [LS301: lockstep explain LS301]"
    ),
    "loss.backward() of uneven parts": (
        "optimizer.step() without world.backward for this batch\n"
        "  found: this rank's part is 5 of 9 samples, so its mean counts as much as others only when weighted\n"
        "  do:    call world.backward(loss), which weighs the loss exactly, in place of loss.backward() or torch.autograd.grad\n"
        "  more:  [LS206: lockstep explain LS206]"
    ),
    "layer added after prepare": (
        "parameters added, replaced, unfrozen or moved after world.prepare\n"
        "  found: 0.weight, 0.bias replaced; their gradients are not averaged over the ranks\n"
        "  do:    change the model first, then call world.prepare\n"
        "  more:  [LS303: lockstep explain LS303]"
    ),
    "model converted in a pass": (
        "parameters added, replaced, unfrozen or moved after world.prepare\n"
        "  found: 0.weight now torch.float32, was torch.float64, 0.bias now torch.float32, was "
        "torch.float64, 2.weight now torch.float32, was torch.float64, 2.bias now torch.float32, was "
        "torch.float64; their gradients are not averaged over the ranks\n"
        "  do:    change the model first, then call world.prepare\n"
        "  more:  [LS303: lockstep explain LS303]"
    ),
    "layer unfrozen in a pass": (
        "parameters added, replaced, unfrozen or moved after world.prepare\n"
        "  found: 0.weight unfrozen, 0.bias unfrozen; their gradients are not averaged over the "
        "ranks\n"
        "  do:    change the model first, then call world.prepare\n"
        "  more:  [LS303: lockstep explain LS303]"
    ),
    "replicas part": (
        "replicas that stay equal (step 1)\n"
        "  found: 1 of 4 tensors differ between ranks: 2.bias\n"
        "  do:    look for a forward pass that goes around the prepared model, parameters changed by hand on some ranks, or a step taken on some ranks only\n"
        "  more:  [LS304: lockstep explain LS304]"
    ),
    "other models": (
        "world.prepare\n"
        "  found: rank 0: Linear of 3 parameters (shapes f35b494511fe); rank 1: Linear of 4 parameters (shapes 4a78abb57711)\n"
        "  do:    build the same on every rank: same code, arguments, seed and data"
    ),
    "data of other lengths": (
        "world.loader\n"
        "  found: rank 0: a loader over 8 samples in global batches of 4 (checksum 20f0fcb7); rank 1: a loader over 9 samples in global batches of 4 (checksum a4e42c80)\n"
        "  do:    build the same on every rank: same code, arguments, seed and data; split and draw data before world.prepare, after which every rank draws other random numbers, or with a seed\n"
        "  more:  [LS104: lockstep explain LS104]"
    ),
    "data of other content": (
        "a TensorDataset that is the same on every rank\n"
        "  found: sample 0 on rank 1 differs from sample 0 on rank 0\n"
        "  do:    compare the copies of the data on the machines; sort what os.listdir or a set gives; shuffle, split and draw data before world.prepare, after which every rank draws other random numbers, or with a seed\n"
        "  more:  [LS104: lockstep explain LS104]"
    ),
    "plateau of other metrics": (
        "ReduceLROnPlateau.step(metric)\n"
        "  found: rank 0: 0.5, rank 1: 1.5\n"
        "  do:    give it a value that is equal everywhere: world.mean(metric) or world.sum(...)\n"
        "  more:  [LS402: lockstep explain LS402]"
    ),
    "sum in an evaluation loop": (
        "world.sum in the body of an evaluation loop\n"
        "  found: in this pass some rank has no samples of some batch and skips it\n"
        "  do:    sum up inside the loop and call the collective once, after it"
    ),
    "model not prepared": (
        "world.backward of a loss that reaches no prepared model\n"
        "  found: the 4 parameters that it reaches (of shapes (4, 16), (16, 6), (16,), (4,)) belong to no module: none was prepared; they were equal on all ranks, and are not any more: each rank trains a model of its own\n"
        "  do:    give the model to world.prepare with its optimizer, and use what it returns: model, optimizer = world.prepare(model, optimizer)\n"
        "  more:  [LS311: lockstep explain LS311]"
    ),
    "loss that sums": (
        'world.backward of a loss with reduction="sum"\n'
        "  found: NllLoss sums over the 4 samples of this part of the global batch, which has 8; the losses of the parts are averaged, so the gradients get smaller with each further rank or micro-batch\n"
        '  do:    use reduction="mean", or divide the loss by the number of its samples: loss / max(1, len(x))\n'
        "  more:  [LS202: lockstep explain LS202]"
    ),
    "sum divided by the global batch": (
        "world.backward of a sum that is divided by the global batch\n"
        "  found: NllLoss sums over the 4 samples of this part of the global batch, and the loss is divided by 8; the losses of the parts are averaged, so the gradients get smaller with each further rank or micro-batch\n"
        '  do:    use reduction="mean", or divide the loss by the number of its samples: loss / max(1, len(x))\n'
        "  more:  [LS202: lockstep explain LS202]"
    ),
    "mean divided by the micro-batches": (
        "world.backward of a loss that is divided by 3\n"
        "  found: a global batch has 3 micro-batches, over which world.backward averages by itself; if the loss is divided for them, the gradients are 1/3 of what they should be\n"
        "  do:    leave out the division by the number of accumulation steps\n"
        "  more:  [LS204: lockstep explain LS204]"
    ),
    "nothing prepared": (
        "training without world.prepare\n"
        "  found: optimizers made 3 steps on this rank, and there was no collective between them on any rank: unless the script exchanges gradients in another way, each process has trained a model of its own\n"
        "  do:    give the model to world.prepare with its optimizer, and use what it returns: model, optimizer = world.prepare(model, optimizer)\n"
        "  more:  [LS311: lockstep explain LS311]"
    ),
    "optimizer not prepared": (
        "SGD.step() of an optimizer that is not prepared\n"
        "  found: it holds 4 parameters of a prepared model: with micro-batches it steps in each of them, world.step does not count, and the checks of gradients and replicas do not run\n"
        "  do:    step what world.prepare returns: model, optimizer = world.prepare(model, optimizer)\n"
        "  more:  [LS407: lockstep explain LS407]"
    ),
    "test loader not prepared": (
        "world.sum of what every rank computed over an unprepared DataLoader\n"
        "  found: every rank went through the same 33 samples; this rank brought 10, and the sum 20 counts each sample 2 times\n"
        "  do:    prepare the loader (test = world.prepare(test)), so that each rank gets its part; or leave world.sum out where every rank evaluates them all\n"
        "  more:  [LS501: lockstep explain LS501]"
    ),
    "prepared loader on one rank": (
        "evaluating over a prepared loader on some ranks only\n"
        "  found: only rank 0 iterated it (test_mistakes.py:58: for x, y in loader:); a rank gets no more than its part of the samples, so the result covers a part\n"
        "  do:    evaluate on all ranks with world.sum, or on one rank with an unprepared DataLoader\n"
        "  more:  [LS501: lockstep explain LS501]"
    ),
    "training over the unprepared loader": (
        "training over an unprepared DataLoader\n"
        "  found: its dataset is that of a prepared loader, but here every rank goes through all of it, and does not get its part of each global batch\n"
        "  do:    iterate what world.prepare returned: model, optimizer, train = world.prepare(model, optimizer, train)\n"
        "  more:  [LS110: lockstep explain LS110]"
    ),
    "means of batches are summed": (
        "world.sum over all ranks, divided by len(loader)\n"
        "  found: len(loader) is 5, the number of batches that one rank gets, and 2 ranks have added theirs: a mean over batches comes out 2 times too large\n"
        "  do:    add up what counts for each sample, total += loss.item() * len(x), and divide world.sum(total) by the number of samples\n"
        "  more:  [LS501: lockstep explain LS501]"
    ),
    "steps counted in the loop": (
        "optimizer.step() in some micro-batches of a global batch\n"
        "  found: it was called in 1 of 4 micro-batches, but not in the last one, after which the optimizer steps: it has not stepped for this global batch\n"
        "  do:    call optimizer.step() in every iteration and count no batches: it steps once for each global batch\n"
        "  more:  [LS405: lockstep explain LS405]"
    ),
    "schedule of micro-batches": (
        "CosineAnnealingLR with T_max=45 in a training of 3 epochs\n"
        "  found: len(loader) is 15, the micro-batches of an epoch, but the scheduler steps once for each global batch: it makes at most 12 of its 45 steps\n"
        "  do:    compute its length before world.prepare, where len(loader) counts global batches, or from loader.steps"
    ),
    "schedule of epochs": (
        "CosineAnnealingLR with T_max=3 in a training of 3 epochs\n"
        "  found: it has stepped 4 times in an epoch, and its rate rises again after 3 steps\n"
        "  do:    call scheduler.step() once in an epoch, after the loop over the loader, or build it for all steps: T_max = the number of epochs * loader.steps"
    ),
    "schedule that ends early": (
        "SGD.step() with a learning rate of 0\n"
        "  found: all parameter groups have had a learning rate of 0 in the 10 steps since step 12, the last one with another rate\n"
        "  do:    build the schedule for the whole training: for the number of epochs * loader.steps, which is not divided by accumulation steps, if it steps with the optimizer, or for the number of epochs if it steps once in an epoch"
    ),
    "checkpoint.save() of one rank": (
        "checkpoint.save() on rank 0, world.barrier() on rank 1\n"
        "  found: rank 0: checkpoint.save(); rank 1: barrier\n"
        "  do:    all ranks must call checkpoint.save() and world.barrier(), in the same order: take what only some ranks call out of `if world.is_main:`"
    ),
    "sum of one rank": (
        "world.sum() on rank 0, world.mean() on rank 1\n"
        "  found: rank 0: sum of int; rank 1: mean of float\n"
        "  do:    all ranks must call world.sum() and world.mean(), in the same order: take what only some ranks call out of `if world.is_main:`"
    ),
    "shapes that do not match": (
        "world.sum\n"
        "  found: rank 0: sum of float32[2]; rank 1: sum of float32[3]\n"
        "  do:    call the same collective with the same structure, shapes and types on every rank"
    ),
    "sum of rank 0 while others train": (
        "world.sum() on some ranks only\n"
        "  found: rank 0: all_gather of 16 numbers in uint8; rank 1: all_gather of 7 numbers in float64\n"
        "  do:    all ranks must call world.sum(): take it out of `if world.is_main:`, and let no rank leave the loop before it earlier than others (break, return)"
    ),
    "single on two": (
        "strategy='single'\n"
        "  found: world size 2: the processes would train apart\n"
        "  do:    use strategy='ddp', or start one process"
    ),
    "shares for three": (
        "shares='1:2:3'\n"
        "  found: 3 shares for a world size of 2\n"
        "  do:    give 2 whole numbers, one for each rank, for example 1:2"
    ),
}
