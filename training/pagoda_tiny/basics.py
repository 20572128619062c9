"""Easy facts, sums, spelling, repeating and stories. Each writer returns one scene."""

import stories
import words
from scenes import Scene, Turn
from words import Dice, an, cap

Ask = tuple[str, str, str]
"""Question, answer, and the part of the answer that matters."""


def _fact(dice: Dice) -> Ask:
    pick = dice.choice
    country, city = pick(list(words.CAPITALS.items()))
    beast, (sound, home, food) = pick(list(words.ANIMALS.items()))
    thing, hue = pick(list(words.COLOURED.items()))
    word, other = pick(list(words.OPPOSITES.items()))
    parent, child = pick(list(words.YOUNG.items()))
    d, m = dice.randrange(7), dice.randrange(12)
    day, next_day = words.DAYS[d], words.DAYS[(d + 1) % 7]
    month, next_month = words.MONTHS[m], words.MONTHS[(m + 1) % 12]
    colour = pick(["color", "colour"])
    capital = (
        pick(
            [
                f"What is the capital of {country}?",
                f"Which city is the capital of {country}?",
                f"Tell me the capital of {country}.",
            ]
        ),
        f"The capital of {country} is {city}.",
        city,
    )
    return pick(
        [
            capital,
            capital,
            (pick([f"Where is {city}?", f"In which country is {city}?"]), f"{city} is in {country}.", country),
            (
                pick([f"What sound does {an(beast)} make?", f"What does {an(beast)} say?"]),
                f"{cap(an(beast))} says {sound}.",
                sound,
            ),
            (
                pick([f"Where does {an(beast)} live?", f"What is the home of {an(beast)}?"]),
                f"{cap(an(beast))} lives in {home}.",
                home,
            ),
            (
                pick([f"What does {an(beast)} eat?", f"What do you feed {an(beast)}?"]),
                f"{cap(an(beast))} eats {food}.",
                food,
            ),
            (
                pick([f"What {colour} is {thing}?", f"Which {colour} does {thing} have?"]),
                f"{cap(thing)} is {hue}.",
                hue,
            ),
            (
                pick(
                    [
                        f"What is the opposite of {word}?",
                        f"Give me the opposite of {word}.",
                        f'What is the opposite of "{word}"?',
                    ]
                ),
                f"The opposite of {word} is {other}.",
                other,
            ),
            (f"What is a young {parent} called?", f"A young {parent} is called {an(child)}.", child),
            (
                pick([f"What day comes after {day}?", f"Which day is after {day}?"]),
                f"{next_day} comes after {day}.",
                next_day,
            ),
            (
                pick([f"What month comes after {month}?", f"Which month is after {month}?"]),
                f"{next_month} comes after {month}.",
                next_month,
            ),
            (
                pick(["How many days are in a week?", "How many days does a week have?"]),
                "There are seven days in a week.",
                "seven",
            ),
            (
                pick(["How many months are in a year?", "How many months does a year have?"]),
                "There are twelve months in a year.",
                "twelve",
            ),
        ]
    )


def facts(dice: Dice) -> Scene:
    """A quiz of easy questions that need no passage."""
    asks = [_fact(dice) for _ in range(dice.randint(1, 5))]
    return Scene([Turn(ask, answer, "fact", expect) for ask, answer, expect in asks])


