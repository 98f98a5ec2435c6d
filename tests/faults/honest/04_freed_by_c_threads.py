"""All Python threads of both ranks wait for locks and events, with no timeout. Rank 1's is released by a POSIX timer
of C (SIGEV_THREAD: a thread that Python does not know until it calls back), rank 0's by the callback of the future of
an asynchronous collective, which gloo's thread calls once rank 1 has joined."""
import ctypes
import os
import threading
import time

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
x = torch.ones(4)
dist.all_reduce(x)
assert x.tolist() == [2.0] * 4


class SigEvent(ctypes.Structure):
    _fields_ = [("value", ctypes.c_void_p), ("signo", ctypes.c_int), ("notify", ctypes.c_int),
                ("function", ctypes.c_void_p), ("attribute", ctypes.c_void_p), ("pad", ctypes.c_char * 64)]


class TimerSpec(ctypes.Structure):
    _fields_ = [("interval_s", ctypes.c_long), ("interval_ns", ctypes.c_long),
                ("value_s", ctypes.c_long), ("value_ns", ctypes.c_long)]


libc = ctypes.CDLL(None, use_errno=True)
gate = threading.Lock()
gate.acquire()
calls = []


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def opened(value):
    calls.append(value)
    gate.release()


began = time.monotonic()
y = torch.full((1000,), float(rank + 1))
if rank == 1:
    event = SigEvent(value=7, notify=2, function=ctypes.cast(opened, ctypes.c_void_p).value)
    timer = ctypes.c_void_p()
    assert libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer)) == 0, ctypes.get_errno()
    spec = TimerSpec(value_s=24)
    assert libc.timer_settime(timer, 0, ctypes.byref(spec), None) == 0, ctypes.get_errno()
    seen = []

    def helper():
        with gate:
            seen.append(time.monotonic() - began)

    thread = threading.Thread(target=helper)
    thread.start()
    thread.join()
    assert calls == [7], calls
    assert seen[0] >= 23.9, seen
    libc.timer_delete(timer)
    dist.all_reduce(y)
else:
    done = threading.Event()
    work = dist.all_reduce(y, async_op=True)
    work.get_future().then(lambda future: done.set())
    done.wait()
    assert time.monotonic() - began >= 15
    work.wait()
assert y.tolist() == [3.0] * 1000
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    print("HONEST OK", flush=True)
