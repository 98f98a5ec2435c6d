"""`lockstep run` beside torchrun and plain Python, with scripts that know nothing of Lockstep."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from launched import Launched, launch
from older_torch import needs_torchrun_flag
from ranks import HANG_S

pytestmark = pytest.mark.launcher

LOCKSTEP = [sys.executable, "-m", "lockstep.cli.main", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
WARM = ["--warm", "--no-warm"]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def start(
    folder: Path, line: list[str], *, typed: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A command to its end; what it writes is read as text, whatever it is."""
    kept = environment()
    kept.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)  # if lockstep was imported in this process
    if line[: len(TORCHRUN)] == TORCHRUN:
        kept["TMPDIR"] = str(folder)  # it leaves its own there
    return subprocess.run(
        line,
        cwd=folder,
        env={**kept, **variables},
        input=typed,
        capture_output=True,
        encoding="utf-8",
        errors="backslashreplace",
        timeout=HANG_S,
    )


def run(folder: Path, *line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`lockstep run`, which is to end well."""
    done = launch(["run", *line], folder, env={**environment(), **variables})
    assert done.returncode == 0, done.stderr
    return done


# --- what a script finds in its environment ------------------------------------------------------

ENVIRONMENT = """
import ctypes, json, numpy, os
name = os.environ["WRITE_TO"] + os.environ["RANK"]
json.dump(dict(os.environ), open(name, "w"))
files = [word for word in open("/proc/self/maps").read().split() if "libscipy_openblas64_" in word]
threads = [ctypes.CDLL(file).scipy_openblas_get_num_threads64_() for file in set(files)]
json.dump(threads, open(name + "-openblas", "w"))
"""

OTHERWISE = {
    "MASTER_ADDR": "an address of loopback, where torchrun has a name",
    "MASTER_PORT": "a free port",
    "OMP_NUM_THREADS": "as many as there are cores for it; torchrun: 1",
    "TORCHELASTIC_ERROR_FILE": "in the rank's own folder",
    "TMPDIR": "this test's",
    "WRITE_TO": "this test's",
}
ONLY_HERE = {
    "GLOO_SOCKET_IFNAME": "the interface of the run",
    "LOCKSTEP_STEP_MEMORY": "files in memory, where ranks may be started again",
    "LOCKSTEP_CHOSEN_THREADS": "that the launcher chose OMP_NUM_THREADS",
    "LOCKSTEP_EVIDENCE": "what its launcher reads of it, in memory",
    "LOCKSTEP_LAUNCHER": "who started it",
    "LOCKSTEP_RANK_FOLDER": "its logs and evidence",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "set by `import lockstep`",
    "TORCH_FR_BUFFER_SIZE": "Flight Recorder, for hang verdicts",
}
ONLY_THERE = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "what torchrun tells itself"}


@needs_torchrun_flag("--virtual-local-rank")
def test_ranks_get_the_same_variables_and_threads_as_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ENVIRONMENT)
    flags = (
        "--role trainer --max-restarts 2 --rdzv-backend c10d --rdzv-endpoint localhost:0 "
        "--rdzv-id job --virtual-local-rank --monitor-interval 0.05"
    )
    outside = {"PET_NPROC_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": "4,7"}
    cold = [*LOCKSTEP, "--no-warm"]
    for name, line in {"torchrun": TORCHRUN, "warm": LOCKSTEP, "cold": cold}.items():
        done = start(tmp_path, [*line, *flags.split(), "script.py"], WRITE_TO=name, **outside)
        assert done.returncode == 0, done.stderr
    for rank in range(2):
        theirs = json.loads((tmp_path / f"torchrun{rank}").read_text())
        for name in ("warm", "cold"):
            ours = json.loads((tmp_path / f"{name}{rank}").read_text())
            assert ours.keys() - theirs.keys() == ONLY_HERE.keys()
            assert theirs.keys() - ours.keys() == ONLY_THERE.keys()
            same = ours.keys() & theirs.keys() - OTHERWISE.keys()
            assert {n: ours[n] for n in same} == {n: theirs[n] for n in same}
        for name in ("torchrun", "warm", "cold"):
            variables = json.loads((tmp_path / f"{name}{rank}").read_text())
            threads = json.loads((tmp_path / f"{name}{rank}-openblas").read_text())
            assert set(threads) <= {int(variables["OMP_NUM_THREADS"])}


# --- what is started, and with which arguments ---------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("./a.sh x${local_rank}", ["sh 0 x0", "sh 1 x1"]),
        ("--run-path a.py --k=${local_rank} -- $x", ["py 0 --k=0 -- $x", "py 1 --k=1 -- $x"]),
    ],
)
def test_programs_and_scripts_get_the_local_rank_by_torchruns_macro(
    tmp_path: Path, line: str, said: list[str]
) -> None:
    (tmp_path / "a.sh").write_text('#!/bin/sh\necho sh $LOCAL_RANK "$@"\n')
    (tmp_path / "a.sh").chmod(0o755)
    (tmp_path / "a.py").write_text(
        "import os, sys\nsys.stdout.write(' '.join(['py', os.environ['RANK'], *sys.argv[1:]]))\n"
    )
    variables = {"PET_NO_PYTHON": "1"} if "a.sh" in line else {}
    done = run(tmp_path, "--nproc", "2", *line.split(), **variables)
    assert sorted(done.stdout.splitlines()) == [f"[rank {text[3]}] {text}" for text in said]


def test_a_script_may_have_spaces_and_dashes_in_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "a b" / "-c"
    folder.mkdir(parents=True)
    (folder / "né w.py").write_text("import neighbour, sys; print(sys.argv[1:], neighbour.x)")
    (folder / "neighbour.py").write_text("x = 1")
    (tmp_path / "away").mkdir()
    done = run(
        tmp_path / "away", "../a b/-c/né w.py", "a b", "*", HOME="/nowhere", TMPDIR="/nowhere"
    )
    assert done.stdout == "['a b', '*'] 1\n"


def test_modules_beside_the_script_go_first(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text("import click, torch; print(click.mine)")
    (tmp_path / "sub" / "click.py").write_text("mine = 1")  # the launcher has the other one
    done = run(tmp_path, "sub/script.py")
    assert done.stdout == "1\n"
    assert "fresh interpreters (click.py beside the script)" in done.stderr


# --- streams -------------------------------------------------------------------------------------

SPEAKS = """
import os, sys
rank = os.environ["RANK"]
sys.stdout.write(f"apple {rank}\\npear {rank}\\n")
sys.stderr.write(f"error {rank}\\n")
"""


@needs_torchrun_flag("--duplicate-stdout-filters")
def test_flags_for_streams_show_and_keep_what_torchruns_do(tmp_path: Path) -> None:
    flags = "--redirects 3 --tee 0:1,1:2 --duplicate-stdout-filters apple,plum"
    (tmp_path / "script.py").write_text(SPEAKS)
    line = ["--nproc-per-node", "2", "--log-dir", "logs", *flags.split(), "script.py"]
    theirs = start(tmp_path, [*TORCHRUN, *line])
    ours = run(tmp_path, *line)
    prefix = re.compile(r"^\[\w+ ?\d\]:? ?", re.MULTILINE)
    for stream in ("stdout", "stderr"):
        shown = [
            sorted(
                text
                for text in prefix.sub("", getattr(done, stream)).splitlines()
                if text.startswith(("apple", "pear", "error"))
            )
            for done in (theirs, ours)
        ]
        assert shown[0] == shown[1]
    kept = {path.name: path for path in (tmp_path / "logs").glob("script-*/attempt_0/*")}
    for rank in "01":
        assert (kept[f"rank_{rank}"] / "stdout.log").read_text() == f"apple {rank}\npear {rank}\n"
        assert (kept[f"rank_{rank}"] / "stderr.log").read_text() == f"error {rank}\n"
    assert kept["filtered_stdout.log"].read_text() == "[rank 0] apple 0\n"


def test_every_byte_of_the_only_rank_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys\nfor _ in range(200): sys.stdout.buffer.write(bytes(range(256)) * 200)\n"
    )
    done = subprocess.run(
        [*LOCKSTEP, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, timeout=HANG_S
    )
    assert done.returncode == 0
    assert done.stdout == bytes(range(256)) * 40_000


@pytest.mark.thorough
def test_a_reader_that_leaves_early_does_not_end_the_training(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os\n"
        "for i in range(20_000): print(i, 'x' * 80)\n"
        "open('done' + os.environ['RANK'], 'w')\n"
    )
    line = f"{' '.join(LOCKSTEP)} --nproc 2 script.py | head -n 1"
    done = start(tmp_path, ["sh", "-c", line])
    assert done.stdout.split("]")[1].startswith(" 0 x")
    assert "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.glob("done*")} == {"done0", "done1"}


def test_a_launcher_without_standard_streams_starts_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "print(sys.stdin.read(), file=sys.stderr)\n"
        "open('done' + os.environ['RANK'], 'w')\n"
    )
    line = f"{' '.join(LOCKSTEP)} --nproc 2 script.py <&- >&- 2>&-"
    done = start(tmp_path, ["sh", "-c", line], typed="")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("done*")} == {"done0", "done1"}


LEAVES_OPEN = """
import ctypes, gzip, zipfile
text = open("text", "w")
text.write("data")
packed = gzip.open("packed", "wt")
packed.write("data")
archive = zipfile.ZipFile("archive", "w")
archive.writestr("name", "data")
nested = {"log": [open("nested", "wb")]}
nested["log"][0].write(b"data")
ctypes.CDLL(None).printf(b"from a C library\\n")
"""


def test_files_that_a_script_leaves_open_are_complete(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LEAVES_OPEN)
    assert run(tmp_path, "script.py").stdout == "from a C library\n"
    assert (tmp_path / "text").read_text() == (tmp_path / "nested").read_text() == "data"
    assert gzip.decompress((tmp_path / "packed").read_bytes()) == b"data"
    with zipfile.ZipFile(tmp_path / "archive") as archive:
        assert archive.read("name") == b"data"


# --- signals -------------------------------------------------------------------------------------


@needs_torchrun_flag("--signals-to-handle")
def test_a_signal_of_the_users_choice_ends_the_run_at_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(print('heard it', flush=True)))\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(60)\n"
    )
    flags = ["--signals-to-handle", "SIGUSR1,SIGTERM", "--nproc", "2"]
    with Launched(["run", *flags, "script.py"], cwd=tmp_path) as launcher:
        assert {launcher.stdout.readline() for _ in range(2)} == {
            f"[rank {rank}] up\n" for rank in range(2)
        }
        launcher.send_signal(signal.SIGUSR1)
        done = launcher.finish()
    assert done.stdout.count("heard it") == 2
    assert done.returncode == 128 + signal.SIGUSR1


@pytest.mark.thorough
def test_the_events_for_torchs_event_handler_are_those_of_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys, os; sys.exit(os.environ['RANK'] == '1')")
    flags = ["--nproc-per-node", "2", "--event-log-handler", "console", "script.py"]
    told = [
        sorted(re.findall(r'"torchelastic\.worker\.status\.(\w+)"', done.stderr))
        for done in (start(tmp_path, [*line, *flags]) for line in (TORCHRUN, LOCKSTEP))
    ]
    assert told[0] == told[1]
    assert "RENDEZVOUS" in told[0]


# --- users' scripts ------------------------------------------------------------------------------

PROCESSES = """
import multiprocessing, os, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor(float(index * index))

def double(x):
    return 2 * x

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.map(double, [1, 2]) == [2, 4]
        loader = DataLoader(Squares(), batch_size=4, num_workers=1,
                            multiprocessing_context=method, persistent_workers=True)
        for _ in range(2):
            total = sum(batch.sum() for batch in loader)
            dist.all_reduce(total)
            assert total == 2 * 140, total
        del loader
    dist.destroy_process_group()
"""


def test_a_rank_may_use_loader_workers_and_process_pools(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PROCESSES)
    run(tmp_path, "--nproc", "2", "script.py")


MODEL = """
import torch
from torch.utils.data import DataLoader, TensorDataset
x = torch.arange(64.0).reshape(16, 4) / 64
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2)
"""
ACCELERATE = (
    MODEL
    + """
