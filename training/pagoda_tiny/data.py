"""Turns chats and books into training windows. Knows tokens and which of them are learnt; no model."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from generate_chats import write_chat
from model import END_OF_TEXT, PAD, SPECIAL_TOKENS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from words import Dice

BOOKS = {"readers-and-storybooks": 0.65, "fairy-tales-and-childrens-books": 0.35}
"""Text files of the corpus and their shares of the text windows."""


@dataclass(frozen=True)
class Batch:
    """Input ids, the id that follows each, and whether that one is learnt; all [rows, length]."""

    ids: Tensor
    targets: Tensor
    learnt: Tensor


def render(record: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """A record as the chat template writes it, and the spans (characters) that the model is to say itself."""
    if "text" in record:
        return record["text"], [(0, len(record["text"]))]
    text, spans = "", []
    for message in record["messages"]:
        text += f"<|im_start|>{message['role']}\n"
        said = f"{message['content']}<|im_end|>"
        if message["role"] == "assistant":
            spans.append((len(text), len(text) + len(said)))
        text += f"{said}\n"
    return text, spans


def read_books(corpus: Path) -> dict[str, tuple[list[str], list[str]]]:
    """{file: (documents to train on, held-out documents)}: every 100th document is held out."""
    books = {}
    for name in BOOKS:
        with (corpus / f"{name}.jsonl").open(encoding="utf-8") as file:
            texts = [json.loads(line)["text"] for line in file]
        random.Random(0).shuffle(texts)
        books[name] = ([text for at, text in enumerate(texts) if at % 100], texts[::100])
    return books


def make_tokenizer(corpus: Path, size: int) -> Tokenizer:
    """A byte-level BPE of `size` tokens over chats and books; single digits, so that sums can be learnt."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    dice = Dice(0)
    texts = [render(write_chat(dice))[0] for _ in range(4000)]
    for name, (train, _) in read_books(corpus).items():
        left = BOOKS[name] * 2e6
        for text in train:
            if left > 0:
                texts.append(text)
                left -= len(text)
    for special in SPECIAL_TOKENS:
        texts = [text.replace(special, " ") for text in texts]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pack_books(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All texts in one row of ids, each after an end-of-text."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids += [END_OF_TEXT, *encoding.ids]
    return torch.tensor(ids, dtype=torch.int32)


class ChatStream:
    """Endless fresh chats as token ids. Whole chats are packed, so that no answer loses its question."""

    def __init__(self, tokenizer: Tokenizer, *, seed: int, prompt_share: float) -> None:
        self._tokenizer = tokenizer
        self._dice = Dice(seed)
        self._rng = random.Random(seed)
        self._prompt_share = prompt_share
        self._waiting: list[tuple[list[int], list[bool]]] = []

    def _encode(self, record: dict[str, Any]) -> tuple[list[int], list[bool]]:
        """Ids with a leading end-of-text, and which of them are learnt: the answers and a share of the rest."""
        text, spans = render(record)
        encoding = self._tokenizer.encode(text)
        learnt = [False]
        for start, _ in encoding.offsets:
            said = any(first <= start < last for first, last in spans)
            learnt.append(said or self._rng.random() < self._prompt_share)
        return [END_OF_TEXT, *encoding.ids], learnt

    def window(self, length: int) -> tuple[list[int], list[bool]]:
        """`length` ids: the longest waiting chat that still fits, again and again, then padding."""
        ids: list[int] = []
        learnt: list[bool] = []
        while len(ids) < length:
            while len(self._waiting) < 48:
                self._waiting.append(self._encode(write_chat(self._dice)))
            left = length - len(ids)
            fits = [at for at, (chat, _) in enumerate(self._waiting) if len(chat) <= left]
            if ids and not fits:
                break
            # A window begins with the chat that waited longest, so that none waits forever.
            at = max(fits, key=lambda at: len(self._waiting[at][0])) if ids else 0
            chat, marks = self._waiting.pop(at)
            ids += chat
            learnt += marks
        padding = max(0, length - len(ids))
        return ids[:length] + [PAD] * padding, learnt[:length] + [False] * padding


class Mixture:
    """Batches of chat windows and text windows."""

    def __init__(self, tokenizer: Tokenizer, books: dict[str, Tensor], *, seed: int, text_share: float) -> None:
        self._chats = ChatStream(tokenizer, seed=seed, prompt_share=0.1)
        self._books = books
        self._rng = random.Random(seed)
        self._text_share = text_share

    def batches(self, *, rows: int, length: int) -> Iterator[Batch]:
        while True:
            all_ids, all_learnt = [], []
            for _ in range(rows):
                if self._rng.random() < self._text_share:
                    name = self._rng.choices(list(BOOKS), list(BOOKS.values()))[0]
                    stream = self._books[name]
                    at = self._rng.randrange(len(stream) - length - 1)
                    all_ids.append(stream[at : at + length + 1].long())
                    all_learnt.append(torch.ones(length, dtype=torch.bool))
                else:
                    ids, learnt = self._chats.window(length + 1)
                    all_ids.append(torch.tensor(ids))
                    all_learnt.append(torch.tensor(learnt[1:]))
            both = torch.stack(all_ids)
            yield Batch(both[:, :-1], both[:, 1:], torch.stack(all_learnt))
