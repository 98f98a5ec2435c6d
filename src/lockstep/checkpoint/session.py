"""`world.checkpoint(folder, **state)`: the full state of a training, saved and resumed.

Communication: `save` is two small exchanges of text, `resume` three, `wait` one; each carries
errors too, so that what goes wrong on one rank is raised on all of them. No tensor is sent. What
all ranks have alike rank 0 writes, and every rank its shards, in a thread while the training goes
on; what goes wrong there is carried by the next exchange. Every rank reads what it needs.

Where replicas train apart, `step` also keeps each round in memory (`rounds`), without any
communication, and `resume` looks there first.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.batch.loader import Loader
from lockstep.batch.pytree import tensors
from lockstep.checkpoint import layout, sharding
from lockstep.checkpoint.checks import BUILD, check_fits, check_state, other_lengths
from lockstep.checkpoint.encoding import Box, encode, rng_state_from_text, rng_state_to_text
from lockstep.checkpoint.formats.reading import read_stored
from lockstep.checkpoint.health import examine
from lockstep.checkpoint.lock import holder
from lockstep.checkpoint.modules import load_plain, plain_state_dict
from lockstep.checkpoint.optimizer_state import load_saved_state, saved_parameter_dtypes
from lockstep.checkpoint.preemption import Moment, Policy, Requests
from lockstep.checkpoint.rounds import Rounds, choose
from lockstep.checkpoint.save import (
    HostCopies,
    Others,
    Part,
    Writer,
    write_checkpoint,
)
from lockstep.distributed import seeding
from lockstep.distributed.collectives import (
    check_same_metric,
    exchange_on_all_ranks,
    run_on_all_ranks,
)
from lockstep.distributed.process_group import Run
from lockstep.distributed.torch_compat import is_sharded
from lockstep.errors import CheckpointError, UsageError
from lockstep.session.extension import Extension, Place

M = TypeVar("M", bound=Callable[..., Any])
_IN_MEMORY = "the last round, from memory"
_STOPPED = 128 + 15
"""What a shell says of a process that SIGTERM has ended."""
_STOPPING_S = 5.0
"""Seconds for a save that is being written when the run fails after SIGTERM."""


def _in_phase(method: M) -> M:
    """A method of `Checkpoint` whose time is that of checkpoints."""

    @wraps(method)
    def measured(self: Checkpoint, *args: Any, **options: Any) -> Any:
        before = self._progress.enter_phase("checkpoint")
        try:
            return method(self, *args, **options)
        finally:
            self._progress.enter_phase(before)

    return cast(M, measured)


class CheckpointWorld(Protocol):
    """The run's own state."""

    strategy: str
    """Its name."""

    def state_dict(self) -> dict[str, Any]:
        """With the integers `step` and `epoch`."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Takes a state up again."""

    def print(self, *values: object) -> None:
        """Tells the user something, once."""


class _WriterAtEnd(Extension):
    """Waits for the writer of a checkpoint when the run ends, and stops listening for requests."""

    def __init__(self, writer: Writer, requests: Requests) -> None:
        self._writer = writer
        self._requests = requests

    def close(self, failed: bool) -> None:
        """Ends both. After SIGTERM a failed run is killed before long, so it waits for seconds."""
        timeout = _STOPPING_S if failed and self._requests.stop else None
        self._requests.close()
        self._writer.close(failed, timeout)


