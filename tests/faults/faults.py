"""Faults as data: what goes wrong, and what `lockstep run` must say, with which exit code.

Each script is one that a user might write; most know nothing of Lockstep. `says` are patterns that
the last block must hold, in that order (`.` matches line ends).
"""

from __future__ import annotations

from dataclasses import dataclass

_GLOO = """
import datetime, os, select, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
dist.all_reduce(torch.ones(1))
"""
_DDP = (
    _GLOO
    + """
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
model = torch.nn.parallel.DistributedDataParallel(module)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(steps):
    for _ in range(steps):
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
)
_WORKERS = (
    _GLOO
    + """
from torch.utils.data import DataLoader, TensorDataset

print("FAULT", flush=True)
for (batch,) in DataLoader(TensorDataset(torch.zeros(1024, 1024)), batch_size=256, num_workers=2):
    dist.all_reduce(batch.sum())
"""
)
_SHARED_MEMORY = """
import os, signal
from datetime import timedelta
import torch, torch.distributed as dist
import lockstep

world = lockstep.init("ddp", device="cpu")
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))
model, optimizer = world.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

def train(steps):
    for _ in range(steps):
        world.backward(model(torch.randn(8, 64)).sum())
        optimizer.step()
        optimizer.zero_grad()

train(12)
print("FAULT", flush=True)
"""


@dataclass(frozen=True)
class Fault:
    """One way to go wrong."""

    name: str
    script: str
    exit_code: int
    says: tuple[str, ...]
    nproc: int = 2
    flags: tuple[str, ...] = ()
    launcher_signal: int | None = None
    """Sent to the launcher when the script has printed FAULT."""
    waits_for_words: bool = False
    """It goes on when Lockstep has said the words: each rank may then read a byte from `told`."""
    memory_bytes: int | None = None
    """Limit of the control group in which the run is started."""
    shared_memory: str | None = None
    """Size of the /dev/shm that it has."""


FAULTS = [
    Fault(
        "no room in /dev/shm for a worker's semaphores",
        _WORKERS,
        exit_code=1,
        says=(r"script.py:\d+: for \(batch,\)", "what to do: /dev/shm, shared memory, is full"),
        shared_memory="4k",
    ),
    Fault(
        "no room in /dev/shm for a worker's batches",
        _WORKERS,
        exit_code=1,
        says=(r"script.py:\d+: for \(batch,\)", "what to do: /dev/shm, shared memory, is full"),
        shared_memory="512k",
    ),
    Fault(
        "exception on one rank",
        _GLOO
        + """
def load(sample):
    raise ValueError(f"sample {sample} is broken")

print("FAULT", flush=True)
if rank == 1:
    load(17)
dist.all_reduce(torch.ones(1))
""",
        exit_code=1,
        says=("FIRST FAILURE: rank 1", "ValueError: sample 17 is broken", r"script.py:\d+: raise"),
    ),
    Fault(
        "sys.exit(3)",
        _GLOO
        + """
print("FAULT", flush=True)
if rank == 1:
    sys.exit(3)
dist.all_reduce(torch.ones(1))
""",
        exit_code=3,
        says=("FIRST FAILURE: rank 1", r"sys\.exit\(3\)"),
    ),
    Fault(
        "os._exit(4)",
        _GLOO
        + """
print("FAULT", flush=True)
if rank == 1:
    os._exit(4)
dist.all_reduce(torch.ones(1))
""",
        exit_code=4,
        says=("FIRST FAILURE: rank 1", "exit code 4"),
    ),
    Fault(
        "SIGKILL",
        _GLOO
        + """
print("FAULT", flush=True)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
""",
        exit_code=71,
        says=("FIRST FAILURE: rank 1", "SIGKILL"),
    ),
    Fault(
        "the kernel's out-of-memory killer",
        _GLOO
        + """
print("FAULT", flush=True)
if rank == 1:
    hoard = [torch.ones(1 << 24) for _ in range(100)]
dist.all_reduce(torch.ones(1))
""",
        exit_code=71,
        says=("FIRST FAILURE: rank 1", "killed by the kernel's out-of-memory killer", "--micro-ba"),
        memory_bytes=1500 << 20,
    ),
    Fault(
        "segmentation fault",
        _GLOO
        + """
