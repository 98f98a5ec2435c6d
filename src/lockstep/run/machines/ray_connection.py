"""Manages the connection to one node of a Ray cluster, and to the helper process there.

With `--hosts`, ssh starts the helper (module `remote`) and carries its input and output. With
`--ray`, an *actor* does, a process that Ray starts on the node: `HelperActor` starts the helper,
and its methods write to the helper's input and read its output. So everything goes through Ray's
own connections, which may be encrypted. Threads in this process call the methods and pass the data
on to pipes, from which `Remote` reads in the same way as from those of ssh.

When this process ends, for whatever reason, Ray ends the actor, and the helper ends the launcher.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.run.machines.ray_placement import RayNode
from lockstep.run.machines.ssh_connection import Remote, ShowLine
from lockstep.run.machines.ssh_errors import Problem

READ_BYTES = 1 << 16
NUM_CALLS_AT_ONCE = 4
"""The number of calls of the actor at the same time: write, read of two streams, and wait."""
GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
THREADS_VARIABLE = "OMP_NUM_THREADS"


class HelperActor:
    """Starts the helper on a node, and carries its input and output. It runs as an actor of Ray.

    Args:
        module: name of the Python module that is started as the helper.
        nonce: argument of the module, with which its answers begin.
        gpu_ids: the GPUs of the run on this node; empty for those that Ray has chosen.
    """

    def __init__(self, module: str, nonce: str, gpu_ids: Sequence[str]) -> None:
        # Ray sets the number of threads in its processes, but the launcher chooses it for its
        # ranks.
        environment = dict(os.environ)
        environment.pop(THREADS_VARIABLE, None)
        if gpu_ids:
            environment[GPU_VARIABLE] = ",".join(gpu_ids)

        # Ray blocks SIGINT in this thread, and the ranks would inherit that.
        blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._helper = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", module, nonce],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._outputs = {"stdout": self._helper.stdout, "stderr": self._helper.stderr}

    def write(self, data: bytes) -> None:
        """Writes data to the helper's input, or closes the input if there is no data."""
        if self._helper.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):  # the helper has ended
            if data:
                self._helper.stdin.write(data)
                self._helper.stdin.flush()
            else:
                self._helper.stdin.close()

    def read(self, stream: str) -> bytes:
        """Reads the helper's output on "stdout" or "stderr"; returns empty data at its end."""
        output = self._outputs[stream]
        return os.read(output.fileno(), READ_BYTES) if output else b""

    def wait(self) -> int:
        """Waits until the helper has ended, and returns its exit code."""
        return self._helper.wait()


