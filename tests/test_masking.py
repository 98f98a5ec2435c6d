"""Passwords and tokens are hidden in a command line, and nothing else is."""

from __future__ import annotations

import pytest

from lockstep.masking import mask_secrets

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("arguments", "masked"),
    [
        ("--token abc", "--token ***"),
        ("--hf-token=abc --lr 1", "--hf-token=*** --lr 1"),
        ("--apiKey abc", "--apiKey ***"),
        ("wandb.api_key=abc", "wandb.api_key=***"),
        ("+db.password=abc", "+db.password=***"),
        ("--aws_secret_access_key abc data", "--aws_secret_access_key *** data"),
        ("-password x --auth y", "-password *** --auth ***"),
        ("--name hf_abcdefghijklmnopqrst", "--name ***"),
        ("x=ghp_0123456789abcdefghij0123", "x=***"),
        ("https://me:word@example.org/a?b=c:d@e", "https://me:***@example.org/a?b=c:d@e"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abcdef", "***"),
        ("--token --lr 1", "--token --lr 1"),
    ],
)
def test_secrets_are_hidden(arguments: str, masked: str) -> None:
    assert mask_secrets(["train.py", *arguments.split()]) == ["train.py", *masked.split()]


@pytest.mark.parametrize(
    "arguments",
    [
        "--tokenizer gpt2 --max-tokens 512 --num_tokens=9 --token-file a.txt",
        "--sort-key name --keys a,b --author me --authors=you",
        "--commit 7ab7c1857ab7c1857ab7c1857ab7c1857ab7c185 token password",
        "https://example.org:8000/path user@host:path s3://bucket/key sk-learn",
        "--lr=0.1 --deep -x 3 secret.txt model.width=8",
    ],
)
def test_what_is_no_secret_stays(arguments: str) -> None:
    assert mask_secrets(["train.py", *arguments.split()]) == ["train.py", *arguments.split()]
