"""Facts in the prompt and questions about them: the answer must be copied, not known. Each writer returns one scene."""

from collections.abc import Callable

import words
from scenes import Scene, Turn
from words import Dice, Person, an, cap

Question = tuple[str, str, str]
"""Question, answer, and the value that the answer must hold."""


def _pose(dice: Dice, facts: list[str], questions: list[Question], *, most: int = 4) -> Scene:
    """The facts (in the system message, or before or after the first question), then up to `most` questions."""
    body = " ".join(facts)
    if dice.chance(0.12):
        body = "\n".join(facts)
    asked = dice.some(questions, 1, most)
    turns = [Turn(ask, answer, "lookup", value) for ask, answer, value in asked]
    first = turns[0]
    style = dice.random()
    if style < 0.12:
        return Scene(turns, system=body)
    ask = dice.choice(
        [
            f"{body} {first.ask}",
            f"{body} {first.ask}",
            f"{body}\n{first.ask}",
            f"{body}\n\n{first.ask}",
            f"Read this: {body}\nQuestion: {first.ask}",
            f"{first.ask}\n{body}",
            f"Text: {body}\n{first.ask}",
        ]
    )
    if style < 0.3:
        confirm = dice.choice(["Thank you, I will remember that.", "I see.", "Good to know."])
        return Scene([Turn(body, confirm, "talk"), *turns])
    return Scene([Turn(ask, first.answer, "lookup", first.expect), *turns[1:]])


def _how_many(dice: Dice) -> int:
    """Of the facts of a passage: mostly few, now and then many."""
    return dice.randint(5, 10) if dice.chance(0.12) else dice.randint(1, 4)


def possessions(dice: Dice) -> Scene:
    """Who has what, in which colour."""
    people = dice.people(_how_many(dice))
    same = dice.choice(words.THINGS) if dice.chance(0.5) else ""
    facts, questions = [], []
    colour = dice.choice(["color", "colour"])
    for person, hue in zip(people, dice.sample(words.HUES, len(people)), strict=True):
        thing, name = same or dice.choice(words.THINGS), person.name
        hue = dice.made_up() if dice.chance(0.12) else hue
        facts.append(
            dice.choice(
                [
                    f"{name} has {an(hue)} {thing}.",
                    f"{name}'s {thing} is {hue}.",
                    f"The {thing} of {name} is {hue}.",
                    f"{name} bought {an(hue)} {thing}.",
                ]
            )
        )
        questions.append(
            (
                dice.choice([f"What {colour} is {name}'s {thing}?", f"Which {colour} is the {thing} of {name}?"]),
                f"{name}'s {thing} is {hue}.",
                hue,
            )
        )
        if same:
            questions.append(
                (
                    dice.choice([f"Who has the {hue} {thing}?", f"Whose {thing} is {hue}?"]),
                    f"{name} has the {hue} {thing}.",
                    name,
                )
            )
    return _pose(dice, facts, questions)


def places(dice: Dice) -> Scene:
    """Where things and people are."""
    count = _how_many(dice)
    facts, questions = [], []
    for thing, spot, person in zip(
        dice.sample(words.THINGS, count), dice.sample(words.SPOTS, count), dice.people(count), strict=True
    ):
        if dice.chance(0.5):
            facts.append(
                dice.choice([f"The {thing} is in the {spot}.", f"{person.name} put the {thing} into the {spot}."])
            )
            questions.append(
                (
                    dice.choice([f"Where is the {thing}?", f"Where can I find the {thing}?"]),
                    f"The {thing} is in the {spot}.",
                    spot,
                )
            )
            questions.append((f"What is in the {spot}?", f"The {thing} is in the {spot}.", thing))
        else:
            facts.append(dice.choice([f"{person.name} is in the {spot}.", f"{person.name} went to the {spot}."]))
            questions.append((f"Where is {person.name}?", f"{person.name} is in the {spot}.", spot))
            questions.append((f"Who is in the {spot}?", f"{person.name} is in the {spot}.", person.name))
    return _pose(dice, facts, questions)


def profile(dice: Dice, person: Person) -> list[tuple[str, str, list[Question], str | int]]:
    """What can be said of a person: (key, sentence about "{name}", questions, value)."""
    n = person.name
    age, city, job, food = (
        dice.randint(4, 90),
        dice.choice(words.CITIES),
        dice.choice(words.JOBS),
        dice.choice(words.FOODS),
    )
    hue, hobby, beast = dice.choice(words.HUES), dice.choice(words.HOBBIES), dice.choice(list(words.ANIMALS))
    pet = dice.choice(words.PET_NAMES) if dice.chance(0.6) else cap(dice.made_up())
    if dice.chance(0.2):
        city = cap(dice.made_up())
    return [
        ("age", f"{{name}} is {age} years old.", [(f"How old is {n}?", f"{n} is {age} years old.", str(age))], age),
        (
            "city",
            f"{{name}} lives in {city}.",
            [
                (f"Where does {n} live?", f"{n} lives in {city}.", city),
                (f"In which city does {n} live?", f"{n} lives in {city}.", city),
            ],
            city,
        ),
        (
            "job",
            f"{{name}} works as {an(job)}.",
            [
                (f"What is the job of {n}?", f"{n} is {an(job)}.", job),
                (f"What does {n} do for a living?", f"{n} is {an(job)}.", job),
            ],
            job,
        ),
        (
            "food",
            f"{{name}} likes {food}.",
            [
                (f"What does {n} like to eat?", f"{n} likes {food}.", food),
                (f"What does {n} like?", f"{n} likes {food}.", food),
            ],
            food,
        ),
        (
            "color",
            f"The favourite colour of {n} is {hue}.",
            [(f"What is the favourite colour of {n}?", f"The favourite colour of {n} is {hue}.", hue)],
            hue,
        ),
        (
            "hobby",
            f"The hobby of {n} is {hobby}.",
            [(f"What is the hobby of {n}?", f"The hobby of {n} is {hobby}.", hobby)],
            hobby,
        ),
        (
            "pet",
            f"{{name}} has {an(beast)} called {pet}.",
            [
                (f"What is the name of the {beast}?", f"The {beast} is called {pet}.", pet),
                (f"What pet does {n} have?", f"{n} has {an(beast)} called {pet}.", beast),
            ],
            pet,
        ),
        (
            "friend",
            f"{{name}} has a friend called {(f := dice.person().name)}.",
            [(f"Who is the friend of {n}?", f"The friend of {n} is {f}.", f)],
            f,
        ),
    ]


