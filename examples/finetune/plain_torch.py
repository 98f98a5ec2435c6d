"""A language model of transformers is fine-tuned on one device, in plain PyTorch."""

import argparse

import torch
from peft import get_peft_model
from text import ADAPTERS, count, load_text, options
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    train_set, test_set = load_text(tokenizer, args.limit)
    pad = DataCollatorForSeq2Seq(tokenizer)
    train = DataLoader(train_set, args.batch_size, shuffle=True, collate_fn=pad)
    test = DataLoader(test_set, args.batch_size, collate_fn=pad)
    model = AutoModelForCausalLM.from_pretrained(args.base)
    model.gradient_checkpointing_enable()
    if args.lora:
        model = get_peft_model(model, ADAPTERS)
    model.to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)

    for epoch in range(args.epochs):
        losses = []
        model.train()
        for batch in train:
            loss = model(**batch.to(device)).loss  # the mean over the tokens of the answers
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        tested = torch.zeros(2, dtype=torch.float64)
        model.eval()
        with torch.no_grad():
            for batch in test:
                total = model(**batch.to(device), num_items_in_batch=1).loss  # not divided
                tested += torch.stack([total, count(batch)]).cpu()
        print(
            f"epoch {epoch}: loss {sum(losses) / len(losses):.4f} a token in training, "
            f"{tested[0] / tested[1]:.4f} in the test"
        )
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main(options())
