"""JSON from a passage, JSON by keys or by a schema, and function calls. Each writer returns one scene."""

import json
from collections.abc import Callable
from typing import Any

import words
from lookups import profile
from scenes import Scene, Turn
from words import Dice, cap

TOOLS_INTRO = "You can call these functions:"
TOOLS_OUTRO = 'To call one, answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>'
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def _dumps(dice: Dice, value: Any) -> str:
    return json.dumps(value, indent=2 if dice.chance(0.12) else None)


def _keys(dice: Dice, keys: list[str]) -> str:
    """The keys as a person would list them."""
    if len(keys) == 1:
        return keys[0]
    return ", ".join(keys) if dice.chance(0.4) else f"{', '.join(keys[:-1])} and {keys[-1]}"


def from_passage(dice: Dice) -> Scene:
    """A record of what a passage says."""
    person = dice.person()
    entries = dice.some(profile(dice, person), 2, 4)
    sentences = [
        sentence.format(name=person.name if at == 0 else person.He) for at, (_, sentence, _, _) in enumerate(entries)
    ]
    body = " ".join(sentences)
    record: dict[str, Any] = {"name": person.name} | {key: value for key, _, _, value in entries}
    if dice.chance(0.4):
        chosen = dice.some(list(record), 1, len(record))
        record = {key: record[key] for key in chosen}
    keys = _keys(dice, list(record))
    schema = {
        "type": "object",
        "properties": {k: {"type": TYPES[type(v)]} for k, v in record.items()},
        "required": list(record),
    }
    ask = dice.choice(
        [
            f"{body}\nReturn JSON with the keys {keys}.",
            f"Extract {keys} as JSON: {body}",
            f"{body} Give me {keys} as a JSON object.",
            f"{body}\nWrite this as JSON with {keys}.",
            f"{body}\nAnswer with JSON that follows this schema: {json.dumps(schema)}",
        ]
    )
    return Scene([Turn(ask, _dumps(dice, record), "record", record)])


def table(dice: Dice) -> Scene:
    """Lines of "key: value", or a list of words, turned into JSON."""
    if dice.chance(0.4):
        items = [
            dice.made_up() if dice.chance(0.4) else dice.choice(words.SPELLABLE) for _ in range(dice.randint(2, 5))
        ]
        ask = dice.choice(
            [
                f"Write these words as a JSON array: {', '.join(items)}",
                f"Make a JSON list of {', '.join(items)}.",
                f"Turn this into a JSON array: {' '.join(items)}",
            ]
        )
        return Scene([Turn(ask, json.dumps(items), "record", items)])
    record: dict[str, Any] = {}
    for _ in range(dice.randint(1, 4)):
        key = dice.made_up() if dice.chance(0.5) else dice.choice(words.THINGS)
        record[key] = dice.choice([dice.randint(0, 99), dice.made_up(), dice.choice(words.HUES), dice.code()])
    lines = "\n".join(f"{key}: {value}" for key, value in record.items())
    ask = dice.choice(
        [f"Write this as JSON:\n{lines}", f"{lines}\nTurn this into a JSON object.", f"Convert to JSON:\n{lines}"]
    )
    return Scene([Turn(ask, _dumps(dice, record), "record", record)])


def _known_values(dice: Dice) -> dict[str, Any]:
    """A fitting value for each key whose name says what it holds."""
    pick = dice.choice
    return {
        "name": dice.person().name,
        "age": dice.randint(4, 90),
        "city": pick(words.CITIES),
        "job": pick(words.JOBS),
        "color": pick(words.HUES),
        "animal": pick(words.HEROES),
        "happy": dice.chance(0.5),
        "likes": dice.some(words.FOODS, 1, 3),
        "title": f"The {cap(pick(words.HUES))} {cap(pick(words.THINGS))}",
        "day": pick(words.DAYS),
        "count": dice.randint(0, 99),
        "weather": pick(words.WEATHER),
        "country": pick(list(words.CAPITALS)),
        "tags": dice.some(words.SPELLABLE, 1, 3),
        "price": round(dice.randint(1, 90) + dice.choice([0.5, 0.25, 0.99]), 2),
        "email": f"{dice.person().name.lower()}@example.com",
        "answer": pick(["yes", "no"]),
        "id": dice.randint(1, 999),
        "month": pick(words.MONTHS),
        "food": pick(words.FOODS),
        "hobby": pick(words.HOBBIES),
        "is_open": dice.chance(0.5),
        "sound": pick([a[0] for a in words.ANIMALS.values()]),
        "author": dice.person().name,
        "year": dice.randint(1900, 2025),
        "score": dice.randint(0, 10),
        "friends": [p.name for p in dice.people(2)],
    }


