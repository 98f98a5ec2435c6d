"""Rank 1 stands in pdb, whose commands come late through a pipe (20 s). Rank 0 meanwhile computes under sys.settrace
and sys.setprofile with faulthandler of its own (registered for SIGUSR1 and SIGUSR2, one dump after 12 s, all into its file), then
waits in recv. Nobody else may use these signals, that timer or the trace function."""
import faulthandler
import io
import os
import pdb
import signal
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
x = torch.ones(2)
dist.all_reduce(x)
assert x.tolist() == [2.0, 2.0]

if rank == 1:
    def buggy(value):
        doubled = value * 2
        return doubled

    typist = subprocess.Popen(["sh", "-c", "sleep 20; printf 'p value * 21\\nn\\np value + 1000\\nc\\n'"], stdout=subprocess.PIPE, text=True)
    screen = io.StringIO()
    begin = time.monotonic()
    answer = pdb.Pdb(stdin=typist.stdout, stdout=screen, nosigint=True, readrc=False).runcall(buggy, 2)
    assert answer == 4
    assert time.monotonic() - begin >= 19.9
    assert "42" in screen.getvalue() and "1002" in screen.getvalue(), screen.getvalue()
    assert typist.wait() == 0
    dist.send(torch.tensor([float(answer)]), 0)
else:
    dumps = tempfile.NamedTemporaryFile("w+", suffix=".txt")
    faulthandler.register(signal.SIGUSR1, file=dumps, chain=False)
    faulthandler.register(signal.SIGUSR2, file=dumps, chain=False)
    faulthandler.dump_traceback_later(12, repeat=False, file=dumps)
    lines, returns = [0], [0]

    def tracer(frame, event, arg):
        if event == "line":
            lines[0] += 1
        return tracer

    def profiler(frame, event, arg):
        if event == "return":
            returns[0] += 1

    def count(n):
        s = 0
        for i in range(n):
            s += i
        return s

    rounds = 0
    begin = time.monotonic()
    sys.setprofile(profiler)
    sys.settrace(tracer)
    while time.monotonic() - begin < 15:
        assert count(1000) == 499500
        rounds += 1
    own_trace, own_profile = sys.gettrace(), sys.getprofile()
    sys.settrace(None)
    sys.setprofile(None)
    assert own_trace is tracer and own_profile is profiler
    assert lines[0] == rounds * 2003, (lines, rounds)
    assert returns[0] == rounds, (returns, rounds)
    y = torch.zeros(1)
    dist.recv(y, 1)
    assert y.item() == 4.0
    dumps.seek(0)
    text = dumps.read()
    assert text.count("Timeout (") == 1, text
    assert text.count("most recent call first") == text[text.index("Timeout ("):].count("most recent call first"), text
    assert text.count("Current thread") == 0, text
    os.kill(os.getpid(), signal.SIGUSR2)
    dumps.seek(0)
    more = dumps.read()
    assert more.startswith(text) and more[len(text):].count("Current thread") == 1, more
    assert faulthandler.unregister(signal.SIGUSR1) and faulthandler.unregister(signal.SIGUSR2)
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    print("HONEST OK", flush=True)
