"""Lockstep's API. Rank 0: two threads take two locks in opposite order; one of them gives up after 18 s, releases
and tries again. Then a pool of one thread whose task waits for a task in the same pool, with a timeout and a
fallback. Rank 1 waits in world.sum and world.gather."""
import threading
import time
from concurrent.futures import ThreadPoolExecutor, TimeoutError

import lockstep

world = lockstep.init(seed=0)
for step in range(3):
    assert int(world.sum(world.rank + step)) == 1 + 2 * step

if world.rank == 0:
    first, second = threading.Lock(), threading.Lock()
    both_hold = threading.Barrier(2)
    journal = []

    def patient():
        with second:
            both_hold.wait()
            with first:
                journal.append("patient")

    def polite():
        with first:
            both_hold.wait()
            begin = time.monotonic()
            got = second.acquire(timeout=18)
            assert not got
            assert time.monotonic() - begin >= 17.9
            journal.append("gave up")
        with second:
            with first:
                journal.append("polite")

    threads = [threading.Thread(target=patient), threading.Thread(target=polite)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(journal) == ["gave up", "patient", "polite"] and journal[0] == "gave up", journal
assert int(world.sum(world.rank + 10)) == 21

answer = 0
if world.rank == 0:
    pool = ThreadPoolExecutor(1)

    def inner():
        return 41

    def outer():
        future = pool.submit(inner)
        begin = time.monotonic()
        try:
            future.result(timeout=16)
        except TimeoutError:
            assert time.monotonic() - begin >= 15.9
            assert future.cancel()
            return inner() + 1
        raise AssertionError("the pool has one thread")

    answer = pool.submit(outer).result()
    assert answer == 42
    pool.shutdown()
assert world.gather(answer) == [42, 0]
rank = world.rank
world.close()
if rank == 0:
    print("HONEST OK", flush=True)
