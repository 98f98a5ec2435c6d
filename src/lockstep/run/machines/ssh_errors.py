"""Explains why ssh, or rsync over ssh, has failed: finds the cause and advice for its error output.

The error output mixes lines of several programs: ssh itself, a *ProxyCommand* (a program that the
user's ~/.ssh/config starts to reach the host), and the shell, Python or rsync on the host. Causes
that ssh reports are only searched for in the lines of ssh and of a ProxyCommand, since a login
banner or a program on the host may print similar words. A *drop* means that the ssh server closed
the connection before anything else; a later attempt may succeed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import NamedTuple

from lockstep.run.machines.hosts import Host
from lockstep.run.machines.machine_connection import Problem
from lockstep.run.machines.ssh_command import DEFAULT_SSH_COMMAND, SshCommand


class ConnectionDropped(Problem):
    """The ssh server closed the connection before anything else; another attempt may succeed."""


class Cause(NamedTuple):
    """A cause of a failure. `{name}`, `{address}`, `{python}` and `{ssh}` are filled in."""

    pattern: str
    """The regular expression that is searched for in the error output."""
    found: str
    """What is wrong, for the user."""
    advice: str
    """What the user can do."""

    @property
    def is_drop(self) -> bool:
        """True if the ssh server has closed the connection before anything else."""
        return self.pattern == DROP_PATTERN


# "kex_exchange_identification: Connection closed by remote host"
# "Connection closed by UNKNOWN port 65535"
DROP_PATTERN = "exchange_identification|Connection closed by UNKNOWN port"

# The beginnings of lines in which ssh itself says why it ends:
# "ssh: connect to host node1 port 22: Connection refused"
# "channel 0: open failed: administratively prohibited: open failed"
# "me@node1: Permission denied (publickey)."
SSH_LINE_PATTERN = re.compile(
    r"\S*ssh\S*: |dbclient: |channel \d+: |kex_|banner exchange: |Timeout, server |Host key |"
    r"Connection (?:to \S+ port|closed by|reset by|timed out)|@ +WARNING: |Received disconnect |"
    r".*Permission denied \([a-z]"
)
# A line of a ProxyCommand comes from a shell, or ends with a reason:
# "/bin/sh: 1: exec: nc: not found"
# "nc: connect to node1 port 22: Connection refused"
PROXY_LINE_PATTERN = re.compile(
    r"(?!Warning: |Load key )(?:[\w./-]+:(?:\d+:)? |.*: [A-Z][a-z ]+\.?$)"
)
NUM_LINES_BEFORE_DROP = 4
"""How many lines before ssh's report of a drop are searched for those of a ProxyCommand."""

# The last lines of rsync, which are always the same:
# "rsync error: error in rsync protocol data stream (code 12) at io.c(231) [sender=3.2.7]"
RSYNC_END_PATTERN = re.compile(r"rsync error: |rsync: connection unexpectedly closed|\[\w+\] ")

# "bash: line 1: /opt/python: No such file or directory"
NO_PROGRAM_PATTERN = "no such file|not found|does not exist|permission denied|unknown command"

CAUSES_ON_HOST = (
    Cause(
        rf"(?i){{python}}.*(?:{NO_PROGRAM_PATTERN})|(?:{NO_PROGRAM_PATTERN}).*{{python}}",
        "{python} cannot be started there",
        "make the same environment there, at the same path, or start from one that all machines "
        "have",
    ),
    Cause(
        # `lockstep` exists there, but not `lockstep.run.machines.helper`: it is an older version,
        # the package of this name on PyPI, or an empty folder.
        r"No module named '?lockstep\.run",
        "the package `lockstep` there is not this version of Lockstep",
        "install the same version of torch-lockstep there, for {python}",
    ),
    Cause(
        r"No module named '?lockstep|nknown option:? -P",
        "{python} has no Lockstep there",
        "create the same environment there, at the same path: the first machine's Python is used",
    ),
    Cause(
        r"Too many levels of symbolic links",
        "a folder that is sent is a link there, and rsync follows none that lead out of the folder",
        "name it in .gitignore, or make it a folder there",
    ),
    Cause(
        r"rsync.*not found",
        "it has no rsync",
        "install rsync there, or copy the folder yourself",
    ),
)
"""Failures of the programs that ssh starts on the host, in the order in which they are tried."""

