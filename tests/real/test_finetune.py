"""Language models of transformers, whole and with adapters of peft: the numbers of plain torch."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from installed import verify
from ranks import context, run_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

import lockstep
from lockstep.errors import UsageError
from lockstep.strategies import DP, Pipeline

pytestmark = pytest.mark.real

FOLDER = Path(__file__).parents[2] / "examples" / "finetune"
SIZES = {"width": 32, "layers": 3, "vocabulary": 300, "steps": 1}
OPTIONS = {"epochs": 2, "batch_size": 7, "lr": 3e-3, "limit": 30}
PIPELINE = Pipeline(num_micro_batches=2)

# No threads that outlive progress bars and from_pretrained.
tqdm.monitor_interval = 0
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
# Imported once for all ranks of these tests.
context.set_forkserver_preload(
    ["torch", "lockstep.world", "datasets", "peft", "transformers.models.llama.modeling_llama"]
)


def example(program: str, options: dict[str, Any]) -> list[float]:
    """Runs a program of the example; the losses in training and in the test, epoch after epoch."""
    sys.path.insert(0, str(FOLDER))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        import_module(program).main(argparse.Namespace(**options))
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("epoch")]
    return [float(number) for line in lines for number in re.findall(r"\d\.\d+", line)]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of transformers: with matrices for words in and for words out, and with one."""
    folder = tmp_path_factory.mktemp("bases")
    for name in ("untied", "tied"):
        options = {"out": str(folder / name), "tied": name == "tied", **SIZES}
        run_ranks(example, 1, "make_base", options)
    return {name: str(folder / name) for name in ("untied", "tied")}


# Against plain torch


def build(base: str, *, lora: bool = False, checkpointing: bool = True) -> nn.Module:
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    sys.path.insert(0, str(FOLDER))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base)
    if checkpointing:
        model.gradient_checkpointing_enable()
    return get_peft_model(model, import_module("text").ADAPTERS) if lora else model


def batches(base: str) -> DataLoader[Any]:
    """Padded ones of samples of different lengths: 7, 7 and 4."""
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq

    sys.path.insert(0, str(FOLDER))
    tokenizer = AutoTokenizer.from_pretrained(base)
    data, _ = import_module("text").load_text(tokenizer, 20)
    return DataLoader(data, 7, collate_fn=DataCollatorForSeq2Seq(tokenizer))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