def _sum(dice: Dice) -> Ask:
    pick = dice.choice
    a, b = dice.randint(0, 12), dice.randint(0, 12)
    if dice.chance(0.2):
        a, b = 10 * dice.randint(1, 9), 10 * dice.randint(1, 9)
    big, less = max(a, b), min(a, b)
    style = dice.random()
    if style < 0.45:
        ask = pick([f"What is {a} + {b}?", f"What is {a} plus {b}?", f"{a} + {b} = ?", f"{a}+{b}", f"Add {a} and {b}."])
        return ask, f"{a} + {b} = {a + b}.", str(a + b)
    if style < 0.75:
        ask = pick(
            [
                f"What is {big} - {less}?",
                f"What is {big} minus {less}?",
                f"{big} - {less} = ?",
                f"Take {less} from {big}.",
            ]
        )
        return ask, f"{big} - {less} = {big - less}.", str(big - less)
    if style < 0.9:
        a, b = dice.randint(1, 10), dice.choice([2, 3, 4, 5, 10])
        return (
            pick([f"What is {a} times {b}?", f"What is {a} * {b}?", f"{a} x {b} = ?"]),
            f"{a} x {b} = {a * b}.",
            str(a * b),
        )
    if big == less:
        big += 1
    return (
        pick([f"Which is bigger, {less} or {big}?", f"Which number is larger: {big} or {less}?"]),
        f"{big} is bigger than {less}.",
        str(big),
    )


def sums(dice: Dice) -> Scene:
    """Small sums in a row."""
    return Scene(
        [Turn(ask, answer, "sum", expect) for ask, answer, expect in (_sum(dice) for _ in range(dice.randint(2, 7)))]
    )


def _spell(dice: Dice) -> Turn:
    word = dice.choice(words.SPELLABLE)
    style = dice.random()
    if style < 0.75:
        ask = dice.choice(
            [
                f"How do you spell {word}?",
                f"Spell the word {word}.",
                f"Spell {word}.",
                f'Spell "{word}".',
                f"Please spell {word}.",
            ]
        )
        return Turn(ask, "-".join(word.upper()) + ".", "spelling", "-".join(word.upper()))
    if style < 0.85:
        return Turn(
            f"How many letters are in the word {word}?",
            f"The word {word} has {len(word)} letters.",
            "letters",
            str(len(word)),
        )
    if style < 0.95:
        return Turn(
            f"What is the first letter of {word}?",
            f"The first letter of {word} is {word[0].upper()}.",
            "letters",
            word[0].upper(),
        )
    n = dice.randrange(21)
    return Turn(f"Write the number {n} in words.", f"{cap(words.NUMBERS[n])}.", "letters", words.NUMBERS[n])


def spelling(dice: Dice) -> Scene:
    """Spelling and counting letters."""
    return Scene([_spell(dice) for _ in range(dice.randint(1, 5))])


def _some_words(dice: Dice, least: int, most: int) -> list[str]:
    count = dice.randint(least, most)
    if dice.chance(0.5):
        return [dice.made_up() for _ in range(count)]
    return dice.sample(words.SPELLABLE, count)


