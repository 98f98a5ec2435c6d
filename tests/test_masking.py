"""Passwords and tokens are hidden in a command line, and nothing else is."""

from __future__ import annotations

import pytest

from lockstep.masking import digest_of_secrets, mask_secrets

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
        ("--wandb-key 0123456789abcdef0123456789abcdef01234567", "--wandb-key ***"),
        (
            "--wandb_key=abc --openai-key=abc --hf_key abc",
            "--wandb_key=*** --openai-key=*** --hf_key ***",
        ),
        ("wandb.key=abc --key abc", "wandb.key=*** --key ***"),
        ("--db-pass hunter2 --pw x1 --pat abc", "--db-pass *** --pw *** --pat ***"),
        ("--credential=abc --credentials abc", "--credential=*** --credentials ***"),
        ("--aws-access-key-id abc", "--aws-access-key-id ***"),
        ("--sort-key 0123456789abcdef0123", "--sort-key ***"),
        ("postgres://u:pa/ss@host/db", "postgres://u:***@host/db"),
        ("postgres://u:pa@ss@host:5432", "postgres://u:***@host:5432"),
        ("--url=https://tok123@github.com/x", "--url=https://***@github.com/x"),
        ("git+ssh://0123456789abcdef0123@host", "git+ssh://***@host"),
        ('{"password":"x","lr":"1"}', '{"password":"***","lr":"1"}'),
        ("--config={'api_key':'x\\'y','n':2}", "--config={'api_key':'***','n':2}"),
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
        "--pad-token <pad> --eos_token=</s> --image-key jpg --num-pass 2 --pass 2 --token 512",
        "--use-auth-token true --key=false --compass north --path a --bypass=x --keyword y",
        "ssh://git@example.org/x http://host:8000/a@b https://example.org/a?b=c:d@e",
        '{"sort_key":"name","tokens":"3"}',
        "--lr=0.1 --deep -x 3 secret.txt model.width=8",
    ],
)
def test_what_is_no_secret_stays(arguments: str) -> None:
    assert mask_secrets(["train.py", *arguments.split()]) == ["train.py", *arguments.split()]


def test_a_secret_with_spaces_is_hidden() -> None:
    header = "Authorization: Bearer abc.def"
    assert mask_secrets(["train.py", header]) == ["train.py", "Authorization: Bearer ***"]


def test_ranks_see_whether_their_secrets_are_equal() -> None:
    digests = [digest_of_secrets(["train.py", "--key", value]) for value in ("image", "image", "x")]
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == 4
    assert digest_of_secrets(["train.py", "--lr", "1"]) == ""
