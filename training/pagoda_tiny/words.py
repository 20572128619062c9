"""Word lists and the seeded chooser that the chat writers draw from. Knows no chat form."""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def _list(words: str) -> list[str]:
    return words.split()


GIRLS = _list(
    "Anna Lily Mia Sara Emma Rosa Nina Ella Zoe Amina Maya Lucy Grace Ruth Ada Iris Leila Priya Hana Kate "
    "Ann Alice Clara Daisy Eva Fatima Greta Helen Ines Jane Julia Kim Laila Lina Mary Meera Molly Nora "
    "Olga Pia Rita Sofia Tara Tina Uma Vera Wendy Yuki Zara Beth Carla Dora Elsa Freya Gita Holly Ivy "
    "Jasmin Lena Mona Nadia Olivia Paula Rachel Salma Stella Thea Violet Yara"
)
BOYS = _list(
    "Tom Ben Sam Max Leo Jack Omar Finn Noah Paul Adam Luke Ravi Hugo Eric Ivan Dan Peter Kofi Ken Bob "
    "Alex Amir Anton Arun Bill Carl Chen David Diego Elias Emil Felix Frank Fred George Hans Hassan Henry "
    "Ian Jamal James Jim Joe John Jonas Juan Karim Kenji Lars Liam Marco Mark Matt Milan Nick Nils Oscar "
    "Pablo Philip Ralph Robin Samir Simon Theo Tim Victor Will Yusuf"
)
HELD_OUT_GIRLS = _list("Agnes Bianca Celine Dalia Edith Farah Imani Noor Petra Wanda")
HELD_OUT_BOYS = _list("Boris Cyrus Dmitri Edgar Gustav Kwame Lorenzo Otto Rufus Tobias")

CAPITALS = {
    "France": "Paris", "England": "London", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin",
    "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima", "Norway": "Oslo", "Greece": "Athens",
    "Portugal": "Lisbon", "Austria": "Vienna", "Ireland": "Dublin", "India": "Delhi", "Kenya": "Nairobi",
    "Canada": "Ottawa", "Poland": "Warsaw", "Finland": "Helsinki", "Sweden": "Stockholm",
    "China": "Beijing", "Vietnam": "Hanoi", "Cuba": "Havana", "Ghana": "Accra", "Russia": "Moscow",
    "Turkey": "Ankara", "Chile": "Santiago", "Denmark": "Copenhagen", "Korea": "Seoul", "Thailand": "Bangkok",
    "Belgium": "Brussels", "Hungary": "Budapest", "Switzerland": "Bern", "Scotland": "Edinburgh",
    "the USA": "Washington", "Australia": "Canberra", "Brazil": "Brasilia", "Mexico": "Mexico City",
}  # fmt: skip
CITIES = [*CAPITALS.values(), "Boston", "Milan", "Mumbai", "Lagos", "Sydney", "Toronto", "Porto", "Lyon", "Kyoto"]

ANIMALS = {
    "cat": ("meow", "a house", "fish"), "dog": ("woof", "a kennel", "meat"), "cow": ("moo", "a barn", "grass"),
    "duck": ("quack", "a pond", "water plants"), "sheep": ("baa", "a field", "grass"),
    "lion": ("roar", "the grassland", "meat"), "bee": ("buzz", "a hive", "nectar"), "owl": ("hoot", "a tree", "mice"),
    "frog": ("croak", "a pond", "flies"), "horse": ("neigh", "a stable", "hay"), "mouse": ("squeak", "a hole", "seeds"),
    "bird": ("tweet", "a nest", "seeds"), "pig": ("oink", "a pen", "corn"), "wolf": ("howl", "a den", "meat"),
    "snake": ("hiss", "a hole", "mice"), "fox": ("yip", "a den", "mice"), "hen": ("cluck", "a coop", "corn"),
    "goat": ("bleat", "a field", "leaves"), "bear": ("growl", "a cave", "berries and fish"),
    "rabbit": ("squeak", "a burrow", "carrots"), "elephant": ("trumpet", "the grassland", "leaves"),
    "monkey": ("chatter", "the trees", "bananas"), "tiger": ("roar", "the jungle", "meat"),
    "fish": ("nothing at all", "the water", "small plants"), "squirrel": ("squeak", "a tree", "nuts"),
}  # fmt: skip
HEROES = [*ANIMALS, "turtle", "hedgehog", "dragon", "kitten", "puppy", "whale", "camel", "crow", "snail", "beetle"]
CHARACTERS = _list(
    "princess prince king queen robot pirate witch wizard giant ghost farmer teacher sailor doctor knight baker dwarf "
    "fairy girl boy child woman man cook singer mermaid monster dinosaur unicorn snowman clown"
)
YOUNG = {
    "cat": "kitten", "dog": "puppy", "cow": "calf", "duck": "duckling", "sheep": "lamb", "lion": "cub",
    "horse": "foal", "hen": "chick", "goat": "kid", "bear": "cub", "pig": "piglet", "frog": "tadpole",
}  # fmt: skip
PET_NAMES = _list("Spot Coco Bella Rex Milo Luna Toby Pip Rusty Shadow Honey Biscuit Ginger Patch Snowy Tiger")

