"""Rank 1 runs calls of C that a signal, a SIGSTOP/SIGCONT or a tracer interrupts (sleep, usleep, nanosleep, poll,
select, epoll_wait, sigtimedwait, sem_timedwait, semtimedop, recv with SO_RCVTIMEO), each in a thread, libc.sleep in
main; 18 s. Each must run its whole time and return what it returns undisturbed. Rank 0 waits in an all_reduce, then
they change places."""
import ctypes
import errno
import os
import signal
import socket
import struct
import threading
import time

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
SECONDS = 18
libc = ctypes.CDLL(None, use_errno=True)
dist.init_process_group("gloo")


def total(value):
    t = torch.tensor([float(value)])
    dist.all_reduce(t)
    return t.item()


for step in range(3):
    assert total(rank + step) == 1 + 2 * step


class Spec(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]


def c_sleep():
    return libc.sleep(SECONDS), 0


def c_usleep():
    return libc.usleep(SECONDS * 1_000_000), 0


def c_nanosleep():
    left = Spec()
    return libc.nanosleep(ctypes.byref(Spec(SECONDS, 0)), ctypes.byref(left)), 0


def c_poll():
    return libc.poll(None, 0, SECONDS * 1000), 0


def c_select():
    return libc.select(0, None, None, None, ctypes.byref(Spec(SECONDS, 0))), 0


def c_epoll_wait():
    fd = libc.epoll_create1(0)
    answer = libc.epoll_wait(fd, ctypes.create_string_buffer(64), 1, SECONDS * 1000)
    failure = ctypes.get_errno() if answer < 0 else 0
    os.close(fd)
    ctypes.set_errno(failure)
    return answer, 0


def c_sigtimedwait():
    signals = ctypes.create_string_buffer(128)
    libc.sigemptyset(signals)
    libc.sigaddset(signals, signal.SIGRTMIN + 9)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN + 9})
    return libc.sigtimedwait(signals, None, ctypes.byref(Spec(SECONDS, 0))), -errno.EAGAIN


def c_sem_timedwait():
    semaphore = ctypes.create_string_buffer(64)
    assert libc.sem_init(semaphore, 0, 0) == 0
    return libc.sem_timedwait(semaphore, ctypes.byref(Spec(int(time.time()) + SECONDS + 1, 0))), -errno.ETIMEDOUT


def c_semtimedop():
    number = libc.semget(0, 1, 0o600)
    assert number >= 0, ctypes.get_errno()
    try:
        answer = libc.semtimedop(number, struct.pack("Hhh", 0, -1, 0), ctypes.c_size_t(1), ctypes.byref(Spec(SECONDS, 0)))
        failure = ctypes.get_errno()
    finally:
        libc.semctl(number, 0, 0)
    ctypes.set_errno(failure)
    return answer, -errno.EAGAIN


def c_recv():
    a, b = socket.socketpair()
    a.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", SECONDS, 0))
    answer = libc.recv(a.fileno(), ctypes.create_string_buffer(8), 8, 0)
    failure = ctypes.get_errno()
    a.close(), b.close()
    ctypes.set_errno(failure)
    return answer, -errno.EAGAIN


problems = []


def check(call):
    ctypes.set_errno(0)
    begin = time.monotonic()
    answer, expected = call()
    failure = ctypes.get_errno()
    took = time.monotonic() - begin
    if (answer < 0 and -failure != expected) or (answer >= 0 and answer != expected) or took < SECONDS - 0.1:
        problems.append(f"{call.__name__}: {answer}, errno {failure}, {took:.2f} s")


others = [c_usleep, c_nanosleep, c_poll, c_select, c_epoll_wait, c_sigtimedwait, c_sem_timedwait, c_semtimedop, c_recv]
for turn in (1, 0):
    if rank == turn:
        threads = [threading.Thread(target=check, args=(call,)) for call in others]
        for t in threads:
            t.start()
        check(c_sleep if turn else c_poll)
        for t in threads:
            t.join()
        assert not problems, problems
    assert total(rank + turn) == 1 + 2 * turn
dist.destroy_process_group()
if rank == 0:
    print("HONEST OK", flush=True)
