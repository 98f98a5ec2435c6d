"""No thread but main. Main waits for a lock that it holds itself (rank 0), in SimpleQueue.get (rank 1), with no
timeout; the handler of an alarm releases the one and fills the other."""
import os
import queue
import signal
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

lock = threading.Lock()
events = queue.SimpleQueue()
alarms = []


def on_alarm(number, frame):
    alarms.append(time.monotonic())
    if rank == 0:
        lock.release()
    else:
        events.put("wake")


signal.signal(signal.SIGALRM, on_alarm)
begin = time.monotonic()
signal.setitimer(signal.ITIMER_REAL, 22)
if rank == 0:
    lock.acquire()
    lock.acquire()
else:
    assert events.get() == "wake"
took = time.monotonic() - begin
assert took >= 21.9, took
assert len(alarms) == 1, alarms
assert signal.getsignal(signal.SIGALRM) is on_alarm
assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
assert total(rank + 1) == 3
dist.destroy_process_group()
if rank == 0:
    print("HONEST OK", flush=True)
