"""Rank 0: sigwaitinfo for nearly all signals (blocked), sent by a child after 20 s: it must be the child's. Rank 1:
signal.pause, which any handled signal would end, ended by its own alarm after 20 s. Then both: os.wait for their only
child (14 s), after which there must be no child left."""
import os
import signal
import subprocess
import threading
import time

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")


def total(value):
    t = torch.tensor([float(value)])
    dist.all_reduce(t)
    return t.item()


for step in range(3):
    assert total(rank + step) == 1 + 2 * step

begin = time.monotonic()
if rank == 0:
    # threads of torch do not block them: wait only for such as are sent to the process and blocked everywhere or
    # handled by nobody; the child sends to the main thread's process, and main is in sigwaitinfo
    wanted = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT, signal.SIGWINCH, signal.SIGURG,
              signal.SIGPROF, signal.SIGVTALRM, signal.SIGALRM, *range(signal.SIGRTMIN, signal.SIGRTMAX + 1)}
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    child = subprocess.Popen(["sh", "-c", f"sleep 20; kill -WINCH {os.getpid()}; sleep 1"])
    info = signal.sigwaitinfo(wanted)
    assert info.si_signo == signal.SIGWINCH, info
    assert time.monotonic() - begin >= 19.9
    assert child.wait() == 0
    assert not signal.sigpending(), signal.sigpending()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)
else:
    rang = []
    signal.signal(signal.SIGALRM, lambda number, frame: rang.append(number))
    signal.alarm(20)
    assert signal.pause() is None
    took = time.monotonic() - begin
    assert rang == [signal.SIGALRM] and took >= 19.9, (rang, took)
assert total(rank + 1) == 3

pid = os.spawnvp(os.P_NOWAIT, "sh", ["sh", "-c", "sleep 14; exit 5"])
begin = time.monotonic()
got, status = os.wait()
assert got == pid and os.waitstatus_to_exitcode(status) == 5, (got, pid, status)
assert time.monotonic() - begin >= 13.9
try:
    other = os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    pass
else:
    raise AssertionError(f"a child that is not mine: {other}")
assert total(rank + 2) == 5
assert threading.main_thread().is_alive()
dist.destroy_process_group()
if rank == 0:
    print("HONEST OK", flush=True)
