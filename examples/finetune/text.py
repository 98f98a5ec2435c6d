"""The text, the adapters and the options.

A sample is a function of Python's own library: its first line is the prompt, and the first
paragraph of its docstring the answer, which alone is trained.
"""

import argparse
import ast
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

ADAPTERS = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
LONGEST = 64
"""Tokens of a sample; of longer ones the rest is cut off."""
NO_ANSWER = -100
"""The label of a token that is not trained."""

disable_progress_bars()
disable_progress_bar()


def load_text(
    tokenizer: PreTrainedTokenizerBase, limit: int | None = None
) -> tuple[Dataset, Dataset]:
    """Functions to train on, and every tenth of them to test with."""

    def to_tokens(sample: dict[str, str]) -> dict[str, list[int]]:
        prompt = tokenizer(sample["prompt"])["input_ids"]
        answer = tokenizer(sample["answer"] + tokenizer.eos_token)["input_ids"]
        ids, labels = prompt + answer, [NO_ANSWER] * len(prompt) + answer
        return {"input_ids": ids[:LONGEST], "labels": labels[:LONGEST]}

    found = Dataset.from_list(sorted(_functions(), key=lambda each: sorted(each.values()))[:limit])
    found = found.map(to_tokens, remove_columns=found.column_names)
    found = found.filter(lambda sample: sample["labels"][-1] != NO_ANSWER)
    tests = range(0, len(found), 10)
    return found.select(sorted({*range(len(found))} - {*tests})), found.select(tests)


def _functions() -> Iterator[dict[str, str]]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
            if text:
                yield {
                    "prompt": f"def {node.name}({ast.unparse(node.args)}):\n",
                    "answer": " ".join(text.partition("\n\n")[0].split()),
                }


def count(batch: Mapping[str, Tensor]) -> Tensor:
    """The tokens of a batch that are to be predicted; the first of a sample is not."""
    return (batch["labels"][:, 1:] != NO_ANSWER).sum()


def options() -> argparse.Namespace:
    """Of both programs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", default="runs/base", help="the folder that make_base.py made")
    parser.add_argument("--out", default="runs/tuned", help="the folder that is written")
    parser.add_argument("--lora", action="store_true", help="train adapters alone (peft)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="samples of a step")
    parser.add_argument("--lr", type=float, default=None, help="3e-4, of adapters 1e-2")
    parser.add_argument("--limit", type=int, default=600, help="the first samples alone")
    args = parser.parse_args()
    args.lr = args.lr or (1e-2 if args.lora else 3e-4)
    return args
