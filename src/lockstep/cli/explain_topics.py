"""Topics that people look up with `lockstep explain` and that have no code, such as "deadlock".

A topic has the words that lead to it, a short answer, and the page of the documentation with the
rest.
"""

from __future__ import annotations

from dataclasses import dataclass

EXIT_CODES = ("70", "71")
"""Exit codes that may be looked up. Smaller numbers stand for groups of codes: 2 for LS2."""


@dataclass(frozen=True)
class Topic:
    """One topic."""

    # English and Chinese words that lead to it, in lower case. The first is its name.
    words: tuple[str, ...]
    # One paragraph.
    text: str
    # The page of the documentation, without ".md" and its folder, and the heading in it.
    page: str

    @property
    def name(self) -> str:
        """The word that the list of topics shows."""
        return self.words[0]


TOPICS = (
    Topic(
        ("deadlock", "hang", "hangs", "hung", "stall", "stuck", "timeout", "watchdog", "死锁")
        + ("挂起", "卡死", "卡住", "超时"),
        "A deadlock is a hang in which ranks wait for each other, most often in collectives that "
        "do not match: one rank alone evaluates, saves or skips a batch. The verdict of lockstep "
        "run names the line in which each rank waits. Have all ranks reach the same collectives in "
        "the same order.",
        "troubleshooting#the-verdicts",
    ),
    Topic(
        ("straggler", "slow", "slower", "speed", "慢", "掉队"),
        "A straggler is a rank that comes last in nearly every step, so that the others wait for "
        "it. Train with lockstep run --report FOLDER; lockstep report FOLDER then shows where each "
        "rank spends the time of a step. --shares auto gives slower ranks smaller parts of the "
        "batch.",
        "report",
    ),
    Topic(
        ("exit", "exit_code", "code", "codes", "status", *EXIT_CODES, "退出码"),
        "The exit code of lockstep run is that of the first failure: 1 an exception of the script, "
        "2 incorrect use of Lockstep, 3 ranks that could not connect, 4 ranks that differ, 70 a "
        "deadlock, 71 a lost rank, and 128 + N for signal N.",
        "troubleshooting#exit-codes",
    ),
    Topic(
        ("failure", "crash", "failed", "killed", "restart", "restarts", "失败", "崩溃", "重启"),
        "When a rank fails, all ranks are ended, and the last lines, FIRST FAILURE, name the rank "
        "and the line that failed first. With --max-restarts the ranks are started again, from the "
        "last step that is kept in memory or from the last checkpoint.",
        "failures",
    ),
    Topic(
        (
            "checkpoint",
            "checkpoints",
            "load",
            "resume",
            "save",
            "断点",
            "断点续训",
            "检查点",
            "恢复",
        ),
        "world.checkpoint(FOLDER, model=model, optimizer=optimizer, loader=loader) saves, and its "
        "resume() continues from the latest checkpoint, on any number of processes. lockstep "
        "checkpoint inspects, compares, converts and repairs what is saved.",
        "checkpoints",
    ),
    Topic(
        ("batch_size", "batch", "batchsize", "批次", "全局批次"),
        "batch_size is that of the global batch: the samples of one optimizer step over all "
        "processes. It stays the same on any number of them, and so does the learning rate.",
        "global_batch",
    ),
    Topic(
        ("memory", "oom", "内存", "显存"),
        "Where a step does not fit into memory: micro_batch_size computes it in parts with the "
        'same result ("auto" finds how large they may be), precision="bf16" halves activations, '
        "the strategy fsdp divides the weights and the optimizer state among the processes.",
        "large_models",
    ),
    Topic(
        (
            "network",
            "connection",
            "gloo",
            "interface",
            "nccl",
            "port",
            "ssh",
            "tcp",
            "网络",
            "端口",
        ),
        "lockstep doctor --hosts A,B checks machines and the links between them before a run. "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network interface if Lockstep chooses "
        "another one.",
        "several_machines#when-it-does-not-work",
    ),
    Topic(
        ("settings", "environment", "init", "options", "precision", "seed", "strategy", "variables")
        + ("设置", "选项", "环境变量"),
        "A setting is an argument of lockstep.init, an option of lockstep run, an environment "
        "variable LOCKSTEP_..., or a key in lockstep.toml.",
        "reference#settings",
    ),
    Topic(
        ("verify", "different", "equal", "对比", "验证"),
        "lockstep verify runs a script on one process and on several, and compares what they "
        "compute step by step. DIFFERENT names the first difference and its cause, with a code "
        "such as LS205 that lockstep explain tells more about.",
        "verify",
    ),
)


def find_topic(query: str) -> Topic | None:
    """Returns the topic that one of these words leads to; None if none of them does."""
    for word in query.lower().split():
        for topic in TOPICS:
            if word in topic.words:
                return topic
    return None