import ctypes
print("FAULT", flush=True)
if rank == 1:
    ctypes.string_at(0)
dist.all_reduce(torch.ones(1))
""",
        exit_code=71,
        says=("FIRST FAILURE: rank 1", "SIGSEGV", r"script.py:\d+: ctypes.string_at\(0\)"),
    ),
    Fault(
        "SIGSTOP",
        _GLOO.replace('"gloo"', '"gloo", timeout=datetime.timedelta(seconds=9)')
        + """
print("FAULT", flush=True)
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(torch.ones(1))
""",
        exit_code=71,
        says=(
            "FIRST FAILURE: rank 1 on",
            "stopped by a signal or a debugger",
            "consequences: rank 0",
        ),
    ),
    Fault(
        "the GIL held in C",
        _GLOO
        + """
began = time.process_time()  # of this process alone, however busy the machine is
sum(range(10**7))
a_second = int(10**7 / (time.process_time() - began))
print("FAULT", flush=True)
if rank == 1:
    sum(range(14 * a_second))  # one call of C, which never lets go of the lock
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
""",
        exit_code=0,
        flags=("--hang-after", "1"),
        says=("rank 1 is in C code that holds Python.s lock", r"script.py:\d+: sum\(range"),
    ),
    Fault(
        "endless loop on one rank",
        _GLOO
        + """
print("FAULT", flush=True)
told = os.open("told", os.O_RDWR)
while rank == 1 and not select.select([told], [], [], 0)[0]:
    pass
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
""",
        exit_code=0,
        flags=("--hang-after", "1"),
        says=("rank 1 works on", "rank 0 .*waits", r"script.py:\d+: (while|pass)"),
        waits_for_words=True,
    ),
    Fault(
        "all_reduce against barrier",
        _GLOO
        + """
print("FAULT", flush=True)
if rank == 1:
    dist.barrier()
else:
    dist.all_reduce(torch.ones(4))
dist.all_reduce(torch.ones(1))
""",
        exit_code=70,
        says=(
            "deadlock",
            "first mismatch: call 2",
            r"rank 0: all_reduce.*script.py:\d+: dist.all_reduce\(torch.ones\(4\)\)",
            r"rank 1: barrier.*script.py:\d+: dist.barrier\(\)",
        ),
    ),
    Fault(
        "the same collective with other shapes",
        _GLOO
        + """
print("FAULT", flush=True)
dist.all_reduce(torch.ones(3 + rank))
dist.barrier()
""",
        exit_code=70,
        says=("deadlock", "different sizes", "rank 0: all_reduce of 3", "rank 1: all_reduce of 4"),
    ),
    Fault(
        "both ranks receive",
        _GLOO
        + """
print("FAULT", flush=True)
dist.recv(torch.ones(1), 1 - rank)
""",
        exit_code=70,
        says=(
            "deadlock: ranks 0-1 wait in recv, for each other",
            r"script.py:\d+: dist.recv",
            "send",
        ),
    ),
    Fault(
        "a stage of a pipeline leaves the loop",
        """
import lockstep, torch
from torch.utils.data import TensorDataset
with lockstep.init("pipeline", device="cpu") as world:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = world.prepare(model, optimizer)
    print("FAULT", flush=True)
    for turn, (x,) in enumerate(world.loader(TensorDataset(torch.randn(64, 4)), 16)):
        if world.rank == 1 and turn == 10:
            break
        world.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
    world.sum(1.0)
""",
        exit_code=70,
        says=(
            "deadlock: ranks 0-1 wait in all_gather and recv, for each other",
            "rank 0 .*waits in recv, between the stages of the pipeline",
            r"script.py:\d+: world.backward",
            r"rank 1 .*waits in all_gather",
            r"script.py:\d+: world.sum",
            "same turns of the loop",
        ),
    ),
    Fault(
        "shared memory: a rank is killed in the middle",
        _SHARED_MEMORY
        + """
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
train(1)
""",
        exit_code=71,
        says=("FIRST FAILURE: rank 1", "SIGKILL"),
        nproc=3,
    ),
    Fault(
        "compressed gradients: a rank is killed in the exchange",
        _SHARED_MEMORY.replace('"ddp"', 'lockstep.strategies.DDP(compress="int8")')
        + """
if world.rank == 1:
    dist.isend = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
