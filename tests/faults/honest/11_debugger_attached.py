"""A debugger (ptrace by a helper) attaches to all threads of rank 0, keeps them stopped for 20 s and lets them go.
Rank 1 waits in an all_reduce, then is debugged itself for 12 s while it holds a lock that its thread waits for."""
import ctypes
import os
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist

DEBUGGER = r'''
import ctypes, os, sys, time
pid, seconds = int(sys.argv[1]), float(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long
libc.waitpid.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
held = []
for tid in sorted(int(t) for t in os.listdir(f"/proc/{pid}/task")):
    if libc.ptrace(16, tid, None, None) == 0:
        assert libc.waitpid(tid, None, 0x40000000) == tid
        held.append(tid)
    elif tid == pid:
        sys.exit(f"cannot attach: errno {ctypes.get_errno()}")
time.sleep(seconds)
for tid in held:
    assert libc.ptrace(17, tid, None, None) == 0
print(len(held))
'''

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")


def total(value):
    t = torch.tensor([float(value)])
    dist.all_reduce(t)
    return t.item()


for step in range(3):
    assert total(rank + step) == 1 + 2 * step
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1 & (2**64 - 1)), 0, 0, 0)


def debug_me(seconds):
    begin = time.monotonic()
    child = subprocess.Popen([sys.executable, "-c", DEBUGGER, str(os.getpid()), str(seconds)], stdout=subprocess.PIPE)
    out, _ = child.communicate()
    assert child.returncode == 0
    assert int(out) >= 1
    assert time.monotonic() - begin >= seconds


if rank == 0:
    debug_me(20)
assert total(rank + 5) == 11
if rank == 1:
    lock, seen = threading.Lock(), []

    def waiter():
        with lock:
            seen.append(1)

    with lock:
        thread = threading.Thread(target=waiter)
        thread.start()
        debug_me(12)
        assert not seen
    thread.join()
    assert seen == [1]
assert total(rank + 6) == 13
dist.destroy_process_group()
if rank == 0:
    print("HONEST OK", flush=True)
