"""Implements `lockstep doctor`: checks whether one or several machines are ready for a run.

A check of a machine, such as that of its clock, returns a *finding*: a level (ok, warning or
error), what was found, and what to do. *Facts* are the measurements from which a finding is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.output import print_for_people, write_json
from lockstep.columns import pad
from lockstep.errors import SettingError
from lockstep.language import translate

if TYPE_CHECKING:
    from lockstep.doctor.base import Finding

BETWEEN_MACHINES = "between the machines"
"""The section on their differences."""
REACHED_CHECK = "reached"
"""The name under which the failure of a machine stands among its checks."""


@click.command(
    short_help="Checks whether machines are ready for a run.",
    epilog="Exit code 0: ready to run; 1: a check failed.",
    context_settings={"allow_extra_args": True},
)
@click.option("--folder", type=click.Path(path_type=Path), default=Path("."),
              help="The folder for checkpoints, whose disk is checked.")  # fmt: skip
@click.option("--fix", is_flag=True, help="Fix what can be fixed without root.")
@click.option("--hosts", metavar="HOSTS|FILE",
              help="Check these machines and the links between them.")  # fmt: skip
@click.option(
    "--script", metavar="FILE", help="With --hosts: check that it is the same everywhere."
)
@click.option("--data", metavar="FILE|FOLDER",
              help="With --hosts: check that they are the same everywhere.")  # fmt: skip
@click.option(
    "--ssh", default="ssh", help="With --hosts: the ssh command, such as 'ssh -F config'."
)
@click.option("--json", "json_file", metavar="[FILE]", is_flag=False, flag_value="-",
              help="Write the report to FILE, or to stdout.")  # fmt: skip
@click.pass_context
def command(
    ctx: click.Context,
    /,
    folder: Path,
    fix: bool,
    hosts: str | None,
    script: str | None,
    data: str | None,
    ssh: str,
    json_file: str | None,
) -> None:
    """Checks versions, GPUs, cores, memory, limits, clock, disk and network in under 30 seconds.

    Each check is one line: ok, warning or error, what was found, and what to do.
    """
    # This command takes options only. If there are arguments, the user has probably named machines
    # without --hosts, `lockstep doctor a b`, or without commas, `lockstep doctor --hosts a b`.
    if ctx.args:
        machines = [hosts, *ctx.args] if hosts else ctx.args
        do = f"lockstep doctor --hosts {','.join(machines)}"
        raise SettingError(f"lockstep doctor {' '.join(ctx.args)}", "machines need --hosts", do)

    files = {}  # the files to compare on all machines
    if script is not None:
        files["script"] = script
    if data is not None:
        files["data"] = data

    if hosts is None and files:
        first_option = next(iter(files))
        raise SettingError(
            f"--{first_option}", "there is nothing to compare it with", "add --hosts"
        )

    if hosts is None:
        exit_code = _examine_this_machine(folder, fix, json_file)
    else:
        exit_code = _examine_hosts(hosts, folder, ssh, files, fix, json_file)
    ctx.exit(exit_code)


def _examine_this_machine(folder: Path, fix: bool, json_file: str | None) -> int:
    """Prints the findings about this machine, and returns the exit code.

    Args:
        folder: the folder for checkpoints.
        fix: whether to repair what can be repaired.
        json_file: the file for the report, see `write_json`.
    """
    from lockstep import doctor

    facts, repairs = doctor.examine(folder, repair=fix)
    findings = doctor.judge(facts)
    print_for_people(_report_lines(findings, repairs), json_file)
    write_json(json_file, doctor.as_json(facts, findings))
    return doctor.exit_code(findings)


def _examine_hosts(
    hosts: str, folder: Path, ssh: str, files: Mapping[str, str], fix: bool, json_file: str | None
) -> int:
    """Prints the findings about several machines and the links between them.

    Args:
        hosts: the machines, or the name of a hostfile.
        folder: the folder for checkpoints.
        ssh: the ssh command.
        files: the files to compare on all machines: `script`, a file, and `data`, a file or folder.
        fix: whether to repair on each machine what can be repaired.
        json_file: the file for the report, see `write_json`.

    Returns:
        The exit code.
    """
    from lockstep import doctor
    from lockstep.doctor import hosts as doctor_hosts
    from lockstep.run.machines.hostfile import parse_hosts
    from lockstep.run.machines.ssh_command import SshCommand

    facts_of_machine, failures = doctor_hosts.examine(
        parse_hosts(hosts), folder, SshCommand.parse(ssh), files=files, fix=fix
    )

    report = []
    findings_as_json = {}
    sections = _findings_by_section(facts_of_machine, failures)
    for title, findings in sections.items():  # the title is a machine's name, or BETWEEN_MACHINES
        if title == BETWEEN_MACHINES:
            heading = translate(title)
            repairs = ()
        else:
            heading = title
            # A machine that did not answer has no facts, and so no repairs.
            repairs = facts_of_machine.get(title, {}).get("fixed", ())

        report.append(f"{heading}:")
        report += [f"  {line}" for line in _report_lines(findings, repairs)]
        findings_as_json[title] = {check: each._asdict() for check, each in findings.items()}

    print_for_people(report, json_file)
    write_json(json_file, {"findings": findings_as_json, "facts": facts_of_machine})

    return max(doctor.exit_code(findings) for findings in sections.values())


def _findings_by_section(
    facts_of_machine: Mapping[str, Mapping[str, Any]], failures: Mapping[str, Finding]
) -> dict[str, dict[str, Finding]]:
    """Returns the sections of the report: one for each machine, and one about their differences.

    Args:
        facts_of_machine: the answers of each machine, by its name.
        failures: the finding about each machine that has failed, by its name. Such a machine may
            have answered some requests before.

    Returns:
        The findings of each section, by the name of the check.
    """
    from lockstep.doctor import judge as judge_machine
    from lockstep.doctor.comparison import judge as judge_differences

    sections: dict[str, dict[str, Finding]] = {}
    for machine, facts in facts_of_machine.items():
        sections[machine] = judge_machine(facts["checks"])

    # The failure comes first. The findings that the machine has sent before it failed follow.
    for machine, failure in failures.items():
        sections[machine] = {REACHED_CHECK: failure, **sections.get(machine, {})}

    if facts_of_machine:
        sections[BETWEEN_MACHINES] = judge_differences(facts_of_machine)

    return sections


def _report_lines(findings: Mapping[str, Finding], repairs: Iterable[str]) -> list[str]:
    """Returns a line for each repair, followed by the lines of the findings.

    Args:
        findings: the findings, by the name of the check.
        repairs: texts that describe the repairs that were made.
    """
    from lockstep import doctor

    fixed = pad(translate("fixed"), doctor.LEVEL_WIDTH)
    repair_lines = [f"{fixed}{translate(repair)}" for repair in repairs]
    return [*repair_lines, *doctor.format_findings(findings)]
