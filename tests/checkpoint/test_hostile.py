"""Files that are broken, or made to do harm: refused, nothing of them run, memory bounded.

Every case is given to every reader, in one process of its own, which says what came of it.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from ranks import HANG_S, run_ranks
from safetensors.torch import save_file
from torch import nn

import lockstep
from lockstep.checkpoint import checksums
from lockstep.checkpoint.weights import load_weights
from lockstep.cli.checkpoint import command
from lockstep.errors import CheckpointError, LockstepError

pytestmark = pytest.mark.ranks

MARKER = "somebody-was-here"
HUGE = 2**40


class Evil:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.marker = folder / MARKER

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


# What is sound, and is spoiled below.


def torch_file(folder: Path) -> Path:
    torch.save({"model": net().state_dict()}, folder / "w.pt")
    return folder / "w.pt"


def safetensors_file(folder: Path) -> Path:
    lockstep.save_weights(net(), folder / "w.safetensors")
    return folder / "w.safetensors"


def index_of(folder: Path, places: dict[str, Any], name: str = "w.safetensors") -> Path:
    path = folder / f"{name}.index.json"
    path.write_text(json.dumps({"weight_map": places}))
    return path


def dcp_folder(folder: Path, state: Any = None) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is alone
        state = {"model": net().state_dict()} if state is None else state
        dcp.save(state, checkpoint_id=folder / "saved")
    return folder / "saved"


def checkpoint(folder: Path) -> Path:
    """A run's folder with one checkpoint in it."""
    with lockstep.init() as world:
        model = world.prepare(net())
        world.checkpoint(folder / "run", model=model).save()
    return folder / "run"


def edited(folder: Path, change: Callable[[dict[str, Any], Path], Any]) -> Path:
    """The same, its manifest changed, with sizes and checksums that are right."""
    run = checkpoint(folder)
    (step,) = run.glob("step-*")
    manifest = json.loads((step / "manifest.json").read_text())
    change(manifest, step)
    write_manifest(step, manifest)
    return run


def write_manifest(step: Path, manifest: dict[str, Any]) -> None:
    (step / "manifest.json").write_bytes(checksums.seal_manifest(manifest))


def replaced(name: str) -> Callable[[Path], Path]:
    """A checkpoint in which a pickle has the name and the size of a file that belongs there."""

    def make(folder: Path) -> Path:
        def change(manifest: dict[str, Any], step: Path) -> None:
            (step / name).write_bytes(pickle.dumps(Evil(folder)))
            manifest["files"][name] = (step / name).stat().st_size
            for key in list(manifest.get("checksums", ())):
                manifest["checksums"][key] = checksums.file_checksum(step / key)

        return edited(folder, change)

    return make


def in_metadata(change: Callable[[Any, Path], Any]) -> Callable[[Path], Path]:
    """A folder of DCP with changed metadata; what `change` gives takes the metadata's place."""

    def make(folder: Path) -> Path:
        saved = dcp_folder(folder)
        metadata = pickle.loads((saved / ".metadata").read_bytes())
        metadata = change(metadata, folder) or metadata
        (saved / ".metadata").write_bytes(pickle.dumps(metadata))
        return saved

    return make


def first_place(metadata: Any) -> Any:
    return next(iter(metadata.storage_data.values()))


def set_chunk(metadata: Any, size: int) -> None:
    entry = metadata.state_dict_metadata["model.0.weight"]
    entry.size = torch.Size([size, 3])
    entry.chunks[0].sizes = entry.size


def overlapping(metadata: Any, _: Path) -> None:
    entry = metadata.state_dict_metadata["model.0.weight"]
    entry.size = torch.Size([8, 3])
    entry.chunks.append(entry.chunks[0])