COLOURED = {
    "grass": "green", "snow": "white", "a banana": "yellow", "coal": "black", "a ripe tomato": "red",
    "the clear sky": "blue", "the sky": "blue", "an orange": "orange", "milk": "white", "a leaf": "green",
    "blood": "red", "chocolate": "brown", "the night sky": "black", "a lemon": "yellow", "a flamingo": "pink",
    "an elephant": "grey", "a plum": "purple", "the sun": "yellow", "a frog": "green", "a strawberry": "red",
    "the sea": "blue", "a carrot": "orange", "a cloud": "white", "a crow": "black", "a pea": "green",
}  # fmt: skip
_PAIRS = (
    "hot-cold big-small fast-slow up-down happy-sad light-dark open-closed wet-dry full-empty young-old high-low "
    "hard-soft early-late left-right near-far strong-weak loud-quiet rich-poor day-night clean-dirty good-bad "
    "long-short thick-thin black-white first-last push-pull win-lose begin-end in-out yes-no love-hate tall-short"
)
OPPOSITES = dict(pair.split("-") for pair in _PAIRS.split())
OPPOSITES = {right: left for left, right in OPPOSITES.items()} | OPPOSITES

THINGS = _list(
    "ball kite book boat drum hat cake key lamp doll box cup bell coin shell map stone flower feather basket "
    "bag bike bowl brush button candle chair clock coat cart flute fork glove jar ladder mirror mug necklace "
    "pen pencil pillow plate pot puzzle ribbon ring robot rope scarf shoe shirt spoon sword ticket top toy "
    "train truck umbrella vase violin wagon watch whistle"
)
HUES = _list("red blue green yellow white black brown pink purple orange golden grey silver")
SPOTS = _list(
    "box bag drawer basket kitchen garden car cupboard pocket jar barn shed attic tent school house tower "
    "bedroom cellar boat bucket tree office shop"
)
PLACES = _list("park forest beach school garden market river farm hill library lake village mountain meadow zoo")
JOBS = _list(
    "teacher farmer baker doctor painter singer driver nurse gardener pilot cook writer sailor tailor builder "
    "dentist judge dancer"
)
FOODS = _list(
    "apples bread rice soup cheese pears carrots honey eggs cake noodles plums beans bananas pizza grapes nuts "
    "berries pancakes fish salad"
)
HOBBIES = _list("reading swimming dancing singing cooking running painting fishing chess football music drawing")
WEATHER = _list("sunny rainy windy cloudy snowy foggy stormy")
DAYS = _list("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _list("January February March April May June July August September October November December")
NUMBERS = _list(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)
SPELLABLE = [
    *THINGS, *ANIMALS, *HUES, *SPOTS, *FOODS, *PLACES,
    *_list(
        "sun moon star water fire rain snow milk apple happy friend music paper table window cloud door hand "
        "night light king queen story dream winter summer spring hello world cat tree sea sand ship road"
    ),
]  # fmt: skip

_ONSETS = _list("b bl br c ch cl d dr f fl g gl gr h j k kl l m n p pl qu r s sh sk sl st t th tr v w z")
_VOWELS = _list("a e i o u oo ee ai")
_CODAS = _list("b ck d ff g l ll m n ng nt p r rk s st t x zz")


def an(word: str) -> str:
    """The word with its indefinite article."""
    return f"{'an' if word[0] in 'aeiouAEIOU' else 'a'} {word}"


def cap(text: str) -> str:
    """The text with its first letter in upper case, the rest as it is."""
    return text[:1].upper() + text[1:]


class Person:
    """A name with its pronouns."""

    def __init__(self, name: str, *, girl: bool) -> None:
        self.name = name
        self.kind = "girl" if girl else "boy"
        self.he, self.him, self.his = ("she", "her", "her") if girl else ("he", "him", "his")
        self.He = cap(self.he)


class Dice(random.Random):
    """A seeded chooser. With `held_out`, names come from lists that training never draws from."""

    def __init__(self, seed: int, *, held_out: bool = False) -> None:
        super().__init__(seed)
        self.held_out = held_out

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def some(self, items: Sequence[T], least: int, most: int) -> list[T]:
        """Between `least` and `most` different items, in random order."""
        return self.sample(items, min(len(items), self.randint(least, most)))

    def made_up(self) -> str:
        """A word that is (nearly) never in a lexicon, so that it can only be copied."""
        word = self.choice(_ONSETS) + self.choice(_VOWELS)
        if self.chance(0.5):
            word += self.choice(_ONSETS) + self.choice(_VOWELS)
        return word + (self.choice(_CODAS) if self.chance(0.7) else "")

    def people(self, count: int) -> list[Person]:
        """Different people; one in four has a made-up name."""
        girls, boys = (HELD_OUT_GIRLS, HELD_OUT_BOYS) if self.held_out else (GIRLS, BOYS)
        found: dict[str, Person] = {}
        while len(found) < count:
            girl = self.chance(0.5)
            if not self.held_out and self.chance(1 / 4):
                name = cap(self.made_up())
            else:
                name = self.choice(girls if girl else boys)
            found.setdefault(name, Person(name, girl=girl))
        return list(found.values())

    def person(self) -> Person:
        return self.people(1)[0]

    def code(self) -> str:
        """A short code of letters and digits, such as K7P2."""
        return "".join(self.choice("ABCDEFGHJKLMNPRSTVWXYZ23456789") for _ in range(self.randint(3, 5)))
