"""The same on any number of devices, under any strategy.

python with_lockstep.py
lockstep run --nproc 2 with_lockstep.py
lockstep run --nproc 2 --strategy fsdp with_lockstep.py
lockstep run --nproc 2 --strategy pipeline with_lockstep.py
"""

import argparse

import torch
from peft import get_peft_model
from safetensors.torch import load_file
from text import ADAPTERS, count, load_text, options
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
)

import lockstep


def main(args: argparse.Namespace) -> None:
    world = lockstep.init(seed=0)
    torch.manual_seed(0)
    device = world.device
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    train_set, test_set = load_text(tokenizer, args.limit)
    pad = DataCollatorForSeq2Seq(tokenizer)
    train = DataLoader(train_set, args.batch_size, shuffle=True, collate_fn=pad)
    train = world.loader(train, weight=count)  # the loss is the mean over tokens
    test = DataLoader(test_set, args.batch_size, collate_fn=pad)
    with lockstep.deferred_init():  # takes no memory: in `prepare` each rank reads its part
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.base))
        lockstep.load_weights(model, args.base)
        if args.lora:
            model = get_peft_model(model, ADAPTERS)
    model.gradient_checkpointing_enable()
    bare = model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    model, optimizer, test = world.prepare(model, optimizer, test)

    for epoch in range(args.epochs):
        losses = []
        model.train()
        for batch in train:
            loss = model(**batch.to(device)).loss  # the mean over this rank's tokens
            world.backward(loss)
            world.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if world.is_last_micro_batch:
                losses.append(world.loss())
        tested = torch.zeros(2, dtype=torch.float64)
        model.eval()
        with torch.no_grad():
            for batch in test:
                total = model(**batch.to(device), num_items_in_batch=1).loss  # not divided
                tested += torch.stack([total, count(batch)]).cpu()
        tested = world.sum(tested)
        world.print(
            f"epoch {epoch}: loss {sum(losses) / len(losses):.4f} a token in training, "
            f"{tested[0] / tested[1]:.4f} in the test"
        )
    save(world, model, bare, args)
    if world.is_main:
        tokenizer.save_pretrained(args.out)
    world.close()


def save(
    world: lockstep.World, model: nn.Module, bare: PreTrainedModel, args: argparse.Namespace
) -> None:
    """Writes a folder that `from_pretrained` reads; all ranks call it, whatever each one holds."""
    weights = f"{args.out}/{'with_base' if args.lora else 'model'}.safetensors"
    lockstep.save_weights(model, weights)
    if world.is_main and args.lora:
        bare.save_pretrained(args.out, state_dict=load_file(weights))  # of these the adapters
    elif world.is_main:
        bare.config.save_pretrained(args.out)


if __name__ == "__main__":
    main(options())
