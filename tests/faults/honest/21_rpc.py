"""Bonus. torch.distributed.rpc: rank 0's main waits in rpc_sync, rank 1's main has nothing to do and waits in
rpc.shutdown; rank 1's function runs 18 s in a thread of TensorPipe's pool, in a Condition with a timeout."""
import os
import threading
import time

import torch
import torch.distributed.rpc as rpc


def slow(x):
    condition = threading.Condition()
    begin = time.monotonic()
    with condition:
        assert condition.wait(18) is False
    assert time.monotonic() - begin >= 17.9
    return x * 2


def main():
    rank = int(os.environ["RANK"])
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=100, _transports=["uv"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        begin = time.monotonic()
        answer = rpc.rpc_sync("worker1", slow, args=(torch.arange(4.0),))
        assert answer.tolist() == [0.0, 2.0, 4.0, 6.0]
        assert time.monotonic() - begin >= 17.9
    rpc.shutdown()
    if rank == 0:
        print("HONEST OK", flush=True)


if __name__ == "__main__":
    main()