def plain(base: str, ways: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a few steps on one device, without Lockstep."""
    model, losses = build(base, **ways), []
    optimizer = sgd(model)
    for batch in batches(base):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def spread(
    base: str, file: str, strategy: Any, compiled: bool, ways: dict[str, Any]
) -> list[float]:
    """The same under Lockstep; every rank helps to write the weights."""
    sys.path.insert(0, str(FOLDER))
    losses = []
    with lockstep.init(strategy, seed=0) as world:
        model = build(base, **ways)
        optimizer = sgd(model)
        if compiled:
            model.compile(backend="aot_eager")
        model, optimizer = world.prepare(model, optimizer)
        for batch in world.loader(batches(base), weight=import_module("text").count):
            world.backward(model(**batch).loss)
            world.clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
            if world.is_last_micro_batch:
                losses.append(world.loss())
        lockstep.save_weights(model, file)
    return losses


CASES: dict[str, tuple[Any, int, str, bool, dict[str, Any]]] = {
    "one process": ("single", 1, "tied", False, {}),
    "ddp": ("ddp", 2, "tied", False, {}),
    "ddp, lora, 3 ranks": ("ddp", 3, "tied", False, {"lora": True}),
    "ddp, compiled": ("ddp", 2, "untied", True, {"checkpointing": False}),
    "fsdp": ("fsdp", 2, "tied", False, {}),
    "fsdp, lora": ("fsdp", 2, "untied", False, {"lora": True}),
    "pipeline": (PIPELINE, 2, "untied", False, {}),
    "pipeline, lora": (PIPELINE, 2, "untied", False, {"lora": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_plain_torch(bases: dict[str, str], tmp_path: Path, case: str) -> None:
    strategy, size, base, compiled, ways = CASES[case]
    losses, weights = run_ranks(plain, 1, bases[base], ways)[0]
    file = tmp_path / "w.safetensors"
    ranks = run_ranks(spread, size, bases[base], str(file), strategy, compiled, ways)
    assert len(losses) == 3
    for found in ranks:
        assert found == pytest.approx(losses, rel=1e-5)
    saved = load_file(file)
    before = load_file(Path(bases[base]) / "model.safetensors")
    assert saved.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-6, msg=name)
        if "lora" not in ways:
            assert not torch.equal(saved[name], before.get(name, saved[name] + 1)), name
        elif "lora_" not in name:
            bare = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(saved[name], before.get(bare, saved[name])), "only adapters train"


# The folder


def there_and_back(base: str, folder: str) -> dict[str, Any]:
    """A folder is loaded into a prepared model and saved, under every strategy; what it can say."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config, found = AutoConfig.from_pretrained(base), {}
    for name, strategy in {"ddp": "ddp", "fsdp": "fsdp", "pipeline": PIPELINE}.items():
        if name == "pipeline" and config.tie_word_embeddings:
            continue
        with lockstep.init(strategy) as world:
            model = world.prepare(AutoModelForCausalLM.from_config(config))
            report = lockstep.load_weights(model, base)
            assert not [*report.missing, *report.unexpected, *report.mismatched]
            lockstep.save_weights(model, f"{folder}/{name}/model.safetensors")
            if world.is_main:
                config.save_pretrained(f"{folder}/{name}")
            try:
                with torch.no_grad():
                    words = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5)
                found[name] = words.tolist()
            except UsageError as error:
                found[name] = error.do
    return found


def one_device(base: str) -> tuple[dict[str, Tensor], list[list[int]]]:
    """A folder as transformers reads it: its weights, and what it says."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        words = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5)
    return {name: value.clone() for name, value in model.state_dict().items()}, words.tolist()


def in_parts(base: str, folder: str) -> None:
    """Under dp, from several files; a bare model of one process writes what ranks read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(base).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(Path(folder).glob("model-*.safetensors"))) > 1
    with lockstep.init(DP(replicas=2)) as world:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
        model = world.prepare(model)
        lockstep.load_weights(model, folder)
        lockstep.save_weights(model, f"{folder}/back/model.safetensors", shard_size="20kB")
    AutoConfig.from_pretrained(base).save_pretrained(f"{folder}/back")


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_a_folder_is_loaded_and_saved_by_every_strategy(
    bases: dict[str, str], tmp_path: Path, name: str
) -> None:
    expected, words = run_ranks(one_device, 1, bases[name])[0]
    for said in run_ranks(there_and_back, 2, bases[name], str(tmp_path)):
        advice = said.pop("pipeline", "")
        assert said == {"ddp": words, "fsdp": words}
        assert (name == "tied") or ("save_weights" in advice and "from_pretrained" in advice)
    run_ranks(in_parts, 1, bases[name], str(tmp_path / "parts"))
    folders = ["ddp", "fsdp", "parts/back", *(["pipeline"] if name == "untied" else [])]
    for folder in folders:
        found, again = run_ranks(one_device, 1, str(tmp_path / folder))[0]
        assert again == words
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())


# Models without memory


def adapted(model: nn.Module) -> nn.Module:
    from peft import get_peft_model

    sys.path.insert(0, str(FOLDER))
    return get_peft_model(model, import_module("text").ADAPTERS)


