"""LS1xx: other samples, another order, or other global batches."""

from __future__ import annotations

from lockstep.diagnose.entries import entry

ENTRIES = (
    entry(
        "LS101",
        "a sample is trained more than once in an epoch",
        """
        Some samples come up on two ranks, or twice on one. DistributedSampler repeats samples
        until all ranks have equally many; an IterableDataset that nobody shards gives each rank
        all of them; a sampler drawn differently on each rank makes the parts overlap. The loss
        still falls, so nothing looks wrong, but the samples that repeat weigh more, and an
        evaluation with repeats reports another number on another number of devices.
        """,
        """
        With Lockstep: give the plain DataLoader, and leave the cutting to the plan.

            train = DataLoader(dataset, batch_size=256, shuffle=True)   # 256: the global batch
            model, optimizer, train = world.prepare(model, optimizer, train)

        A sampler of your own must give the same order on every rank: seed it alike, and do not
        let it look at the rank. With plain DDP: evaluate with an unpadded sampler

            indices = range(rank, len(dataset), world_size)             # no repeats
            test = DataLoader(Subset(dataset, indices), batch_size=64)

        and sum counts over the ranks instead of averaging rates.
        """,
    ),
    entry(
        "LS102",
        "samples are left out of an epoch",
        """
        The parts of the ranks do not add up to the dataset. `drop_last=True` of a
        DistributedSampler or of a loader per rank drops up to one batch on each of them; a shard
        that is cut into shards again loses all but 1/N of the data; files that are dealt out to
        ranks lose those that no rank got. Training works with fewer samples, so nobody notices.
        """,
        """
        With Lockstep: no DistributedSampler and no `dataset[rank::size]`; the loader cuts each
        global batch itself, and `drop_last` drops samples of the whole epoch once.

            train = DataLoader(dataset, batch_size=256, shuffle=True)
            train = world.prepare(train)

        With plain DDP: `DistributedSampler(dataset, drop_last=False)`, once, over the whole
        dataset, and check `sum over ranks of samples seen == len(dataset)` for one epoch.
        """,
    ),
    entry(
        "LS103",
        "every epoch has the same order",
        """
        The sampler gives the same permutation in every epoch. DistributedSampler shuffles by
        seed + epoch, and its epoch stays 0 unless `set_epoch` is called; a sampler of your own
        with a fixed seed does the same. The same samples meet in the same batches each time,
        which costs accuracy a little at a time and shows in no log.
        """,
        """
        With Lockstep: `shuffle=True` draws a new order every epoch, the same on all ranks.

            train = DataLoader(dataset, batch_size=256, shuffle=True)

        A sampler of your own: draw from `torch.randperm` or a generator that it keeps as an
        attribute (both are seeded for each epoch), or tell it the epoch:

            for epoch in world.epochs(20):
                sampler.set_epoch(epoch)

        The last is also the cure with plain DDP. Where a fixed order is meant (a curriculum,
        samples sorted by length), say so once:

            warnings.filterwarnings("ignore", message="(?s).*LS103")
        """,
    ),
    entry(
        "LS104",
        "the dataset differs between ranks",
        """
        The same index gives another sample on another rank, or the lengths differ. Machines hold
        different copies of the data, a download stopped half-way, or a random split was made
        before the seeds were set. Every rank reads its own indices and trains happily; some
        samples are trained twice and some never. A differing length ends in a hang when one rank
        runs out of batches. The same samples in another order (LS105) look like this, too.
        """,
        """
        Compare the copies (number of files, checksums) on the machines, and let one rank write
        what all read:

            with world.main_first():
                download_and_unpack(folder)

        A random split needs the same seed everywhere; `lockstep.init(seed=...)` before it sets
        one. With plain DDP:

            split = random_split(dataset, [0.9, 0.1], torch.Generator().manual_seed(0))
        """,
    ),
    entry(
        "LS105",
        "the order of the dataset differs between processes",
        """
        `os.listdir`, `glob`, sets, and `random.shuffle` without a seed give each process, and
        each machine, an order of its own; so does a sampler that draws from the clock or from the
        rank. All ranks have the same samples, but index 7 is another one on each, so that cutting
        the indices does not cut the samples: some are trained twice, some never.
        """,
        """
        Sort what a file system or a set gives, and seed what shuffles:

            files = sorted(Path(folder).glob("*.jpg"))
            random.Random(0).shuffle(files)

        This is the same with Lockstep and with plain DDP. A sampler of your own should draw from
        `torch.randperm`, which Lockstep seeds alike on all ranks for each epoch.
        """,
    ),
    entry(
        "LS106",
        "several ranks draw the same augmentation",
        """
        Random crops, noise or diffusion steps are equal on all ranks, because every process calls
        `manual_seed(0)` and its loader workers inherit that. A batch then holds N samples with
        one and the same augmentation. Everything runs; the model sees 1/N of the variety.
        """,
        """
        With Lockstep: draw from the global streams (`torch`, `numpy.random`, `random`) inside
        `__getitem__`. They are seeded for each sample of each epoch, the same on any rank.

            def __getitem__(self, index):
                return augment(self.images[index], torch.rand(()))

        Do not seed inside the dataset, and do not keep `default_rng(0)` in it. With plain DDP:
        seed each rank apart once the model is built.

            torch.manual_seed(seed + rank)
        """,
    ),
    entry(
        "LS107",
        "a sample's content depends on the rank or worker that reads it",
        """
        The dataset looks at the rank, the worker's number, the time, or a generator of its own
        that moves on with each read. Which augmentation a sample gets then depends on who reads
        it and when, so one process and N processes train on other pictures, and a resumed run on
        others again. It is not wrong in itself, but no comparison can tell it from a fault.
        """,
        """
        Draw from the global streams in `__getitem__`, which Lockstep seeds for each sample from
        (seed, epoch, index):

            noise = torch.randn(3)          # not self.generator, not torch.Generator()

        Without Lockstep, seed a generator from the index and the epoch:

            generator = torch.Generator().manual_seed(hash((epoch, index)) % 2**63)
        """,
    ),
    entry(
        "LS108",
        "a stream gives every rank the same samples",
        """
        An IterableDataset knows nothing of ranks, and neither DDP nor the DataLoader cuts it: each
        rank, and each worker, reads the stream from its beginning. The speed-up looks perfect,
        because N devices do the same work. Averaging N equal gradients gives the gradient of one,
        so the global batch is N times smaller than it seems.
        """,
        """
        With Lockstep: prepare the DataLoader over the stream, and let the stream give all of its
        samples on every rank; the loader cuts it. Do not cut it yourself as well.

            train = world.prepare(DataLoader(stream, batch_size=256))

        With plain DDP: deal the samples out by rank and worker.

            part = rank * workers + worker
            for sample in itertools.islice(stream, part, None, world_size * workers):
                yield sample

        For Hugging Face datasets: `datasets.distributed.split_dataset_by_node`.
        """,
    ),
    entry(
        "LS109",
        "the same samples in another order or in other global batches",
        """
        One process and N processes train on the same samples, but not in the same steps.
        DistributedSampler shuffles with a generator of its own and deals samples out one by one,
        so a global batch on N ranks is not the batch that one process would take. Results agree
        on average and never step by step, which hides every other difference.
        """,
        """
        With Lockstep: the plan makes the global batches first and cuts them afterwards; leave
        samplers per rank out.

            train = DataLoader(dataset, batch_size=256, shuffle=True)
            train = world.prepare(train)

        With plain DDP: draw one permutation with a fixed seed on all ranks, cut it into global
        batches, and give each rank a slice of each of them.
        """,
    ),
    entry(
        "LS110",
        "the global batch grows with the number of processes",
        """
        `batch_size=32` in each of N processes is a global batch of 32 N. An epoch has N times
        fewer steps, and a learning rate, a warm-up and a schedule that were tuned for 32 meet
        another problem. The script runs faster and ends worse, and is then believed to be broken.
        So it is with batches that the loop draws itself, without a DataLoader, and with a loader
        that was not given to `world.prepare`.
        """,
        """
        With Lockstep: `batch_size` is the global batch on any number of devices. Say so where the
        other meaning is wanted, and change the learning rate with it:

            train = world.loader(dataset, batch_size_per_device=32, shuffle=True)
            size = 32 * world.size
            rate = lockstep.scale_learning_rate(0.1, batch_size=size, base_batch_size=32)

        Draw in a dataset's `__getitem__`, not in the loop, and prepare its loader. With plain DDP:
        `DataLoader(dataset, batch_size=256 // world_size, ...)`.
        """,
    ),
)
