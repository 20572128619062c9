"""Writes short stories from plots: a plot is a row of beats, a beat a choice of sentences."""

from words import FOODS, HEROES, HUES, PLACES, THINGS, WEATHER, Dice, Person, an, cap

Plot = list[list[str]]

OPENINGS = [
    "Once upon a time there was {a_kind} named {hero}.",
    "Once there was {a_kind} called {hero} who lived near the {place}.",
    "{hero} was {a_small_kind} who lived by the {place}.",
    "One {weather} day, {a_kind} named {hero} went to the {place}.",
    "Long ago, near the {place}, there lived {a_kind} named {hero}.",
    "There was once {a_small_kind}. {He} was called {hero}.",
    "In a small house near the {place} lived {a_kind} named {hero}.",
]
PLOTS: dict[str, Plot] = {
    "lost": [
        [
            "{He} had {a_hue_thing} and loved it very much.",
            "{His} best toy was {a_hue_thing}.",
            "{His} grandmother had given {him} {a_hue_thing}.",
        ],
        [
            "One morning the {thing} was gone.",
            "But one day {he} could not find the {thing}.",
            "One evening {he} came home without the {thing}.",
        ],
        [
            "{hero} looked under the bed, behind the door and in the garden, but it was not there.",
            "{He} looked everywhere and began to cry.",
            "{He} asked everyone in the {place}, but nobody had seen it.",
        ],
        [
            '{friend} the {beast} heard {him} cry. "Let us look together," {fhe} said.',
            '"Do not be sad," said {his} friend {friend}. "Four eyes see more than two."',
            'Then {friend} came by. "Where did you play last?" {fhe} asked.',
        ],
        [
            "At last they found the {thing} under a big tree in the {place}.",
            "They walked back to the {place}, and there the {thing} was, behind a stone.",
            "Soon {friend} saw something {hue} in the grass. It was the {thing}!",
        ],
        [
            '"Thank you!" said {hero}, and {he} gave {friend} a big hug.',
            "{hero} laughed and danced, and from that day {he} took good care of it.",
        ],
    ],
    "share": [
        [
            "{hero} had a big basket of {food}.",
            "{His} mother gave {him} some {food} for the day.",
            "{He} loved {food} more than anything else.",
        ],
        [
            "On the way {he} met {friend}, who was very hungry.",
            "{friend} the {beast} sat by the road and had nothing to eat.",
        ],
        ["At first {hero} did not want to share.", '"These are mine," said {hero}, and {he} walked on.'],
        [
            "But then {he} saw how sad {friend} was, and {he} turned around.",
            "But the food did not taste good when {he} ate alone.",
            'Then {he} thought, "What if I were the hungry one?"',
        ],
        [
            "{hero} gave half of the {food} to {friend}, and they sat down and ate together.",
            '"Here, take some," said {hero}. "There is enough for two."',
        ],
        [
            "It was the best meal {he} had ever had.",
            "From that day on they were good friends.",
            "{hero} learned that things taste better when we share them.",
        ],
    ],
    "brave": [
        [
            "{hero} was afraid of the dark.",
            "{hero} was afraid of water.",
            "{hero} was the smallest of all and never felt brave.",
            "Everyone said that {hero} was too small to help.",
        ],
        [
            "One night there was a loud cry from the {place}.",
            "One day a storm came over the {place}.",
            "Then one day {he} heard somebody call for help.",
        ],
        [
            "{friend} the {beast} had fallen into a deep hole.",
            "{friend} was stuck in the mud and could not get out.",
            "{friend} had lost the way and was all alone.",
        ],
        [
            "{hero} was shaking, but {he} ran to help.",
            '"I must try," thought {hero}, and {he} took a deep breath and went.',
            "{His} heart beat fast, but {he} did not turn back.",
        ],
        [
            "{He} found a long rope and pulled and pulled until {friend} was free.",
            "{He} took {friend} by the hand, and step by step they walked home.",
            "{He} held out a branch, and {friend} climbed up.",
        ],
        [
            '"You are the bravest of all," said {friend}.',
            "After that, {hero} was not afraid any more.",
            "Being brave, {hero} learned, means to be afraid and to help all the same.",
        ],
    ],
    "wish": [
        [
            "One day {he} found {a_hue_thing} in the {place}.",
            "While {he} was digging, {he} found an old {thing}.",
            "On {his} birthday {he} was given {a_hue_thing}.",
        ],
        [
            'It began to shine, and a little voice said, "You may have one wish."',
            '"I am a magic {thing}," it said. "What do you wish for?"',
        ],
        [
            "{hero} thought of gold and of a great castle.",
            "{hero} thought for a long time.",
            "{hero} wanted to wish for a house full of {food}.",
        ],
        [
            "Then {he} saw {friend} the {beast}, who was ill and could not play.",
            "But then {he} remembered {friend}, who had no home.",
        ],
        ['"I wish that {friend} is happy again," {he} said.', '"Please help {friend}," said {hero}.'],
        ["At once {friend} jumped up and laughed.", "And so it was. {friend} came running, as happy as could be."],
        [
            "The {thing} never spoke again, but {hero} did not mind, for now {he} had a friend.",
            "It was the best wish in the world.",
        ],
    ],
    "make": [
        ["{hero} wanted to make {a_thing}.", "{hero} dreamed of {a_thing} of {his} own."],
        ["{He} took some wood, a little paint and a lot of time.", "{He} worked all morning without a rest."],
        [
            "But the first {thing} broke in two.",
            "But the wind came and blew it all away.",
            "But it did not look right at all.",
        ],
        [
            "{friend} laughed, but {hero} did not give up.",
            '"Try again," said {friend}. "I will help you."',
            "{hero} was sad for a moment. Then {he} began again.",
        ],
        [
            "In the evening there it stood: a fine {hue} {thing}!",
            "The second one was better, and the third one was perfect.",
        ],
        [
            "Everyone came to the {place} to see it.",
            '{friend} could not believe it. "How did you do that?" {fhe} asked.',
        ],
        ['"I just kept trying," said {hero}.', "{hero} smiled and was very proud."],
    ],
    "rain": [
        [
            "{hero} wanted to play outside, but it was raining.",
            "It had rained for three days, and {hero} had nothing to do.",
        ],
        ['"What a bad day!" said {hero}.', "{He} sat at the window and looked at the wet {place}."],
        [
            "Then {friend} came with {a_hue_thing}.",
            "There was a knock on the door. It was {friend} with {a_hue_thing}.",
        ],
        [
            "They jumped in every puddle from the house to the {place}.",
            "They made a boat of paper and let it swim down the street.",
            "They told each other stories and ate {food}.",
        ],
        [
            "When the sun came out, there was a big rainbow over the {place}.",
            "In the evening the rain stopped, and they did not even see it.",
        ],
        ['"I hope that it rains again tomorrow," said {hero}.', "It was not such a bad day after all."],
    ],
    "trick": [
        ["{hero} was clever and loved to play tricks.", "Nobody in the {place} was as clever as {hero}."],
        [
            "One day {he} hid the {thing} that belonged to {friend} the {beast}.",
            '"There is gold under that tree," {he} told {friend} the {beast}. But there was none.',
        ],
        [
            "{friend} looked for it all day and was very tired.",
            "{friend} dug all day long and found nothing but stones.",
        ],
        ["{hero} laughed and laughed.", "{hero} thought that it was very funny."],
        [
            "But the next day {hero} needed help, and nobody believed {him}.",
            "But when {hero} fell into the water and called for help, everyone thought that it was a trick.",
        ],
        [
            'Only {friend} came. "A friend is a friend," {fhe} said, and pulled {him} out.',
            "At last {friend} came and helped {him} all the same.",
        ],
        [
            '"I am sorry," said {hero}, and {he} never played a bad trick again.',
            "{hero} was ashamed, and {he} gave {friend} {a_hue_thing} as a present.",
        ],
    ],
    "race": [
        [
            "{hero} was slow, and {friend} the {beast} was fast.",
            "{friend} the {beast} was the fastest runner in the {place}.",
        ],
        [
            '"I can run faster than you," said {friend}. "Let us have a race!"',
            "One day they had a race to the {place2}.",
        ],
        ["{friend} ran ahead and soon could not be seen any more.", "{friend} was far ahead after a minute."],
        ['"I have time," thought {friend}, and {fhe} lay down to sleep.', "But {friend} stopped to eat some {food}."],
        ["{hero} walked on and on, step by step.", "{hero} did not stop, not even once."],
        ["When {friend} looked up, {hero} was already there.", "When {friend} came, {hero} was waiting with a smile."],
        ["Slow and steady wins the race.", '"Well done," said {friend}. "Next time I will not sleep."'],
    ],
    "new": [
        [
            "{hero} had no friends, because {he} had just moved to the {place}.",
            "It was {his} first day at a new school.",
        ],
        ["{He} sat alone and looked at {his} {thing}.", "Nobody talked to {him}, and {he} felt very small."],
        [
            'Then {friend} came and asked, "What is that?"',
            "Then the ball rolled to {his} feet, and {friend} came running.",
        ],
        ['"It is my {thing}," said {hero}. "Do you want to see it?"', '"Do you want to play with us?" asked {friend}.'],
        ["They played all day and did not see how late it was.", "They laughed so much that everyone came to look."],
        [
            'That night {hero} told {his} mother, "I have a friend now."',
            "The next day {hero} could not wait to go back.",
        ],
    ],
    "night": [
        ["{hero} could not sleep.", "It was late, but {hero} was still awake."],
        [
            "{He} looked out of the window and saw a star that was brighter than all the others.",
            "The moon looked in at the window.",
        ],
        ['"Why are you awake?" asked {friend} the {beast}.', "A little {beast} sat on the wall. It was {friend}."],
        ['"I am waiting for a dream," said {hero}.', '"I am afraid that I will miss something," said {hero}.'],
        [
            '"Then I will tell you a story," said {friend}, and {fhe} told {him} of {a_hue_thing} that could fly.',
            "{friend} sang a song about the {place} and {a_hue_thing}.",
        ],
        ["Before it came to an end, {hero} was asleep.", "{hero} closed {his} eyes and dreamed of it all night long."],
    ],
    "garden": [
        [
            "{hero} found a tiny seed and put it into the ground.",
            '{His} grandfather gave {him} a seed. "Be patient," he said.',
        ],
        ["Every day {he} gave it some water.", "{He} watered it in the morning and in the evening."],
        ["But nothing happened for a long time.", '"Nothing will grow there," said {friend}.'],
        ["{hero} did not stop. {He} even sang to it.", '"Wait and see," said {hero}.'],
        [
            "Then, one {weather} morning, there was a small green leaf.",
            "After many days a little leaf looked out of the ground.",
        ],
        [
            "It grew and grew until it was as tall as a house.",
            "Soon there was a {hue} flower, the finest in the {place}.",
        ],
        [
            "Everyone wanted to see it, and {hero} gave a seed to each of them.",
            '"You see," said {hero}, "good things need time."',
        ],
    ],
    "thief": [
        [
            "One day the {thing} of the king was gone.",
            "In the {place} there was a famous {hue} {thing}, and one night it was stolen.",
        ],
        [
            '"Who finds it shall have a bag of gold," said the king.',
            "Everyone was afraid, but {hero} wanted to find it.",
        ],
        [
            "{hero} saw small steps in the sand and followed them.",
            "{hero} found a feather on the floor and thought about it.",
        ],
        [
            "They led to the {place2}, where {friend} the {beast} was hiding.",
            "In the {place2} {he} met {friend} the {beast}.",
        ],
        [
            '"I only wanted to look at it," said {friend}. "It is so beautiful."',
            '"I took it because I was lonely," said {friend}.',
        ],
        [
            '"Come with me and say sorry," said {hero}.',
            '{hero} was not angry. "Give it back, and all will be well," {he} said.',
        ],
        [
            "The king forgave {friend}, and that night there was a great feast with {food}.",
            "So the {thing} came home, and {friend} was never lonely again.",
        ],
    ],
}
CLOSINGS = [
    "And they all lived happily ever after.",
    "The end.",
    "That night {hero} went to bed with a smile.",
    "It was a very good day.",
]