def without_memory(base: str, strategy: str) -> None:
    """Drawn, read and adapted models are those of plain torch, with their rotary embeddings."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(base)
    tokens = torch.tensor([[5, 6, 7]])

    def output(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return model.eval()(input_ids=tokens).logits

    def from_config() -> nn.Module:
        return AutoModelForCausalLM.from_config(config)

    def read() -> nn.Module:
        model = from_config()
        lockstep.load_weights(model, base)
        return model

    torch.manual_seed(0)
    expected = {"drawn": output(from_config())}
    torch.manual_seed(0)
    adapted_model = adapted(AutoModelForCausalLM.from_pretrained(base))
    expected["adapted"] = output(adapted_model)
    expected["read"] = output(AutoModelForCausalLM.from_pretrained(base))
    adapters = {n: p.detach() for n, p in adapted_model.named_parameters() if "lora_" in n}
    builds = {"drawn": from_config, "read": read, "adapted": lambda: adapted(read())}
    with lockstep.init(strategy) as world:
        for name, build in builds.items():
            torch.manual_seed(0)
            with lockstep.deferred_init():
                model = build()
            model = world.prepare(model)
            torch.testing.assert_close(output(model), expected[name])
        for name, parameter in model.named_parameters():
            # What is tied was drawn once, and dropped.
            is_comparable = not config.tie_word_embeddings and not parameter.is_meta
            if name in adapters and is_comparable:
                whole = getattr(parameter, "full_tensor", lambda p=parameter: p)()
                assert torch.equal(whole.detach(), adapters[name]), name
        with torch.device("meta"):
            model = from_config()
        lockstep.load_weights(model, base)
        torch.testing.assert_close(output(world.prepare(model)), expected["read"])
        with torch.device("meta"):
            model = from_config()
        with pytest.raises(UsageError, match="was built on the meta device"):
            output(world.prepare(model))


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "pipeline"])
def test_models_that_were_built_without_memory(bases: dict[str, str], strategy: str) -> None:
    tied = strategy == "fsdp"
    run_ranks(
        without_memory,
        1 if strategy == "single" else 2,
        bases["tied" if tied else "untied"],
        strategy,
    )


# The example


EXAMPLES = {
    "whole": ("tied", False, [("ddp", 2), ("fsdp", 2)]),
    "whole, untied": ("untied", False, [("pipeline", 2)]),
    "adapters": ("untied", True, [("ddp", 3), ("fsdp", 2), ("pipeline", 2)]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_is_the_same_under_every_strategy(
    bases: dict[str, str], tmp_path: Path, name: str
) -> None:
    base, lora, runs = EXAMPLES[name]
    options = {**OPTIONS, "base": bases[base], "lora": lora}

    def run(program: str, strategy: str, size: int) -> tuple[list[float], dict[str, Tensor]]:
        folder = tmp_path / f"{program}-{strategy}"
        env = {} if strategy == "plain" else {"LOCKSTEP_STRATEGY": strategy}
        first, *others = run_ranks(example, size, program, {**options, "out": str(folder)}, env=env)
        assert others == [[]] * (size - 1), "rank 0 alone prints"
        assert (folder / "adapter_config.json").exists() is lora
        return first, run_ranks(one_device, 1, str(folder))[0][0]

    _, before = run("plain_torch", "plain", 1)
    losses, weights = run("with_lockstep", "single", 1)
    assert before.keys() == weights.keys(), "what plain torch saves"
    assert losses[2] < losses[0]
    for strategy, size in runs:
        found, saved = run("with_lockstep", strategy, size)
        assert found == pytest.approx(losses, abs=3e-4)
        for key, value in weights.items():
            torch.testing.assert_close(saved[key], value, rtol=1e-2, atol=1e-4, msg=key)


@pytest.mark.parametrize("lora", [False, True])
def test_verify_says_equal(bases: dict[str, str], tmp_path: Path, lora: bool) -> None:
    script = [str(FOLDER / "with_lockstep.py"), "--base", bases["untied"], "--limit", "20"]
    script += ["--batch-size", "7", "--epochs", "1", *(["--lora"] if lora else [])]
    verdict = verify("--nproc", "2", *script, cwd=tmp_path)
    assert (verdict["code"], verdict["verdict"]) == (0, "EQUAL"), verdict
