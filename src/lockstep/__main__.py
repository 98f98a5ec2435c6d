"""`python -m lockstep` is the command `lockstep`."""

from __future__ import annotations

from lockstep.cli.main import main

if __name__ == "__main__":
    main(prog_name="lockstep")
