"""Train a small GPT-2 on synthetic text with the Hugging Face Trainer; the callback is the only line about Holdfast.

Run it with `holdfast run examples/hugging_face.yaml`, under `torchrun`, or alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from holdfast.integrations.huggingface import HoldfastCallback


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards from a random token."""

    def __init__(self, number: int) -> None:
        first = torch.randint(64, (number, 1), generator=torch.Generator().manual_seed(number))
        self._tokens = (first + torch.arange(32)) % 64

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[place], "labels": self._tokens[place]}


def main() -> None:
    """Train, evaluate after each epoch, and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("hugging-face"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=512)
    given = parser.parse_args()
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
    arguments = TrainingArguments(
        output_dir=str(given.output),
        num_train_epochs=given.epochs,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        use_cpu=not torch.cuda.is_available(),
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Words(given.sequences),
        eval_dataset=Words(64),
        callbacks=[HoldfastCallback()],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
