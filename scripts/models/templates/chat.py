"""Chat turns: facts, lists, counting, how-to, stories. Each function returns (question, answer)."""

from random import Random

from templates.facts import (
    ADJ,
    ANIMALS,
    BOYS,
    CATS,
    COUNTRIES,
    DAYS,
    DISHES,
    GIRLS,
    MONTHS,
    NUMW,
    OPPOSITES,
    PLACES,
)

Turn = tuple[str, str]


def country_turn(r: Random) -> Turn:
    c = r.choice(list(COUNTRIES))
    cap, cont, lang, cur = COUNTRIES[c]
    k = r.randrange(4)
    if k == 0:
        q = r.choice(
            [
                f"What is the capital of {c}?",
                f"Which city is the capital of {c}?",
                f"Tell me the capital of {c}.",
            ]
        )
        a = f"The capital of {c} is {cap}. {c} is a country in {cont}, and many people there speak {lang}."
    elif k == 1:
        q = r.choice([f"Where is {c}?", f"Which continent is {c} in?", f"On which continent can I find {c}?"])
        a = f"{c} is a country in {cont}. Its capital is {cap}, and many people there speak {lang}."
    elif k == 2:
        q = r.choice([f"Which language do people speak in {c}?", f"What language is spoken in {c}?"])
        a = f"Many people in {c} speak {lang}. {c} is a country in {cont}, and its capital is {cap}."
    else:
        q = r.choice(
            [
                f"Tell me about {c}.",
                f"Can you tell me something about {c}?",
                f"Describe {c} in a few sentences.",
                f"Give me some facts about {c}.",
            ]
        )
        a = (
            f"{c} is a country in {cont}. The capital of {c} is {cap}. Many people in {c} speak {lang}. "
            f"The money used in {c} is called the {cur}."
        )
    return q, a


def animal_turn(r: Random) -> Turn:
    n = r.choice(list(ANIMALS))
    s, legs, home, young, food = ANIMALS[n]
    k = r.randrange(5)
    an = "an" if n[0] in "aeiou" else "a"
    ayoung = "an" if young[0] in "aeiou" else "a"
    if k == 0:
        return (
            r.choice([f"What sound does {an} {n} make?", f"What does {an} {n} sound like?"]),
            f"{an.capitalize()} {n} {s}. When you hear an animal that {s}, it may be {an} {n}.",
        )
    if k == 1:
        return (
            r.choice([f"How many legs does {an} {n} have?", f"How many legs are there on {an} {n}?"]),
            f"{an.capitalize()} {n} has {legs} legs. Two of them together have {legs} + {legs} = {2 * legs} "
            "legs.",
        )
    if k == 2:
        return (
            r.choice([f"Where does {an} {n} live?", f"What is the home of {an} {n}?"]),
            f"{an.capitalize()} {n} often lives in {home}. There it can find {food} to eat.",
        )
    if k == 3:
        return (
            r.choice([f"What is a young {n} called?", f"What do you call a baby {n}?"]),
            f"A young {n} is called {ayoung} {young}. When the {young} grows up, it becomes {an} {n}.",
        )
    return (
        r.choice([f"Tell me about the {n}.", f"Describe {an} {n}.", f"Give me some facts about the {n}."]),
        f"The {n} is an animal with {legs} legs. It {s}, and it often lives in {home}. "
        f"The {n} likes to eat {food}. A young {n} is called {ayoung} {young}.",
    )


def opposite_turn(r: Random) -> Turn:
    a, b = r.choice(OPPOSITES)
    if r.random() < 0.5:
        a, b = b, a
    th = r.choice(["day", "room", "road", "box", "story", "dog", "house", "song"])
    return (
        (
            r.choice(
                [
                    f"What is the opposite of {a}?",
                    f"Give me the opposite of the word {a}.",
                    f"Which word means the opposite of {a}?",
                ]
            ),
            f"The opposite of {a} is {b}. If a {th} is not {a}, you can say that it is {b}.",
        )
        if r.random() < 0.6
        else (
            r.choice([f"The {th} is {a}. What is the opposite?", f"Say the opposite: the {th} is {a}."]),
            f"The opposite is: the {th} is {b}. The word {b} is the opposite of {a}.",
        )
    )


