"""`LOCKSTEP_LANG=zh`: what a person reads is Chinese, and what programs read is English."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launched import launch

from lockstep.columns import width_of

pytestmark = pytest.mark.launcher

IN_CHINESE = {**os.environ, "LOCKSTEP_LANG": "zh"}
IN_A_CHINESE_LOCALE = {
    **{name: value for name, value in os.environ.items() if name != "LOCKSTEP_LANG"},
    "LC_ALL": "zh_CN.UTF-8",
}

WRONG_USE = """
import lockstep
from torch import nn
world = lockstep.init()
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
if world.rank == 0:
    print("ready")
world.prepare(model)
"""

DEADLOCK = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(4))
else:
    dist.barrier()
"""


def test_an_error_of_a_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WRONG_USE)
    done = launch(
        ["run", "--nproc", "2", "--log-dir", "logs", "train.py"], cwd=tmp_path, env=IN_CHINESE
    )
    assert done.returncode == 2, done.stderr
    assert "FIRST FAILURE（首个故障）：rank 0-1（主机 " in done.stderr
    assert "    建议：去掉 DistributedDataParallel：world.prepare 会包装普通模型" in done.stderr
    assert "  do: " not in done.stderr


@pytest.mark.thorough
def test_a_hang_in_a_chinese_locale(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DEADLOCK)
    done = launch(
        ["run", "--nproc", "2", "--hang-after", "3", "--log-dir", "logs", "--report", "report"]
        + ["train.py"],
        cwd=tmp_path,
        env=IN_A_CHINESE_LOCALE,
    )
    assert done.returncode == 70, done.stderr
    assert "  死锁：rank 0-1 在不匹配的集合通信中等待" in done.stderr
    assert "怎么办：每个 rank 必须以相同顺序调用相同的集合通信" in done.stderr
    (log,) = (tmp_path / "logs").rglob("hang.json")
    assert log.read_text(encoding="utf-8").isascii()
    # The record, from which the report is made and which other machines may read, is English.
    records = [path.read_text(encoding="utf-8") for path in (tmp_path / "report").iterdir()]
    assert any("deadlock: ranks 0-1 wait" in record for record in records)


@pytest.mark.thorough
def test_a_verdict_of_verify(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "from torch import nn\n"
        "dist.init_process_group('gloo')\n"
        "model = nn.Linear(2, 1)\n"
        "torch.manual_seed(dist.get_rank())\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(4, 2)).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    done = launch(
        ["verify", "--steps", "2", "--json", "verdict.json", "train.py"],
        cwd=tmp_path,
        env=IN_CHINESE,
    )
    assert done.returncode == 1, done.stderr
    assert "DIFFERENT（不同）  2 个进程" in done.stdout
    assert "  详见    lockstep explain LS" in done.stdout
    verdict = json.loads((tmp_path / "verdict.json").read_text(encoding="utf-8"))
    assert verdict["verdict"] == "DIFFERENT"
    assert json.dumps(verdict, ensure_ascii=False).isascii()


@pytest.mark.thorough
def test_what_a_function_has_printed_is_not_translated(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import lockstep, os, sys\n"
        "def train():\n"
        "    print('step 12: all files are there', file=sys.stderr, flush=True)\n"
        "    os._exit(3)\n"
        "if __name__ == '__main__':\n"
        "    lockstep.launch(train, nproc=1)\n"
    )
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=IN_CHINESE, capture_output=True, text=True
    )
    assert "  原因：rank 0（主机 " in done.stderr
    assert "        step 12: all files are there\n" in done.stderr
    assert "它最后的输出：" in done.stderr


def test_the_help_is_translated_and_fits_the_terminal(tmp_path: Path) -> None:
    env = {**IN_CHINESE, "COLUMNS": "80"}
    commands = launch(["--help"], cwd=tmp_path, env=env).stdout
    assert commands.startswith("用法：lockstep [OPTIONS] COMMAND")
    assert "\n  doctor      检查机器是否可以开始训练。\n" in commands
    options = launch(["run", "--help"], cwd=tmp_path, env=env).stdout
    assert "\n多机，通过 ssh：\n" in options
    # The names of options stay, and what click adds is translated, too.
    assert "\n  --seed NUMBER               所有随机数的种子。\n" in options
    assert "[默认：warm]" in options
    assert all(width_of(line) <= 80 for line in options.splitlines() if "# " not in line)
    english = [line for line in options.splitlines() if re.search("[a-z]+ [a-z]+ [a-z]+", line)]
    assert [line for line in english if "lockstep run" not in line] == []


@pytest.mark.thorough
def test_the_lines_of_a_training(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import lockstep, torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "world = lockstep.init()\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)\n"
        "model, optimizer, loader = world.prepare(model, optimizer, loader)\n"
        "for epoch in world.epochs(1):\n"
        "    for (x,) in world.progress(loader):\n"
        "        optimizer.zero_grad()\n"
        "        world.backward(model(x).mean())\n"
        "        optimizer.step()\n"
        "world.close()\n"
    )
    done = launch(["run", "--nproc", "2", "train.py"], cwd=tmp_path, env=IN_CHINESE)
    lines = [line.removeprefix("[rank 0] ") for line in done.stdout.splitlines()]
    assert "Gloo 只用 lo（GLOO_SOCKET_IFNAME：单机）" in done.stderr
    assert lines[0].startswith("lockstep ")
    assert lines[0].endswith(" · 2 个进程（1 台主机）")
    (strategy,) = [line for line in lines if line.startswith("  strategy ")]
    (loader,) = [line for line in lines if line.startswith("  loader 0")]
    # The reasons stand below each other, by the columns of a terminal.
    begin = width_of(strategy.partition("2 个进程")[0])
    assert width_of(loader.partition("每个全局批次")[0]) == begin
    assert "4 / 8" in loader
    assert any(line.startswith("epoch 0  ") and line.endswith(" s") for line in lines)
    assert any(line.startswith("  训练        8 个样本，") for line in lines)


def test_explain_and_a_wrong_language(tmp_path: Path) -> None:
    explained = launch(["explain", "205"], cwd=tmp_path, env=IN_CHINESE)
    assert explained.stdout.startswith("LS205: 对平均值再取平均")
    found = launch(["explain", "滑动平均"], cwd=tmp_path, env=IN_CHINESE)
    assert "LS307" in found.stdout
    misspelled = launch(["explain", "--markdwn", "zh"], cwd=tmp_path, env=IN_CHINESE)
    assert misspelled.returncode == 2
    assert "\n帮助：lockstep explain --help\n\n错误：没有选项 '--markdwn'。" in misspelled.stderr
    refused = launch(
        ["explain", "205"], cwd=tmp_path, env={**os.environ, "LOCKSTEP_LANG": "chinese"}
    )
    assert refused.returncode == 2
    assert "found: languages are en, zh" in refused.stderr