def written(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def evil_torch(zipped: bool) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        state = {"model": net().state_dict(), "args": Evil(folder)}
        torch.save(state, folder / "w.pt", _use_new_zipfile_serialization=zipped)
        return folder / "w.pt"

    return make


def evil_in_an_index(folder: Path) -> Path:
    state = net().state_dict()
    torch.save({**state, "more": Evil(folder)}, folder / "pytorch_model-1.bin")
    return index_of(folder, dict.fromkeys(state, "pytorch_model-1.bin"), "pytorch_model.bin")


def evil_piece(folder: Path) -> Path:
    """A piece of as many bytes as the real one, with something else to be made of it."""
    saved = dcp_folder(folder, {"model": {"weight": torch.zeros(4, 3)}})
    place = first_place(pickle.loads((saved / ".metadata").read_bytes()))
    buffer = io.BytesIO()
    torch.save([torch.zeros(4, 3), Evil(folder)], buffer)
    content = buffer.getvalue()
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    first_place(metadata).length = len(content)
    assert place.offset == 0
    (saved / place.relative_path).write_bytes(content)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    return saved


def evil_object(folder: Path) -> Path:
    """What is no tensor is an archive of its own."""
    state = {**net().state_dict(), "0._extra_state": Evil(folder)}
    return dcp_folder(folder, {"model": state})


def rezipped(change: Callable[[zipfile.ZipFile, str, bytes], Any]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = torch_file(folder)
        with zipfile.ZipFile(path) as archive:
            members = {m.filename: archive.read(m) for m in archive.infolist()}
        with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as archive:
            warnings.simplefilter("ignore")  # of names that are there twice
            for name, content in members.items():
                change(archive, name, content)
        return path

    return make


def bomb(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    big = bytes(2**28) if name.endswith("data/0") else content
    archive.writestr(name, big, compress_type=zipfile.ZIP_DEFLATED)


def claiming(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    """A tensor of 2**40 values over the few that are there."""
    if name.endswith("data.pkl"):
        content = pickle_of_tensor(HUGE)
    archive.writestr(name, content)


def pickle_of_tensor(count: int) -> bytes:
    """What torch.save writes for {"w": a tensor of `count` floats}, whatever is in the file."""
    persistent = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0" + b"0X\3\0\0\0cpu"
    long = b"\x8a\x06" + count.to_bytes(6, "little")
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + persistent + long + b"tQK\0" + long
    tensor += b"\x85K\1\x85\x89ccollections\nOrderedDict\n)RtR"
    return b"\x80\2}X\1\0\0\0w" + tensor + b"s."


def cut(make: Callable[[Path], Path], name: str = "", keep: float = 0.6) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        path = make(folder)
        file = next(iter(path.rglob(name))) if name else path
        os.truncate(file, int(file.stat().st_size * keep))
        return path

    return made


def linked(make: Callable[[Path], Path], name: str) -> Callable[[Path], Path]:
    """A file of a folder is a link to one elsewhere."""

    def made(folder: Path) -> Path:
        path = make(folder)
        file = next(iter(path.rglob(name)))
        shutil.move(file, folder / "elsewhere")
        file.symlink_to(folder / "elsewhere")
        return path

    return made


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "w.safetensors")
    return folder / "w.safetensors"


def piped_checkpoint(folder: Path) -> Path:
    def change(manifest: dict[str, Any], step: Path) -> None:
        (step / "model.safetensors").unlink()
        os.mkfifo(step / "model.safetensors")
        manifest["files"]["model.safetensors"] = 0

    return edited(folder, change)


def nested_pickle(folder: Path) -> Path:
    content = b"\x80\2" + b"]" * 30_000 + b"a" * 29_999 + b"."
    with zipfile.ZipFile(folder / "w.pt", "w") as archive:
        archive.writestr("w/data.pkl", content)
        archive.writestr("w/version", "3\n")
        archive.writestr("w/byteorder", "little")
    return folder / "w.pt"


def tree(value: Any) -> Callable[[Path], Path]:
    """A checkpoint whose model has this as its first bias."""

    def make(folder: Path) -> Path:
        def change(manifest: dict[str, Any], step: Path) -> None:
            state = manifest["modules"]["model"]
            items = state.get("$ordered", state.get("$dict"))
            if items is None:
                state["0.bias"] = value
            else:
                next(item for item in items if item[0] == "0.bias")[1] = value

        return edited(folder, change)

    return make


def in_manifest(**values: Any) -> Callable[[Path], Path]:
    return lambda folder: edited(folder, lambda manifest, step: manifest.update(values))


def listed(name: str) -> Callable[[Path], Path]:
    """The manifest lists another file, which is there in that size."""

    def make(folder: Path) -> Path:
        save_file({"w": torch.ones(2)}, folder / "secret.safetensors")

        def change(manifest: dict[str, Any], step: Path) -> None:
            manifest["files"][name] = (step / name).stat().st_size
            if "checksums" in manifest:
                manifest["checksums"][name] = next(iter(manifest["checksums"].values()))

        return edited(folder, change)

    return make


def traversing_index(folder: Path) -> Path:
    save_file({"0.weight": torch.ones(4, 3)}, folder / "secret.safetensors")
    (folder / "in").mkdir()
    return index_of(folder / "in", {"0.weight": "../secret.safetensors"})


def twice_in_an_index(folder: Path) -> Path:
    save_file({"0.weight": torch.ones(4, 3)}, folder / "a.safetensors")
    path = folder / "w.safetensors.index.json"
    path.write_text('{"weight_map": {"0.weight": "a.safetensors", "0.weight": "a.safetensors"}}')
    return path


def manifest_text(text: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        run = checkpoint(folder)
        (step,) = run.glob("step-*")
        (step / "manifest.json").write_text(text)
        return run

    return make


def manifest_pickle(folder: Path) -> Path:
    run = checkpoint(folder)
    (step,) = run.glob("step-*")
    (step / "manifest.json").write_bytes(pickle.dumps(Evil(folder)))
    return run


def in_shards(places: Any, shape: tuple[int, ...] = (4, 3)) -> Callable[[Path], Path]:
    """A checkpoint that has the model's first weight in shards, at these places."""
    leaf = {"$sharded": "0.weight", "dtype": "float32", "shape": list(shape)}

    def make(folder: Path) -> Path:
        def change(manifest: dict[str, Any], step: Path) -> None:
            next(i for i in manifest["modules"]["model"]["$ordered"] if i[0] == "0.weight")[1] = (
                leaf
            )
            manifest["shards"] = places if places == 7 else {"model": {"0.weight": places}}

        return edited(folder, change)

    return make


FULL = [0, [0, 0], [4, 3]]


def test_a_tensor_in_one_shard_is_read(tmp_path: Path) -> None:
    """What is spoiled below is sound."""
    path = in_shards([FULL])(tmp_path)
    load_weights(net(), path)
    invoked(["inspect", str(path)])


BYTES = {"$tensor": "0.bias", "dtype": "uint16", "shape": [HUGE]}
CASES: dict[str, Callable[[Path], Path]] = {
    # Pickles that run something, in each place where a pickle could be.
    "evil torch file": evil_torch(True),
    "evil torch file of the old format": evil_torch(False),
    "evil plain pickle": lambda f: written("w.bin", pickle.dumps(Evil(f)))(f),
    "evil pickle called safetensors": lambda f: written("w.safetensors", pickle.dumps(Evil(f)))(f),
    "evil file of an index": evil_in_an_index,
    "evil index": lambda f: written("w.bin.index.json", pickle.dumps(Evil(f)))(f),
    "evil metadata": in_metadata(lambda metadata, folder: Evil(folder)),
    "evil inside of metadata": in_metadata(lambda m, f: setattr(m, "planner_data", [Evil(f)])),
    "evil piece": evil_piece,
    "evil object": evil_object,
    "evil model of a checkpoint": replaced("model.safetensors"),
    "evil training of a checkpoint": replaced("training.safetensors"),
    "evil manifest": manifest_pickle,
    "a name of torch as dtype": tree({"$dtype": "load"}),
    "a name of torch as dtype of a tensor": tree({**BYTES, "dtype": "hub"}),
    "an unknown kind in a manifest": tree({"$import": "os"}),
    # Cut short, sizes, shapes.
    "cut torch file": cut(torch_file),
    "cut safetensors": cut(safetensors_file),
    "cut metadata": cut(dcp_folder, ".metadata"),
    "cut pieces": cut(dcp_folder, "*.distcp"),
    "cut model of a checkpoint": cut(checkpoint, "model.safetensors"),
    "cut manifest": cut(checkpoint, "manifest.json"),
    "huge tensor in a torch file": rezipped(claiming),
    "huge tensor in a manifest": tree(BYTES),
    "huge tensor in metadata": in_metadata(lambda m, f: set_chunk(m, HUGE)),
    "a shape that is not that of the piece": in_metadata(lambda m, f: set_chunk(m, 5)),
    "pieces that overlap": in_metadata(overlapping),
    "a place behind the end": in_metadata(lambda m, f: setattr(first_place(m), "offset", HUGE)),
    "an offset below zero": in_metadata(lambda m, f: setattr(first_place(m), "offset", -5)),
    "sizes that are no numbers": in_manifest(files={"model.safetensors": "many"}),
    "no modules": in_manifest(modules=None),
    "a list for a module": in_manifest(modules={"model": ["0.weight"]}),
    "no training": in_manifest(training=7),
    "packed without end": rezipped(bomb),
    "shards that overlap": in_shards([FULL, FULL]),
    "shards with a gap": in_shards([]),
    "shards of a file that is not listed": in_shards([[3, *FULL[1:]]]),
    "shards of a file that leads out": in_shards([["/../x", *FULL[1:]]]),
    "a shard before the beginning": in_shards([[0, [-4, 0], [4, 3]]]),
    "a shard of another size": in_shards([[0, [0, 0], [8, 3]]], (8, 3)),
    "a shard of many axes": in_shards([[0, [0] * 99, [1] * 99]], (1,) * 99),
    "a huge tensor in shards": in_shards([[0, [0, 0], [HUGE, HUGE]]], (HUGE, HUGE)),
    "a shard without a place": in_shards([[0]]),
    "shards that are none": in_shards(7),
    # Ways out of the folder, and what is no file.
    "an index that leads out": traversing_index,
    "metadata that leads out": in_metadata(
        lambda m, f: setattr(first_place(m), "relative_path", "../secret.distcp")
    ),
    "metadata that names its folder": in_metadata(
        lambda m, f: setattr(first_place(m), "relative_path", "..")
    ),
    "a manifest that leads out": listed("../../secret.safetensors"),
    "a manifest that names its folder": listed(".."),
    "a linked piece": linked(dcp_folder, "*.distcp"),
    "a linked model of a checkpoint": linked(checkpoint, "model.safetensors"),
    "a pipe": pipe,
    "a pipe in a checkpoint": piped_checkpoint,
    # Names that are there twice, and nesting.
    "twice in an index": twice_in_an_index,
    "twice in a manifest": manifest_text('{"format": 1, "format": 1}'),
    "nested manifest": manifest_text("[" * 200_000),
    "nested index": written("w.bin.index.json", b'{"weight_map":' * 100_000),
    "nested pickle": nested_pickle,
    "nested metadata": lambda f: nested_metadata(f),
    "metadata with a large memory": lambda f: nested_metadata(f, b"\x80\4Nr\xff\xff\xff\x7f."),
    "metadata with a large memory, as text": lambda f: nested_metadata(f, b"Np2000000000\n."),
    "metadata with a deep tuple as key": lambda f: nested_metadata(
        f, b"\x80\4})" + b"\x85" * 1_000_000 + b"Ns."
    ),
    "metadata with a tuple in itself, often": lambda f: nested_metadata(
        f, b"\x80\4})" + b"2\x86" * 60 + b"Ns."
    ),
    "metadata with a large text": lambda f: nested_metadata(f, b"\x80\4\x8d" + b"\xff" * 7 + b"\0"),
}


def nested_metadata(folder: Path, content: bytes = b"") -> Path:
    saved = dcp_folder(folder)
    many = 50_000
    content = content or b"\x80\4" + b"]" * many + b"a" * (many - 1) + b"."
    (saved / ".metadata").write_bytes(content)
    return saved


def readers(path: Path, folder: Path) -> dict[str, Callable[[], Any]]:
    out = folder / "out.safetensors"
    commands = {
        "inspect": ["inspect", str(path)],
        "diff": ["diff", "--training", str(path), str(path)],
        "convert": ["convert", str(path), str(out)],
    }
    if path.name == "run":
        commands["repair"] = ["repair", "--yes", str(path)]
    found: dict[str, Callable[[], Any]] = {
        name: lambda arguments=arguments: invoked(arguments) for name, arguments in commands.items()
    }
    found["load"] = lambda: load_weights(net(), path)
    found["load a part"] = lambda: load_weights(net(), path, strict=False)
    if path.name == "run":
        found["resume"] = lambda: resumed(path)
    return found


def invoked(arguments: list[str]) -> None:
    result = CliRunner().invoke(command, arguments)
    if isinstance(result.exception, SystemExit) or result.exception is None:
        if result.exit_code:
            raise CheckpointError("the command", f"ended with {result.exit_code}", result.output)
    else:
        raise result.exception


def resumed(path: Path) -> None:
    with lockstep.init() as world:
        model = world.prepare(net())
        if not world.checkpoint(path, model=model).resume():
            raise CheckpointError("resuming", "it was passed over", "")


def read_all(folder: Path) -> dict[str, dict[str, str]]:
    """What each reader makes of each case: empty where it has read it; and what it took."""
    resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))  # for the machine that runs the tests
    found: dict[str, dict[str, str]] = {}
    for number, (name, make) in enumerate(CASES.items()):
        place = folder / str(number)
        place.mkdir()
        path = make(place)
        (place / MARKER).unlink(missing_ok=True)  # of making it
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found[name] = {}
        for reader, read in readers(path, place).items():
            try:
                read()
                found[name][reader] = ""
            except LockstepError as error:
                found[name][reader] = str(error)
            except BaseException as error:
                found[name][reader] = f"raw {type(error).__name__}: {error}"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        found[name]["MiB"] = str(grown // 1024)
        found[name]["ran"] = str((place / MARKER).exists())
        shutil.rmtree(place, ignore_errors=True)
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    return run_ranks(read_all, 1, tmp_path_factory.mktemp("hostile"), timeout=HANG_S)[0]


# What is wrong is seen by those who need it: these do not, or (repair) do not read it.
UNTOUCHED = {
    "evil training of a checkpoint": {"load", "load a part", "convert"},
    "no training": {"load", "load a part", "convert"},
    "evil object": {"load a part"},
    "a shape that is not that of the piece": {"load a part"},
}


@pytest.mark.parametrize("case", CASES)
def test_hostile_files_are_refused_by_every_reader(
    outcomes: dict[str, dict[str, str]], case: str
) -> None:
    found = dict(outcomes[case])
    assert found.pop("ran") == "False"
    assert int(found.pop("MiB")) < 300
    for reader, said in found.items():
        assert not said.startswith("raw "), f"{reader}: {said}"
        assert len(said) < 3000, reader
        if reader not in UNTOUCHED.get(case, ()) and reader != "repair":
            assert said, f"{reader} has read it"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("evil torch file", "runs whatever code its author put there"),
        ("evil metadata", "it names pathlib.Path.touch"),
        ("evil inside of metadata", "it names pathlib.Path.touch"),
        ("a linked piece", "is no plain file, but a link"),
        ("metadata that leads out", "'../secret.distcp', which is not a name within its folder"),
        ("packed without end", "packed contents"),
        ("a pipe", "it is no file, but a folder, a pipe or a device"),
        ("pieces that overlap", "its shards overlap, or leave gaps"),
    ],
)
def test_errors_say_why_a_hostile_file_is_refused(
    outcomes: dict[str, dict[str, str]], case: str, said: str
) -> None:
    for reader in ("load", "inspect", "diff", "convert"):
        assert said in outcomes[case][reader]


FLIPPED = {
    "w.pt": torch_file,
    "w.safetensors": safetensors_file,
    ".metadata": dcp_folder,
    "__0_0.distcp": dcp_folder,
    "manifest.json": checkpoint,
}


def flip_bits(folder: Path, flips: int) -> tuple[int, list[str]]:
    """Reads each file `flips` times, each time with another bit turned over."""
    refused, raw = 0, []
    draw = random.Random(flips)
    for name, make in FLIPPED.items():
        place = folder / name
        place.mkdir()
        path = make(place)
        file = next(iter(path.rglob(name))) if path.is_dir() else path
        sound = file.read_bytes()
        for _ in range(flips):
            bit = draw.randrange(8 * len(sound))
            content = bytearray(sound)
            content[bit // 8] ^= 1 << bit % 8
            file.write_bytes(content)
            try:
                load_weights(net(), path)
            except LockstepError:
                refused += 1
            except Exception as error:
                raw.append(f"{name}, bit {bit}: {type(error).__name__}: {error}")
    return refused, raw


@pytest.mark.parametrize("flips", [40, pytest.param(300, marks=pytest.mark.thorough)])
def test_a_flipped_bit_is_refused_or_does_no_harm(tmp_path: Path, flips: int) -> None:
    refused, raw = run_ranks(flip_bits, 1, tmp_path, flips)[0]
    assert not raw
    assert refused > flips
