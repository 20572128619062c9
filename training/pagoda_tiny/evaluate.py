"""Measures a checkpoint on chats and books that training never saw, through transformers, as a user would load it.

usage: python evaluate.py CHECKPOINT [--corpus DIR] [--count 100] [--samples]
Names and made-up words in the questions are drawn from lists held out of training; answers are greedy.
"""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from data import BOOKS, read_books, render
from generate_chats import write_scene
from scenes import Message, Scene, Turn, messages_of
from train import DEFAULT_CORPUS
from transformers import AutoModelForCausalLM, AutoTokenizer
from words import Dice

SEED = 10_000_019
SOURCES = {
    "lookup": "lookup",
    "fact": "facts",
    "sum": "sums",
    "spelling": "spelling",
    "echo": "echo",
    "record": "record",
    "schema": "record",
    "keys": "record",
    "call": "call",
    "story": "story",
}
"""What is measured, and the writer whose scenes hold it."""
SAMPLES = [
    "Hello!",
    "Who are you?",
    "Tell me a story about a fox.",
    "Tell me a story about a robot.",
    "What is the capital of France?",
    "What is 7 + 5?",
    "Spell lamp.",
    "Ann has a red hat. Bob has a blue hat. What colour is Ann's hat?",
    "Wanda is 31 years old. She lives in Porto. She works as a baker.\n"
    "Return JSON with the keys name, age, city and job.",
    'Answer with JSON that follows this schema: {"type": "object", "properties": {"title": {"type": "string"}, '
    '"blorp": {"type": "integer"}}, '
    '"required": ["title", "blorp"]}',
    "Why is the sky blue?",
    "Thank you!",
]


@dataclass(frozen=True)
class Probe:
    """A chat that ends with a question, and the turn that follows."""

    messages: list[Message]
    turn: Turn


def probes(kind: str, count: int) -> list[Probe]:
    """Questions of one kind, with the right answers as history where the scene has earlier turns."""
    dice = Dice(SEED, held_out=True)
    found: list[Probe] = []
    while len(found) < count:
        scene = write_scene(dice, SOURCES[kind])
        at = [index for index, turn in enumerate(scene.turns) if turn.kind == kind and turn.expect is not None]
        if at:
            index = dice.choice(at)
            messages = messages_of([Scene(scene.turns[: index + 1])], scene.system)[:-1]
            found.append(Probe(messages, scene.turns[index]))
    return found


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def follows(schema: dict[str, Any], value: Any) -> bool:
    """Whether the value is what the schema describes (types, required and no other keys, enum)."""
    if "enum" in schema and value not in schema["enum"]:
        return False
    match schema["type"]:
        case "object":
            properties = schema["properties"]
            if not isinstance(value, dict) or value.keys() != properties.keys():
                return False
            return all(follows(properties[key], item) for key, item in value.items())
        case "array":
            return isinstance(value, list) and all(follows(schema["items"], item) for item in value)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case _:
            return isinstance(value, str)


def _holds(reply: str, expect: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(expect)}(?!\w)", reply) is not None


def _is_call(reply: str, expect: dict[str, Any]) -> bool:
    inner = re.fullmatch(r"\s*<tool_call>(.*)</tool_call>\s*", reply, re.DOTALL)
    return bool(_parsed(inner.group(1) if inner else reply) == expect)


def _has_keys(reply: str, keys: list[str]) -> bool:
    value = _parsed(reply)
    return isinstance(value, dict) and sorted(value) == sorted(keys)


CHECKS: dict[str, Callable[[str, Any], bool]] = {
    "lookup": _holds,
    "fact": _holds,
    "sum": lambda reply, expect: (
        re.findall(r"\d+", reply)[-1:] == [expect] or ("bigger" in reply and re.findall(r"\d+", reply)[:1] == [expect])
    ),
    "spelling": lambda reply, expect: reply.rstrip(".") == expect,
    "echo": lambda reply, expect: reply == expect,
    "record": lambda reply, expect: _parsed(reply) == expect,
    "schema": lambda reply, expect: follows(expect, _parsed(reply)),
    "keys": _has_keys,
    "call": _is_call,
    "story": lambda reply, expect: _holds(reply.lower(), expect.lower()),
}


