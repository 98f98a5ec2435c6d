"""LS2xx: all ranks have the same gradients, and they are not those of the global batch."""

from __future__ import annotations

from lockstep.diagnose.entries import entry

ENTRIES = (
    entry(
        "LS201",
        "gradients are N times those of one process (a sum instead of a mean)",
        """
        The gradients of N ranks were added and not divided. It comes from an `all_reduce` written
        by hand, from a loss with `reduction="sum"` divided by the samples of one rank, or from a
        loss that was multiplied by the world size for a DDP that averages. Adam hides it almost
        completely, SGD takes steps N times too long.
        """,
        """
        With Lockstep: a mean over this rank's samples, and nothing else; the rest is exact.

            loss = F.cross_entropy(model(x), y)     # reduction="mean"
            world.backward(loss)

        By hand: divide after the sum.

            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        """,
    ),
    entry(
        "LS202",
        "gradients are 1/N of those of one process",
        """
        DDP averages over ranks. A loss that is a sum over the batch, or one that is divided by the
        global batch on each rank already, is divided by N once more. The loss that is printed is
        right, and training is slower by a factor that looks like a bad learning rate.
        """,
        """
        With Lockstep: divide by this rank's number of samples only (the mean), and say where
        something else than samples counts:

            loss = F.cross_entropy(model(x), y)     # not reduction="sum", not / batch_size
            world.backward(loss)

        With plain DDP: use `reduction="mean"`, or multiply a sum over the global batch by
        `world_size` before `backward`.
        """,
    ),
    entry(
        "LS203",
        "gradients are k times those of the whole batch (accumulation is not divided)",
        """
        `backward` adds to `.grad`. After k micro-batches, each with a mean of its own, the sum is
        k times the mean over all of them. The learning rate is then k times what was meant, which
        a warm-up or Adam often hides.
        """,
        """
        With Lockstep: leave the accumulation to the loader. The loop stays the same.

            train = world.loader(dataset, batch_size=256, micro_batch=64)
            for x, y in train:
                world.backward(F.cross_entropy(model(x), y))    # weighted
                optimizer.step()                                # once per global batch
                optimizer.zero_grad()

        By hand: `(loss / k).backward()` where all micro-batches have equally many samples.
        """,
    ),
    entry(
        "LS204",
        "gradients are 1/k of those of the whole batch (divided twice)",
        """
        The loss of each micro-batch is divided by k in the script, and something else divides it
        again: a trainer that accumulates, a loss that is divided by the tokens of the whole batch
        already, or Lockstep, whose `world.backward` weighs each micro-batch by its samples.
        """,
        """
        With Lockstep: no division in the script.

            world.backward(loss)                    # not loss / accumulation_steps

        By hand: divide in one place, either the loss by k or the sum by all tokens.
        """,
    ),
    entry(
        "LS205",
        "a mean of means: parts weigh alike though their tokens differ",
        """
        Each rank, or each micro-batch, divides by its own number of tokens (or of other things
        that count: masked pixels, boxes, `ignore_index`), and these means are then averaged.
        A short sequence on one rank weighs as much as a long one on another. DDP cannot know of
        tokens; the loss looks reasonable, and differs with the number of devices and micro-batches.
        """,
        """
        With Lockstep: say what a batch weighs; the mean is then over all tokens of the global
        batch.

            train = world.loader(dataset, 256, weight=lambda batch: (batch[1] != -100).sum())
            for tokens, labels in train:
                logits = model(tokens)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
                world.backward(loss)

        With plain DDP: sum over tokens, divide by the tokens of all ranks, undo DDP's average.

            count = torch.tensor(float((labels != -100).sum()))
            dist.all_reduce(count)
            (sum_of_losses * world_size / count).backward()
        """,
    ),
    entry(
        "LS206",
        "a mean of means: parts weigh alike though their numbers of samples differ",
        """
        The last batch of an epoch, uneven shares, or micro-batches that do not divide the batch
        give ranks different numbers of samples. Each takes a mean over its own, and DDP averages
        the means, so that a sample in a small part weighs more. `loss.backward()` cannot know it.
        """,
        """
        With Lockstep: `world.backward`, which weighs each part by its samples.

            world.backward(loss)                    # not loss.backward()

        With plain DDP: `drop_last=True`, or weigh by hand:

            (loss * len(x) * world_size / samples_of_all_ranks).backward()
        """,
    ),
    entry(
        "LS207",
        "an all-gather that carries no gradient",
        """
        `torch.distributed.all_gather` fills tensors that have no history. A loss over gathered
        embeddings (contrastive, metric learning) then sees those of other ranks as constants, and
        the embeddings lose the gradient that flows through them. After DDP's average it is too
        small, typically by N. The loss itself is right, so it looks like slow learning.
        """,
        """
        Gather with the function that has a backward pass, and compute the whole loss on each rank;
        with equal parts the average over ranks is then exact:

            from torch.distributed.nn.functional import all_gather
            everything = torch.cat(all_gather(embeddings))
            world.backward(contrastive_loss(everything))

        `world.gather` is for metrics and carries no gradient. This holds with Lockstep and with
        plain DDP (there `loss.backward()`).
        """,
    ),
    entry(
        "LS208",
        "a loss that couples the samples of a batch is computed on each rank alone",
        """
        Contrastive losses, losses over batch statistics, ranking and Dice over the batch compare
        samples with each other. Computed on a part they see fewer pairs: with 8 ranks a sample has
        an eighth of its negatives. No weighting of means can repair that, since the loss of the
        whole is not the mean of the losses of its parts.
        """,
        """
        Bring the whole batch together before the loss, with a gather that has a gradient:

            from torch.distributed.nn.functional import all_gather
            everything = torch.cat(all_gather(embeddings))
            world.backward(contrastive_loss(everything))

        Micro-batches cannot be used for such a loss. Where each part alone is what is meant, keep
        it so: then results depend on the number of devices.
        """,
    ),
    entry(
        "LS209",
        "gradients are another constant multiple",
        """
        All gradients have the same ratio to those of one process, and it is neither N nor k. The
        usual sources are a loss scale that was not taken off before clipping or stepping, a
        division by the batch size of another level (of a device, of a host), and both mistakes of
        LS201 and LS203 at once, which give N k or N / k.
        """,
        """
        Follow the factor: print the loss that `backward` gets on one process and on N, and look
        for what multiplies or divides it. With Lockstep the loss is a plain mean over this
        rank's samples:

            loss = F.cross_entropy(model(x), y)
            world.backward(loss)                    # scales for fp16 and takes it off again
            world.clip_grad_norm(model, 1.0)
        """,
    ),
    entry(
        "LS210",
        "gradients differ in no known pattern",
        """
        The same samples give other gradients, and the difference is no factor and follows no
        weights. What is left is what the script computes differently: a branch on the rank or on
        the number of processes, a state that is carried from batch to batch (a queue, a moving
        average, a hidden state), or samples of a batch that influence each other.
        """,
        """
        Look for `rank`, `world_size` and `len(batch)` in the model and the loss, and for buffers
        that the forward pass writes. A state of the model belongs into a buffer, so that it is
        kept equal:

            self.register_buffer("queue", torch.zeros(4096, 128))

        A loss that couples samples is LS208, batch statistics are LS306.
        """,
    ),
)
