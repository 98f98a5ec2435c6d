"""Rank 1 downloads its data before init_process_group, from a server that answers late; rank 0 waits in init.
Later the same with new_group: rank 1 comes 15 s later."""
import http.server
import os
import threading
import time
import urllib.request

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
PAYLOAD = bytes(range(256)) * 4096


class Late(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(20)
        self.send_response(200)
        self.send_header("Content-Length", str(len(PAYLOAD)))
        self.end_headers()
        self.wfile.write(PAYLOAD)

    def log_message(self, *args):
        pass


if rank == 1:
    server = http.server.HTTPServer(("127.0.0.1", 0), Late)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    begin = time.monotonic()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/data", timeout=60) as answer:
        data = answer.read()
    assert data == PAYLOAD
    assert time.monotonic() - begin >= 19.9
    server.shutdown()

begin = time.monotonic()
dist.init_process_group("gloo")
x = torch.tensor([rank + 1.0])
dist.all_reduce(x)
assert x.item() == 3.0
if rank == 1:
    begin = time.monotonic()
    time.sleep(15)
    assert time.monotonic() - begin >= 15
group = dist.new_group([0, 1])
y = [torch.zeros(1), torch.zeros(1)]
dist.all_gather(y, torch.tensor([float(rank)]), group=group)
assert [v.item() for v in y] == [0.0, 1.0]
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    print("HONEST OK", flush=True)
