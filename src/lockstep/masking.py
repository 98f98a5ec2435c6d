"""Hides passwords and access tokens in a command line before it is stored or shown.

Records of runs, and pages made from them, are passed on to others. A value is replaced by `***` if
its option is named like a secret (`--api-key`, `hub.token=`), or if it looks like a secret
(`hf_...`, `sk-...`, a password in an address or in JSON). This is only a precaution: a secret
without a telling name that looks like any other word is not hidden.
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
The options `--tokenizer`, `--max-tokens` and `--token-file` do not take a secret."""
WORDS_THAT_CHANGE_MEANING = frozenset(
    {"sort", "group", "image", "label", "text", "input", "output", "target", "metric", "monitor"}
    | {"dict", "column", "data", "feature", "state", "query", "join", "index", "primary", "foreign"}
    | {"pad", "eos", "bos", "unk", "mask", "sep", "cls", "special", "stop", "start", "end", "per"}
    | {"max", "min", "num", "n", "first", "second", "last", "one", "two", "single", "forward"}
)
"""Words before a secret word that give it another meaning: `--sort-key name`, `--pad-token 0`,
`--num-pass`. Then only a value that looks random is hidden."""
_LOOKS_RANDOM = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9+/_=-]{20,}")
"""Long hexadecimal and base64 texts."""
_NUMBER_OR_SWITCH = re.compile(
    r"-?[0-9]{0,3}(?:\.[0-9]+)?|true|false|none|null|yes|no", re.IGNORECASE
)
"""Small numbers and switches, which are not secrets: `--pass 2`, `--use-auth-token true`."""
# Names before an equals sign: `--token`, `hub.token`, Hydra's `+hub.token`. In `http://host?token`
# and `{"token"` the text before an equals sign is no name.
_OPTION_NAME = re.compile(r"[-+\w.]+")
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
"""A user name of at least this length in an address, without a password, is taken for a token."""


def mask_secrets(arguments: Sequence[str]) -> list[str]:
    """Replaces passwords and access tokens in a command line by `***`.

    For example, `["train.py", "--token", "hf_abc"]` becomes `["train.py", "--token", "***"]`.

    Args:
        arguments: the words of the command line.
    """
    masked = []
    open_option = ""  # an option whose value the next argument may be
    for argument in arguments:
        # `--token VALUE`. A value may begin with one dash, as a random text or `-1` may.
        if open_option and not argument.startswith("--"):
            is_secret = _is_secret(open_option, argument)
            # A value that is no secret as a whole may still contain one, such as a password.
            masked.append(MASK if is_secret else _mask_value(argument))
            open_option = ""
            continue

        name, equals_sign, value = argument.partition("=")
        is_open_option = argument.startswith("-") and not equals_sign
        open_option = argument if is_open_option else ""

        # `--token=VALUE`
        is_setting = equals_sign != "" and _OPTION_NAME.fullmatch(name) is not None
        if is_setting and _is_secret(name, value):
            masked.append(f"{name}={MASK}")
        else:
            masked.append(_mask_value(argument))

    return masked


def digest_of_secrets(arguments: Sequence[str]) -> str:
    """Returns four hexadecimal digits that show whether ranks were given the same secrets.

    They are too few to reveal the secrets. Returns an empty text if there are none.
    """
    secrets = []
    for argument, masked in zip(arguments, mask_secrets(arguments), strict=True):
        if argument != masked:
            secrets.append(argument)
    if not secrets:
        return ""
    return hashlib.sha256("\0".join(secrets).encode(errors="replace")).hexdigest()[:4]


def _is_secret(name: str, value: str) -> bool:
    """Returns True if an option is named like a secret, and its value may be one.

    For example `--api-token hf_abc` or `password=x`, but not `--num-tokens 10`.
    """
    name_with_hyphens = _CAMEL_CASE.sub("-", name.lstrip("-+"))  # --accessKey -> access-Key
    words = re.split(r"[-_.]", name_with_hyphens.lower())  # ["access", "key"]
    if words[-2:] == ["key", "id"]:  # --access-key-id counts as --access-key
        words.pop()

    is_named_like_secret = words[-1] in SECRET_WORDS
    if not is_named_like_secret or not value:
        return False

    # The key of `--sort-key length` is the name of a column, and no secret. But a random text is
    # hidden all the same, as in `--sort-key 9f86d081884c7d659a2feaa0c55ad015`.
    word_has_other_meaning = len(words) > 1 and words[-2] in WORDS_THAT_CHANGE_MEANING
    if word_has_other_meaning:
        return _LOOKS_RANDOM.fullmatch(value) is not None

    # `--use-auth-token true` has no secret either.
    is_number_or_switch = _NUMBER_OR_SWITCH.fullmatch(value) is not None
    return not is_number_or_switch


def _mask_value(argument: str) -> str:
    """Replaces tokens, secrets in JSON and passwords in addresses within an argument."""
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

    `postgres://ann:secret@host/data` becomes `postgres://ann:***@host/data`, and
    `https://hf_abc@host/model` becomes `https://***@host/model`.
    """
    scheme = match["scheme"]
    rest = match["rest"]
    end_of_user = _end_of_user(rest)
    if end_of_user is None:
        return match[0]

    user_and_password = rest[:end_of_user]  # `ann:secret`, or `hf_abc`
    at_host = rest[end_of_user:]  # `@host/data`
    user, colon, _ = user_and_password.partition(":")
    if colon:
        return f"{scheme}://{user}:{MASK}{at_host}"

    # On the web, a user without a password is a token. Elsewhere only a long one is, as in
    # `wandb://0123456789abcdef@host`, and not `ssh://git@host`.
    if scheme.lower() in ("http", "https") or len(user) >= MIN_TOKEN_AS_USER:
        return f"{scheme}://{MASK}{at_host}"

    return match[0]


def _end_of_user(rest: str) -> int | None:
    """Returns where the `@` behind the user and the password stands; None if there is no user.

    A password may contain `@` and `/`, although they should be written as `%40` and `%2F`:

        ann:secret@host     user and password end at the only `@`
        ann:p@ss@host/path  they end at the last `@` before the slash
        ann:p/ss@host       the slash is in the password: they end at the last `@` of all
        host:8080/page@2    no user: a port stands before the slash
        host:/page@2        no user: the number of the port is left out

    Args:
        rest: the address without its scheme: `user:password@host/path`.
    """
    if "@" not in rest:
        return None

    before_slash = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in before_slash:
        return before_slash.rindex("@")

    # Every `@` is behind a slash: `ann:p/ss@host`, or `host:8080/page@2` and `host/page@2`.
    _, colon, port_or_password = before_slash.partition(":")
    is_port = re.fullmatch(r"[0-9]*", port_or_password) is not None
    slash_is_in_password = colon != "" and not is_port
    return rest.rindex("@") if slash_is_in_password else None
