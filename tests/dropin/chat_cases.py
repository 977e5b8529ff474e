"""A preprocess function for chats. Workers import this module, so it imports nothing heavy."""

from __future__ import annotations

from typing import Any


class Supervised:
    """A preprocess function as LLaMA-Factory has them: dict of lists to dict of lists, broken rows dropped, prompts not trained."""

    def __init__(self, tokenizer: Any, ignore_index: int) -> None:
        self.tokenizer = tokenizer
        self.ignore_index = ignore_index

    def __call__(self, examples: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        made: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
        for prompt, response, system in zip(examples["_prompt"], examples["_response"], examples["_system"], strict=True):
            if len(prompt) % 2 != 1 or len(response) != 1:
                continue
            turns = [*prompt, *response]
            turns[0] = {**turns[0], "content": f"{system} {turns[0]['content']}"}
            tokens: list[int] = []
            labels: list[int] = []
            for source, target in zip(turns[::2], turns[1::2], strict=True):
                source_ids = self.tokenizer.encode(f"user {source['content']} assistant").ids
                target_ids = [*self.tokenizer.encode(target["content"]).ids, self.tokenizer.token_to_id("[EOS]")]
                tokens += source_ids + target_ids
                labels += [self.ignore_index] * len(source_ids) + target_ids
            made["input_ids"].append(tokens)
            made["attention_mask"].append([1] * len(tokens))
            made["labels"].append(labels)
        return made