def calendar_turn(r: Random) -> Turn:
    names, what = r.choice([(DAYS, "day"), (MONTHS, "month")])
    i = r.randrange(len(names))
    n = len(names)
    k = r.randrange(3)
    if k == 0:
        return (
            r.choice([f"Which {what} comes after {names[i]}?", f"What {what} comes next after {names[i]}?"]),
            f"The {what} after {names[i]} is {names[(i + 1) % n]}. After {names[(i + 1) % n]} comes "
            f"{names[(i + 2) % n]}.",
        )
    if k == 1:
        return (
            r.choice([f"Which {what} comes before {names[i]}?", f"What {what} is before {names[i]}?"]),
            f"The {what} before {names[i]} is {names[i - 1]}. Before {names[i - 1]} comes {names[i - 2]}.",
        )
    m = r.randint(3, 6)
    seq = [names[(i + j) % n] for j in range(m)]
    return (
        r.choice(
            [
                f"List {NUMW[m]} {what}s starting with {names[i]}.",
                f"Name {NUMW[m]} {what}s, starting from {names[i]}.",
            ]
        ),
        f"Here are {NUMW[m]} {what}s starting with {names[i]}:\n"
        + "\n".join(f"{j + 1}. {x}" for j, x in enumerate(seq)),
    )


def list_turn(r: Random) -> Turn:
    c = r.choice(list(CATS))
    n = r.randint(3, 7)
    xs = r.sample(CATS[c], n)
    style = r.randrange(3)
    q = r.choice(
        [
            "List {n} {c}.",
            "Name {n} {c}.",
            "Give me {n} {c}.",
            "Can you list {n} {c}?",
            "Please write a list of {n} {c}.",
            "I need {n} {c}.",
        ]
    ).format(n=NUMW[n] if r.random() < 0.6 else n, c=c)
    if style == 0:
        xs.sort()
        q += r.choice([" Sort them.", " Put them in alphabetical order."])
        a = f"Here are {NUMW[n]} {c} in alphabetical order:\n" + "\n".join(
            f"{i + 1}. {x}" for i, x in enumerate(xs)
        )
    elif style == 1:
        xs = CATS[c][:n]
        a = f"Here are {NUMW[n]} {c}:\n" + "\n".join(f"{i + 1}. {x}" for i, x in enumerate(xs))
    else:
        xs = CATS[c][:n]
        q += r.choice([" Use dashes.", " Use a bullet list."])
        a = f"Here are {NUMW[n]} {c}:\n" + "\n".join(f"- {x}" for x in xs)
    return q, a


def count_turn(r: Random) -> Turn:
    k = r.randrange(4)
    if k == 0:
        a = r.randint(0, 60)
        b = a + r.randint(4, 12)
        return (
            r.choice(
                [
                    f"Count from {a} to {b}.",
                    f"Please count from {a} to {b}.",
                    f"Write the numbers from {a} to {b}.",
                ]
            ),
            f"Counting from {a} to {b}: " + ", ".join(map(str, range(a, b + 1))) + ".",
        )
    if k == 1:
        b = r.randint(0, 40)
        a = b + r.randint(4, 10)
        return (
            r.choice([f"Count down from {a} to {b}.", f"Count backwards from {a} to {b}."]),
            f"Counting down from {a} to {b}: " + ", ".join(map(str, range(a, b - 1, -1))) + ".",
        )
    if k == 2:
        s = r.choice([2, 3, 5, 10])
        a = s * r.randint(0, 6)
        n = r.randint(4, 9)
        return (
            r.choice(
                [
                    f"Count by {s} starting at {a}, {NUMW.get(n, n)} numbers.",
                    f"Write {n} numbers starting at {a} in steps of {s}.",
                ]
            ),
            f"Here are {n} numbers in steps of {s}: " + ", ".join(str(a + s * i) for i in range(n)) + ".",
        )
    n = r.randint(2, 12)
    m = r.randint(4, 10)
    return (
        r.choice(
            [
                f"Write the multiplication table of {n} up to {m}.",
                f"Show me the table of {n} up to {m}.",
                f"Give me the {n} times table up to {m}.",
            ]
        ),
        f"Here is the table of {n}:\n" + "\n".join(f"{n} x {i} = {n * i}" for i in range(1, m + 1)),
    )