train(1)
""",
        exit_code=71,
        says=("FIRST FAILURE: rank 1 on", "SIGKILL", "consequences: rank 0"),
    ),
    Fault(
        "low-rank gradients: a rank is killed in the exchange",
        _SHARED_MEMORY.replace(
            '"ddp"', 'lockstep.strategies.DDP(compress="powersgd", powersgd_start=2)'
        )
        + """
if world.rank == 2:
    torch.linalg.qr = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
train(1)
""",
        exit_code=71,
        says=("FIRST FAILURE: rank 2 on", "SIGKILL"),
        nproc=3,
    ),
    Fault(
        "shared memory: a rank is stopped in the middle",
        _SHARED_MEMORY.replace('"cpu"', '"cpu", collective_timeout=timedelta(seconds=9)')
        + """
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
train(1)
""",
        exit_code=71,
        says=("FIRST FAILURE: rank 1 on", "stopped by a signal", "consequences: rank 0"),
    ),
    Fault(
        "shared memory: a rank has one step more",
        _SHARED_MEMORY
        + """
train(world.rank)
world.barrier()
""",
        exit_code=4,
        says=("RanksDifferError", "rank 0: all_gather of 16 .*rank 1: all_reduce of 4420", "do:"),
    ),
    Fault(
        "shared memory: a rank waits in a collective of torch's",
        _SHARED_MEMORY
        + """
if world.rank == 1:
    dist.barrier()
train(1)
""",
        exit_code=70,
        says=(
            "deadlock: ranks 0-1 wait in collectives that do not match",
            "rank 0 .*waits in all_reduce of 4420 float32 .*in backward",
            r"script.py:\d+: world.backward",
            "rank 1 .*waits in barrier",
            r"script.py:\d+: dist.barrier",
        ),
    ),
    Fault(
        "the same collective with far larger shapes",
        _GLOO
        + """
print("FAULT", flush=True)
dist.all_reduce(torch.ones(1 if rank else 100_000))
""",
        exit_code=71,
        says=("FIRST FAILURE: rank 1", "SIGABRT", r"script.py:\d+: dist.all_red", "other sizes"),
    ),
    Fault(
        "uneven numbers of steps under DDP",
        _DDP
        + """
print("FAULT", flush=True)
train(5 + rank)
dist.barrier()
""",
        exit_code=70,
        says=("deadlock", r"script.py:\d+: dist.barrier\(\)", r"script.py:\d+: model\(torch"),
    ),
    Fault(
        "rank 0 alone evaluates with the DDP model",
        _DDP
        + """
train(3)
print("FAULT", flush=True)
if rank == 0:
    model(torch.randn(8, 4))
dist.barrier()
""",
        exit_code=70,
        says=("deadlock", r"script.py:\d+: model\(torch.randn\(8, 4\)\)", "model.module|all ranks"),
    ),
    Fault(
        "one of three skips a batch",
        _DDP
        + """
print("FAULT", flush=True)
train(5 - (rank == 1))
dist.barrier()
""",
        exit_code=70,
        says=("FIRST FAILURE: rank 1 on", "deadlock: ranks 0-2", "same number of batches"),
        nproc=3,
    ),
    Fault(
        "one rank returns from main early",
        _DDP
        + """
train(3)
print("FAULT", flush=True)
if rank == 0:
    train(1)
""",
        exit_code=71,
        says=("FIRST FAILURE: rank 1", "left"),
    ),
    Fault(
        "honest work of rank 0 alone",
        _DDP
        + """
train(3)
print("FAULT", flush=True)
told = os.open("told", os.O_RDWR)
while rank == 0 and not select.select([told], [], [], 0)[0]:
    sum(range(10000))
dist.barrier()
dist.destroy_process_group()
""",
        exit_code=0,
        flags=("--hang-after", "1"),
        says=("rank 0 works on", r"rank 1.*barrier"),
        waits_for_words=True,
    ),
    Fault(
        "a slow rank",
        _DDP
        + """
print("FAULT", flush=True)
for _ in range(60):
    if rank == 1:
        time.sleep(0.25)
    train(1)
dist.destroy_process_group()
""",
        exit_code=0,
        says=("rank 1", "straggler|slow|late"),
    ),
    Fault(
        "Ctrl-C",
        _GLOO
        + """
