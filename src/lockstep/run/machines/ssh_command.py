"""Builds the command lines of ssh, for all that is started or copied by it.

ssh is the user's own program, with the user's own configuration, keys, agent and jump hosts. It
never asks for a password.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import SettingError

SSH_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),  # nobody would see a question, and ssh would wait forever
    *("-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3"),
    *("-o", "ControlMaster=no"),  # a master would stay behind when the run has ended
    *("-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none"),
)


@dataclass(frozen=True)
class SshCommand:
    """The ssh program, and the user's options for it.

    A host is given by the name that the user wrote: `node1`, `user@node1`, `user@[fe80::1]`.
    """

    words: tuple[str, ...]
    """The program and its options, such as `("ssh", "-F", "config")`."""

    @classmethod
    def parse(cls, text: str) -> SshCommand:
        """Splits the value of --ssh into words.

        Raises:
            SettingError: it is empty, or a quote is not closed.
        """
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise SettingError(f"--ssh {text}", str(error), "write it as for a shell") from None
        if not words:
            raise SettingError(f"--ssh {text!r}", "it names no program", "leave it out")
        return cls(tuple(words))

    def running(self, command: Sequence[str], host_name: str) -> list[str]:
        """Returns the command that runs another command on a host."""
        # `exec` replaces the shell there, so that the command is the process that sshd watches.
        return [*self.connecting_to(host_name), f"exec {shlex.join(command)}"]

    def connecting_to(self, host_name: str) -> list[str]:
        """Returns the first words of all commands for a host, up to its name."""
        return [*self.words, *SSH_OPTIONS, _name_for_ssh(host_name)]

    def for_rsync(self) -> str:
        """Returns what rsync runs to connect to a host, whose name it adds itself (`rsync -e`)."""
        return shlex.join([*self.words, *SSH_OPTIONS])

    def by_hand(self, host_name: str) -> str:
        """Returns the command with which a user logs in to a host, for advice."""
        return f"{shlex.join(self.words)} {_name_for_ssh(host_name)}"


DEFAULT_SSH_COMMAND = SshCommand(("ssh",))


def _name_for_ssh(host_name: str) -> str:
    """Returns the name as ssh accepts it: without the brackets of an IPv6 address."""
    return host_name.replace("[", "").replace("]", "")
