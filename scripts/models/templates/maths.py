"""Sums and word problems, with the working. Each function returns (question, answer)."""

from random import Random

from templates.facts import BOYS, GIRLS, ITEMS

Turn = tuple[str, str]


def plain_turn(r: Random) -> Turn:
    k = r.randrange(4)
    if k == 0:
        a, b = r.randint(1, 99), r.randint(1, 99)
        e, v = f"{a} + {b}", a + b
        q = r.choice(
            [f"What is {e}?", f"Add {a} and {b}.", f"Calculate {e}.", f"What is the sum of {a} and {b}?"]
        )
    elif k == 1:
        a, b = r.randint(1, 99), r.randint(1, 99)
        a, b = max(a, b), min(a, b)
        e, v = f"{a} - {b}", a - b
        q = r.choice([f"What is {e}?", f"Subtract {b} from {a}.", f"Calculate {e}."])
    elif k == 2:
        a, b = r.randint(2, 12), r.randint(2, 12)
        e, v = f"{a} * {b}", a * b
        q = r.choice(
            [
                f"What is {e}?",
                f"Multiply {a} by {b}.",
                f"Calculate {e}.",
                f"What is the product of {a} and {b}?",
            ]
        )
    else:
        b, v = r.randint(2, 12), r.randint(2, 12)
        a = b * v
        e = f"{a} / {b}"
        q = r.choice([f"What is {e}?", f"Divide {a} by {b}.", f"Calculate {e}."])
    return q, f"We calculate {e} = {v}. The answer is {v}."


def word_turn(r: Random) -> Turn:
    p, o = r.sample(BOYS + GIRLS, 2)
    he = "He" if p in BOYS else "She"
    it = r.choice(ITEMS)
    k = r.randrange(9)
    a, b, c = r.randint(5, 40), r.randint(2, 20), r.randint(2, 9)
    if k == 0:
        q = f"{p} has {a} {it}. {he} buys {b} more {it}. How many {it} does {p} have now?"
        s = (
            f"{p} starts with {a} {it}. {he} buys {b} more {it}, so we add: {a} + {b} = {a + b}. {p} has "
            f"{a + b} {it} now. The answer is {a + b}."
        )
    elif k == 1:
        a = b + r.randint(1, 30)
        q = f"{p} has {a} {it}. {he} gives {b} {it} to {o}. How many {it} does {p} have left?"
        s = (
            f"{p} starts with {a} {it}. {he} gives away {b} {it}, so we subtract: {a} - {b} = {a - b}. {p} "
            f"has {a - b} {it} left. The answer is {a - b}."
        )
    elif k == 2:
        b = r.randint(2, 9)
        q = f"{p} has {b} boxes. There are {c} {it} in each box. How many {it} does {p} have in total?"
        s = (
            f"There are {b} boxes with {c} {it} in each box, so we multiply: {b} * {c} = {b * c}. {p} has "
            f"{b * c} {it} in total. The answer is {b * c}."
        )
    elif k == 3:
        n = r.randint(2, 9)
        q = (
            f"{p} has {n * c} {it}. {he} shares them equally with {c} friends. How many {it} does each "
            "friend get?"
        )
        s = (
            f"{p} shares {n * c} {it} equally with {c} friends, so we divide: {n * c} / {c} = {n}. Each "
            f"friend gets {n} {it}. The answer is {n}."
        )
    elif k == 4:
        q = f"{p} has {a} {it} and {o} has {b} {it}. How many {it} do they have together?"
        s = (
            f"{p} has {a} {it} and {o} has {b} {it}, so we add: {a} + {b} = {a + b}. They have {a + b} {it} "
            f"together. The answer is {a + b}."
        )
    elif k == 5:
        n = r.randint(2, 9)
        q = f"One of the {it} costs {c} dollars. {p} buys {n} {it}. How much does {p} pay?"
        s = (
            f"Each one costs {c} dollars and {p} buys {n} {it}, so we multiply: {n} * {c} = {n * c}. {p} "
            f"pays {n * c} dollars. The answer is {n * c}."
        )
    elif k == 6:
        n = r.randint(2, 9)
        q = (
            f"{p} has {a} {it}. {he} finds {n} bags with {c} {it} in each bag. How many {it} does {p} have "
            "now?"
        )
        s = (
            f"First we find how many {it} are in the bags: {n} * {c} = {n * c}. Then we add the {it} that "
            f"{p} already has: "
            f"{a} + {n * c} = {a + n * c}. {p} has {a + n * c} {it} now. The answer is {a + n * c}."
        )
    elif k == 7:
        a = b + c + r.randint(1, 30)
        q = f"{p} has {a} {it}. {he} loses {b} {it} and gives {c} {it} to {o}. How many {it} are left?"
        s = (
            f"{p} starts with {a} {it}. After losing {b} {it}, {p} has {a} - {b} = {a - b} {it}. After "
            f"giving {c} {it} to {o}, "
            f"{p} has {a - b} - {c} = {a - b - c} {it}. The answer is {a - b - c}."
        )
    else:
        q = f"{p} reads {c} pages every day. How many pages does {p} read in {b} days?"
        s = (
            f"{p} reads {c} pages every day for {b} days, so we multiply: {b} * {c} = {b * c}. {p} reads "
            f"{b * c} pages. The answer is {b * c}."
        )
    if r.random() < 0.15:
        q = r.choice(["Solve this problem: ", "Please solve: ", "Here is a problem. "]) + q
    return q, s