class Checkpoint:
    """Saves and resumes the state of a training. All ranks make one and call its methods.

    Args:
        folder: holds the run's checkpoints; rank 0 makes it with the first save.
        run: that it belongs to.
        policy: when to save and what to keep.
        state: what to save, by name: modules, optimizers, schedulers, loaders, and what else has
            `state_dict` and `load_state_dict`. Modules are saved under the names of the bare
            module, each in a file of its own, so that they fit a run of any size and any wrapper.
        world: the run's own state.
        replicas: what replicas that train apart have each of its own; None: none do. It is a
            `lockstep.training.prepare.ReplicaStates`.
        rounds: keep those of such replicas in memory, where the launcher holds some.

    Raises:
        UsageError: there is nothing to save, or something that has no state.
    """

    def __init__(
        self,
        folder: str | Path,
        run: Run,
        policy: Policy,
        state: Mapping[str, Any],
        *,
        world: CheckpointWorld,
        replicas: Any = None,
        rounds: bool = False,
    ) -> None:
        check_state(state)
        self.folder = Path(folder)
        self.last_resume_note = ""
        """What the last `resume()` found and did, in a sentence or two."""
        self._collectives = run.collectives
        self._joined = run.joined
        self._progress = run.step
        self._policy = policy
        self._state = dict(state)
        for value in state.values():
            if isinstance(value, Loader):
                _ = value.fingerprint  # read before the training: some datasets change in it
        self._world, self._replicas = world, replicas
        self._doing = f"saving a checkpoint in {self.folder}"
        self._passed_over: tuple[str, ...] = ()
        self._copies = HostCopies()
        self._writer = Writer(self.folder, run.collectives)
        here = rounds and replicas is not None and bool(run.topology.memory)
        self._rounds = Rounds(self.folder, run.collectives) if here else None
        requests = Requests()
        self._moment = Moment(policy.every, run.collectives, requests)
        self._stepped = 0
        # Not this object, which holds a copy of the state: nobody may want it any more.
        run.extensions.add(_WriterAtEnd(self._writer, requests), Place.OBSERVER)

    @_in_phase
    def save(self, metric: float | Tensor | None = None) -> Path | None:
        """Saves the present step; returns its folder, in which it will be complete soon.

        What is saved is the state of this moment, the random state of every rank with it: the
        training may go on while the ranks write. The checkpoint is complete or not there at all; an
        earlier one of the same step is replaced. With `asynchronous=False` it is safely on disk
        when this returns, else when `wait()` does.

        Args:
            metric: how good the training is just now, the same on all ranks; see `best`.

        Returns:
            None where it was left out, because an earlier one is being written and
            `busy="skip"` was set.

        Raises:
            CheckpointError: on all ranks, when any of them cannot do its part (a state that cannot
                be stored, a later step in the folder, another run that writes there), or when the
                checkpoint before this one could not be written (disk full, not writable). The
                state of the training is as it was, and so are earlier checkpoints.
            RanksDifferError: another metric on another rank.
        """
        collect = partial(self._collect, None if metric is None else float(metric))
        states, answers = exchange_on_all_ranks(self._collectives, self._doing, collect)
        check_same_metric("checkpoint.save(metric=...)", [told["metric"] for told in answers])
        if answers[0]["skip"]:
            return None
        self._writer.open = False
        self._copies.begin(states.values())
        others = [r for r, answer in enumerate(answers) if r and answer["stores"]]
        rank = self._collectives.topology.rank

        def hand_over() -> tuple[tuple[Part, dict[str, Any]], str | None]:
            self._writer.finish()  # rank 0 has: this one may have thought of leaving the save out
            if rank and rank not in others:
                return (Part({}), {}), None
            part, trees = self._part(states, answers)
            if rank:
                return (part, {}), None
            manifest = self._manifest(states, answers[0]["metric"], trees)
            temporary = layout.temporary_folder(self.folder, manifest["step"])
            self._writer.begin(temporary, self._passed_over)
            return (part, manifest), temporary.name

        try:
            # One exchange: no rank writes before all have their copies, and the folder is there.
            (part, manifest), names = exchange_on_all_ranks(
                self._collectives, self._doing, hand_over
            )
            self._start_writing(part, manifest, names[0], others)
        except BaseException:  # also Ctrl-C: the folder may be there, and nobody writes to it
            self._writer.drop()
            raise
        self._writer.open = True
        if not self._policy.asynchronous:
            self.wait()
        self._moment.saved()
        path = layout.step_folder(self.folder, int(states["world"]["step"]))
        self._passed_over = tuple(name for name in self._passed_over if name != path.name)
        return path

    def _start_writing(
        self, part: Part, manifest: dict[str, Any], name: str, others: list[int]
    ) -> None:
        """Starts the thread of a rank that writes, to the hidden folder of this name."""
        writer = self._writer
        rank = self._collectives.topology.rank
        temporary = self.folder / name
        told = Others(self._joined, name, others)
        if rank == 0:
            write = partial(
                write_checkpoint,
                temporary,
                part,
                manifest,
                keep=self._policy.keep,
                best=self._policy.best,
                passed_over=self._passed_over,
                others=partial(told.reports, writer.run_failed, writer.check),
                check=writer.check,
            )
            writer.start(write)
        elif rank in others:
            writer.remember(temporary)
            writer.start(partial(_write_part, temporary, part, told, rank, writer.check))

    def step(self) -> Path | None:
        """To be called after each optimizer step: saves when `every` says so, or a signal asks.

        SIGUSR1 to any process of the run: all save in the same step, and go on. SIGTERM: all save
        in the same step, and the run ends with exit code 143, as one that SIGTERM has ended. Both
        are noticed within about half a second of training, and only here.

        Under DiLoCo, where `lockstep run` may start the ranks again, it also copies the state of
        each round to memory, from which `resume()` then takes it.

        Returns:
            The folder, where it has saved.

        Raises:
            SystemExit: after SIGTERM, when the checkpoint is on disk.
            CheckpointError: as `save` does.
        """
        number = self._progress.number
        if number == self._stepped:  # in the middle of a global batch
            return None
        self._stepped = number
        if self._rounds is not None and self._replicas.round_is_over:
            self._keep_round(self._rounds)
        what = self._moment.decide(number)
        if what is None:
            return None
        path = self.save()
        if what == "stop":
            self.wait()
            path = path or self.save()  # it was left out for one that is complete now
            self.wait()
            self._world.print(f"stopped by SIGTERM; {path} is complete, resume() goes on")
            raise SystemExit(_STOPPED)
        return path

    @_in_phase
    def resume(self) -> bool:
        """Takes up the latest sound checkpoint; False where the folder has none.

        A round that is still in memory is taken up instead, unless the checkpoint is of a later
        step. Rank 0 chooses, and all ranks read the same checkpoint. One whose files are not what
        was written is passed over, which is said. Everything is checked on all ranks before
        anything is changed. Random states are restored where the number of ranks is that of the
        run that saved; `last_resume_note` says what was done.

        Raises:
            CheckpointError: on all ranks, when any of them cannot see or read the checkpoint that
                rank 0 has found, when it does not fit what this run has, or when there are
                checkpoints and none of them is sound.
        """
        self.wait()
        if self._rounds is not None and self._resume_round(self._rounds):
            return True
        doing = f"resuming from {self.folder}"
        see = partial(_find, self.folder, thoroughly=self._collectives.topology.is_main)
        _, answers = exchange_on_all_ranks(self._collectives, doing, lambda: (None, see()))
        chosen = Finding(*answers[0])
        self._passed_over = tuple(chosen.passed_over)
        _check_found(self.folder, chosen, [str(r) for r, (name, *_) in enumerate(answers) if name])
        if chosen.name is None:
            self.last_resume_note = f"nothing to resume in {self.folder}"
            return False
        path = self.folder / chosen.name
        loaded = run_on_all_ranks(self._collectives, doing, lambda: self._read_all(path, chosen.id))
        note = run_on_all_ranks(self._collectives, doing, lambda: self._apply_all(path, loaded))
        self._resumed(note + chosen.words)
        return True

    @_in_phase
    def wait(self) -> None:
        """Returns when everything saved so far is on disk, on all ranks.

        Raises:
            CheckpointError: on all ranks, when something could not be written.
        """
        run_on_all_ranks(self._collectives, self._doing, self._writer.finish)
        self._writer.open = False

    @property
    def best(self) -> Path | None:
        """The complete checkpoint with the best metric, or None. What is being written is not.

        Raises:
            UsageError: `world.checkpoint` was not told which is the best.
        """
        if self._policy.best is None:
            raise UsageError(
                "checkpoint.best",
                "nothing says which metric is the best",
                'say world.checkpoint(..., best="min") or "max", and save(metric=...)',
            )
        return layout.best(layout.list_checkpoints(self.folder), self._policy.best)

    def _collect(self, metric: float | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """This rank's states, and what the others are to know of them."""
        skip = self._policy.busy == "skip" and self._writer.busy
        if not skip:
            self._writer.finish()
        states = self._states(self._stateful())
        held = self._held(states)
        return states, {
            "skip": skip,
            "metric": metric,
            "streams": rng_state_to_text(seeding.rng_state(self._collectives.device)),
            "held": held,
            "stores": bool(held) or any(map(is_sharded, tensors(states))),
        }

    def _states(self, stateful: Mapping[str, Any]) -> dict[str, Any]:
        states: dict[str, Any] = {"world": self._world.state_dict()}
        for name, value in stateful.items():
            module = isinstance(value, nn.Module)
            states[name] = plain_state_dict(value) if module else value.state_dict()
        return states

    def _keep_round(self, rounds: Rounds) -> None:
        """Copies to memory what is not in that of a rank before this one on the machine."""
        topology = self._collectives.topology
        first = topology.local_rank == 0
        together = max(1, topology.size // self._replicas.count)
        replicas = self._replicas.state_dict(shared=first)
        random = rng_state_to_text(seeding.rng_state(self._collectives.device))
        rounds.keep(
            {"step": self._progress.number, "random": random},
            {**self._states(self._state), "replicas": replicas["shared"]} if first else None,
            replicas["state"] if first or topology.rank % together == 0 else {},
        )

    def _resume_round(self, rounds: Rounds) -> bool:
        """Takes up the round that is in memory, if one is, and no later step is on disk."""
        doing = "resuming from memory"

        def look() -> tuple[None, dict[str, Any]]:
            latest = layout.latest(self.folder)
            step = -1 if latest is None else layout.step_of(latest)
            return None, {**rounds.report(), "own": self._replicas.own, "disk": step}

        _, reports = exchange_on_all_ranks(self._collectives, doing, look)
        chosen = choose(reports, self._replicas.count)
        # As far as what is on disk is of the same step, it has all replicas.
        if chosen is None or reports[0]["disk"] >= chosen.step + (not chosen.lost):
            return False
        machines, wanted = ([report[key] for report in reports] for key in ("machine", "own"))
        shared, replicas = rounds.read(chosen, machines, wanted)
        manifest = {
            "step": chosen.step,
            "epoch": self._epoch(shared),
            "world_size": chosen.facts["world_size"],
            "strategy": self._world.strategy,
            "modules": self._modules(),
        }
        loaded = {
            **shared,
            "manifest": manifest,
            "random": chosen.random and list(map(rng_state_from_text, chosen.random)),
            "replicas": {"shared": shared["replicas"], "state": replicas},
        }

        def apply() -> str:
            check_fits(_IN_MEMORY, self._state, loaded)
            return self._apply_all(_IN_MEMORY, loaded)

        note = run_on_all_ranks(self._collectives, doing, apply)
        rounds.forget_after(chosen.step)
        for replica in chosen.lost:
            note += f"; replica {replica} was lost with its machine, and begins with the shared "
            note += f"weights and the optimizer state of replica {chosen.instead[replica]}"
        self._resumed(note)
        return True

    def _resumed(self, note: str) -> None:
        self.last_resume_note = note
        self._world.print(note)
        self._stepped = self._progress.number

    def _held(self, states: Mapping[str, Any]) -> dict[str, list[int | str]]:
        """Of states of which this rank may have a part only: the entries that it has."""
        held = {}
        if "state" in states["world"]:
            held["world"] = [*states["world"]["state"]]
        for name, value in self._stateful().items():
            if isinstance(value, nn.Module):
                here = [key for key, own in states[name].items() if not sharding.is_meta(own)]
                if len(here) < len(states[name]):
                    held[name] = here
            elif getattr(value, "partial", False):
                held[name] = list(states[name]["state"])
        return held

    def _part(
        self, states: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]
    ) -> tuple[Part, dict[str, Any]]:
        """Copies to host memory what this rank stores; and its trees, by file."""
        rank = self._collectives.topology.rank
        partly = {name for answer in answers for name in answer["held"]}
        here: dict[str, Any] = {}
        for name, state in states.items():
            if name in partly:
                held = [answer["held"].get(name) for answer in answers]
                here[name] = sharding.stored_entries(state, held, rank)
            else:
                here[name] = state if rank == 0 else sharding.shards_only(state)
        modules = {name: here.pop(name) for name in self._modules()}
        if rank == 0:
            here["random"] = [rng_state_from_text(answer["streams"]) for answer in answers]
        files: dict[str, dict[str, Tensor]] = {}
        boxes: dict[str, dict[str, Box]] = {}
        trees: dict[str, Any] = {}
        for name, state in {**modules, layout.TRAINING: here}.items():
            trees[name], tensors, boxes[name] = encode(
                state,
                inside=name if name in modules else "",
                to_host=self._copies.take,
                main=rank == 0,
            )
            if tensors or rank == 0:
                files[layout.tensor_file(name, rank)] = tensors
        self._copies.finish()
        entries = {
            name: trees[name] if name in modules else trees[layout.TRAINING][name]["state"]
            for name in (partly if rank else ())
        }
        return Part(files, boxes, entries), trees

    def _read_all(self, path: Path, identity: str | None) -> dict[str, Any]:
        """All states of a checkpoint, after every check that can be made before loading."""
        manifest = _seen(path, identity)
        modules = {name: read_stored(path, manifest, name) for name in manifest["modules"]}
        training = read_stored(path, manifest, layout.TRAINING)
        others = training if isinstance(training, dict) else {}
        saved = {"manifest": manifest, **others, **modules}
        check_fits(path, self._state, saved)
        if self._replicas is not None and "replicas" in saved:
            self._replicas.check(saved["replicas"])
        return saved

    def _apply_all(self, path: Path | str, loaded: Mapping[str, Any]) -> str:
        """Takes up what `_read_all` gave; returns what was done, in words.

        Args:
            path: of the checkpoint, or where else it was.
            loaded: all states; `random` may be None.
        """
        notes = ""
        modules = {
            name: value for name, value in self._state.items() if isinstance(value, nn.Module)
        }
        saved_dtypes = saved_parameter_dtypes(modules, loaded)
        for name, target in {**self._state, "world": self._world}.items():
            if isinstance(target, LRScheduler):
                for place, saved, built in other_lengths(target, loaded[name]):
                    notes += f"; {name} keeps {place}={saved} as saved, not {built} as built"
            with _explained(f"resuming {name} from {path}", BUILD.format(name)):
                if isinstance(target, nn.Module):
                    load_plain(target, loaded[name])
                elif isinstance(target, Optimizer):
                    state = sharding.reshard_optimizer(loaded[name], target)
                    # A prepared optimizer may have a part of the parameters only.
                    own = getattr(target, "load_saved_state", partial(load_saved_state, target))
                    own(state, saved_dtypes)
                else:
                    target.load_state_dict(sharding.in_memory(loaded[name]))
        if self._replicas is not None:
            with _explained(f"resuming the replicas from {path}", BUILD.format("the model")):
                self._replicas.load_state_dict(loaded.get("replicas"))
        elif "replicas" in loaded:
            notes += "; its replicas are left out, the training goes on from their shared weights"
        manifest, topology = loaded["manifest"], self._collectives.topology
        size = manifest["world_size"]
        note = f"resumed {path} (epoch {manifest['epoch']}, step {manifest['step']}, "
        note += f"strategy {manifest['strategy']}, {size} rank{'s' if size > 1 else ''})"
        if size != topology.size:
            return (
                f"{note}; it was saved by {size} processes and this run has {topology.size}, so "
                f"model-side randomness (dropout) starts from the seed{notes}"
            )
        versions = "resume with the versions of Python and torch that saved them"
        if loaded["random"] is None:
            return f"{note}; model-side randomness (dropout) starts from the seed{notes}"
        with _explained(f"resuming the random streams from {path}", versions):
            streams = sharding.in_memory(loaded["random"][topology.rank])
            seeding.set_rng_state(streams, self._collectives.device)
        return note + notes

    def _manifest(
        self, states: Mapping[str, Any], metric: float | None, trees: Mapping[str, Any]
    ) -> dict[str, Any]:
        from lockstep import __version__  # the package itself imports this module

        return {
            "step": int(states["world"]["step"]),
            # Tells apart two checkpoints of one name, on machines that share no file system.
            "id": secrets.token_hex(8),
            "lockstep": __version__,
            "torch": torch.__version__,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "epoch": self._epoch(states),
            "world_size": self._collectives.topology.size,
            "strategy": self._world.strategy,
            "metric": metric if metric is not None and math.isfinite(metric) else None,
            "best": self._policy.best,
            "modules": {name: trees[name] for name in self._modules()},
            "training": trees[layout.TRAINING],
        }

    def _epoch(self, states: Mapping[str, Any]) -> int:
        # A loop that is not over `world.epochs` is known to the loaders alone.
        loaders = [name for name, value in self._state.items() if isinstance(value, Loader)]
        trained = (states[name]["epoch"] for name in loaders)
        return int(states["world"]["epoch"] or min(filter(None, trained), default=0))

    def _stateful(self) -> dict[str, Any]:
        """All that is saved but the world's own state."""
        more = {} if self._replicas is None else {"replicas": self._replicas}
        return {**self._state, **more}

    def _modules(self) -> list[str]:
        return [name for name, value in self._state.items() if isinstance(value, nn.Module)]


@contextmanager
def _explained(doing: str, do: str) -> Iterator[None]:
    """Turns whatever a state that does not fit leads to into a `CheckpointError`."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(doing, f"{type(error).__name__}: {error}", do) from error


def _write_part(
    temporary: Path, part: Part, told: Others, rank: int, check: Callable[[], object]
) -> None:
    """What the thread of another rank than 0 does."""
    report = None
    try:
        with layout.plain_errors("saving the checkpoint", temporary):
            report = part.write(temporary, check)
    finally:
        told.tell(rank, report)


def _check_found(folder: Path, chosen: Finding, seen_by: list[str]) -> None:
    """Whether the ranks see one folder, and there is something sound in it, or nothing at all."""
    if chosen.name is None and chosen.passed_over:
        raise CheckpointError(
            f"resuming from {folder}",
            f"none of its checkpoints is sound{chosen.words}",
            f"see `lockstep checkpoint repair {folder}`; to begin anew, choose another folder",
        )
    if chosen.name is None and seen_by:
        raise CheckpointError(
            f"resuming from {folder}",
            f"rank {', '.join(seen_by)} sees a complete checkpoint there, rank 0 sees none",
            "use a shared folder, one that all machines see, or copy it to the machine of rank 0",
        )


class Finding(NamedTuple):
    """What one rank sees in the run's folder."""

    name: str | None
    """Of the latest sound checkpoint, and what tells it from others of that name; None: none."""
    id: str | None
    passed_over: dict[str, str]
    """Newer ones, and what is wrong with each."""
    writer: str | None = None
    """Another run that writes there."""

    @property
    def words(self) -> str:
        """What else is to be said, to follow on a sentence."""
        passed = ", ".join(f"{name} ({why})" for name, why in self.passed_over.items())
        text = f"; passed over: {passed}" if passed else ""
        return text + (f"; {self.writer} writes into this folder" if self.writer else "")


def _find(folder: Path, *, thoroughly: bool) -> Finding:
    """The latest sound checkpoint of a folder.

    Args:
        folder: holds the run's checkpoints.
        thoroughly: compare the checksums too, for which all of it is read.

    Raises:
        CheckpointError: `folder` is a file or cannot be read.
    """
    if not thoroughly:
        path = layout.latest(folder)
        return Finding(None if path is None else path.name, None, {})
    passed_over: dict[str, str] = {}
    for path in layout.candidates(folder):
        health = examine(path, values=True) if layout.is_complete(path) else None
        if health is None:
            passed_over[path.name] = "incomplete"
        elif health.problems and not health.foreign:
            passed_over[path.name] = "; ".join(health.problems)
        else:
            identity = layout.read_manifest(path).get("id")
            return Finding(path.name, identity, passed_over, holder(folder))
    return Finding(None, None, passed_over)


def _seen(path: Path, identity: str | None) -> dict[str, Any]:
    """The manifest, of the checkpoint that rank 0 has found."""
    found = "rank 0 has found it there, and this rank does not see it"
    if path.exists():
        manifest = layout.read_manifest(path)
        if manifest.get("id") == identity:
            return manifest
        found = "this rank sees another checkpoint under that name than rank 0 does"
    raise CheckpointError(
        f"resuming from {path}",
        found,
        "use a shared folder, one that all machines see, or copy the checkpoint to each",
    )
