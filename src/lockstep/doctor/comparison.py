"""Compares the machines of a run: their versions, clocks, links, folders and data.

`machines` is always a dictionary with the *facts* of each machine, which `hosts.examine` has
collected, by the name that the user gave the machine. Facts that a machine could not provide have
the single key `UNKNOWN`, with the reason. Each comparison returns a *finding*: what differs, and
what to do. All functions are pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.communication.link import Link
from lockstep.doctor.base import ERROR, OK, UNKNOWN, WARNING, Facts, Finding, join_findings
from lockstep.machine.network import is_loopback_address
from lockstep.run.machines.hosts import NAMES_OF_ONE_MACHINE
from lockstep.units import format_number
from lockstep.wording import count_noun, join_and_count

VERSIONS = ("python", "torch", "cuda", "rocm", "nccl", "lockstep")
MAX_SHOWN_DIFFERENCES = 5
MAX_SHOWN_MACHINES = 3
CLOCK_OFFSET_OF_WARNING_S = 1.0
CLOCK_OFFSET_OF_ERROR_S = 60.0
"""A clock that differs by more than these seconds is reported as a warning, or as an error."""
MAX_BANDWIDTH_RATIO = 10.0
"""If the fastest link is more than this many times as fast as the slowest, the slowest is probably
broken. A busy machine makes a smaller difference."""

Machines = Mapping[str, Facts]
"""The facts of each machine: `own` (its address), `clock` (by how many seconds its clock is ahead
of this machine's), `links` (to the other machines), `checks` (the facts of each check of `doctor`),
`resolved` (the addresses of all machines' names), `script`, `data`, and `shared` (True if it sees
the file that the first machine wrote; None on the first machine if it could not write). If a
machine stopped answering, the later ones are missing."""
NO_ANSWER = {UNKNOWN: "it did not answer"}
"""Used in place of facts that a machine has not provided."""

ADVICE_ON_NAMES = "give the address instead of the name, or write it into /etc/hosts there"
ADVICE_ON_SCRIPT = "copy it, as lockstep run --copy does"
ADVICE_ON_DATA = "copy it from one machine to the others (rsync -a), or mount the same disk on all"


def judge(machines: Machines) -> dict[str, Finding]:
    """Returns all findings about the machines of a run, by the name of what is compared.

    The script and the data set are only compared if the user has named them.
    """
    # "names" are the host names of the machines, and "folder" is the folder for checkpoints.
    findings = {
        "versions": _judge_versions(machines),
        "packages": _judge_packages(machines),
        "variables": _judge_variables(machines),
        "clocks": _judge_clocks(machines),
        "names": _judge_names(machines),
        "links": _judge_links(machines),
        "folder": _judge_folder(machines),
        "token": _judge_token(machines),
    }
    if any("script" in facts for facts in machines.values()):
        findings["script"] = _judge_script(machines)
    if any("data" in facts for facts in machines.values()):
        findings["data"] = _judge_data(machines)
    return findings


def _differences(values_of_machine: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Describes each value that differs between machines: `numpy 2.1 on a, 2.2 on b, c`.

    If a machine does not have a value, its value is "none".

    Args:
        values_of_machine: the values of each machine, by the name of the machine and of the value.
    """
    names: dict[str, None] = {}  # used as a set that keeps the order
    for values in values_of_machine.values():
        names.update(dict.fromkeys(values))

    differences = []
    for name in names:
        # The machines with each value: {"2.1": ["a"], "2.2": ["b", "c"]}.
        machines_with_value: dict[str, list[str]] = defaultdict(list)
        for machine, values in values_of_machine.items():
            value = values.get(name)
            text = "none" if value is None else str(value)
            machines_with_value[text].append(machine)

        if len(machines_with_value) > 1:
            parts: list[str] = []
            for text, machines in machines_with_value.items():
                parts.append(f"{text} on {_name_machines(machines)}")
            differences.append(f"{name} {', '.join(parts)}")

    return differences


def _name_machines(machines: Sequence[str]) -> str:
    """Lists the first few machines and the number of the others: `a, b, c and 2 more`."""
    return join_and_count(machines, MAX_SHOWN_MACHINES)


def _join_differences(differences: Sequence[str]) -> str:
    """Joins the first few differences, and adds the number of the others: `...; ...; and 2
    more`.
    """
    text = "; ".join(differences[:MAX_SHOWN_DIFFERENCES])
    num_more = len(differences) - MAX_SHOWN_DIFFERENCES
    return f"{text}; and {num_more} more" if num_more > 0 else text


def _compare(
    facts_of_machine: Mapping[str, Facts], *, level: str, do: str, if_equal: str
) -> Finding:
    """Compares facts that should be equal on all machines.

    Machines whose facts are not known are listed in the finding, as a warning.

    Args:
        facts_of_machine: the facts of each machine, by the name of the machine.
        level: the level of the finding if facts differ.
        do: the advice of the finding if facts differ.
        if_equal: the text of the finding if nothing differs and all machines have answered.
    """
    known = {}
    unknown = []
    for machine, facts in facts_of_machine.items():
        if UNKNOWN in facts:
            unknown.append(machine)
        else:
            known[machine] = facts

    problems = []
    differences = _differences(known)
    if differences:
        problems.append(Finding(level, f"differs: {_join_differences(differences)}", do))
    problems += _warnings_about_unknown(unknown)

    if not problems:
        return Finding(OK, if_equal)
    return join_findings("", problems)


def _warnings_about_unknown(machines: Sequence[str]) -> list[Finding]:
    """Returns a warning about machines whose facts are not known, in a list.

    The list is empty if there are no such machines.
    """
    if not machines:
        return []
    do = "see the other findings about that machine"
    return [Finding(WARNING, f"not known of {_name_machines(machines)}", do)]


def _facts_of_check(machines: Machines, check: str) -> dict[str, Facts]:
    """Returns the facts of one check, by the name of the machine."""
    return {name: facts["checks"].get(check, NO_ANSWER) for name, facts in machines.items()}


def _one_fact(facts: Facts, name: str) -> Facts:
    """Returns one fact of a machine as a mapping, which is the form that `_compare` expects.

    A single value becomes a mapping with that value: `{"digest": "12ab"}`. If the facts are not
    known, they are returned as they are, as `_compare` recognizes their key `UNKNOWN`.
    """
    if UNKNOWN in facts:
        return facts
    value = facts.get(name)
    if isinstance(value, Mapping):
        return value
    return {name: value}


def _judge_versions(machines: Machines) -> Finding:
    """Finds versions of Python, torch, CUDA, NCCL and Lockstep that differ."""
    compared = {}
    for name, software in _facts_of_check(machines, "software").items():
        # `UNKNOWN` is kept, as `_compare` needs it.
        keys = [key for key in software if key in VERSIONS or key == UNKNOWN]
        compared[name] = {key: software[key] for key in keys}

    return _compare(
        compared,
        level=ERROR,
        do="install the same everywhere, at the same path",
        if_equal="the same Python, torch, CUDA, NCCL and Lockstep everywhere",
    )


def _judge_packages(machines: Machines) -> Finding:
    """Finds installed packages whose versions differ."""
    packages = {}
    for name, software in _facts_of_check(machines, "software").items():
        packages[name] = _one_fact(software, "packages")

    # `if_equal` is only shown if all machines have the same packages, so the number is taken from
    # any of them.
    answered = [versions for versions in packages.values() if UNKNOWN not in versions]
    num_packages = len(answered[0]) if answered else 0
    return _compare(
        packages,
        level=WARNING,
        do="make the same environment everywhere",
        if_equal=f"the same {num_packages} everywhere",
    )


def _judge_variables(machines: Machines) -> Finding:
    """Finds environment variables whose values differ, except those that are specific to a
    machine.
    """
    compared = {}
    for name, variables in _facts_of_check(machines, "variables").items():
        keys = [key for key in variables if key not in NAMES_OF_ONE_MACHINE]
        compared[name] = {key: variables[key] for key in keys}

    # Variables that `lockstep run --hosts` sends to all machines, such as NCCL_DEBUG, already have
    # the value of the machine on which doctor runs: see `forwarded` in `hosts`.
    return _compare(
        compared,
        level=WARNING,
        do="set them to the same values; those that lockstep run --hosts sends from here count as "
        "set on each machine",
        if_equal="those of torch and its libraries are the same everywhere",
    )


def _judge_clocks(machines: Machines) -> Finding:
    """Finds clocks that differ from the clock of this machine.

    The fact `clock` is the number of seconds by which a machine's clock is ahead. It may be missing
    if the machine stopped answering.
    """
    offset_s = {name: facts["clock"] for name, facts in machines.items() if "clock" in facts}
    largest_s = max((abs(seconds) for seconds in offset_s.values()), default=0.0)
    if largest_s <= CLOCK_OFFSET_OF_WARNING_S:
        measured_s = max(largest_s, 0.001)  # the measurement is not more precise than that
        return Finding(OK, f"within {measured_s:.3f} s of this machine")

    wrong_clocks = []
    for name, seconds in offset_s.items():
        if abs(seconds) > CLOCK_OFFSET_OF_WARNING_S:
            direction = "ahead of" if seconds > 0 else "behind"
            wrong_clocks.append(f"{name} is {abs(seconds):.1f} s {direction} this machine")

    return Finding(
        ERROR if largest_s > CLOCK_OFFSET_OF_ERROR_S else WARNING,
        _join_differences(wrong_clocks),
        "timedatectl set-ntp true, or start chrony, as root",
    )


def _judge_names(machines: Machines) -> Finding:
    """Finds names of machines that another machine cannot look up, or that lead to loopback.

    A run uses the address that each machine has given for itself (its fact `own`). Whether the
    others can look up its name only matters if it gave none.

    If machine `a` cannot look up `c`, the line for three machines is "names  those of 3 machines
    looked up on each; not all know c: a run uses the address".
    """
    problems: list[Finding] = []
    observers_without_answer: list[str] = []
    reached_by_address: list[str] = []  # names that not all machines can look up
    for observer, facts in machines.items():
        # What the observer got when it looked up the name of each machine.
        addresses_of_target = facts.get("resolved", NO_ANSWER)
        if UNKNOWN in addresses_of_target:
            observers_without_answer.append(observer)
            continue

        for target, addresses in addresses_of_target.items():
            is_known = bool(addresses)
            if is_known:
                problems += _problems_of_addresses(observer, target, addresses, machines)
            elif machines[target]["own"]:
                reached_by_address.append(target)
            else:
                problems.append(_unknown_name(observer, target))

    summary = f"those of {count_noun(len(machines), 'machine')} looked up on each"
    if reached_by_address:
        names = _name_machines(list(dict.fromkeys(reached_by_address)))  # each once
        summary += f"; not all know {names}: a run uses the address"

    return join_findings(summary, [*_warnings_about_unknown(observers_without_answer), *problems])


def _unknown_name(machine: str, name: str) -> Finding:
    """Returns the finding about a machine that cannot look up the name of another one."""
    found = f"{machine} does not know {name}"
    return Finding(ERROR, found, ADVICE_ON_NAMES)


def _problems_of_addresses(
    machine: str, name: str, addresses: Sequence[str], machines: Machines
) -> list[Finding]:
    """Returns a finding if the addresses that a machine has looked up for a name are loopback.

    At loopback, a machine only reaches itself. That is wrong for the name of another machine, and
    unusual for its own name. In a run on one machine it is right.
    """
    is_loopback = all(is_loopback_address(address) for address in addresses)
    if not is_loopback or len(machines) == 1:
        return []

    found = f"on {machine}, {name} is {addresses[0]}: loopback"
    level = WARNING if name == machine else ERROR
    return [Finding(level, found, ADVICE_ON_NAMES)]


@dataclass(frozen=True)
class _MeasuredLink:
    """A link between two machines that works, in one direction."""

    direction: str
    """`a to b`."""
    bandwidth: float
    """Bytes per second."""
    latency_s: float


def _judge_links(machines: Machines) -> Finding:
    """Finds links that do not work, that only carry short messages, or that are very slow.

    Each machine has tried to connect to every other one, and has measured the links to a few.
    """
    problems = []
    measured = []
    interfaces = set()  # the network interfaces that the links use
    num_tried = 0
    for machine, facts in machines.items():
        # `links` is by the name of the other machine. A link that was only tried has an `error`,
        # which is empty if it works. One that was measured has the result of `helper.measure`.
        for other_machine, link in facts["links"].items():
            num_tried += 1
            direction = f"{machine} to {other_machine}"
            if link.get("interface"):
                interfaces.add(link["interface"])

            problem = _link_problem(direction, link)
            if problem is not None:
                problems.append(problem)
            elif "bandwidth" in link:
                measured.append(_MeasuredLink(direction, link["bandwidth"], link["latency_s"]))

    problems = _hide_most_texts(problems)
    if not measured:
        # A single machine has no links. Of several, none could be measured.
        summary = "one machine" if len(machines) == 1 else "none"
        return join_findings(summary, problems)

    slowest = min(measured, key=lambda link: link.bandwidth)
    latency_s = max(link.latency_s for link in measured)
    bandwidth = str(Link(latency_s, slowest.bandwidth))  # a link is written as `960 Mb/s`
    summary = f"at least {bandwidth} (and {format_number(latency_s * 1e3, 2)} ms) each way"

    # Each pair of machines has two links, one in each direction.
    num_links = len(machines) * (len(machines) - 1)
    if len(measured) != num_links:
        summary += f", {num_tried} of {num_links} ways tried, {len(measured)} measured"

    if interfaces:
        summary += f", over {', '.join(sorted(interfaces))}"

    problems += _warnings_about_slow_link(measured)
    return join_findings(summary, problems)


def _warnings_about_slow_link(measured: Sequence[_MeasuredLink]) -> list[Finding]:
    """Returns a warning, in a list, if the slowest link is much slower than the fastest."""
    slowest = min(measured, key=lambda link: link.bandwidth)
    fastest = max(measured, key=lambda link: link.bandwidth)
    if slowest.bandwidth * MAX_BANDWIDTH_RATIO >= fastest.bandwidth:
        return []

    # `direction` is a text: "a to b is 20 times as slow as b to c".
    ratio = fastest.bandwidth / slowest.bandwidth
    found = f"{slowest.direction} is {ratio:.0f} times as slow as {fastest.direction}"
    return [Finding(WARNING, found, "check its cable, port and network interface")]


def _link_problem(direction: str, link: Facts) -> Finding | None:
    """Returns the problem of a link in one direction (`a to b`), or None if the link works."""
    if link.get("error"):
        do = "allow connections between the machines on all ports: Gloo and NCCL choose them"
        return Finding(ERROR, f"{direction}: {link['error']}", do)
    if link.get("stalled"):
        found = f"{direction}: short messages arrive, long ones do not (perhaps the MTU is wrong)"
        do = "set the MTU of the interfaces to that of the network between them"
        return Finding(ERROR, found, do)
    return None


def _hide_most_texts(errors: Sequence[Finding]) -> list[Finding]:
    """Removes the texts of all but the first few errors, and adds `and 3 more` in place of them.

    Args:
        errors: findings about links, all with the level `ERROR`.

    Returns:
        The first errors; the others without their texts, since `join_findings` still needs their
        advice; and a finding that has only the text `and 3 more`.
    """
    shown = list(errors[:MAX_SHOWN_DIFFERENCES])
    hidden = errors[MAX_SHOWN_DIFFERENCES:]
    if not hidden:
        return shown

    hidden_without_texts = [error._replace(found="") for error in hidden]
    summary_of_hidden = Finding(ERROR, f"and {len(hidden)} more")
    return [*shown, *hidden_without_texts, summary_of_hidden]


def _judge_folder(machines: Machines) -> Finding:
    """Finds machines that do not see the file that the first machine wrote into the checkpoint
    folder.

    The fact `shared` of a machine is

        True     if it has seen the file,
        False    if it has not seen the file,
        None     on the first machine, if it could not write the file,
        missing  if the machine did not answer.
    """
    sees_file = {name: facts["shared"] for name, facts in machines.items() if "shared" in facts}
    no_answer = [name for name in machines if name not in sees_file]

    # Without the file, nothing is known of any machine.
    could_not_write = [name for name, seen in sees_file.items() if seen is None]
    if could_not_write:
        name = could_not_write[0]
        found = f"not known: {name} cannot write there"
        return Finding(WARNING, found, "name another folder")

    problems = []
    not_shared = [name for name, seen in sees_file.items() if seen is False]
    if not_shared:
        found = f"not shared: files written there are not visible on {_name_machines(not_shared)}"
        do = "checkpoints, ledger and report need one disk that all machines mount"
        problems.append(Finding(WARNING, found, do))
    problems += _warnings_about_unknown(no_answer)

    if not problems:
        return Finding(OK, "all machines see the same files")
    return join_findings("", problems)  # the texts of the problems need no summary before them


def _judge_script(machines: Machines) -> Finding:
    """Finds machines on which the script is missing (its facts are None) or differs."""
    script = {name: facts.get("script", NO_ANSWER) for name, facts in machines.items()}
    missing = [name for name, facts in script.items() if facts is None]
    if missing:
        return Finding(ERROR, f"missing on {_name_machines(missing)}", ADVICE_ON_SCRIPT)
    return _compare(script, level=ERROR, do=ADVICE_ON_SCRIPT, if_equal="the same everywhere")


def _judge_token(machines: Machines) -> Finding:
    """Finds tokens that differ. A token is the secret by which the machines of a run recognize each
    other.

    Each machine has sent the first digits of a digest of its token. These are compared, as a token
    itself is never sent.
    """
    digests = {}
    for name, token in _facts_of_check(machines, "token").items():
        digests[name] = _one_fact(token, "digest")

    # This is only a warning: `lockstep run --hosts` sends the token of one machine to all others.
    # Different tokens matter if the user starts a launcher on each machine by hand.
    do = (
        "launchers started by hand on each machine will reject each other (lockstep run --hosts "
        "sends one): copy the file ~/.config/lockstep/token of one machine to the others"
    )
    return _compare(digests, level=WARNING, do=do, if_equal="the same everywhere")


def _judge_data(machines: Machines) -> Finding:
    """Compares the data set on the machines, and reports the first kind of difference.

    The kinds are the number of files, their sizes, their names, and pieces of their contents. The
    facts are the result of `data.gather`.
    """
    data_of_machine = {name: facts.get("data", NO_ANSWER) for name, facts in machines.items()}
    missing = [name for name, facts in data_of_machine.items() if facts is None]
    if missing:  # nothing is at the path
        return Finding(ERROR, f"missing on {_name_machines(missing)}", ADVICE_ON_DATA)

    for key in ("files", "bytes", "sizes", "names"):
        finding = _compare_data(data_of_machine, key)
        differs = finding.level == ERROR
        if differs:
            return finding
    return _compare_data(data_of_machine, "contents")


def _compare_data(data_of_machine: Mapping[str, Facts], key: str) -> Finding:
    """Compares one fact about the data set, such as `bytes`.

    Machines that have not answered are listed in the finding, as a warning.
    """
    return _compare(
        {machine: _one_fact(facts, key) for machine, facts in data_of_machine.items()},
        level=ERROR,
        do=ADVICE_ON_DATA,
        if_equal=_describe_equal_data(data_of_machine),
    )


def _describe_equal_data(data: Mapping[str, Facts]) -> str:
    """Returns the text for the case that the data set is the same on all machines.

    Args:
        data: the facts of each machine about the data set. The numbers in the text are those of the
            first machine that has answered.
    """
    known_facts = [facts for facts in data.values() if UNKNOWN not in facts]
    num_files = known_facts[0]["files"] if known_facts else 0
    num_digested = len(known_facts[0]["contents"]) if known_facts else 0
    return (
        f"the same names and sizes ({count_noun(num_files, 'file')}), and pieces of contents "
        f"({count_noun(num_digested, 'file')})"
    )