def howto_turn(r: Random) -> Turn:
    d = r.choice(list(DISHES))
    b, s, v, m = DISHES[d]
    if v == "mix":
        steps = [
            f"Wash the {b} and put it in a bowl.",
            f"Add the {s} and a little salt.",
            f"Mix everything for {m} minutes.",
            f"Serve the {d.split()[-1]} and enjoy it.",
        ]
    elif v == "bake":
        steps = [
            f"Put the {b} in a bowl and add the {s}.",
            "Mix everything until it is smooth.",
            f"Bake it in the oven for {m} minutes.",
            f"Let the {d.split()[-1]} cool down and enjoy it.",
        ]
    elif v in ("boil", "simmer"):
        steps = [
            f"Pour the {b} into a pot.",
            f"Add the {s} and stir.",
            f"Let it {v} for {m} minutes.",
            f"Serve the {d.split()[-1]} and enjoy it.",
        ]
    else:
        steps = [
            f"Prepare the {b} and put it in a pan.",
            f"Add the {s}.",
            f"{v.capitalize()} it for {m} minutes.",
            f"Serve the {d.split()[-1]} and enjoy it.",
        ]
    k = r.randrange(3)
    if k < 2:
        q = r.choice(
            [
                f"How do I make {d}?",
                f"How can I make {d}?",
                f"Tell me how to make {d}.",
                f"Give me the steps to make {d}.",
                f"Explain how to make {d}.",
            ]
        )
        return q, f"You can make {d} in {NUMW[len(steps)]} steps:\n" + "\n".join(
            f"{i + 1}. {x}" for i, x in enumerate(steps)
        )
    q = r.choice([f"What do I need to make {d}?", f"Which ingredients do I need for {d}?"])
    return q, f"To make {d}, you need {b} and {s}. It takes about {m} minutes."


def story_turn(r: Random) -> Turn:
    an = r.choice(list(ANIMALS))
    adj = r.choice(ADJ)
    pl = r.choice(PLACES)
    nm = r.choice(BOYS + GIRLS)
    he, his = ("he", "his") if nm in BOYS else ("she", "her")
    food = ANIMALS[an][4]
    q = r.choice(
        [
            f"Tell me a short story about a {adj} {an} named {nm}.",
            f"Write a short story about a {adj} {an} called {nm} in a {pl}.",
            f"Can you write a story about {nm} the {adj} {an}?",
            f"I want to hear a story about a {adj} {an} named {nm} and a {pl}.",
        ]
    )
    if pl not in q:
        pl = "forest"
    a = (
        f"Once upon a time there was a {adj} {an} named {nm}. {nm} lived near a {pl}. Every day {he} walked "
        f"to the {pl} to look for {food}. "
        f"One day {nm} met a friend, and they shared the {food}. {nm} was very happy. In the evening {he} "
        f"went back to {his} home and slept."
    )
    return q, a


def smalltalk_turn(r: Random) -> Turn:
    return r.choice(
        [
            (
                r.choice(
                    ["Hello!", "Hi!", "Hello there!", "Hi there!", "Good morning!", "Good evening!", "Hey!"]
                ),
                "Hello! How can I help you today?",
            ),
            (
                r.choice(["Who are you?", "What are you?", "What is your name?", "Tell me about yourself."]),
                "I am a very small language model. I can answer short questions, solve simple problems and "
                "write small Python functions.",
            ),
            (
                r.choice(["What can you do?", "How can you help me?", "What are you good at?"]),
                "I can answer short questions, make lists, count, solve simple word problems, write JSON and "
                "write small Python functions.",
            ),
            (
                r.choice(["Thank you!", "Thanks!", "Thanks a lot!", "Great, thank you."]),
                "You are welcome! Let me know if you have another question.",
            ),
            (r.choice(["Goodbye!", "Bye!", "See you later!", "That is all."]), "Goodbye! Have a nice day."),
            (
                r.choice(["How are you?", "How are you today?", "How do you feel?"]),
                "I am fine, thank you. How can I help you today?",
            ),
        ]
    )


def compare_turn(r: Random) -> Turn:
    a, b = r.sample(range(1, 200), 2)
    hi, lo = max(a, b), min(a, b)
    if r.random() < 0.5:
        return (
            r.choice([f"Which number is bigger, {a} or {b}?", f"Which is larger: {a} or {b}?"]),
            f"The bigger number is {hi}, because {hi} is greater than {lo}.",
        )
    return (
        r.choice([f"Which number is smaller, {a} or {b}?", f"Which is less: {a} or {b}?"]),
        f"The smaller number is {lo}, because {lo} is less than {hi}.",
    )


def repeat_turn(r: Random) -> Turn:
    w = r.choice([word for words in CATS.values() for word in words])
    n = r.randint(2, 6)
    k = r.randrange(3)
    if k == 0:
        return (
            r.choice(
                [f"Repeat the word {w} {n} times.", f"Write the word {w} {n} times.", f"Say {w} {n} times."]
            ),
            f"Here is the word {w} repeated {n} times: " + ", ".join([w] * n) + ".",
        )
    xs = r.sample(r.choice(list(CATS.values())), r.randint(3, 5))
    if k == 1:
        return (
            f"Reverse this list: {', '.join(xs)}.",
            f"The list in reverse order is: {', '.join(xs[::-1])}.",
        )
    return (
        r.choice(
            [f"Sort this list: {', '.join(xs)}.", f"Put this list in alphabetical order: {', '.join(xs)}."]
        ),
        f"The list in alphabetical order is: {', '.join(sorted(xs, key=str.lower))}.",
    )
