"""Which threads of a rank may yet make a call that others wait for.

Rank 1 waits in `barrier` for rank 0, whose main thread waits in `all_reduce` for rank 1. That is a
deadlock, unless another thread of rank 0 may yet call `barrier`. The stacks were recorded while the
libraries were at rest; asyncio's loops run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_snapshots import completed_all_reduces, make_call, make_snapshots, rank_state, stack_in_op
from ranks import HANG_S, in_clean_process
from test_probe import ask_probe, installed_probe, state_from_answer, wait_until

from lockstep.run.watch import hang, probe
from lockstep.run.watch.activity import Activity, Kind
from lockstep.run.watch.snapshot import Group
from lockstep.run.watch.stacks import Frame, Stack

pytestmark = pytest.mark.launcher

GROUPS = (Group("0", "default_pg", (0, 1)), Group("3", "savers", (0, 1)))
TIMED_WAIT = ("lib/python3.11/threading.py:331 wait",)
TIMED_EVENT = (*TIMED_WAIT, "lib/python3.11/threading.py:629 wait")
TIMED_QUEUE = (*TIMED_WAIT, "lib/python3.11/queue.py:180 get")
LOOP = (
    "lib/python3.11/selectors.py:468 select",
    "lib/python3.11/asyncio/base_events.py:1884 _run_once",
    "lib/python3.11/asyncio/base_events.py:607 run_forever",
)
THREAD = (
    "lib/python3.11/threading.py:982 run",
    "lib/python3.11/threading.py:1045 _bootstrap_inner",
)
PACKAGES = "lib/python3.11/site-packages"

AT_REST = {
    "tensorboard": (
        *TIMED_QUEUE,
        f"{PACKAGES}/tensorboard/summary/writer/event_file_writer.py:269 _run",
        f"{PACKAGES}/tensorboard/summary/writer/event_file_writer.py:244 run",
        *THREAD[1:],
    ),
    "tensorboard, writing": (
        "lib/python3.11/site-packages/tensorboard/compat/tensorflow_stub/io/gfile.py:766 flush",
        f"{PACKAGES}/tensorboard/summary/writer/record_writer.py:43 flush",
        f"{PACKAGES}/tensorboard/summary/writer/event_file_writer.py:293 _run",
        f"{PACKAGES}/tensorboard/summary/writer/event_file_writer.py:244 run",
        *THREAD[1:],
    ),
    "tensorboardX": (
        "lib/python3.11/selectors.py:415 select",
        "lib/python3.11/multiprocessing/connection.py:947 wait",
        "lib/python3.11/multiprocessing/connection.py:257 poll",
        "lib/python3.11/multiprocessing/queues.py:113 get",
        f"{PACKAGES}/tensorboardX/event_file_writer.py:199 run",
        *THREAD[1:],
    ),
    "wandb's loop": (
        *LOOP,
        "lib/python3.11/asyncio/runners.py:118 run",
        f"{PACKAGES}/wandb/sdk/lib/asyncio_compat.py:76 run",
        f"{PACKAGES}/wandb/sdk/lib/asyncio_manager.py:270 _main",
        *THREAD,
    ),
    "wandb's finalizer": (
        f"{PACKAGES}/wandb/sdk/lib/service/service_finalizer.py:95 _publish_queue",
        *THREAD,
    ),
    "wandb's metrics": (
        *TIMED_EVENT,
        f"{PACKAGES}/opentelemetry/sdk/metrics/_internal/export/__init__.py:555 _ticker",
        *THREAD,
    ),
    "mlflow": (
        *TIMED_QUEUE,
        f"{PACKAGES}/mlflow/utils/async_logging/async_logging_queue.py:192 _log_run_data",
        f"{PACKAGES}/mlflow/utils/async_logging/async_logging_queue.py:126 _logging_loop",
        *THREAD,
    ),
    "mlflow's metrics": (
        *TIMED_EVENT,
        f"{PACKAGES}/mlflow/system_metrics/system_metrics_monitor.py:131 monitor",
        *THREAD,
    ),
    "rich": (*TIMED_EVENT, f"{PACKAGES}/rich/live.py:35 run", *THREAD[1:]),
    "tqdm, of Debian": (
        *TIMED_EVENT,
        "lib/python3/dist-packages/tqdm/_monitor.py:69 run",
        *THREAD[1:],
    ),
}
MAY_CALL = {
    # A job of the user's runs when its time has come.
    "apscheduler": (
        *TIMED_EVENT,
        f"{PACKAGES}/apscheduler/schedulers/blocking.py:28 _main_loop",
        *THREAD,
    ),
    "watchdog": (
        *TIMED_QUEUE,
        f"{PACKAGES}/watchdog/observers/api.py:391 dispatch_events",
        *THREAD,
    ),
    "a Timer": (*TIMED_EVENT, "lib/python3.11/threading.py:1376 run", *THREAD[1:]),
    # sentry_sdk puts its frames around those of each thread.
    "a Timer of a script with sentry_sdk": (
        *TIMED_EVENT,
        "lib/python3.11/threading.py:1376 run",
        f"{PACKAGES}/sentry_sdk/integrations/threading.py:129 _run_old_run_func",
        f"{PACKAGES}/sentry_sdk/integrations/threading.py:136 run",
        *THREAD[1:],
    ),
    "clearml's scheduler": (
        *TIMED_EVENT,
        f"{PACKAGES}/clearml/automation/scheduler.py:700 _daemon",
        *THREAD,
    ),
    # ClearML pings its server, and calls the script's abort callback when that asks for it. This
    # stack and the next two follow sources.
    "clearml's ping": (
        "lib/python3.11/multiprocessing/synchronize.py:349 wait",
        f"{PACKAGES}/clearml/utilities/process/mp.py:304 wait",
        f"{PACKAGES}/clearml/backend_interface/task/development/worker.py:140 _daemon",
        *THREAD,
    ),
    # A library that prefetches takes the next batch from an iterator of the script's.
    "a library that prefetches": (
        *TIMED_WAIT,
        "lib/python3.11/queue.py:148 put",
        f"{PACKAGES}/some_library/prefetch.py:9 _loop",
        *THREAD,
    ),
    # A library that saves now and then may call a collective without any code of the script's.
    "a library that saves": (*TIMED_EVENT, f"{PACKAGES}/some_library/saver.py:7 _loop", *THREAD),
    # A server of the user's may get a request; that of prometheus_client looks the same.
    "a server": (
        "lib/python3.11/selectors.py:415 select",
        "lib/python3.11/socketserver.py:233 serve_forever",
        *THREAD,
    ),
    # The callback of a pool runs in the thread that gets the results.
    "a pool": (
        "lib/python3.11/multiprocessing/connection.py:395 _recv",
        "lib/python3.11/multiprocessing/pool.py:579 _handle_results",
        *THREAD,
    ),
    "an event loop of which nothing is known": (*LOOP, *THREAD),
    "the user's function in a sweep of wandb's": (
        "/home/me/train.py:12 train",
        f"{PACKAGES}/wandb/agents/pyagent.py:303 _run_job",
        *THREAD,
    ),
    "the user's writer": (*TIMED_QUEUE, "/home/me/tensorboard/writer.py:12 run", *THREAD[1:]),
    "the user's function in a writer": (
        "lib/python3.11/json/encoder.py:200 encode",
        "/home/me/metrics.py:3 gather",
        f"{PACKAGES}/tensorboard/summary/writer/event_file_writer.py:293 _run",
        *THREAD[1:],
    ),
    "a library's checkpoint": (
        *TIMED_QUEUE,
        f"{PACKAGES}/wandb/sdk/wandb_run.py:10 hook",
        f"{PACKAGES}/torch/distributed/checkpoint/state_dict_saver.py:300 save",
        *THREAD,
    ),
    "Python's own frames alone": (*TIMED_QUEUE, *THREAD),
}


def stack_of(lines: tuple[str, ...]) -> Stack:
    """Returns the stack of lines such as `lib/python3.11/threading.py:331 wait`."""
    stack = []
    for text in lines:
        place, _, function = text.rpartition(" ")
        file, _, line = place.rpartition(":")
        path = file if file.startswith("/") else f"/usr/{file}"
        stack.append(Frame(path, int(line), function))
    return tuple(stack)


def may_yet_come(**threads_of_rank_0: Any) -> bool:
    """Returns True if the verdict says that rank 0 may yet come in another thread."""
    calls = completed_all_reduces(5)
    waits = make_call("barrier", 1, group="3")
    rank_0 = rank_state(
        0, stack_in_op("all_reduce", 40), *calls, make_call("all_reduce", 6, 1), groups=GROUPS
    )
    rank_1 = rank_state(1, stack_in_op("barrier", 50), *calls, waits, groups=GROUPS)
    snapshots = make_snapshots(replace(rank_0, **threads_of_rank_0), rank_1)
    verdict = hang.find(*snapshots, waited_s=8.0)
    assert verdict is not None
    is_deadlock = (verdict.kind, verdict.fatal) == ("deadlock", True)
    assert is_deadlock or verdict.headline.startswith("rank 0 may yet come in another thread")
    return not is_deadlock


@pytest.mark.parametrize("name", AT_REST)
def test_a_library_that_reports_makes_no_call(name: str) -> None:
    assert not may_yet_come(threads=(stack_of(AT_REST[name]),))


@pytest.mark.parametrize("name", MAY_CALL)
def test_a_thread_that_may_run_the_users_code_may_make_the_call(name: str) -> None:
    assert may_yet_come(threads=(stack_of(MAY_CALL[name]),))
    of_library = stack_of(AT_REST["tensorboard"])
    assert may_yet_come(threads=(of_library, stack_of(MAY_CALL[name])))


# --- asyncio: one and the same stack, whatever the loop waits for

Holds = Callable[[], contextlib.AbstractAsyncContextManager[None]]


@contextlib.contextmanager
def running_loop(holds: Holds) -> Iterator[int]:
    """Runs an event loop in a thread, with what the argument holds, until the block ends.

    Yields:
        The identifier of the thread.
    """
    is_running = threading.Event()
    stops: list[Callable[[], object]] = []

    async def run() -> None:
        async with holds():
            loop = asyncio.get_running_loop()
            may_end = asyncio.Event()
            stops.append(lambda: loop.call_soon_threadsafe(may_end.set))
            is_running.set()
            await may_end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert is_running.wait(HANG_S)
    try:
        assert thread.ident is not None
        yield thread.ident
    finally:
        for stop in stops:
            stop()
        thread.join(HANG_S)


def is_in_select(thread: int) -> bool:
    return probe._stacks_of_other_threads()[thread][0][2] == "select"


def loop_may_call(thread: int) -> bool:
    stack = tuple(Frame(*fields) for fields in probe._stacks_of_other_threads()[thread])
    if thread in probe._idle_event_loops():
        return may_yet_come(threads=(), idle_loops=(stack,))
    return may_yet_come(threads=(stack,))


@contextlib.asynccontextmanager
async def nothing() -> AsyncIterator[None]:
    yield


@contextlib.asynccontextmanager
async def a_task_that_waits_for_a_thread() -> AsyncIterator[None]:
    task = asyncio.ensure_future(asyncio.Queue[int]().get())
    yield
    task.cancel()


@contextlib.asynccontextmanager
async def a_cancelled_call() -> AsyncIterator[None]:
    asyncio.get_running_loop().call_later(3600, print).cancel()
    yield


@contextlib.asynccontextmanager
async def work_of_an_executor() -> AsyncIterator[None]:
    await asyncio.get_running_loop().run_in_executor(None, int)
    yield


@contextlib.asynccontextmanager
async def a_later_call() -> AsyncIterator[None]:
    asyncio.get_running_loop().call_later(3600, print)
    yield


@contextlib.asynccontextmanager
async def a_task_with_a_timeout() -> AsyncIterator[None]:
    task = asyncio.ensure_future(asyncio.wait_for(asyncio.Queue[int]().get(), 3600))
    await asyncio.sleep(0)
    yield
    task.cancel()


@contextlib.asynccontextmanager
async def a_server() -> AsyncIterator[None]:
    async with await asyncio.start_server(print, "127.0.0.1", 0):
        yield


@contextlib.asynccontextmanager
async def a_connection() -> AsyncIterator[None]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        asyncio.get_running_loop().add_reader(ours, print)
        yield
        asyncio.get_running_loop().remove_reader(ours)


@pytest.mark.parametrize(
    "holds",
    [nothing, a_task_that_waits_for_a_thread, a_cancelled_call, work_of_an_executor],
)
def test_an_event_loop_that_only_a_thread_can_wake_makes_no_call(holds: Holds) -> None:
    with running_loop(holds) as thread:
        wait_until(lambda: thread in probe._idle_event_loops())
        assert not loop_may_call(thread)


@pytest.mark.parametrize("holds", [a_later_call, a_task_with_a_timeout, a_server, a_connection])
def test_an_event_loop_that_waits_for_more_may_make_the_call(holds: Holds) -> None:
    with running_loop(holds) as thread:
        wait_until(lambda: is_in_select(thread))
        assert loop_may_call(thread)


def test_an_event_loop_that_runs_the_users_code_may_make_the_call() -> None:
    running = threading.Event()
    may_end = threading.Event()

    def work() -> None:
        running.set()
        may_end.wait(HANG_S)

    @contextlib.asynccontextmanager
    async def begin_work() -> AsyncIterator[None]:
        asyncio.get_running_loop().call_soon(work)
        yield

    with running_loop(begin_work) as thread:
        assert running.wait(HANG_S)
        assert loop_may_call(thread)
        may_end.set()


@in_clean_process
def test_the_answer_tells_idle_event_loops_from_other_threads(tmp_path: Path) -> None:
    with running_loop(nothing) as idle, running_loop(a_server), installed_probe(tmp_path):
        wait_until(lambda: idle in probe._idle_event_loops())
        text = ask_probe(tmp_path, "7")
        state = state_from_answer(text)
    expected = tuple(Frame(*fields) for fields in json.loads(text)["stacks"][str(idle)])
    assert state.idle_loops == (expected,)
    assert state.threads is not None
    assert set(state.all_threads) == {expected, *state.threads}
    assert any(stack[0].function == "select" for stack in state.threads)


def test_a_rank_that_waits_for_an_event_loop_at_its_exit_names_it() -> None:
    shutdown = (Frame(threading.__file__, 1, "_shutdown"),)
    loop = (*stack_of(LOOP), Frame("/home/me/train.py", 7, "serve"))
    state = rank_state(0, shutdown, threads=(), idle_loops=(loop,))
    assert Activity(state, Kind.BLOCKED).line == loop[-1]
