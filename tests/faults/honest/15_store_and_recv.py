"""Rank 0's main waits in recv from rank 1; rank 1 waits in store.get for a key that a second thread of rank 0 sets
after a child of it has ended (18 s). Then monitored_barrier with a late rank (8 s), then batch_isend_irecv and an
async all_gather that rank 1 waits for long before rank 0 joins (10 s)."""
import datetime
import os
import subprocess
import threading
import time

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
for _ in range(3):
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    assert x.item() == 3.0

if rank == 0:
    def publish():
        done = subprocess.run(["sh", "-c", "sleep 18; echo table-7"], capture_output=True)
        store.set("go", done.stdout.strip())

    thread = threading.Thread(target=publish)
    thread.start()
    y = torch.zeros(7)
    begin = time.monotonic()
    dist.recv(y, src=1)
    assert y.tolist() == [7.0] * 7
    assert time.monotonic() - begin >= 17
    thread.join()
else:
    value = store.get("go")
    assert value == b"table-7", value
    dist.send(torch.full((7,), 7.0), dst=0)

if rank == 1:
    time.sleep(8)
dist.monitored_barrier(timeout=datetime.timedelta(seconds=50))

if rank == 0:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        time.sleep(end - time.monotonic())
mine, other = torch.full((50_000,), float(rank)), torch.zeros(50_000)
works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)])
for work in works:
    work.wait()
assert other.tolist() == [1.0 - rank] * 50_000
parts = [torch.zeros(3), torch.zeros(3)]
work = dist.all_gather(parts, torch.full((3,), float(rank)), async_op=True)
while not work.is_completed():
    time.sleep(0.01)
work.wait()
assert parts[0].tolist() == [0.0] * 3 and parts[1].tolist() == [1.0] * 3
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    print("HONEST OK", flush=True)
