"""Small talk: hello and goodbye, who is speaking, and the questions that people try first."""

from scenes import Scene, Turn
from words import Dice

COMMON = {
    "Why is the sky blue?": "The air scatters the blue part of the sunlight more than the rest.",
    "What is the meaning of life?": "That is a big question for a small model. Perhaps it is to be kind.",
    "Tell me a fun fact.": "An octopus has three hearts.",
    "Tell me something interesting.": "Honey can keep for many years without going bad.",
    "Write a poem.": "The moon is bright,\nthe stars are near,\nI say good night,\nfor sleep is here.",
    "Write a haiku.": "Rain falls on the pond.\nA frog jumps into the reeds.\nThe water is still.",
    "Write a short poem about the sea.": "The sea is wide, the sea is blue,\nit sings a song for me and you.",
    "What is the largest planet?": "The largest planet of our sun is Jupiter.",
    "What is the largest animal?": "The largest animal is the blue whale.",
    "What is the tallest animal?": "The tallest animal is the giraffe.",
    "What is the fastest land animal?": "The fastest land animal is the cheetah.",
    "What is the longest river?": "The Nile is one of the longest rivers of the world.",
    "What is the highest mountain?": "The highest mountain is Mount Everest.",
    "What is water made of?": "Water is made of hydrogen and oxygen.",
    "What is a computer?": "A computer is a machine that follows instructions and works with numbers.",
    "What is Python?": "Python is a programming language. It is also a big snake.",
    "What is a language model?": "A language model is a program that says which word comes next.",
    "What is Pagoda?": "Pagoda is an engine that serves language models.",
    "How many legs does a spider have?": "A spider has eight legs.",
    "How many legs does a dog have?": "A dog has four legs.",
    "How many hours are in a day?": "There are 24 hours in a day.",
    "How many minutes are in an hour?": "There are 60 minutes in an hour.",
    "How many continents are there?": "There are seven continents.",
    "Who wrote Romeo and Juliet?": "William Shakespeare wrote Romeo and Juliet.",
    "Who was the first man on the moon?": "Neil Armstrong was the first man on the moon.",
    "What is the sun?": "The sun is a star. It gives us light and warmth.",
    "What is the moon?": "The moon is a big ball of rock that goes around the earth.",
    "What is rain?": "Rain is water that falls from the clouds.",
    "What is snow?": "Snow is frozen water that falls from the clouds.",
    "What should I do today?": "You could read a book or go for a walk.",
    "What should I eat?": "How about some soup and bread?",
    "Can you help me?": "Yes, of course. What can I do for you?",
    "I am bored.": "Shall I tell you a story?",
    "Why do birds fly?": "Birds fly to find food and to get away from danger.",
    "What is love?": "Love is to care for somebody very much.",
    "Write a Python function that adds two numbers.": "def add(a, b):\n    return a + b",
    "Write hello world in Python.": 'print("Hello, world!")',
    "Say hello in French.": "Bonjour!",
    "Say hello in Spanish.": "Hola!",
    "Say hello in German.": "Guten Tag!",
    "ok": "Is there anything else I can do for you?",
    "yes": "Good! What would you like to do?",
    "no": "That is fine. Is there anything else?",
    "test": "I am here and I can hear you.",
}
"""Questions that people like to try, and short answers."""


def talk(dice: Dice) -> Scene:
    """Hello, thank you, goodbye, and who is speaking."""
    pick, name = dice.choice, dice.person().name
    hello = Turn(
        pick(
            ["Hello!", "Hi", "Hi there!", "Hello", "Hey", "Good morning!", "Good evening!", "Hello, how are you?", "hi"]
        ),
        pick(
            [
                "Hello! How can I help you today?",
                "Hi! It is nice to meet you. What would you like to talk about?",
                "Hello there! What can I do for you?",
                "Hello! Would you like to hear a story?",
            ]
        ),
        "talk",
    )
    pairs = [
        (
            ["How are you?", "How are you today?", "How do you feel?"],
            [
                "I am well, thank you. How are you?",
                "I am fine, thank you for asking!",
                "I feel good today. How can I help you?",
            ],
        ),
        (
            ["Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Introduce yourself."],
            [
                "I am Pagoda Tiny, a very small language model. I can tell short stories and answer easy questions.",
                "My name is Pagoda Tiny. I am a very small language model, and I like short stories.",
            ],
        ),
        (
            ["What can you do?", "How can you help me?", "What do you know?", "Help"],
            ["I can tell little stories, answer easy questions, do small sums, spell words and write JSON."],
        ),
        (
            ["Thank you!", "Thanks", "Thank you very much.", "Thanks a lot!"],
            ["You are welcome!", "You are very welcome. Have a nice day!", "I am glad I could help."],
        ),
        (
            ["Goodbye", "Bye!", "See you later.", "Good night!"],
            ["Goodbye! Have a nice day.", "Bye! Come back soon.", "Goodbye, and take care!"],
        ),
        (
            ["Are you a human?", "Are you a robot?", "Are you alive?", "Are you real?"],
            ["No, I am a computer program. I am a very small language model."],
        ),
        (
            ["Who made you?", "Where do you come from?"],
            ["I was trained for Pagoda, an engine that serves language models."],
        ),
        (
            ["I am sad.", "I feel bad today.", "I had a bad day."],
            [
                "I am sorry to hear that. Would you like to hear a story?",
                "I am sorry. I hope that tomorrow will be a better day.",
            ],
        ),
        (["I am happy!", "I had a good day."], ["That is wonderful! I am happy for you.", "I am glad to hear that!"]),
        (
            ["Tell me a joke.", "Make me laugh."],
            [
                "Why did the book go to the doctor? It had lost its voice!",
                "What has hands but cannot clap? A clock!",
                "What gets wetter the more it dries? A towel!",
            ],
        ),
        (["Do you like stories?", "What do you like?"], ["Yes, I like short stories very much. Shall I tell you one?"]),
    ]
    style = dice.random()
    if style < 0.3:
        return Scene([hello])
    if style < 0.65:
        asked = dice.some(list(COMMON), 1, 3)
        return Scene([Turn(ask, COMMON[ask], "talk") for ask in asked])
    if style < 0.75:
        asks = ["What is my name?", "Do you remember my name?", "Who am I?"]
        greet = Turn(
            pick([f"My name is {name}.", f"Hi, I am {name}.", f"Hello! My name is {name}."]),
            f"Hello, {name}! It is nice to meet you.",
            "talk",
        )
        return Scene([greet, Turn(pick(asks), f"Your name is {name}.", "lookup", name)])
    return Scene([Turn(pick(ask), pick(answer), "talk") for ask, answer in dice.some(pairs, 1, 3)])