def tell(
    dice: Dice, *, hero: Person | None = None, kind: str = "", thing: str = "", place: str = "", plot: str = ""
) -> str:
    """A story; what is not given is drawn.

    Args:
        hero: the main person. kind: what the hero is ("fox"); a child unless given.
        thing, place: what the story is about, where it plays. plot: a key of PLOTS.
    """
    lead, friend = dice.people(2)
    lead = hero or lead
    if friend.name == lead.name:
        friend = Person("Pip", girl=False)
    kind = kind or (lead.kind if dice.chance(0.6) else dice.choice(HEROES))
    where, elsewhere = dice.sample(PLACES, 2)
    thing, hue = thing or dice.choice(THINGS), dice.choice(HUES)
    beast = dice.choice([animal for animal in HEROES if animal != kind])
    words = {
        "hero": lead.name,
        "he": lead.he,
        "him": lead.him,
        "his": lead.his,
        "He": lead.He,
        "His": cap(lead.his),
        "friend": friend.name,
        "fhe": friend.he,
        "beast": beast,
        "place": place or where,
        "place2": elsewhere,
        "thing": thing,
        "a_thing": an(thing),
        "hue": hue,
        "a_hue_thing": f"{an(hue)} {thing}",
        "food": dice.choice(FOODS),
        "a_kind": an(kind)
        if dice.chance(0.4)
        else f"{an(dice.choice(['little', 'young', 'small', 'kind', 'happy']))} {kind}",
        "a_small_kind": f"{an(dice.choice(['small', 'little', 'young', 'clever', 'friendly', 'lonely']))} {kind}",
        "weather": dice.choice(WEATHER),
    }
    beats = [dice.choice(OPENINGS)]
    beats += [dice.choice(beat) for beat in PLOTS[plot or dice.choice(list(PLOTS))]]
    if dice.chance(0.5):
        beats.append(dice.choice(CLOSINGS))
    sentences = [beat.format(**words) for beat in beats]
    if dice.chance(0.25):  # in two paragraphs
        half = len(sentences) // 2
        return " ".join(sentences[:half]) + "\n\n" + " ".join(sentences[half:])
    return " ".join(sentences)