print("FAULT", flush=True)
while True:
    time.sleep(0.1)
""",
        exit_code=130,
        says=("SIGINT",),
        launcher_signal=2,
    ),
    Fault(
        "SIGTERM",
        _GLOO
        + """
print("FAULT", flush=True)
dist.barrier() if rank else time.sleep(300)
""",
        exit_code=143,
        says=("SIGTERM",),
        launcher_signal=15,
    ),
]

_HONEST_GLOO = (
    """
import asyncio, ctypes, datetime, fcntl, multiprocessing, queue, socket, struct, subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
"""
    + _GLOO
    + """
group = dist.new_group()
dist.barrier(group)
holds, lets_go = (kind(None, use_errno=True) for kind in (ctypes.PyDLL, ctypes.CDLL))

told = os.open("told", os.O_RDWR)
until_told = struct.pack("ihh", told, 1, 0)  # a struct pollfd; POLLIN

def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def tell(value):
    told = [None, None]
    dist.all_gather_object(told, value)
    return told

print("FAULT", flush=True)
"""
)


def _honest(name: str, script: str, *says: str) -> Fault:
    """A run that looks like a hang for some seconds, and is none; it ends with a barrier of all."""
    script = f"{_HONEST_GLOO}{script}\ndist.barrier()\ndist.destroy_process_group()\n"
    flags = ("--hang-after", "1")
    return Fault(name, script, 0, says, flags=flags, waits_for_words=bool(says))


_MAY_COME = "rank 0 may yet come in another thread; rank 1 has waited for it"

FAULTS += [
    _honest(
        "poll in C that holds the GIL",
        """
if rank == 1:
    check(holds.poll(until_told, 1, -1))
""",
        "rank 1 is in C code that holds Python.s lock",
        r"script.py:\d+: check\(holds.poll",
    ),
    _honest(
        "poll in C that holds the GIL, in a thread",
        """
if rank == 1:
    with ThreadPoolExecutor() as pool:
        pool.submit(lambda: check(holds.poll(until_told, 1, -1))).result()
""",
        "rank 1 is in C code that holds Python.s lock",
    ),
    _honest(
        "sleep in C that holds the GIL",
        """
if rank == 1:
    check(holds.usleep(5_000_000))
""",
    ),
    _honest(
        "short naps in C that hold the GIL",
        """
if rank == 1:
    end = time.monotonic() + 5
    sys.setswitchinterval(60)  # as one call of C that waits, looks, and waits again
    while time.monotonic() < end:
        check(holds.poll(None, 0, 1))
""",
    ),
    _honest(
        "poll in C that lets the GIL go, which another thread holds",
        """
began = time.process_time()
sum(range(10**7))
a_second = int(10**7 / (time.process_time() - began))
if rank == 1:
    thread = threading.Thread(target=lambda: sum(range(5 * a_second)))
    thread.start()
    check(lets_go.poll(None, 0, 5000))
    thread.join()
""",
    ),
    _honest(
        "poll in C beside a thread that seldom lets the GIL go",
        """
if rank == 1:
    end = time.monotonic() + 5
    def spin():
        while time.monotonic() < end:
            pass
    sys.setswitchinterval(1.0)
    thread = threading.Thread(target=spin)
    thread.start()
    check(lets_go.poll(None, 0, 5000))
    thread.join()
""",
    ),
    _honest(
        "a new thread comes to a group of the main threads",
        """
def upload():
    os.read(told, 1)
    dist.barrier(group)

if rank == 0:
    thread = threading.Thread(target=upload)
    thread.start()
    dist.barrier()
    thread.join()
else:
    dist.barrier(group)
    dist.barrier()
""",
        _MAY_COME,
        r"script.py:\d+: os.read\(told, 1\)",
    ),
    _honest(
        "a timer comes to a group of the main threads",
        """
if rank == 0:
    timer = threading.Timer(5, dist.barrier, [group])
    timer.start()
    dist.barrier()
    timer.join()
else:
    dist.barrier(group)
    dist.barrier()
""",
    ),
    _honest(
        "a thread waits for what a child process makes",
        """
if rank == 0:
    made = multiprocessing.get_context("fork").Queue()
    child = multiprocessing.get_context("fork").Process(
        target=lambda: (time.sleep(5), made.put(1))
    )
    child.start()
    thread = threading.Thread(target=lambda: (made.get(), dist.barrier(group)))
    thread.start()
    dist.barrier()
    thread.join()
    child.join()
