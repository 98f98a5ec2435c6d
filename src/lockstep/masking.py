"""Hides passwords and access tokens in a command line, before it is written down or shown.

Records of runs and pages made of them are handed on to others. An argument is hidden if its option
is called like a secret (`--api-key`, `hub.token=`), or if it looks like one (`hf_...`, `sk-...`, a
password in an address or in JSON). What is left of it is `***`. This is a precaution: a secret
under another name that looks like any other word stays.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

MASK = "***"

SECRET_WORDS = frozenset(
    {"token", "secret", "password", "passwd", "passphrase", "pwd", "pass", "pw", "pat", "key"}
    | {"credential", "credentials", "apikey", "bearer", "auth"}
)
"""The last word of an option that takes a secret: `--hf-token`, `wandb.api_key`, `--db.password`.
`--tokenizer`, `--max-tokens` and `--token-file` take none."""
WORDS_OF_FIELDS = frozenset(
    {"sort", "group", "image", "label", "text", "input", "output", "target", "metric", "monitor"}
    | {"dict", "column", "data", "feature", "state", "query", "join", "index", "primary", "foreign"}
    | {"pad", "eos", "bos", "unk", "mask", "sep", "cls", "special", "stop", "start", "end", "per"}
    | {"max", "min", "num", "n", "first", "second", "last", "one", "two", "single", "forward"}
)
"""Before a secret word they name something else: `--sort-key name`, `--pad-token 0`, `--num-pass`.
Then only what looks like a random number is hidden."""
_RANDOM = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9+/_=-]{20,}")
"""Long hexadecimal and base64 texts."""
_PLAIN_VALUE = re.compile(r"-?[0-9]{0,3}(?:\.[0-9]+)?|true|false|none|null|yes|no", re.IGNORECASE)
"""Small numbers and switches, which are no secrets: `--pass 2`, `--use-auth-token true`."""
# Words of camel case: `hfToken`, `apiKey`.
_CAMEL_CASE = re.compile(r"(?<=[a-z])(?=[A-Z])")
# Tokens of well-known services begin alike. A JSON Web Token is base64 of `{"`.
_SECRET_VALUE = re.compile(
    r"(?:hf_|gh[opsu]_|github_pat_|glpat-|sk-|sk_live_|xox[abprs]-|AKIA|ASIA|AIza|npm_|pypi-|dckr_pat_"
    r"|ya29\.|wandb_v1_|eyJ[\w-]+\.eyJ)[\w.-]{12,}"
)
_BEARER = re.compile(r"(?<=bearer )\s*\S+", re.IGNORECASE)
_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*)://(?P<rest>[^\s\"']+)")
# A name and a text in JSON or in a dict of Python's: `"password": "x"`.
_TEXT_IN_JSON = re.compile(
    r"""(?P<before>(?P<quote>["'])(?P<name>[\w.-]+)(?P=quote)\s*:\s*)"""
    r"""(?P<mark>["'])(?P<value>(?:\\.|(?!(?P=mark)).)*)(?P=mark)"""
)
MIN_TOKEN_AS_USER = 20
"""A name before `@` in an address, without a password, that is so long is a token."""


def mask_secrets(arguments: Sequence[str]) -> list[str]:
    """Returns a command line in which passwords and access tokens are replaced by `***`.

    Args:
        arguments: the words of the command line, such as `["train.py", "--token", "hf_abc"]`.
    """
    masked = []
    name_before = ""
    for argument in arguments:
        if name_before and not argument.startswith("--"):
            hidden = _is_secret(name_before, argument)
            name_before = ""
            masked.append(MASK if hidden else _mask_value(argument))
            continue

        name, equals_sign, value = argument.partition("=")
        if equals_sign and re.fullmatch(r"[-+\w.]+", name) and _is_secret(name, value):
            masked.append(f"{name}={MASK}")
            continue

        # `--token VALUE`; a word without a dash is no option, and what follows it is not its value.
        is_option = argument.startswith("-") and not equals_sign
        name_before = argument if is_option else ""
        masked.append(_mask_value(argument))

    return masked


def digest_of_secrets(arguments: Sequence[str]) -> str:
    """Returns four digits by which ranks see whether they were given the same secrets.

    They are too few to tell which secrets. The text is empty if there are none.
    """
    secrets = []
    for argument, masked in zip(arguments, mask_secrets(arguments), strict=True):
        if argument != masked:
            secrets.append(argument)
    if not secrets:
        return ""
    return hashlib.sha256("\0".join(secrets).encode(errors="replace")).hexdigest()[:4]


def _is_secret(name: str, value: str) -> bool:
    """True if the name of an option says that its value is a secret, and the value may be one."""
    words = re.split(r"[-_.]", _CAMEL_CASE.sub("-", name.lstrip("-+")).lower())
    if words[-1] == "id" and words[-2:-1] == ["key"]:  # such as `--access-key-id`
        words = words[:-1]
    if words[-1] not in SECRET_WORDS or not value:
        return False
    if not WORDS_OF_FIELDS.isdisjoint(words[-2:-1]):
        return _RANDOM.fullmatch(value) is not None

    return _PLAIN_VALUE.fullmatch(value) is None


def _mask_value(argument: str) -> str:
    """Replaces what looks like a token or is called so in JSON, and passwords in addresses."""
    masked = _SECRET_VALUE.sub(MASK, argument)
    masked = _BEARER.sub(MASK, masked)
    masked = _TEXT_IN_JSON.sub(_mask_text_in_json, masked)
    return _ADDRESS.sub(_mask_address, masked)


def _mask_text_in_json(match: re.Match[str]) -> str:
    if not _is_secret(match["name"], match["value"]):
        return match[0]
    return f"{match['before']}{match['mark']}{MASK}{match['mark']}"


def _mask_address(match: re.Match[str]) -> str:
    """Replaces the password of `scheme://user:password@host`, and the token of `https://token@host`.

    A password may contain `@` and `/`, which should have been written as `%40` and `%2F`.
    """
    scheme = match["scheme"]
    rest = match["rest"]
    host_and_user = re.split(r"[/?#]", rest, maxsplit=1)[0]

    user, colon, after_colon = host_and_user.partition(":")
    if "@" in host_and_user:
        end = host_and_user.rindex("@")
    elif colon and "@" in rest and not re.fullmatch(r"[0-9]*", after_colon):
        end = rest.rindex("@")  # no port follows the colon, so it is a password with a slash
    else:
        return match[0]

    user, colon, _ = rest[:end].partition(":")
    if colon:
        return f"{scheme}://{user}:{MASK}{rest[end:]}"
    if scheme.lower() in ("http", "https") or len(user) >= MIN_TOKEN_AS_USER:
        return f"{scheme}://{MASK}{rest[end:]}"

    return match[0]