def people(dice: Dice) -> Scene:
    """One or two people described in a few sentences."""
    facts, questions = [], []
    for person in dice.people(dice.choice([1, 1, 2])):
        entries = dice.some(profile(dice, person), 2, 4)
        for at, (_, sentence, asks, _) in enumerate(entries):
            facts.append(sentence.format(name=person.name if at == 0 or dice.chance(0.2) else person.He))
            questions += asks
    return _pose(dice, facts, questions)


def codes(dice: Dice) -> Scene:
    """Codes, prices, times and made-up meanings."""
    count = _how_many(dice)
    facts, questions = [], []
    style = dice.randrange(4)
    for at, thing in enumerate(dice.sample(words.THINGS, count)):
        code, number, word = dice.code(), dice.randint(2, 99), dice.made_up()
        if style == 0:
            facts.append(f"The code of the {thing} is {code}.")
            questions.append(
                (
                    dice.choice([f"What is the code of the {thing}?", f"Which code does the {thing} have?"]),
                    f"The code of the {thing} is {code}.",
                    code,
                )
            )
        elif style == 1:
            facts.append(f"{cap(an(thing))} costs {number} coins.")
            questions.append(
                (
                    dice.choice([f"How much is {an(thing)}?", f"How many coins does {an(thing)} cost?"]),
                    f"{cap(an(thing))} costs {number} coins.",
                    str(number),
                )
            )
        elif style == 2:
            beast, hue = dice.choice(words.HEROES), dice.choice(words.HUES)
            facts.append(f"{cap(an(word))} is {an(hue)} {beast}.")
            questions.append((f"What is {an(word)}?", f"{cap(an(word))} is {an(hue)} {beast}.", beast))
        else:
            place = dice.choice(words.PLACES)
            facts.append(f"{'Bus' if at % 2 else 'Train'} {number} goes to the {place}.")
            questions.append(
                (
                    f"Where does {'bus' if at % 2 else 'train'} {number} go?",
                    f"{'Bus' if at % 2 else 'Train'} {number} goes to the {place}.",
                    place,
                )
            )
    if dice.chance(0.3):
        secret = dice.made_up() if dice.chance(0.6) else dice.code()
        facts.append(dice.choice([f"The secret word is {secret}.", f"The password is {secret}."]))
        key = "secret word" if "secret word" in facts[-1] else "password"
        questions.append((f"What is the {key}?", f"The {key} is {secret}.", secret))
    return _pose(dice, facts, questions)


def about_me(dice: Dice) -> Scene:
    """The user speaks of themselves and later asks what was said."""
    person = dice.person()
    pet, beast, city = dice.choice(words.PET_NAMES), dice.choice(list(words.ANIMALS)), dice.choice(words.CITIES)
    age, food, hue = dice.randint(4, 90), dice.choice(words.FOODS), dice.choice(words.HUES)
    entries = [
        (f"My name is {person.name}.", "What is my name?", f"Your name is {person.name}.", person.name),
        (f"I live in {city}.", "Where do I live?", f"You live in {city}.", city),
        (f"I am {age} years old.", "How old am I?", f"You are {age} years old.", str(age)),
        (f"I like {food}.", "What do I like?", f"You like {food}.", food),
        (f"My favourite colour is {hue}.", "What is my favourite colour?", f"Your favourite colour is {hue}.", hue),
        (
            f"I have {an(beast)} called {pet}.",
            f"What is the name of my {beast}?",
            f"Your {beast} is called {pet}.",
            pet,
        ),
    ]
    chosen = dice.some(entries, 1, 4)
    told = " ".join(entry[0] for entry in chosen)
    reply = (
        f"Hello, {person.name}! It is nice to meet you."
        if person.name in told
        else dice.choice(["That is nice.", "That is good to know!", "Thank you for telling me."])
    )
    turns = [Turn(told, reply, "talk")]
    if dice.chance(0.4):
        turns.append(Turn("How are you?", "I am well, thank you. How are you?", "talk"))
    turns += [Turn(ask, answer, "lookup", value) for _, ask, answer, value in dice.some(chosen, 1, 3)]
    return Scene(turns)


WRITERS: list[Callable[[Dice], Scene]] = [possessions, places, people, codes, about_me]


def lookup(dice: Dice) -> Scene:
    """One of the writers above."""
    return dice.choice(WRITERS)(dice)
