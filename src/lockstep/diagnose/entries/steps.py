"""LS4xx: equal gradients lead to other steps. LS5xx: only what is reported differs."""

from __future__ import annotations

from lockstep.diagnose.entries import entry

ENTRIES = (
    entry(
        "LS401",
        "a scheduler steps once per micro-batch or once per process",
        """
        A scheduler that is stepped in the loop counts turns of the loop, and with accumulation
        there are k of them for one optimizer step. Other wrappers step a scheduler once for each
        process on purpose. Either way the rate decays k or N times too fast: the schedule is over
        after a fraction of the training, which ends with a rate of nearly 0.
        """,
        """
        With Lockstep: prepare the scheduler too. It then steps with the optimizer.

            model, optimizer, scheduler = world.prepare(model, optimizer, scheduler)

        By hand: step it where the optimizer steps, and count its length in optimizer steps.

            if (i + 1) % k == 0:
                optimizer.step()
                scheduler.step()
        """,
    ),
    entry(
        "LS402",
        "the learning rate depends on the number of processes",
        """
        The rate is multiplied by the world size, the schedule's length is computed from
        `len(loader)` of one rank, or ReduceLROnPlateau is given a metric of one rank. The rate is
        then another on another number of devices, or, in the last case, on each rank, which makes
        the replicas part.
        """,
        """
        With Lockstep: the global batch stays the same, so the rate does too; `len(train)` of a
        prepared loader is the same on any number of devices.

            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)     # not 0.1 * world.size
            scheduler.step(world.mean(metric))                          # ReduceLROnPlateau

        With plain DDP and a batch of 32 for each rank: scale the rate on purpose, and once.
        """,
    ),
    entry(
        "LS403",
        "equal gradients, other updates",
        """
        The gradients of the global batch agree and the parameters after the step do not. What
        stands between them is the optimizer: other options (weight decay, momentum, `foreach` and
        `fused` variants), a state that was not loaded or belongs to other parameters, groups in
        another order, a clipping of another norm.
        """,
        """
        Build the optimizer the same on any number of processes, from the model that is prepared,
        and resume its state together with the weights:

            checkpoint = world.checkpoint("runs/1", model=model, optimizer=optimizer, loader=train)
            checkpoint.resume()

        Options that depend on the rank or the world size must go. With plain DDP: load the
        optimizer's state on all ranks, not on rank 0 alone.
        """,
    ),
    entry(
        "LS404",
        "gradients are clipped by the norm of one rank",
        """
        `clip_grad_norm_` sees what is on this rank. Before the gradients are averaged, under
        sharding or in a pipeline that is only a part, and each rank then scales by another factor.
        In accumulation a clipping in every micro-batch clips sums that are not complete.
        """,
        """
        With Lockstep: the norm of the whole gradient, under every strategy, and only on the
        micro-batch that closes the global batch.

            world.backward(loss)
            world.clip_grad_norm(model, 1.0)
            optimizer.step()

        With plain DDP: clip after the last `backward` of the batch, never inside `no_sync()`.
        """,
    ),
    entry(
        "LS405",
        "the number of optimizer steps differs",
        """
        An epoch has another number of steps: the batch per process was kept while processes were
        added, a rank has fewer batches, a step is skipped on some condition of this rank (a NaN,
        an empty batch), or accumulation leaves the last, incomplete group of micro-batches out.
        Under DDP ranks with different numbers of steps wait for each other for ever.
        """,
        """
        With Lockstep: `batch_size` is the global batch, so an epoch has the same steps everywhere.
        A condition must be the same on all ranks:

            if world.max(float(loss.isnan())):      # not: if loss.isnan()
                continue

        By hand: step also after the last micro-batch of an epoch.

            if (i + 1) % k == 0 or i + 1 == len(loader):
                optimizer.step()
        """,
    ),
    entry(
        "LS406",
        "gradients are used before they are averaged",
        """
        DDP averages during the backward pass that closes the global batch. What reads or changes
        `.grad` before that (a clipping or a logging inside `no_sync()`, a hook on a parameter, a
        step in the middle of the accumulation, `autograd.grad` for a penalty) sees the gradient
        of one rank, and what it does is another thing on each of them.
        """,
        """
        With Lockstep: look at gradients between `world.backward` and `optimizer.step()`, on the
        micro-batch that closes the batch; `world.clip_grad_norm` knows when that is.

            norm = world.clip_grad_norm(model, 1.0)
            if norm is not None:                    # None: the batch goes on
                world.print(float(norm))

        A penalty on gradients belongs into the loss, so that it is averaged like the rest. With
        plain DDP: touch `.grad` only after the last `backward`, outside of `no_sync()`.
        """,
    ),
    entry(
        "LS501",
        "only the reported loss differs",
        """
        Samples, gradients and parameters agree; the number that is printed does not. It is the
        loss of one rank's part, or a mean over ranks whose parts have different sizes, or it was
        divided by the length of the whole dataset on each rank. The training is right, the curve
        is not comparable.
        """,
        """
        With Lockstep: add sums and counts over the ranks and divide once, or let `world.log` do
        it.

            total = world.sum(loss.detach() * len(x))
            count = world.sum(len(x))
            world.print(float(total / count))

        With plain DDP: `all_reduce` the sum of the losses and the number of samples.
        """,
    ),
)