else:
    dist.barrier(group)
    dist.barrier()
""",
    ),
    _honest(
        "a thread downloads",
        """
if rank == 0:
    here, there = socket.socketpair()
    async def download():
        reader, writer = await asyncio.open_connection(sock=here)
        await reader.read(1)
        writer.close()

    thread = threading.Thread(target=lambda: (asyncio.run(download()), dist.barrier(group)))
    thread.start()
    sender = subprocess.Popen(["sh", "-c", "sleep 5; echo"], stdout=there)
    dist.barrier()
    thread.join()
    sender.wait()
else:
    dist.barrier(group)
    dist.barrier()
""",
    ),
    _honest(
        "a thread receives from one that sleeps",
        """
def send():
    os.read(told, 1)
    dist.send(torch.ones(1), 1)

if rank == 0:
    thread = threading.Thread(target=send)
    thread.start()
    dist.barrier()
    thread.join()
else:
    dist.recv(torch.ones(1), 0)
    dist.barrier()
""",
        _MAY_COME,
    ),
    _honest(
        "threads of both ranks come late",
        """
def meet():
    time.sleep(5)
    dist.barrier(groups[1 - rank])

groups = [group, dist.new_group()]
dist.barrier(groups[1])
thread = threading.Thread(target=meet)
thread.start()
dist.barrier(groups[rank])
thread.join()
""",
    ),
    _honest(
        "both receive, and both send in threads",
        """
def send():
    os.read(told, 1)
    dist.send(torch.ones(1), 1 - rank)

thread = threading.Thread(target=send)
thread.start()
dist.recv(torch.ones(1), 1 - rank)
thread.join()
""",
        "ranks 0-1 may yet come in another thread",
    ),
    _honest(
        "a rank that is stopped and continued",
        """
pids = tell(os.getpid())
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    threading.Thread(
        target=lambda: (os.read(told, 1), os.kill(pids[1], signal.SIGCONT))
    ).start()
""",
        "rank 1 is stopped by a signal or a debugger; rank 0 has waited for it",
    ),
    _honest(
        "both ranks are stopped and continued",
        """
subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {os.getpid()}"])
os.kill(os.getpid(), signal.SIGSTOP)
""",
    ),
    _honest(
        "a debugger stops a rank in a call of C",
        """
pids = tell(os.getpid())
if rank == 1:
    lets_go.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER: by anybody
    ready = tell(None)
    check(lets_go.poll(None, 0, 7000))
else:
    ready = tell(None)
    PTRACE_ATTACH, PTRACE_DETACH = 16, 17
    threads = [int(name) for name in os.listdir(f"/proc/{pids[1]}/task")]
    for thread in threads:
        check(lets_go.ptrace(PTRACE_ATTACH, thread, None, None))
        os.waitpid(thread, 0x40000000)  # __WALL
    time.sleep(5)
    for thread in threads:
        check(lets_go.ptrace(PTRACE_DETACH, thread, None, None))
""",
    ),
    _honest(
        "the launcher is stopped for a while",
        """
if rank == 0:
    with open(f"/proc/{os.getppid()}/stat") as file:
        launcher = int(file.read().rpartition(")")[2].split()[1])
    os.kill(launcher, signal.SIGSTOP)
    time.sleep(5)
    os.kill(launcher, signal.SIGCONT)
    time.sleep(2)
    dist.send(torch.ones(1), 1)
else:
    dist.recv(torch.ones(1), 0)
""",
    ),
    _honest(
        "a child process works",
        """
if rank == 0:
    subprocess.run(["sh", "-c", "read line < told"], check=True)
""",
        "rank 0 is blocked outside any collective",
    ),
    _honest(
        "a child process works, started from C",
        """
if rank == 0:
    assert os.system("sleep 4") == 0
""",
    ),
    _honest(
        "a lock of a file between the ranks",
        """
with open("lock", "w") as file:
    if rank == 0:
        fcntl.flock(file, fcntl.LOCK_EX)
    tell(None)
    if rank == 1:
        fcntl.flock(file, fcntl.LOCK_EX)
    else:
        time.sleep(4)
        fcntl.flock(file, fcntl.LOCK_UN)
