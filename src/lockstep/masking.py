"""Hides passwords and access tokens in a command line, before it is written down or shown.

Records of runs and pages made of them are handed on to others. An argument is hidden if its option
is called like a secret (`--api-key`, `hub.token=`), or if it looks like one (`hf_...`, `sk-...`, a
password in an address). What is left of it is `***`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MASK = "***"

# The last word of an option that takes a secret: `--hf-token`, `wandb.api_key`, `--db.password`.
# `--tokenizer`, `--max-tokens` and `--sort-key` take none.
_SECRET_NAME = re.compile(
    r"(?:^|[-_.])(?:token|secret|password|passwd|passphrase|pwd|credentials?"
    r"|(?:api|access|auth|private|secret|account|encryption|signing|license)[-_]?key(?:[-_]id)?"
    r"|apikey|bearer|auth)$",
    re.IGNORECASE,
)
# Words of camel case: `hfToken`, `apiKey`.
_CAMEL_CASE = re.compile(r"(?<=[a-z])(?=[A-Z])")
# Tokens of well-known services begin alike. A JSON Web Token is base64 of `{"`.
_SECRET_VALUE = re.compile(
    r"(?:hf_|gh[opsu]_|github_pat_|glpat-|sk-|sk_live_|xox[abprs]-|AKIA|ASIA|AIza|npm_|pypi-|dckr_pat_"
    r"|ya29\.|wandb_v1_|eyJ[\w-]+\.eyJ)[\w.-]{12,}"
)
_PASSWORD_IN_ADDRESS = re.compile(r"(?<=://)(?P<user>[^/@\s:]*):[^/@\s]+@")


def mask_secrets(arguments: Sequence[str]) -> list[str]:
    """Returns a command line in which passwords and access tokens are replaced by `***`.

    Args:
        arguments: the words of the command line, such as `["train.py", "--token", "hf_abc"]`.
    """
    masked = []
    next_is_secret = False
    for argument in arguments:
        if next_is_secret and not argument.startswith("--"):
            next_is_secret = False
            masked.append(MASK)
            continue
        name, equals_sign, value = argument.partition("=")
        is_option = argument.startswith("-")
        if _is_secret_name(name) and equals_sign and value:
            masked.append(f"{name}={MASK}")
            continue
        # `--token VALUE`; a word without a dash is no option, and what follows it is not its value.
        next_is_secret = is_option and not equals_sign and _is_secret_name(name)
        masked.append(_mask_value(argument))
    return masked


def _is_secret_name(name: str) -> bool:
    words = _CAMEL_CASE.sub("-", name.lstrip("-+"))
    return _SECRET_NAME.search(words) is not None


def _mask_value(argument: str) -> str:
    """Replaces what looks like a token, and the password of an address, wherever they stand."""
    without_tokens = _SECRET_VALUE.sub(MASK, argument)
    return _PASSWORD_IN_ADDRESS.sub(rf"\g<user>:{MASK}@", without_tokens)