CAUSES_OF_SSH = (
    Cause(
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is not the one that this machine knows: it was set up anew, or another "
        "machine answers in its place",
        "make sure which, then `ssh-keygen -R {address}` and `{ssh}`",
    ),
    Cause(
        r"Host key verification failed",
        "its host key is not known here",
        "log in once and compare the key: `{ssh}`",
    ),
    Cause(
        r"Permission denied \([a-z]|Too many authentication failures",
        "it requires a password",
        "authorize your key: `ssh-copy-id {name}`; load a key with a passphrase into ssh-agent",
    ),
    Cause(
        rf"(?i)(?:{NO_PROGRAM_PATTERN}|cannot execute).*\s+"
        r"(?:kex_exchange_identification: .*\s+)?Connection closed by UNKNOWN port",
        "the ProxyCommand that leads to it cannot be started here",
        "see its entry in ~/.ssh/config",
    ),
    Cause(
        r"administratively prohibited",
        "the jump host that leads to it forwards nothing",
        "set AllowTcpForwarding in the jump host's sshd_config",
    ),
    Cause(
        r"Could not resolve hostname|Name or service not known|failure in name resolution",
        "the name cannot be resolved",
        "check its spelling, /etc/hosts, and the Host entries in ~/.ssh/config",
    ),
    Cause(
        r"Connection refused",
        "no ssh server is listening there",
        "start sshd on it, or give its port in ~/.ssh/config",
    ),
    Cause(
        r"Connection to UNKNOWN port \S+ timed out",
        "it does not answer, or the jump host or ProxyCommand that leads to it does not",
        "check that it is up, and reachable from the jump host",
    ),
    Cause(
        r"during banner exchange|banner exchange: .* timed out",
        "the connection is accepted, but no ssh server answers",
        "check that its sshd works and listens on that port",
    ),
    Cause(
        r"Connection to .* timed out",  # ssh says "to" when it times out after it has connected
        "its ssh server answers, and then nothing comes through: it hangs, or packets are longer "
        "than the way carries (MTU)",
        "see whether long packets pass: `ping -M do -s 1472 {address}`",
    ),
    Cause(
        r"timed out|No route to host|Network is unreachable|not responding",
        "it does not answer",
        "check that it is up and reachable: `ping {address}`; a firewall must let ssh through",
    ),
    # Last, because with a jump host ssh prints the reason first and then this.
    Cause(
        DROP_PATTERN,
        "its ssh server, or a jump host's, drops the connection, as where many begin at once or "
        "this machine is barred",
        "raise MaxStartups in its sshd_config, and see its log",
    ),
)
"""Failures that ssh reports itself, in the order in which they are tried."""


def ssh_failure(
    host: Host,
    exit_code: int | None,
    error_output: str,
    ssh: SshCommand = DEFAULT_SSH_COMMAND,
    advice: str = "",
) -> Problem:
    """Returns the error that explains why ssh, or rsync over ssh, has failed.

    Args:
        host: the machine.
        exit_code: the exit code of ssh or rsync; None if there was no answer in time.
        error_output: the standard error.
        ssh: the ssh program and the user's options for it.
        advice: what the user can do if the cause is not known; by default, to try ssh by hand.
    """
    ssh_call = ssh.by_hand(host.name)
    # The texts about known problems contain {name}, {address} and so on.
    fields_of_texts = {
        "name": host.name,
        "address": host.address,
        "python": sys.executable,
        "ssh": ssh_call,
    }
    problem = _known_problem_on_host(error_output, fields_of_texts)
    if problem is None:
        problem = _known_problem_of_ssh(error_output, fields_of_texts)
    if problem is not None:
        return problem

    advice_or_default = advice or f"try it by hand: `{ssh_call} {sys.executable} --version`"
    last_line = _last_informative_line(error_output)
    if exit_code is not None:
        return Problem(f"exit code {exit_code}: {last_line}", advice_or_default)

    # A common reason why ssh does not answer is that an interface's MTU is too large for the
    # network. Then ssh connects, as its first packets are short, and hangs when long packets are
    # lost.
    return Problem(
        f"no answer in time: {last_line}",
        f"{advice_or_default}; if that hangs, too, look at the MTU: "
        f"`ping -M do -s 1472 {host.address}`",
    )


def _known_problem_on_host(error_output: str, fields_of_texts: Mapping[str, str]) -> Problem | None:
    """Returns the first cause on the host whose pattern is in the error output, if there is one.

    Args:
        error_output: the standard error.
        fields_of_texts: the values of `{name}`, `{address}`, `{python}` and `{ssh}` in the texts
            for the user.
    """
    for cause in CAUSES_ON_HOST:
        pattern = cause.pattern.replace("{python}", re.escape(sys.executable))
        if re.search(pattern, error_output):
            return Problem(
                cause.found.format(**fields_of_texts), cause.advice.format(**fields_of_texts)
            )
    return None


def _known_problem_of_ssh(error_output: str, fields_of_texts: Mapping[str, str]) -> Problem | None:
    """Returns the first cause that ssh itself reports in the error output, if there is one.

    Args:
        error_output: the standard error.
        fields_of_texts: the values of `{name}`, `{address}`, `{python}` and `{ssh}` in the texts
            for the user.
    """
    lines_of_ssh = _lines_of_ssh(error_output)
    causes = [cause for cause in CAUSES_OF_SSH if re.search(cause.pattern, lines_of_ssh)]
    if not causes:
        return None

    cause = causes[0]
    found = cause.found.format(**fields_of_texts)
    advice = cause.advice.format(**fields_of_texts)
    if not cause.is_drop:
        return Problem(found, advice)

    # Of all causes, only a dropped connection may go away by itself, so it has its own error.
    # Before the server drops the connection, it often says why.
    lines_before = _lines_before_drop(error_output)
    if lines_before:
        found += f"; before that it said: {lines_before[-1]}"
    return ConnectionDropped(found, advice)


def _lines_of_ssh(error_output: str) -> str:
    """Returns the lines of a ProxyCommand before a drop, followed by the lines of ssh itself."""
    lines = [line for line in _lines_before_drop(error_output) if PROXY_LINE_PATTERN.match(line)]
    lines += [line for line in error_output.splitlines() if SSH_LINE_PATTERN.match(line)]
    return "\n".join(lines)


def _lines_before_drop(error_output: str) -> list[str]:
    """Returns the last lines before ssh reports a drop; empty if it does not report one."""
    lines = error_output.splitlines()
    for index, line in enumerate(lines):
        if re.search(DROP_PATTERN, line):
            return lines[max(index - NUM_LINES_BEFORE_DROP, 0) : index]
    return []


def _last_informative_line(error_output: str) -> str:
    """Returns the last line that is neither blank nor one of rsync's closing lines."""
    for line in reversed(error_output.splitlines()):
        line = line.strip()
        if line and not RSYNC_END_PATTERN.match(line):
            return line
    return "no output"
