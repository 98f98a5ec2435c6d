"""Makes a folder of transformers to begin with: a small Llama and its tokenizer.

They learn from the reference of Python's language, which Python brings along. In the place of the
folder any other of a causal language model will do.
"""

import argparse
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def make_tokenizer(text: str, size: int) -> PreTrainedTokenizerFast:
    """Byte pairs, from bytes on: it knows every text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokenizer = make_tokenizer(text, args.vocabulary)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.width,
        intermediate_size=2 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=args.tied,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    for step in range(args.steps):
        begins = torch.randint(len(tokens) - 64, (32, 1))
        batch = tokens[begins + torch.arange(64)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss:.3f}")
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/base")
    parser.add_argument("--tied", action="store_true", help="one matrix for words in and out")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1024)
    main(parser.parse_args())
