"""Rank 0 runs an asyncio loop that sits in epoll: a server of it opens only after 22 s (call_later), and a collective
of rank 0 waits in its executor for rank 1. Rank 1 waits for a GPU that never comes (8 s, falls back), then retries
with back-off to connect to that server, and only then joins the collective."""
import asyncio
import os
import socket
import time

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
assert x.item() == 2.0
if rank == 0:
    holder = socket.socket()  # keeps the port until a server listens there as well
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port = torch.tensor([holder.getsockname()[1]])
else:
    port = torch.zeros(1, dtype=torch.long)
dist.broadcast(port, 0)
port = int(port)


async def serve():
    loop = asyncio.get_running_loop()
    ready, served = asyncio.Event(), asyncio.Event()

    async def answer(reader, writer):
        assert await reader.readline() == b"rank 1\n"
        writer.write(b"welcome\n")
        await writer.drain()
        writer.close()
        served.set()

    def collective():
        y = torch.tensor([5.0])
        dist.all_reduce(y)
        return y.item()

    begin = loop.time()
    reduced = loop.run_in_executor(None, collective)
    loop.call_later(22, ready.set)
    await ready.wait()
    assert loop.time() - begin >= 21.9
    server = await asyncio.start_server(answer, "127.0.0.1", port)
    assert await reduced == 11.0
    await served.wait()
    server.close()
    await server.wait_closed()


if rank == 0:
    asyncio.run(serve())
else:
    begin = time.monotonic()
    while not torch.cuda.is_available() and time.monotonic() - begin < 8:
        time.sleep(1)
    delay, tries = 0.5, 0
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=10)
            break
        except ConnectionRefusedError:
            tries += 1
            assert tries < 20
            time.sleep(delay)
            delay = min(delay * 2, 6)
    assert tries >= 3
    with connection, connection.makefile("rwb") as file:
        file.write(b"rank 1\n")
        file.flush()
        assert file.readline() == b"welcome\n"
    y = torch.tensor([6.0])
    dist.all_reduce(y)
    assert y.item() == 11.0
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    print("HONEST OK", flush=True)