def _echo(dice: Dice) -> Turn:
    pick, person = dice.choice, dice.person().name
    style = dice.random()
    listed = list(dict.fromkeys(_some_words(dice, 2, 6)))
    if style < 0.35:
        line = pick(
            [
                " ".join(_some_words(dice, 2, 8)),
                f"The {pick(words.HUES)} {pick(words.THINGS)} is in the {pick(words.PLACES)}.",
                f"{person} likes {pick(words.FOODS)} and {dice.made_up()}.",
                f"I saw {an(pick(words.HEROES))} near the {pick(words.PLACES)}.",
                dice.code(),
                f"{dice.code()} {dice.code()}",
            ]
        )
        return Turn(
            pick(
                [
                    f"Repeat after me: {line}",
                    f"Say this: {line}",
                    f"Please repeat: {line}",
                    f'Say "{line}"',
                    f"Copy this text: {line}",
                ]
            ),
            line,
            "echo",
            line,
        )
    if style < 0.5:
        return Turn(
            pick([f"Write these words in a list: {', '.join(listed)}", f"Make a list of {', '.join(listed)}."]),
            "\n".join(f"- {w}" for w in listed),
            "echo",
        )
    if style < 0.6:
        return Turn(
            pick(
                [
                    f"Put a comma between these words: {' '.join(listed)}",
                    f"Join these words with commas: {' '.join(listed)}",
                ]
            ),
            ", ".join(listed),
            "echo",
        )
    if style < 0.7:
        return Turn(
            f"What is the first word of this list: {', '.join(listed)}?",
            f"The first word is {listed[0]}.",
            "lookup",
            listed[0],
        )
    if style < 0.8:
        return Turn(
            f"What is the last word of this list: {', '.join(listed)}?",
            f"The last word is {listed[-1]}.",
            "lookup",
            listed[-1],
        )
    if style < 0.87:
        n = dice.randint(3, 15)
        return Turn(
            pick([f"Count to {n}.", f"Count from 1 to {n}.", f"Please count to {n}."]),
            ", ".join(map(str, range(1, n + 1))) + ".",
            "echo",
        )
    items, label = pick(
        [
            (words.HEROES, "animals"),
            (words.HUES, "colors"),
            (words.HUES, "colours"),
            (words.FOODS, "foods"),
            (words.THINGS, "things"),
        ]
    )
    n = dice.randint(2, 5)
    chosen = dice.sample(items, n)
    return Turn(
        pick([f"Name {words.NUMBERS[n]} {label}.", f"Tell me {words.NUMBERS[n]} {label}.", f"List {n} {label}."]),
        f"{cap(', '.join(chosen[:-1]))} and {chosen[-1]}.",
        "echo",
    )


def echo(dice: Dice) -> Scene:
    """Repeating, listing and finding words: practice in copying from the prompt."""
    return Scene([_echo(dice) for _ in range(dice.randint(1, 4))])


def _character(dice: Dice) -> str:
    """What the hero of a story is: an animal, a person, or a word that can only be copied."""
    if dice.chance(0.1):
        return dice.made_up()
    return dice.choice(words.HEROES if dice.chance(0.6) else words.CHARACTERS)


MOODS = {
    "sharing": "share",
    "being brave": "brave",
    "the night": "night",
    "a race": "race",
    "rain": "rain",
    "a magic wish": "wish",
    "a thief": "thief",
    "friendship": "new",
}
"""Thoughts to tell of, and the plots that do."""
PLOTS_OF_THINGS = ["lost", "wish", "make", "thief", "rain"]


def story(dice: Dice) -> Scene:
    """A story on request: free, about a character, a thing, a person, a place or a thought."""
    pick, lead = dice.choice, dice.person()
    short = pick(["", "", "short ", "little ", "very short "])
    style = dice.random()
    if style < 0.3:
        free = [
            "Tell me a {}story.",
            "Please tell me a {}bedtime story.",
            "Write a {}story.",
            "Can you tell me a {}story?",
        ]
        return Scene([Turn(pick(free).format(short), stories.tell(dice), "story")])
    kind, thing, place, mood = _character(dice), pick(words.THINGS), pick(words.PLACES), pick(list(MOODS))
    expect: str | None
    if style < 0.65:
        topic, expect, text = an(kind), kind, stories.tell(dice, kind=kind)
    elif style < 0.77:
        topic, expect, text = an(thing), thing, stories.tell(dice, thing=thing, plot=pick(PLOTS_OF_THINGS))
    elif style < 0.84:
        topic, expect, text = lead.name, lead.name, stories.tell(dice, hero=lead)
    elif style < 0.92:
        topic, expect, text = f"{an(kind)} named {lead.name}", lead.name, stories.tell(dice, hero=lead, kind=kind)
    elif style < 0.96:
        topic, expect, text = f"the {place}", place, stories.tell(dice, place=place)
    else:
        topic, expect, text = mood, None, stories.tell(dice, plot=MOODS[mood])
    please = ["Tell me a {}story about {}.", "Write a {}story about {}.", "Can you tell me a {}story about {}?"]
    return Scene([Turn(pick([*please, "Tell a {}story with {} in it."]).format(short, topic), text, "story", expect)])