class Subject:
    """The model under test."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.tokenizer.padding_side = "left"
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def prompt(self, messages: list[Message]) -> str:
        return str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    @torch.no_grad()
    def replies(
        self, chats: list[list[Message]], *, max_new_tokens: int, do_sample: bool = False
    ) -> list[tuple[str, bool]]:
        """(reply, whether it ended by itself) for each chat."""
        result = []
        for at in range(0, len(chats), 25):
            batch = self.tokenizer(
                [self.prompt(chat) for chat in chats[at : at + 25]], return_tensors="pt", padding=True
            )
            batch.pop("token_type_ids", None)
            sampling = {"do_sample": True} if do_sample else {"do_sample": False, "temperature": None, "top_p": None}
            out = self.model.generate(**batch, max_new_tokens=max_new_tokens, **sampling)
            for row in out[:, batch["input_ids"].shape[1] :]:
                ended = bool(((row == 0) | (row == 2)).any())
                result.append((str(self.tokenizer.decode(row, skip_special_tokens=True)).strip(), ended))
        return result

    @torch.no_grad()
    def loss(self, ids: list[int], learnt: list[bool]) -> tuple[float, int]:
        """(sum of the losses, number) over the marked tokens."""
        limit = self.model.config.max_position_embeddings
        row, marks = torch.tensor([ids[:limit]]), torch.tensor(learnt[1:limit])
        losses = F.cross_entropy(self.model(row).logits[0, :-1].float(), row[0, 1:], reduction="none")
        return losses[marks].sum().item(), int(marks.sum())

    def book_loss(self, texts: list[str]) -> float:
        parts = [
            self.loss(ids, [True] * len(ids)) for ids in (self.tokenizer(text)["input_ids"][:513] for text in texts)
        ]
        return sum(total for total, _ in parts) / sum(count for _, count in parts)

    def answer_loss(self, chats: list[Probe]) -> float:
        """Loss on the right answers."""
        total, number = 0.0, 0
        for probe in chats:
            text, spans = render({"messages": [*probe.messages, {"role": "assistant", "content": probe.turn.answer}]})
            encoding = self.tokenizer(text, return_offsets_mapping=True)
            learnt = [spans[-1][0] <= start < spans[-1][1] for start, _ in encoding["offset_mapping"]]
            part, count = self.loss(encoding["input_ids"], learnt)
            total, number = total + part, number + count
        return total / number


def measure(subject: Subject, *, corpus: Path, count: int) -> dict[str, float]:
    """Rates of right answers by kind, the rate of replies that end by themselves, and held-out losses."""
    result: dict[str, float] = {}
    ended: list[bool] = []
    asked: list[Probe] = []
    for kind, check in CHECKS.items():
        chosen = probes(kind, count)
        asked += chosen[:20]
        replies = subject.replies(
            [probe.messages for probe in chosen], max_new_tokens=240 if kind in ("story", "schema") else 120
        )
        result[kind] = (
            sum(check(reply, probe.turn.expect) for (reply, _), probe in zip(replies, chosen, strict=True)) / count
        )
        ended += [end for _, end in replies]
    result["ends_by_itself"] = sum(ended) / len(ended)
    tales, count_tales = [[{"role": "user", "content": "Tell me a story."}]], 20
    told = subject.replies(tales * count_tales, max_new_tokens=300, do_sample=True)
    result["different_stories"] = len({story for story, _ in told}) / count_tales
    result["loss_answers"] = subject.answer_loss(asked)
    if corpus.exists():
        books = read_books(corpus)
        for name in BOOKS:
            result[f"loss_{name}"] = subject.book_loss(books[name][1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--corpus", type=Path, default=DEFAULT_CORPUS)
    parser.add_argument("--count", type=int, default=100, help="questions of each kind")
    parser.add_argument("--samples", action="store_true", help="print a few replies, greedy and sampled")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    subject = Subject(args.checkpoint)
    if args.samples:
        for ask in SAMPLES:
            for do_sample in (False, True):
                reply, _ = subject.replies(
                    [[{"role": "user", "content": ask}]], max_new_tokens=260, do_sample=do_sample
                )[0]
                print(f"{'sampled' if do_sample else 'greedy '} | {ask!r}\n    {reply!r}")
    print(
        json.dumps(
            {name: round(value, 3) for name, value in measure(subject, corpus=args.corpus, count=args.count).items()}
        )
    )


if __name__ == "__main__":
    main()
