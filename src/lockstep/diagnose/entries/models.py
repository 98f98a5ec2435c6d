"""LS3xx: the model differs between ranks, or is not the one that was prepared."""

from __future__ import annotations

from lockstep.diagnose.entries import entry

ENTRIES = (
    entry(
        "LS301",
        "gradients of some parameters are not averaged",
        """
        DDP averages a bucket of gradients when all parameters in it have one. A parameter that
        was not used for the loss never gets one, so its bucket is never sent, and the used
        parameters in it keep the gradients of their own rank. Torch complains in the next forward
        pass or, in the last step of a run, never. Each rank then trains a little model of its own.
        """,
        """
        Use all parameters, or freeze what is not used before preparing:

            model.old_head.requires_grad_(False)
            model, optimizer = world.prepare(model, optimizer)

        Where it changes from step to step which are used:

            world = lockstep.init(strategy=lockstep.strategies.DDP(find_unused_parameters=True))

        With plain DDP: `DistributedDataParallel(model, find_unused_parameters=True)`.

        FSDP does not mind parameters that no rank uses. Where some ranks use others, it takes one
        for another: pass `FSDP(find_unused_parameters=True)`, and choose `blocks=` so that a unit
        holds all that only some ranks run.
        """,
    ),
    entry(
        "LS302",
        "a forward pass goes around the wrapper",
        """
        DDP prepares its reduction in its own `forward`. A call of `model.module(x)`, of a method
        of the module or of one of its layers does not pass there; the backward pass then leaves
        the gradients on this rank. There is no error and no warning: each rank learns from its
        own part of the data, and the checkpoint holds what rank 0 learned.
        """,
        """
        Call the object that `world.prepare` returned. What else the model can do goes through its
        `forward`:

            class Net(nn.Module):
                def forward(self, x, encode_only=False):
                    hidden = self.encoder(x)
                    return hidden if encode_only else self.head(hidden)

            loss = F.cross_entropy(model(x), y)     # not model.module(x), not model.encode(x)

        `.module` is for reading weights and for evaluation under `torch.no_grad()`. The same holds
        with plain DDP.
        """,
    ),
    entry(
        "LS303",
        "parameters were added, replaced or unfrozen after prepare",
        """
        DDP and FSDP hang their hooks on the parameters that are trained when they wrap the model.
        A layer that is exchanged, an adapter (LoRA) that is added, a backbone that is unfrozen (but
        under FSDP), a `load_state_dict(assign=True)` or a model moved to another device or type
        comes too late: its gradients stay on this rank. On one process the same script is right,
        so it breaks only when it is scaled up.
        """,
        """
        Finish the model first, then prepare it, then do not exchange its parameters:

            model.head = nn.Linear(512, 10)
            model.load_state_dict(weights)
            model, optimizer = world.prepare(model, optimizer)

        To unfreeze later, leave the parameters trainable from the beginning and give the
        optimizer's group a learning rate of 0 until then:

            optimizer.param_groups[1]["lr"] = 1e-4

        With plain DDP: build a new DistributedDataParallel around the changed model.
        """,
    ),
    entry(
        "LS304",
        "the replicas have parted",
        """
        Ranks that begin with the same bits and apply the same averaged gradients keep the same
        bits. When they do not, something was done on some ranks only: gradients that were not
        averaged, a step or a clipping under `if rank == 0`, weights loaded or changed by one rank,
        another learning rate. Torch never compares; the checkpoint of rank 0 hides the others.
        Lockstep compares after steps 1, 2, 3, 10 and every 200.
        """,
        """
        Look for what only some ranks do, from the step that is named backwards:

            if world.is_main:
                model.load_state_dict(...)          # all ranks must do this, or none

        A learning rate that follows a metric needs the same metric everywhere:
        `scheduler.step(world.mean(metric))`. With plain DDP: compare
        `sum(p.double().sum() for p in model.parameters())` over the ranks now and then.
        """,
    ),
    entry(
        "LS305",
        "training begins from other parameters",
        """
        The model has other values before the first step. A seed that depends on the rank or is set
        after the model was built, a loading of weights under `if rank == 0` after the wrap, or
        a number of random draws that depends on the number of processes moves the
        initialisation. Both runs train; they are two different experiments.
        """,
        """
        Seed first, build the model next, and draw nothing that depends on the rank before it:

            world = lockstep.init(seed=0)
            model = Net()
            model = world.prepare(model)            # rank 0's values on all ranks

        With plain DDP: `torch.manual_seed(0)` before the model; DDP sends rank 0's values.
        """,
    ),
    entry(
        "LS306",
        "BatchNorm takes its statistics on each rank alone",
        """
        BatchNorm normalises by the samples that it sees, and under DDP that is the part of one
        rank. With small parts the statistics are noisy and the gradients are others; the running
        averages are those of rank 0 alone. Accuracy drops on more devices, most of all in
        segmentation and detection, where a device has two or four samples.
        """,
        """
        With Lockstep: leave `sync_batchnorm` on, which is the default; it works on the CPU too.

            world = lockstep.init()                 # not sync_batchnorm=False

        A subclass of BatchNorm with a forward of its own cannot be converted. With plain DDP, on
        GPUs:

            model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)

        Or use a normalisation that does not look at other samples, such as GroupNorm.
        """,
    ),
    entry(
        "LS307",
        "BatchNorm takes its statistics from each micro-batch",
        """
        With gradient accumulation BatchNorm sees one micro-batch at a time. Its statistics are
        those of fewer samples, and its running averages move k times per step. The gradients are
        not those of the whole batch, on one device as on many; no weighting can repair it.
        """,
        """
        Compute the batch in one piece where it fits, on more devices if need be, or use a
        normalisation of single samples:

            model.norm = nn.GroupNorm(32, 256)      # instead of nn.BatchNorm2d(256)

        With Lockstep, micro-batches of the same size give the same numbers on any number of
        devices, so that a run with `micro_batch=` can be repeated on other machines. By hand
        there is no cure but this.
        """,
    ),
    entry(
        "LS308",
        "random numbers are drawn in the step",
        """
        Dropout, noise or sampling inside the model or the loss draws from the stream of its
        process. One process and N processes draw other numbers for the same sample, so single
        steps cannot agree. It is no fault: the distribution is the same, provided that the ranks
        draw different numbers.
        """,
        """
        Nothing needs to change for training. To compare runs step by step, switch it off:

            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0

        Noise that belongs to a sample is better drawn in the dataset, where Lockstep seeds each
        sample. With plain DDP: see to it that ranks have different seeds after the model is built.
        """,
    ),
    entry(
        "LS309",
        "buffers differ",
        """
        Parameters agree and buffers do not: running statistics, queues, counters, moving averages.
        Each rank updates them from its own samples, and DDP overwrites those of all ranks with
        rank 0's before the next forward pass, or never with `broadcast_buffers=False`. What
        evaluation uses is then the view of one rank.
        """,
        """
        With Lockstep: a state of the model that moves belongs into a buffer, of which rank 0's
        value is taken everywhere after each step. Update it from all ranks where all count:

            value = world.mean(batch_statistic)
            self.running.lerp_(value, 0.1)

        With plain DDP: `dist.all_reduce(statistic)`, then divide by `world_size`.
        """,
    ),
    entry(
        "LS310",
        "replicas of one process: what is neither a tensor nor returned is not joined",
        """
        DataParallel cuts tensors, copies the model for each device, and joins what the copies
        return. What `forward` keeps beside that, such as a moving average in a buffer or a term of
        the loss in an attribute, is made of each copy's own samples, and the first one's stays. A
        list with an entry a sample is not cut: each copy pairs its samples with the first entries.
        """,
        """
        Return the terms of the loss, and give tensors:

            def forward(self, x, lengths):          # a tensor of lengths, not a list
                hidden = self.encode(x, lengths)
                return self.head(hidden), hidden.square().mean(dim=1)   # not self.penalty = ...

        Means over samples may be numbers; what is a row a sample is joined exactly. A statistic
        that moves with each batch is kept as on one device by `strategy="ddp"` with `world.mean`.
        """,
    ),
)
