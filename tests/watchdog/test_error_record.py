"""What a rank writes down about the exception that ends it."""

from __future__ import annotations

import json
import linecache
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from lockstep.errors import SettingError
from lockstep.run.watch.error_record import (
    ErrorRecord,
    Reserve,
    describe_error,
    exit_code,
    read_error,
    record_error,
)
from lockstep.run.watch.evidence import Evidence
from lockstep.run.watch.exit_status import ExitStatus
from lockstep.run.watch.failure_advice import advise

pytestmark = pytest.mark.launcher

RANK_PROGRAM = """
import sys
from pathlib import Path
from lockstep.run.watch.evidence import Evidence
from lockstep.run.watch.error_record import record_error

path = sys.argv[1]
try:
    exec(compile(open(path).read(), path, "exec"), {"__name__": "__main__"})
except BaseException as error:
    record_error(error, Evidence.in_folder(Path(path).parent))
"""


def run_script(tmp_path: Path, code: str, **variables: str) -> ErrorRecord:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(code))
    subprocess.run(
        [sys.executable, "-c", RANK_PROGRAM, str(script)],
        check=True,
        env={"PATH": "", "RANK": "1", **variables},
        stderr=subprocess.PIPE,
    )
    found = read_error(Evidence.in_folder(tmp_path))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("random.py", "import random; random.shuffle([1])"),
        ("numpy.py", "import numpy.linalg"),
        ("train.py", "from train import go"),
        ("csv/__init__.py", "try: import csv.reader\nexcept ImportError: raise ValueError(1)"),
    ],
)
def test_a_file_that_hides_an_installed_module_is_named(
    tmp_path: Path, name: str, code: str
) -> None:
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "train.py").write_text("def go(): ...")
    hiding = tmp_path / name
    hiding.parent.mkdir(exist_ok=True)
    hiding.touch()
    paths = f"import sys; sys.path[0] = {str(tmp_path)!r}; sys.path.append({str(installed)!r})"
    forget = "for name in ('random', 'csv', 'numpy'): sys.modules.pop(name, None)"
    record = run_script(tmp_path, f"{paths}\n{forget}\n{code}")
    assert record.hiding_file == str(hiding)
    end = ExitStatus(rank=0, host="a", time=1.0, code=1, how="exit code 1", error=record)
    (advice,) = advise("exception", end, network_failed=False)
    assert advice.startswith(f"{hiding} is imported in place of the installed module")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("own.py", "import own.part"),
        ("own.py", "import own; own.missing"),
        ("random.py", "raise ValueError"),
        ("random.py", "import nowhere"),
        ("time.py", "import time; time.missing"),  # a module that is built into Python
    ],
)
def test_no_file_is_named_if_it_hides_nothing(tmp_path: Path, name: str, code: str) -> None:
    (tmp_path / name).touch()
    record = run_script(tmp_path, f"import sys; sys.path[0] = {str(tmp_path)!r}\n{code}")
    assert record.hiding_file == ""


