"""`lockstep doctor`: is this machine fit for a run, and are several together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lockstep.cli.verify import show, write_json
from lockstep.errors import SettingError


@click.command(
    short_help="Says whether this machine is fit for a run.",
    epilog="Exit codes: 0 nothing stands against a run, 1 an error was found.",
    context_settings={"allow_extra_args": True},
)
@click.option("--folder", type=click.Path(path_type=Path), default=Path("."),
              help="Where checkpoints are to go.")  # fmt: skip
@click.option("--fix", is_flag=True, help="Mend what can be mended without root.")
@click.option("--hosts", metavar="HOSTS|FILE",
              help="Look at these machines, and between them.")  # fmt: skip
@click.option("--script", metavar="FILE", help="With --hosts: is it the same everywhere.")
@click.option("--data", metavar="FILE|FOLDER",
              help="With --hosts: is it the same everywhere.")  # fmt: skip
@click.option("--ssh", default="ssh", help="With --hosts: how to call it, such as ssh -F F.")
@click.option("--json", "as_json", metavar="[FILE]", is_flag=False, flag_value="-",
              help="Write the report there, or to stdout.")  # fmt: skip
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
    as_json: str | None,
) -> None:
    """Looks at versions, GPUs, cores, memory, limits, clock, disk and network, in under 30 seconds.

    Each check is one line: ok, warning or error, what was found, and what to do.
    """
    from lockstep import doctor
    from lockstep.run.machines.hosts import ssh_command

    if ctx.args:
        do = f"lockstep doctor --hosts {','.join(filter(None, [hosts, *ctx.args]))}"
        raise SettingError(f"lockstep doctor {' '.join(ctx.args)}", "machines need --hosts", do)
    files = {name: file for name, file in (("script", script), ("data", data)) if file is not None}
    if hosts is not None:
        asked = {"ssh": ssh_command(ssh), "files": files, "fix": fix}
        ctx.exit(_on_hosts(hosts, folder, as_json, asked))
    for name in files:
        raise SettingError(f"--{name}", "there is nothing to compare it with", "add --hosts")
    facts, done = doctor.look(folder, mend=fix)
    findings = doctor.judge(facts)
    show([*(f"fixed    {text}" for text in done), *doctor.lines(findings)], as_json)
    write_json(as_json, doctor.as_json(facts, findings))
    ctx.exit(doctor.exit_code(findings))


def _on_hosts(hosts: str, folder: Path, as_json: str | None, asked: dict[str, Any]) -> int:
    """Prints what is found on and between machines; gives the exit code."""
    from lockstep import doctor
    from lockstep.doctor import between
    from lockstep.doctor.base import Finding
    from lockstep.doctor.hosts import look
    from lockstep.run.machines.hostfile import parse_hosts

    machines, failed = look(parse_hosts(hosts), folder, **asked)
    judged = {name: doctor.judge(facts["checks"]) for name, facts in machines.items()}
    for name, why in failed.items():
        judged[name] = {"reached": why, **judged.get(name, {})}
    if machines:
        judged["between the machines"] = between.judge(machines)
    text = []
    for name, findings in judged.items():
        fixed = [f"fixed    {done}" for done in machines.get(name, {}).get("fixed", ())]
        text += [f"{name}:", *(f"  {line}" for line in [*fixed, *doctor.lines(findings)])]
    show(text, as_json)
    found = {}
    for name, of in judged.items():
        found[name] = {check: dict(zip(Finding._fields, f, strict=True)) for check, f in of.items()}
    write_json(as_json, {"findings": found, "facts": machines})
    return max(doctor.exit_code(findings) for findings in judged.values())
