"""Bonus. Rank 0's main waits in HashStore.get (a store within the process) for a key that its other thread sets; that
thread opens a FIFO for reading, which blocks until a daemon outside the process tree opens it for writing (20 s).
Rank 1 waits in the constructor of a TCPStore of its own whose server rank 0 opens only after that."""
import datetime
import os
import socket
import subprocess
import tempfile
import threading
import time

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
shared = [None]
if rank == 0:
    holder = socket.socket()  # keeps the port until a server listens there as well
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    shared = [holder.getsockname()[1]]
dist.broadcast_object_list(shared, src=0)
port = shared[0]
begin = time.monotonic()
if rank == 0:
    path = tempfile.mkdtemp() + "/pipe"
    os.mkfifo(path)
    subprocess.run(["sh", "-c", f"(setsid sleep 20; echo batch > {path}) >/dev/null 2>&1 </dev/null &"], check=True)
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=100))
    problems = []

    def read():
        try:
            with open(path) as pipe:
                store.set("text", pipe.read().strip())
        except BaseException as error:
            problems.append(error)
            os._exit(5)

    thread = threading.Thread(target=read)
    thread.start()
    assert store.get("text") == b"batch"
    thread.join()
    assert not problems
own = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=datetime.timedelta(seconds=100))
assert time.monotonic() - begin >= 19
own.set(f"from {rank}", str(rank * 11))
assert own.get(f"from {1 - rank}") == str((1 - rank) * 11).encode()
x = torch.tensor([rank + 1.0])
dist.all_reduce(x)
assert x.item() == 3.0
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    print("HONEST OK", flush=True)