@pytest.mark.parametrize(
    ("code", "headline", "line", "expected_code"),
    [
        ("raise ValueError('loss is NaN')", "ValueError: loss is NaN", 1, 1),
        ("raise ValueError", "ValueError", 1, 1),
        ("raise ValueError('one\\ntwo')", "ValueError: one", 1, 1),
        ("import json\njson.loads('{')", "json.decoder.JSONDecodeError: Expecting", 2, 1),
        ("import sys\nsys.exit(3)", "sys.exit(3)", 2, 3),
        ("import sys\nsys.exit('no data')", "sys.exit('no data')", 2, 1),
        ("def f():\n    raise SystemExit(-1)\nf()", "sys.exit(-1)", 2, 255),
        (
            "try:\n    1 / 0\nexcept Exception:\n    raise SystemExit(2)",
            "sys.exit(2) while handling ZeroDivisionError: division by zero",
            2,
            2,
        ),
        (
            "import argparse, sys\np = argparse.ArgumentParser()\np.add_argument('n', type=int)"
            "\np.parse_args(['x'])",
            "sys.exit(2) while handling argparse.ArgumentError: argument n: invalid int",
            4,
            2,
        ),
        ("import os\nx = 1\n(", "SyntaxError: '(' was never closed", 3, 1),
        ("class E(Exception):\n    def __str__(self):\n        1 / 0\nraise E", "E: (its", 4, 1),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", 1, -2),
        (
            "try:\n    1 / 0\nexcept Exception as error:\n    raise SystemExit(1) from error",
            "sys.exit(1) while handling ZeroDivisionError: division by zero",
            2,
            1,
        ),
    ],
)
def test_an_exception_is_recorded_with_its_line_and_exit_code(
    tmp_path: Path, code: str, headline: str, line: int, expected_code: int
) -> None:
    found = run_script(tmp_path, code)
    assert found.headline.startswith(headline)
    assert found.line == f"train.py:{line}: {code.splitlines()[line - 1].strip()}"
    assert found.exit_code == expected_code
    assert "Error" not in headline or "Traceback" in found.traceback or "Syntax" in headline


def test_the_users_own_line_is_the_innermost(tmp_path: Path) -> None:
    found = run_script(
        tmp_path,
        """
        import statistics

        def main():
            return statistics.mean([])

        main()
        """,
    )
    assert found.type == "statistics.StatisticsError"
    assert found.line == "train.py:5: return statistics.mean([])"


def test_a_second_init_process_group_has_advice() -> None:
    record = describe_error(ValueError("trying to initialize the default process group twice!"))
    end = ExitStatus(rank=0, host="a", time=1.0, code=1, how="exit code 1", error=record)
    (advice,) = advise("exception", end, network_failed=False)
    assert "not at all where lockstep.init is called" in advice


def test_the_record_names_the_exceptions_that_came_before(tmp_path: Path) -> None:
    found = run_script(
        tmp_path,
        """
        try:
            try:
                {}["key"]
            except KeyError as error:
                raise RuntimeError("Connection closed by peer") from error
        except RuntimeError:
            raise ValueError("training failed") from None
        """,
    )
    assert found.chain == ("RuntimeError: Connection closed by peer", "KeyError: 'key'")


def test_an_exception_group_is_recorded_as_its_first_exception(tmp_path: Path) -> None:
    found = run_script(
        tmp_path,
        """
        import asyncio

        async def read(name):
            raise OSError(f"{name} is broken")

        async def main():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(read("a"))
                tasks.create_task(read("b"))

        try:
            asyncio.run(main())
        except ExceptionGroup as group:
            raise ExceptionGroup("an epoch", [group]) from None
        """,
    )
    where = "(the only exception in ExceptionGroup: an epoch)"
    assert found.headline == f"OSError: a is broken {where}"
    assert found.line == 'train.py:5: raise OSError(f"{name} is broken")'
    assert (found.type, found.message, found.exit_code) == ("OSError", "a is broken", 1)
    assert "b is broken" in found.traceback


def test_an_exception_group_whose_exceptions_were_never_raised_has_its_own_line() -> None:
    try:
        raise ExceptionGroup("bad samples", [ValueError("3"), ValueError("5")])
    except ExceptionGroup as group:
        made = describe_error(group)
    where = "(the first of 2 exceptions in ExceptionGroup: bad samples)"
    assert made.headline == f"ValueError: 3 {where}"
    assert made.line is not None
    assert 'raise ExceptionGroup("bad samples"' in made.line


def test_sys_exit_while_handling_a_group_names_the_exception_in_it() -> None:
    try:
        try:
            raise ExceptionGroup("tasks", [ValueError("3")])
        except ExceptionGroup as group:
            raise SystemExit(2) from group
    except SystemExit as end:
        made = describe_error(end)
    assert made.headline == "sys.exit(2) while handling ValueError: 3"


