"""What an older version of torch lacks, so that tests of it are skipped there."""

from __future__ import annotations

import pytest
from torch.distributed.run import get_args_parser


def needs_torchrun_flag(flag: str) -> pytest.MarkDecorator:
    """Skips a test where the installed torchrun does not know a flag."""
    known = get_args_parser()._option_string_actions
    return pytest.mark.skipif(flag not in known, reason=f"this torchrun has no {flag}")