class HelperProcess:
    """The helper on a node, with the attributes and methods of `subprocess.Popen` that `Remote`
    uses.

    Args:
        node: the node.
        group: the placement group, which has bundles on the node.
        module: name of the Python module that is started as the helper.
        nonce: argument of the module.
    """

    def __init__(self, node: RayNode, group: Any, module: str, nonce: str) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor_class = ray.remote(HelperActor).options(
            num_cpus=0,  # the resources of the bundles are left to the launcher
            max_concurrency=NUM_CALLS_AT_ONCE,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=node.bundle_index
            ),
        )
        self._actor = actor_class.remote(module, nonce, node.gpu_ids)
        self.returncode: int | None = None
        self.failure = ""
        """Why the helper cannot be reached, in Ray's words; empty while it can."""
        input_end, self._stdin_end = os.pipe()
        stdout_end, write_stdout_end = os.pipe()
        stderr_end, write_stderr_end = os.pipe()
        self.stdin = os.fdopen(self._stdin_end, "wb", buffering=0)
        self.stdout = os.fdopen(stdout_end, "rb", buffering=0)
        self.stderr = os.fdopen(stderr_end, "rb", buffering=0)
        self._start_thread(self._forward_input, input_end)
        self._start_thread(self._forward_output, "stdout", write_stdout_end)
        self._start_thread(self._forward_output, "stderr", write_stderr_end)
        self._start_thread(self._wait)

    def _start_thread(self, work: Any, *args: Any) -> None:
        threading.Thread(target=work, args=args, daemon=True).start()

    def _call(self, method: str, *args: Any) -> Any:
        """Calls a method of the actor, and waits for its result.

        Raises:
            OSError: the actor could not be started, or it or its node is lost.
        """
        import ray

        try:
            return ray.get(getattr(self._actor, method).remote(*args))
        except Exception as error:  # Ray's errors have no common base class
            self.failure = self.failure or str(error)
            raise OSError("the actor of Ray is lost") from None

    def _forward_input(self, input_end: int) -> None:
        """Passes data from a pipe to the helper's input, until the pipe is closed."""
        with contextlib.suppress(OSError):
            while data := os.read(input_end, READ_BYTES):
                self._call("write", data)
            self._call("write", b"")
        os.close(input_end)

    def _forward_output(self, stream: str, output_end: int) -> None:
        """Passes the helper's output on "stdout" or "stderr" to a pipe, until it ends."""
        with contextlib.suppress(OSError):
            while data := self._call("read", stream):
                while data:
                    num_written = os.write(output_end, data)
                    data = data[num_written:]
        os.close(output_end)

    def _wait(self) -> None:
        """Waits until the helper has ended, and keeps its exit code in `returncode`."""
        exit_code = 1
        with contextlib.suppress(OSError):
            exit_code = self._call("wait")
        if self.returncode is None:
            self.returncode = exit_code

    def poll(self) -> int | None:
        """Returns the helper's exit code, or None if it is running."""
        return self.returncode

    def kill(self) -> None:
        """Ends the actor, and with it the helper, the launcher and the ranks."""
        import ray

        if self.returncode is None:
            self.returncode = -signal.SIGKILL
        ray.kill(self._actor)


class RayRemote(Remote):
    """A node of the run, and the helper process there.

    Args:
        node: the node.
        group: the placement group, which has bundles on the node.
        show: function that is called with each line printed there after the launcher was started.
    """

    def __init__(self, node: RayNode, group: Any, show: ShowLine) -> None:
        super().__init__(node, (), show)
        self._node = node
        self._group = group

    def _start_program(self, nonce: str) -> HelperProcess:
        """Starts an actor on the node, which starts the helper."""
        return HelperProcess(self._node, self._group, self._module, nonce)

    async def open(self, request: Mapping[str, Any], was_copied: bool) -> None:
        """Starts the helper, and checks its description of its machine; see `Remote.open`."""
        try:
            await super().open(request, was_copied)
        except Problem:
            # If the helper has not found the folder or the script, the advice differs from that
            # with ssh: nothing can be copied to the nodes of a cluster.
            missing_file = self.facts.get("missing")
            if not missing_file:
                raise
            raise Problem(
                missing_file, "the folder must be on a disk that all nodes of the cluster share"
            ) from None

        # One machine may have several nodes, each with its own devices. They are not one machine
        # for `_warn_about_machines`.
        self.facts["machine"] += f" {self._node.node_id}"

    def _failure(self) -> Problem:
        """Returns the error that explains why the helper does not answer."""
        failure = ""
        if isinstance(self._process, HelperProcess):
            failure = self._process.failure

        error_lines = self._error_output.decode(errors="replace").strip().splitlines()
        # No Lockstep at all ("No module named 'lockstep'"), or one without the helper ("No module
        # named 'lockstep.run.machines.remote'"), which is why the quote is not closed here.
        if "No module named 'lockstep" in failure + "".join(error_lines):
            return Problem(
                "its Python has no Lockstep of this version",
                "install the same version on all nodes of the cluster, for the Python that started "
                "Ray there",
            )

        if failure:
            found = " ".join(failure.split())
        elif error_lines:
            found = error_lines[-1]
        else:
            found = f"no answer within {self.answer_timeout_s:g} s"

        return Problem(
            found, "see `ray status`, and Ray's logs in /tmp/ray/session_latest/logs there"
        )

    def kill(self) -> None:
        """Ends the connection at once."""
        if isinstance(self._process, HelperProcess) and self._process.poll() is None:
            self._process.kill()
