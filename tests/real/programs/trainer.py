"""A language model from its configuration, trained by transformers' Trainer as its docs show it."""

import argparse

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Sums(torch.utils.data.Dataset):
    """Sentences of digits, each the sum of the two before it; the longer ones are padded less."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        digits = [index % 10, index * 7 % 10]
        for _ in range(6 + index % 7):
            digits.append((digits[-1] + digits[-2]) % 10)
        padding = 16 - len(digits)
        return {
            "input_ids": torch.tensor(digits + [0] * padding),
            "attention_mask": torch.tensor([1] * len(digits) + [0] * padding),
            "labels": torch.tensor(digits + [-100] * padding),
        }


class OwnMean(Trainer):
    """Divides by the tokens of its own process."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class OwnLoader(Trainer):
    """Every process trains all samples."""

    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(
            self.train_dataset, batch_size=4, collate_fn=self.data_collator
        )


class Drift(TrainerCallback):
    """Decays one process's weights."""

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.is_world_process_zero:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.999)


class Print(TrainerCallback):
    """Prints what rank 0 logs, in full."""

    def on_log(self, args, state, control, logs, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            print("step", state.global_step, "loss", logs["loss"], "norm", logs["grad_norm"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--defect", default="")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--save", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    set_seed(1)
    config = LlamaConfig(
        vocab_size=10,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    arguments = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=options.accumulate,
        num_train_epochs=2,
        max_steps=options.steps,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="steps" if options.save else "no",
        save_steps=options.save or 500,
        report_to=[],
        disable_tqdm=True,
    )
    kind = {"tokens": OwnMean, "loader": OwnLoader}.get(options.defect, Trainer)
    trainer = kind(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=Sums(options.samples),
        callbacks=[Print(), Drift()] if options.defect == "drift" else [Print()],
    )
    trainer.train(resume_from_checkpoint=options.resume)
    if trainer.is_world_process_zero():
        weights = trainer.model.state_dict()
        print("weights", sum(value.double().sum().item() for value in weights.values()))


if __name__ == "__main__":
    main()