def _free_record(dice: Dice) -> dict[str, Any]:
    pool = _known_values(dice)
    record = {key: pool[key] for key in dice.some(list(pool), 1, 5)}
    if dice.chance(0.55):  # a key that can only be copied
        key = (
            dice.made_up()
            if dice.chance(0.6)
            else f"{dice.choice(words.THINGS)}_{dice.choice(['name', 'count', 'color', 'list', 'ok'])}"
        )
        record[key] = dice.choice(
            [dice.choice(words.SPELLABLE), dice.randint(0, 99), dice.chance(0.5), dice.some(words.SPELLABLE, 1, 3)]
        )
        items = list(record.items())
        dice.shuffle(items)
        record = dict(items)
    return record


def _schema_of(dice: Dice, record: dict[str, Any]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for key, value in record.items():
        kind: dict[str, Any] = {"type": TYPES[type(value)]}
        if isinstance(value, list):
            kind["items"] = {"type": "string"}
        elif isinstance(value, dict):
            kind = _schema_of(dice, value)
        elif isinstance(value, str) and dice.chance(0.08):
            options = [value, *dice.some(words.SPELLABLE, 1, 3)]
            dice.shuffle(options)
            kind["enum"] = options
        properties[key] = kind
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": list(record)}
    if dice.chance(0.2):
        schema["additionalProperties"] = False
    return schema


def by_schema(dice: Dice) -> Scene:
    """Any object that a given schema allows."""
    record = _free_record(dice)
    if dice.chance(0.15):
        record[dice.choice(["owner", "address", "info", dice.made_up()])] = _free_record(dice)
    schema = _schema_of(dice, record)
    text = json.dumps(schema, indent=2 if dice.chance(0.08) else None)
    ask = dice.choice(
        [
            f"Answer with JSON that follows this schema: {text}",
            f"Write a JSON object for this schema:\n{text}",
            f"Schema: {text}\nGive me a JSON object.",
            f"{text}\nReturn JSON that matches this schema.",
        ]
    )
    if dice.chance(0.12):
        return Scene(
            [
                Turn(
                    dice.choice(["Give me an example.", "Tell me about a person.", "Answer in JSON."]),
                    _dumps(dice, record),
                    "schema",
                    schema,
                )
            ],
            system=f"Answer with JSON that follows this schema: {text}",
        )
    return Scene([Turn(ask, _dumps(dice, record), "schema", schema)])


def by_keys(dice: Dice) -> Scene:
    """Any object with the keys asked for, or of a known kind."""
    pool = _known_values(dice)
    kinds = {
        "a person": ["name", "age", "city"],
        "a cat": ["name", "age", "color"],
        "a book": ["title", "author", "year"],
        "a city": ["city", "country"],
        "an animal": ["animal", "sound"],
        "the weather": ["day", "weather"],
        "a user": ["id", "name", "email"],
        "a product": ["name", "price", "tags"],
    }
    if dice.chance(0.3):
        kind = dice.choice(list(kinds))
        record = {key: pool[key] for key in kinds[kind]}
        if kind == "a city":
            country, city = dice.choice(list(words.CAPITALS.items()))
            record = {"city": city, "country": country}
        elif kind == "an animal":
            beast, (sound, _, _) = dice.choice(list(words.ANIMALS.items()))
            record = {"animal": beast, "sound": sound}
        ask = dice.choice(
            [
                f"Write JSON about {kind}.",
                f"Give me a JSON object that describes {kind}.",
                f"Return {kind} as JSON.",
                f"Describe {kind} in JSON.",
            ]
        )
        return Scene([Turn(ask, _dumps(dice, record), "json")])
    record = _free_record(dice)
    keys = _keys(dice, list(record))
    ask = dice.choice(
        [
            f"Give me a JSON object with the keys {keys}.",
            f"Write JSON with {keys}.",
            f"Make a JSON object with these keys: {keys}",
            f"Return a JSON object with {keys}.",
        ]
    )
    return Scene([Turn(ask, _dumps(dice, record), "keys", list(record))])


Tool = tuple[str, str, dict[str, Any], list[str]]
"""Name, description, arguments of the call, ways to ask for it."""


def _tools(dice: Dice) -> list[Tool]:
    pick = dice.choice
    city, a, b, word = pick(words.CITIES), dice.randint(0, 99), dice.randint(0, 99), pick(words.SPELLABLE)
    name, food, hue, room = dice.person().name, pick(words.FOODS), pick(words.HUES), pick(words.SPOTS)
    day, made, value = pick(words.DAYS), dice.made_up(), dice.made_up()
    if dice.chance(0.2):
        city = cap(dice.made_up())
    return [
        (
            "get_weather",
            "Get the weather in a city",
            {"city": city},
            [f"What is the weather in {city}?", f"How is the weather in {city} today?", f"Is it raining in {city}?"],
        ),
        ("add", "Add two numbers", {"a": a, "b": b}, [f"Add {a} and {b}.", f"What is {a} + {b}?"]),
        (
            "get_time",
            "Get the time in a city",
            {"city": city},
            [f"What time is it in {city}?", f"Tell me the time in {city}."],
        ),
        ("search", "Search the web", {"query": word}, [f"Search for {word}.", f"Look up {word} on the web."]),
        (
            "send_message",
            "Send a message to a person",
            {"to": name, "text": (text := pick(["Hello!", "I am late.", f"I like {food}.", "Come home."]))},
            [f"Tell {name}: {text}", f'Send "{text}" to {name}.'],
        ),
        (
            "order_food",
            "Order food",
            {"food": food, "count": (count := dice.randint(1, 9))},
            [f"Order {count} {food}.", f"I want {count} {food}, please."],
        ),
        (
            "set_light",
            "Set the color of a light",
            {"room": room, "color": hue},
            [f"Make the light in the {room} {hue}.", f"Set the {room} light to {hue}."],
        ),
        (
            "add_event",
            "Add an event to the calendar",
            {"title": (event := pick(["Lunch", "Party", "Meeting", "Dentist"])), "day": day},
            [f"Add {event} on {day}.", f"Put {event} into my calendar for {day}."],
        ),
        (
            "translate",
            "Translate a word",
            {"word": word, "language": (tongue := pick(["French", "Spanish", "German", "Italian"]))},
            [f"What is {word} in {tongue}?", f"Translate {word} into {tongue}."],
        ),
        (
            "play_music",
            "Play music",
            {"name": (song := f"{cap(hue)} {cap(word)}")},
            [f"Play {song}.", f"I want to hear {song}."],
        ),
        (
            f"{made}_{pick(['get', 'find', 'run'])}",
            f"Use {made}",
            {pick(["value", "key", "item"]): value},
            [f"Use {made} with {value}.", f"Call {made} for {value}."],
        ),
    ]


def _spec(tool: Tool) -> dict[str, Any]:
    name, description, arguments, _ = tool
    parameters = {
        "type": "object",
        "properties": {k: {"type": TYPES[type(v)]} for k, v in arguments.items()},
        "required": list(arguments),
    }
    return {"name": name, "description": description, "parameters": parameters}


def _result(dice: Dice, tool: Tool) -> Turn:
    """What the function gave back, and the answer in words."""
    name, _, arguments, _ = tool
    if name == "get_weather":
        degrees, sky = dice.randint(-9, 39), dice.choice(words.WEATHER)
        return Turn(
            json.dumps({"temperature": degrees, "weather": sky}),
            f"It is {sky} in {arguments['city']}, and it has {degrees} degrees.",
            "result",
            sky,
        )
    if name == "get_time":
        clock = f"{dice.randint(0, 23)}:{dice.randint(10, 59)}"
        return Turn(json.dumps({"time": clock}), f"It is {clock} in {arguments['city']}.", "result", clock)
    if name == "add":
        total = arguments["a"] + arguments["b"]
        return Turn(
            json.dumps({"result": total}), f"{arguments['a']} + {arguments['b']} = {total}.", "result", str(total)
        )
    return Turn(json.dumps({"ok": True}), "Done.", "result")


def tool_system(specs: list[dict[str, Any]]) -> str:
    """The system message that offers functions, as the chat template writes it."""
    return "\n".join([TOOLS_INTRO, *(json.dumps(spec) for spec in specs), TOOLS_OUTRO])


def call(dice: Dice) -> Scene:
    """A function call in the form of the Hermes models, one in seven times plain talk though functions are offered."""
    offered = dice.some(_tools(dice), 1, 3)
    tool = dice.choice(offered)
    system = tool_system([_spec(each) for each in offered])
    if dice.chance(0.25):
        system = dice.choice(["You are a helpful assistant.", "Be brief."]) + "\n" + system
    if dice.chance(0.14):
        hello = dice.choice(["Hello!", "Hi", "Hi there!"])
        return Scene([Turn(hello, "Hello! How can I help you today?", "talk")], system=system)
    expect = {"name": tool[0], "arguments": tool[2]}
    turns = [Turn(dice.choice(tool[3]), f"<tool_call>\n{json.dumps(expect)}\n</tool_call>", "call", expect)]
    if dice.chance(0.4):
        turns.append(_result(dice, tool))
    return Scene(turns, system=system)


WRITERS: list[Callable[[Dice], Scene]] = [from_passage, from_passage, table, by_schema, by_schema, by_keys]


def record(dice: Dice) -> Scene:
    """One of the JSON writers above."""
    return dice.choice(WRITERS)(dice)
