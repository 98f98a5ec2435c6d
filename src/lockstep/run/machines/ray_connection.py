"""Manages the connection to one node of a Ray cluster, and to the helper process there.

With `--hosts`, ssh starts the helper (module `helper`) and carries its input and output. With
`--ray`, an *actor* does, a process that Ray starts on the node: `HelperActor` starts the helper,
and its methods write to the helper's input and read its output. So everything goes through Ray's
own connections, which may be encrypted. Threads in this process call the methods and pass the data
on to pipes, from which `MachineConnection` reads in the same way as from those of ssh.

When this process ends, for whatever reason, Ray ends the actor, and the helper ends the launcher.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.run.machines.machine_connection import (
    MachineConnection,
    Problem,
    ShowLine,
    helper_command,
)
from lockstep.run.machines.ray_call import CALL_NAME, FOLDER_VARIABLE, OUTCOME_NAME, CallOutcome
from lockstep.run.machines.ray_placement import RayNode

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
        call: the file with the call that the ranks run; None if they run a script.
    """

    def __init__(self, module: str, nonce: str, gpu_ids: Sequence[str], call: bytes | None) -> None:
        # Ray sets the number of threads in its processes, but the launcher chooses it for its
        # ranks.
        environment = dict(os.environ)
        environment.pop(THREADS_VARIABLE, None)
        if gpu_ids:
            environment[GPU_VARIABLE] = ",".join(gpu_ids)

        self._call_folder: Path | None = None
        if call is not None:
            self._call_folder = Path(tempfile.mkdtemp(prefix="lockstep-call-"))
            (self._call_folder / CALL_NAME).write_bytes(call)
            environment[FOLDER_VARIABLE] = str(self._call_folder)

        # Ray blocks SIGINT in this thread, and the ranks would inherit that.
        blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._helper = subprocess.Popen(
            helper_command(module, nonce),
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

    def take_outcome(self) -> bytes | None:
        """Returns the content of the file in which the launcher has left how the call ended.

        The folder with the call is removed.

        Returns:
            The content; None if the launcher has left no file, or if no function was called here.
        """
        if self._call_folder is None:
            return None
        try:
            return (self._call_folder / OUTCOME_NAME).read_bytes()
        except FileNotFoundError:
            return None
        finally:
            shutil.rmtree(self._call_folder, ignore_errors=True)


class HelperProcess:
    """The helper on a node, with the attributes and methods of `subprocess.Popen` that
    `MachineConnection` uses.

    Args:
        node: the node.
        group: the placement group, which has bundles on the node.
        module: name of the Python module that is started as the helper.
        nonce: argument of the module.
        call: Ray's reference to the file with the call; None if the ranks run a script.
    """

    def __init__(self, node: RayNode, group: Any, module: str, nonce: str, call: Any) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor_class = ray.remote(HelperActor).options(
            num_cpus=0,  # the resources of the bundles are left to the launcher
            max_concurrency=NUM_CALLS_AT_ONCE,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=node.bundle_index
            ),
        )
        self._actor = actor_class.remote(module, nonce, node.gpu_ids, call)
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
            if not self.failure:  # later errors only follow from the first one
                self.failure = str(error)
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

    def take_outcome(self) -> CallOutcome | None:
        """Returns how the call has ended, or None if the launcher or its node was lost before."""
        # `_call` returns None if the launcher has left nothing. An OSError says that the node is
        # lost.
        content = None
        with contextlib.suppress(OSError):
            content = self._call("take_outcome")
        if content is None:
            return None
        outcome: CallOutcome = pickle.loads(content)
        return outcome

    def poll(self) -> int | None:
        """Returns the helper's exit code, or None if it is running."""
        return self.returncode

    def kill(self) -> None:
        """Ends the actor, and with it the helper, the launcher and the ranks."""
        import ray

        if self.returncode is None:
            self.returncode = -signal.SIGKILL
        ray.kill(self._actor)


class RayConnection(MachineConnection):
    """The connection to a node of the run, and to the helper process there.

    Args:
        node: the node.
        group: the placement group, which has bundles on the node.
        show: function that is called with each line printed there after the launcher was started.
        call: Ray's reference to the file with the call; None if the ranks run a script.
    """

    def __init__(self, node: RayNode, group: Any, show: ShowLine, call: Any = None) -> None:
        super().__init__(node, show)
        self.node = node
        self._group = group
        self._call = call

    def _start_program(self, nonce: str) -> HelperProcess:
        """Starts an actor on the node, which starts the helper."""
        return HelperProcess(self.node, self._group, self._module, nonce, self._call)

    def take_outcome(self) -> CallOutcome | None:
        """Returns how the call has ended there; see `HelperProcess.take_outcome`."""
        return self._process.take_outcome() if isinstance(self._process, HelperProcess) else None

    def end(self) -> None:
        """Ends the actor, whose helper has ended."""
        if isinstance(self._process, HelperProcess):
            self._process.kill()

    @property
    def machine_id(self) -> str:
        """A text that identifies the node.

        One machine may have several nodes of Ray, each with its own devices. With the id of the
        node, each counts as a machine, and the user is not warned that a machine was named twice.
        """
        return f"{super().machine_id} {self.node.node_id}"

    def _advice_on_missing_file(self, *, was_copied: bool) -> str:
        """Returns what to do if the run's folder or script is not on the node."""
        return "the folder must be on a disk that all nodes of the cluster share"

    def _failure(self) -> Problem:
        """Returns the error that explains why the helper does not answer."""
        failure = ""
        if isinstance(self._process, HelperProcess):
            failure = self._process.failure

        error_lines = self._error_output.decode(errors="replace").strip().splitlines()
        # Python prints "No module named 'lockstep'" if there is no Lockstep at all, and "No module
        # named 'lockstep.run.machines.helper'" if the helper is missing. The text that both begin
        # with has no closing quote.
        lockstep_is_missing = "No module named 'lockstep" in failure + "".join(error_lines)
        if lockstep_is_missing:
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