def test_a_very_long_message_keeps_both_of_its_ends() -> None:
    made = describe_error(ValueError(f"bad batch {'x' * 2_000_000} of sample 7"))
    assert made.headline.startswith("ValueError: bad batch xxx")
    assert made.message.endswith("of sample 7")
    assert "characters are left out here" in made.message
    assert len(json.dumps(made.__dict__)) < 500_000


PROGRAM_WITH_RESERVE = """
import resource, sys
from pathlib import Path
from lockstep.run.watch.evidence import Evidence
from lockstep.run.watch.error_record import Reserve, record_error

folder = Path(sys.argv[1])
reserve = Reserve()
held = []
try:
    exec(compile((folder / "train.py").read_text(), folder / "train.py", "exec"))
except BaseException as error:
    reserve.release()
    record_error(error, Evidence.in_folder(folder))
"""


@pytest.mark.parametrize(
    ("code", "headline", "line"),
    [
        (
            "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
            "while True:\n    held.append(open('/dev/null'))",
            "OSError: [Errno 24] Too many open files",
            "train.py:3: held.append(open('/dev/null'))",
        ),
        (
            "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
            "resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20),) * 2)\n"
            "while True:\n    held.append(bytearray(1 << 16))",
            "MemoryError",
            "train.py:4: held.append(bytearray(1 << 16))",
        ),
    ],
    ids=["descriptors", "memory"],
)
def test_a_rank_without_descriptors_or_memory_can_still_record_its_error(
    tmp_path: Path, code: str, headline: str, line: str
) -> None:
    (tmp_path / "train.py").write_text(code)
    arguments = [sys.executable, "-c", PROGRAM_WITH_RESERVE, str(tmp_path)]
    subprocess.run(arguments, check=True, stderr=subprocess.PIPE)
    found = read_error(Evidence.in_folder(tmp_path))
    assert found is not None
    assert found.headline.startswith(headline)
    assert found.line == line


def test_the_reserve_does_not_close_a_descriptor_that_the_program_uses(tmp_path: Path) -> None:
    reserve = Reserve()
    with open(tmp_path / "own", "w") as file:
        os.dup2(file.fileno(), reserve._descriptor)
    reserve.release()
    os.fstat(reserve._descriptor)
    os.close(reserve._descriptor)


PROGRAM_WITH_DATA_LOADER = """
import torch.utils.data

class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise ValueError(f"bad image {index}")

if __name__ == "__main__":
    for batch in torch.utils.data.DataLoader(Images(), num_workers=1):
        pass
"""


def test_an_error_in_a_data_loader_worker_is_recorded_with_its_own_line(tmp_path: Path) -> None:
    found = run_script(tmp_path, PROGRAM_WITH_DATA_LOADER, OMP_NUM_THREADS="1")
    assert found.headline == "ValueError: bad image 0 (in DataLoader worker process 0)"
    assert found.line == 'train.py:9: raise ValueError(f"bad image {index}")'


PROGRAM_WITH_POOL = """
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

def read(index):
    try:
        return {}[index]
    except KeyError as error:
        raise ValueError(f"bad image {index}") from error

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(sys.argv[1]))
    import train  # as the workers find the function by the name of its module

    context = multiprocessing.get_context("fork")
    with %s as pool:
        for image in pool.map(train.read, range(1)):
            pass
"""


@pytest.mark.parametrize("pool", ["context.Pool(1)", "ProcessPoolExecutor(1, context)"])
def test_an_error_in_a_process_of_a_pool_is_recorded_with_its_own_line(
    tmp_path: Path, pool: str
) -> None:
    """Its traceback is a text, in the exception that the pool makes its cause."""
    found = run_script(tmp_path, PROGRAM_WITH_POOL % pool)
    assert found.headline == "ValueError: bad image 0 (in a worker process)"
    assert found.line == 'train.py:11: raise ValueError(f"bad image {index}") from error'
    assert found.message == "bad image 0"
    assert found.chain == ("KeyError: 0",)


class RemoteTraceback(Exception):
    """Stands for the class of this name in `multiprocessing.pool`."""


