"""Writes the help of `lockstep run`: examples, followed by the options in groups."""

from __future__ import annotations

import click

from lockstep.language import translate

EXAMPLES = (
    ("lockstep run --nproc 2 train.py --epochs 20", "two processes"),
    ("lockstep run --hosts node1,node2 --nproc gpu train.py", "one per GPU of both"),
    ("lockstep run --ray=auto --nproc 8 train.py", "eight, on a Ray cluster"),
    ("lockstep run --slurm --nodes 2 --gpus-per-node 4 train.py", "a job of Slurm"),
)

GROUPS = {
    "Processes": (
        "nproc",
        "module",
        "launch_file",
        "dry_run",
        "quiet",
        "warm",
        "local_rank_argument",
    ),
    "Several machines, by ssh": ("hosts", "copy", "on_lost", "forward_env", "ssh"),
    "Ray": ("ray",),
    "Slurm": ("slurm", "nodes", "gpus_per_node", "time", "sbatch"),
    "Watching and restarts": (
        "on_hang",
        "hang_after",
        "keep_in_memory",
        "report",
        "trace_step",
        "ledger",
        "journal",
        "journal_every",
    ),
}
"""The names of the options in each group, by title. All other options are training settings."""

TITLE_OF_SETTINGS = "Training settings (what the script leaves unset in lockstep.init)"

TORCHRUN_GROUPS = {
    "Several machines, one command on each": (
        ("--nnodes N|MIN:MAX", "How many machines.  [default: 1]"),
        ("--node-rank N", "The number of this machine, from 0."),
        ("--master-addr HOST", "The address of machine 0."),
        ("--rdzv-endpoint HOST:PORT", "Where the machines meet, with --rdzv-backend c10d."),
    ),
    "Watching and restarts": (
        ("--max-restarts N", "Start all ranks again up to N times after a failure.  [default: 0]"),
        ("--log-dir FOLDER", "Keep the logs there."),
    ),
}
"""The most used flags of torchrun, by the title of their group."""

OTHER_SPELLINGS = ("--nproc-per-node", "--nproc_per_node")
"""torchrun's spellings of an option, which the help leaves out."""

EPILOG = (
    "Every flag of torchrun except --logs-specs is accepted, with torchrun's meaning (see torchrun "
    "--help). Options stand before the script; what follows the script is passed to it. An option "
    "can also be set in lockstep.toml, or in [tool.lockstep] of pyproject.toml."
)


def write_options(command: click.Command, ctx: click.Context, out: click.HelpFormatter) -> None:
    """Writes the examples and the groups of options.

    Args:
        command: the command `lockstep run`.
        ctx: the context of the command.
        out: the formatter to write to.
    """
    with out.section("Examples"):
        width = max(len(example) for example, _ in EXAMPLES)
        for example, comment in EXAMPLES:
            out.write(f"  {example:{width}}  # {translate(comment)}\n")
    rows_of_group = _rows_of_groups(command, ctx)
    for title, rows in rows_of_group.items():
        with out.section(title):
            out.write_dl(rows, col_max=26)


def _rows_of_groups(command: click.Command, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
    """Returns the rows of each group, by title, in the order in which they are shown.

    A row consists of the option and its help text.
    """
    rows: dict[str, list[tuple[str, str]]] = {
        "Processes": [],
        "Several machines, by ssh": [],
        "Several machines, one command on each": [],
        "Ray": [],
        "Slurm": [],
        "Watching and restarts": [],
        TITLE_OF_SETTINGS: [],
    }
    # Torchrun's most important options are shown in some of these groups.
    for title, torchrun_rows in TORCHRUN_GROUPS.items():
        rows[title] += torchrun_rows

    group_of_option = {"help": "Processes"}
    for title, names in GROUPS.items():
        for name in names:
            group_of_option[name] = title

    for param in command.get_params(ctx):
        row = param.get_help_record(ctx)
        if row is None or not isinstance(param, click.Option):  # it is hidden, or an argument
            continue

        # "--nproc, --nproc-per-node, --nproc_per_node N" becomes "--nproc N".
        spellings, text = row
        for spelling in OTHER_SPELLINGS:
            spellings = spellings.replace(f", {spelling}", "")

        title = group_of_option.get(str(param.name), TITLE_OF_SETTINGS)
        rows[title].append((spellings, text))

    return rows