from accelerate import Accelerator
from accelerate.utils import set_seed
set_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
assert type(model).__name__ == "DistributedDataParallel"
for a, b in loader:
    accelerator.backward(((model(a) - b) ** 2).mean())
    optimizer.step()
    optimizer.zero_grad()
with open(f"weights{accelerator.process_index}", "w") as file:
    file.write(str(accelerator.unwrap_model(model).weight.tolist()))
accelerator.end_training()
"""
)
FABRIC = (
    MODEL
    + """
from lightning_fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(0)
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for a, b in fabric.setup_dataloaders(loader):
    fabric.backward(((model(a) - b) ** 2).mean())
    optimizer.step()
    optimizer.zero_grad()
with open(f"weights{fabric.global_rank}", "w") as file:
    file.write(str(model.weight.tolist()))
"""
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("package", "source"), [("accelerate", ACCELERATE), ("lightning_fabric", FABRIC)]
)
def test_scripts_of_accelerate_and_fabric_train_as_under_torchrun(
    tmp_path: Path, package: str, source: str
) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed here; make .venv/.installed-bench installs it")
    (tmp_path / "script.py").write_text(source)
    written = []
    for line in (TORCHRUN, *([*LOCKSTEP, warm] for warm in WARM)):
        done = start(tmp_path, [*line, "--nproc-per-node", "2", "script.py"])
        # Where Python takes the modules down, torch's threads may abort the process at its end.
        assert done.returncode == 0 or "--warm" not in line, done.stderr
        written.append([(tmp_path / f"weights{rank}").read_text() for rank in range(2)])
        for rank in range(2):
            (tmp_path / f"weights{rank}").unlink()
    assert written[0] == written[1] == written[2]
    assert written[0][0] == written[0][1]