def test_the_line_of_a_worker_is_named_after_the_script_has_caught_its_error() -> None:
    """The script calls `sys.exit` in its `except` block."""
    error = ValueError("no data")
    error.__cause__ = RemoteTraceback(
        "Traceback (most recent call last):\n"
        '  File "worker.py", line 5, in read\n'
        "ValueError: no data"
    )
    exit = SystemExit(1)
    exit.__context__ = error
    made = describe_error(exit)
    assert made.headline == "sys.exit(1) while handling ValueError: no data (in a worker process)"
    assert made.line == "worker.py:5"


MESSAGE_OF_SPAWN = """

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "worker.py", line 5, in work
    raise ValueError("two lines")
ValueError: two
lines
"""


def test_an_error_in_a_spawned_process_is_recorded_with_its_own_headline() -> None:
    """As `mp.spawn` raises it."""
    made = describe_error(RuntimeError(MESSAGE_OF_SPAWN))
    assert made.headline == "ValueError: two (in process 1)"
    assert made.line == "worker.py:5"


def test_what_fails_before_the_program_begins_has_no_line() -> None:
    code = compile("raise ImportError('No module named no')", "<frozen importlib.util>", "exec")
    with pytest.raises(ImportError) as caught:
        exec(code)
    error = caught.value
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
    assert describe_error(error).line is None


def test_an_error_of_lockstep_keeps_its_line_and_exit_code() -> None:
    made = describe_error(SettingError("shares 1:2", "3 ranks", "give 3 shares"))
    assert (made.type, made.exit_code, made.from_lockstep) == ("SettingError", 2, True)
    assert made.headline == "SettingError: shares 1:2"
    assert "do:    give 3 shares" in made.message


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError(), 1),
        (SystemExit(), 0),
        (SystemExit(4), 4),
        (SystemExit("text"), 1),
        (SystemExit(256), 0),  # as under Python: of a number the system takes 8 bits,
        (SystemExit(2**70), 255),  # and -1 for one that is too large for C
        (SettingError("a", "b", "c"), 2),
    ],
)
def test_exit_codes_are_those_of_the_interpreter(error: BaseException, code: int) -> None:
    assert exit_code(error) == code


def test_the_error_file_of_torch_elastic_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elastic = tmp_path / "elastic.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(elastic))
    record_error(ValueError("loss is NaN"), Evidence.in_folder(tmp_path))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(elastic))
    message: Any = failure.message
    assert message["message"] == "ValueError: loss is NaN"
    assert failure.timestamp > 0
    written = elastic.read_text()
    record_error(ValueError("another"), Evidence.in_folder(tmp_path))
    assert elastic.read_text() == written  # torch's own `record` was there first
    elastic.unlink()
    record_error(SystemExit(3), Evidence.in_folder(tmp_path))
    assert not elastic.exists()


def test_recording_never_raises(tmp_path: Path) -> None:
    record_error(ValueError("x"), Evidence.in_folder(tmp_path / "missing"))
    assert read_error(Evidence.in_folder(tmp_path)) is None


def test_a_record_of_a_newer_version_is_read_without_what_is_new_in_it(tmp_path: Path) -> None:
    evidence = Evidence.in_folder(tmp_path)
    record_error(ValueError("x"), evidence)
    record = json.loads(evidence.error.read_text())
    evidence.error.write_text(json.dumps({**record, "new": [1]}))
    found = read_error(evidence)
    assert found is not None
    assert found.headline == "ValueError: x"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"type": "x"}', '{"unknown": 1}'])
def test_a_file_that_is_not_a_record_reads_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "error.json").write_text(text)
    assert read_error(Evidence.in_folder(tmp_path)) is None


def test_the_file_is_json_and_nothing_else_is_left(tmp_path: Path) -> None:
    record_error(ValueError("x"), Evidence.in_folder(tmp_path))
    values = json.loads((tmp_path / "error.json").read_text())
    assert (values["type"], values["message"]) == ("ValueError", "x")
    assert list(tmp_path.iterdir()) == [tmp_path / "error.json"]
    linecache.checkcache()