""",
    ),
    _honest(
        "a pool of threads works for the main thread",
        """
if rank == 0:
    with ThreadPoolExecutor() as pool:
        list(pool.map(time.sleep, [4, 4]))
""",
    ),
    _honest(
        "a rank waits for a key of the store",
        """
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    time.sleep(4)
    store.set("ready", "1")
else:
    store.wait(["ready"])
""",
    ),
    _honest(
        "a rank waits for a signal",
        """
pids = tell(os.getpid())
if rank == 0:
    time.sleep(4)
    os.kill(pids[1], signal.SIGUSR2)
else:
    signal.signal(signal.SIGUSR2, lambda *_: got.append(1))
    got = []
    signal.pause()
    assert got
""",
    ),
    _honest(
        "a rank looks again and again whether a collective has ended",
        """
if rank == 0:
    time.sleep(4)
work = dist.all_reduce(torch.ones(1), async_op=True)
while not work.is_completed():
    time.sleep(0.1)
""",
    ),
    _honest(
        "a thread that waits for orders while the others are at a barrier",
        """
def obey():
    dist.recv(torch.ones(1), 0)

if rank == 1:
    thread = threading.Thread(target=obey)
    thread.start()
    dist.barrier()
    thread.join()
else:
    time.sleep(4)
    dist.barrier()
    dist.send(torch.ones(1), 1)
""",
    ),
    _honest(
        "an answer of a licence server that C waits for with the GIL",
        """
if rank == 1:
    here, there = socket.socketpair()
    here.settimeout(60)  # in the kernel: recv in C comes back with EINTR, however it is handled
    limit = (60).to_bytes(8, "little") + bytes(8)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    here.setblocking(True)
    server = subprocess.Popen(["sh", "-c", "sleep 4; echo"], stdout=there)
    check(holds.recv(here.fileno(), ctypes.create_string_buffer(1), 1, 0))
    server.wait()
""",
    ),
    _honest(
        "a semaphore that C waits for with the GIL",
        """
if rank == 1:
    semaphore = ctypes.create_string_buffer(32)
    check(holds.sem_init(semaphore, 0, 0))
    until = int(time.time() + 4).to_bytes(8, "little") + bytes(8)
    assert holds.sem_timedwait(semaphore, until) == -1
    assert ctypes.get_errno() == 110, os.strerror(ctypes.get_errno())  # ETIMEDOUT
""",
    ),
    _honest(
        "a group whose timeout is expected",
        """
side = dist.new_group(timeout=datetime.timedelta(seconds=8))
if rank == 0:
    try:
        dist.all_reduce(torch.ones(1), group=side)
    except RuntimeError:
        pass
""",
    ),
    _honest(
        "training in a thread",
        """
def main():
    if rank == 0:
        time.sleep(4)
    dist.barrier()

thread = threading.Thread(target=main)
thread.start()
thread.join()
""",
    ),
    _honest(
        "a worker of a DataLoader is slow",
        """
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        time.sleep(4)
        return index

if rank == 0:
    list(torch.utils.data.DataLoader(Slow(), num_workers=2, multiprocessing_context="fork"))
""",
    ),
    _honest(
        "a rank waits for a person",
        """
if rank == 0:
    typed = subprocess.Popen(["sh", "-c", "sleep 4; echo yes"], stdout=subprocess.PIPE)
    sys.stdin = os.fdopen(typed.stdout.fileno())
    assert input() == "yes"
    typed.wait()
""",
    ),
    _honest(
        "a thread waits for one that reads from a pipe",
        """
if rank == 0:
    read, results = queue.Queue(), queue.Queue()
    here, there = multiprocessing.Pipe()
    def reads():
        read.put(here.recv())

    message = r"\\0\\0\\0\\004\\200\\004N."  # None, as a pickle, behind its length
    sender = subprocess.Popen(["sh", "-c", f"sleep 4; printf '{message}'"], stdout=there)
    threads = [
        threading.Thread(target=reads),
        threading.Thread(target=lambda: (read.get(), dist.barrier(group))),
    ]
    for thread in threads:
        thread.start()
    dist.barrier()
    for thread in threads:
        thread.join()
    sender.wait()
else:
    dist.barrier(group)
    dist.barrier()
""",
    ),
]
