"""Writes chats for training as JSON lines: {"messages": [...]}, or {"text": ...} for a bare story. Seeded.

usage: python generate_chats.py --out chats.jsonl --count 150000 --seed 1
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import basics
import lookups
import records
import stories
import talk
from scenes import Scene, messages_of
from words import Dice

SYSTEMS = [
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a kind and helpful assistant.",
    "Answer in short and simple sentences.",
    "You are Pagoda Tiny, a small and friendly assistant.",
    "Be brief.",
]
WRITERS: dict[str, tuple[Callable[[Dice], Scene], float]] = {
    "talk": (talk.talk, 12),
    "facts": (basics.facts, 8),
    "sums": (basics.sums, 9),
    "spelling": (basics.spelling, 8),
    "echo": (basics.echo, 9),
    "story": (basics.story, 10),
    "lookup": (lookups.lookup, 23),
    "record": (records.record, 24),
    "call": (records.call, 8),
}
"""Each writer and its share of the scenes."""


def write_scene(dice: Dice, name: str = "") -> Scene:
    """A scene by the named writer, or by one drawn by share."""
    if not name:
        name = dice.choices(list(WRITERS), [share for _, share in WRITERS.values()])[0]
    return WRITERS[name][0](dice)


def write_chat(dice: Dice) -> dict[str, Any]:
    """One record: now and then a bare story, else one to three scenes in a row."""
    if dice.chance(0.04):
        return {"text": stories.tell(dice)}
    scenes = [write_scene(dice)]
    system = scenes[0].system
    if not system:
        others = [write_scene(dice) for _ in range(dice.choices([0, 1, 2], [7, 2, 1])[0])]
        scenes += [scene for scene in others if not scene.system]
        system = dice.choice(SYSTEMS) if dice.chance(0.25) else ""
    return {"messages": messages_of(scenes, system)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=150_000, help="records to write")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    dice = Dice(args.seed)
    with args.out.open("w", encoding="utf-8") as file:
        for _ in range(args.count):
            file.write(json.dumps(write_chat(dice), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
