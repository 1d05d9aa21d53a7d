"""Small Python functions and JSON objects. Each function returns (question, answer)."""

import json
from random import Random

from templates.facts import BOYS, CATS, CITIES, COUNTRIES, GIRLS, ITEMS, JOBS, NUMW

Turn = tuple[str, str]


VARS = [
    ("items", "item"),
    ("values", "value"),
    ("numbers", "number"),
    ("data", "x"),
    ("nums", "n"),
    ("words", "word"),
    ("names", "name"),
    ("rows", "row"),
]
ONE = [  # (function stem, description, one-line expression of the pair a, b)
    ("add", "the sum of {a} and {b}", "{a} + {b}"),
    ("subtract", "the difference of {a} and {b}", "{a} - {b}"),
    ("multiply", "the product of {a} and {b}", "{a} * {b}"),
    ("divide", "the quotient of {a} and {b}", "{a} / {b}"),
    ("maximum", "the larger of {a} and {b}", "{a} if {a} > {b} else {b}"),
    ("minimum", "the smaller of {a} and {b}", "{a} if {a} < {b} else {b}"),
    ("power", "{a} raised to the power of {b}", "{a} ** {b}"),
    ("is_equal", "True if {a} and {b} are equal", "{a} == {b}"),
    ("remainder", "the remainder of {a} divided by {b}", "{a} % {b}"),
    ("average", "the average of {a} and {b}", "({a} + {b}) / 2"),
]
LOOPS = [  # (stem, description, start value, test or "", update)
    ("sum", "the sum of all {vs}", "total = 0", "", "total += {v}", "total"),
    ("product", "the product of all {vs}", "result = 1", "", "result *= {v}", "result"),
    ("count", "the number of {vs}", "count = 0", "", "count += 1", "count"),
    ("count_positive", "the number of positive {vs}", "count = 0", "{v} > 0", "count += 1", "count"),
    ("count_negative", "the number of negative {vs}", "count = 0", "{v} < 0", "count += 1", "count"),
    ("sum_even", "the sum of the even {vs}", "total = 0", "{v} % 2 == 0", "total += {v}", "total"),
    ("sum_odd", "the sum of the odd {vs}", "total = 0", "{v} % 2 == 1", "total += {v}", "total"),
    ("keep_even", "a list of the even {vs}", "result = []", "{v} % 2 == 0", "result.append({v})", "result"),
    ("keep_odd", "a list of the odd {vs}", "result = []", "{v} % 2 == 1", "result.append({v})", "result"),
    (
        "keep_positive",
        "a list of the positive {vs}",
        "result = []",
        "{v} > 0",
        "result.append({v})",
        "result",
    ),
    (
        "square_all",
        "a list of the squares of all {vs}",
        "result = []",
        "",
        "result.append({v} * {v})",
        "result",
    ),
    ("double_all", "a list with all {vs} doubled", "result = []", "", "result.append({v} * 2)", "result"),
    ("copy", "a copy of all {vs}", "result = []", "", "result.append({v})", "result"),
    ("find_longest", "the longest of the {vs}", "best = ''", "len({v}) > len(best)", "best = {v}", "best"),
    (
        "find_largest",
        "the largest of the {vs}",
        "best = None",
        "best is None or {v} > best",
        "best = {v}",
        "best",
    ),
    (
        "find_smallest",
        "the smallest of the {vs}",
        "best = None",
        "best is None or {v} < best",
        "best = {v}",
        "best",
    ),
]
RECS = [
    (
        "factorial",
        "the factorial of {n}",
        "    if {n} <= 1:\n        return 1\n    return {n} * factorial({n} - 1)\n",
    ),
    (
        "fibonacci",
        "the Fibonacci number at position {n}",
        "    if {n} < 2:\n        return {n}\n    return fibonacci({n} - 1) + fibonacci({n} - 2)\n",
    ),
    ("is_even", "True if {n} is even", "    return {n} % 2 == 0\n"),
    ("is_odd", "True if {n} is odd", "    return {n} % 2 == 1\n"),
    (
        "is_prime",
        "True if {n} is a prime number",
        "    if {n} < 2:\n        return False\n    for i in range(2, {n}):\n        if {n} % i == 0:\n      "
        "      return False\n    return True\n",
    ),
    ("square", "the square of {n}", "    return {n} * {n}\n"),
    ("cube", "the cube of {n}", "    return {n} * {n} * {n}\n"),
    ("absolute", "the absolute value of {n}", "    if {n} < 0:\n        return -{n}\n    return {n}\n"),
    (
        "sum_to",
        "the sum of the numbers from 1 to {n}",
        "    total = 0\n    for i in range(1, {n} + 1):\n        total += i\n    return total\n",
    ),
    (
        "count_down",
        "a list of the numbers from {n} down to 1",
        "    result = []\n    while {n} > 0:\n        result.append({n})\n        {n} -= 1\n    return "
        "result\n",
    ),
]


def make_function(r: Random) -> tuple[str, str, str, str]:
    """Return (description, source, example call) of a small random function."""
    k = r.random()
    if k < 0.3:
        a, b = r.choice([("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")])
        stem, desc, ex = r.choice(ONE)
        desc = desc.format(a=a, b=b)
        return (
            stem,
            desc,
            f'def {stem}({a}, {b}):\n    """Return {desc}."""\n    return {ex.format(a=a, b=b)}\n',
            f"{a}, {b}",
        )
    if k < 0.8:
        vs, v = r.choice(VARS)
        stem, desc, init, test, upd, out = r.choice(LOOPS)
        desc = desc.format(vs=vs)
        name = f"{stem}_{vs}" if r.random() < 0.6 else stem
        body = f"    {init}\n    for {v} in {vs}:\n"
        body += (
            f"        if {test.format(v=v)}:\n            {upd.format(v=v)}\n"
            if test
            else f"        {upd.format(v=v)}\n"
        )
        return name, desc, f'def {name}({vs}):\n    """Return {desc}."""\n{body}    return {out}\n', vs
    n = r.choice(["n", "num", "number", "value"])
    stem, desc, body = r.choice(RECS)
    desc = desc.format(n=n)
    return stem, desc, f'def {stem}({n}):\n    """Return {desc}."""\n{body.format(n=n)}', n


def write_turn(r: Random) -> Turn:
    name, desc, src, args = make_function(r)
    k = r.randrange(3)
    if k == 0:
        q = r.choice(
            [
                f"Write a Python function {name}({args}) that returns {desc}.",
                f"Write a function named {name} with the arguments {args} that returns {desc}.",
            ]
        )
    elif k == 1:
        q = r.choice(
            [
                f"Please write {name}({args}) in Python. It returns {desc}.",
                f"I need a Python function {name}({args}). It should return {desc}.",
            ]
        )
    else:
        q = f'Complete this Python function:\n```python\n{src.splitlines()[0]}\n    """Return {desc}."""\n```'
    spoken = args.replace(", ", " and ")
    a = (
        f"Here is the function {name}:\n```python\n{src}```\nThe function {name} takes {spoken} and returns "
        f"{desc}."
    )
    return q, a


def explain_turn(r: Random) -> Turn:
    name, desc, src, args = make_function(r)
    src = "\n".join(line for line in src.splitlines() if '"""' not in line)
    spoken = args.replace(", ", " and ")
    return (
        r.choice(["What does this function do?", "Explain this Python function.", "Describe this code."])
        + f"\n```python\n{src}\n```",
        f"The function {name} takes {spoken} and returns {desc}.",
    )


def json_turn(r: Random) -> Turn:
    k = r.randrange(4)
    if k == 0:
        n, age, city, job = r.choice(BOYS + GIRLS), r.randint(18, 80), r.choice(CITIES), r.choice(JOBS)
        d = {"name": n, "age": age, "city": city, "job": job}
        an = "an" if job[0] in "aeiou" else "a"
        q = r.choice(
            [
                f"Write JSON for {n}, who is {age} years old, lives in {city} and works as {an} {job}.",
                f"Give me a JSON object for a person: name {n}, age {age}, city {city}, job {job}.",
            ]
        )
    elif k == 1:
        it, price, cnt, col = r.choice(ITEMS), r.randint(1, 50), r.randint(1, 30), r.choice(CATS["colours"])
        d = {"item": it, "colour": col, "price": price, "count": cnt, "in_stock": cnt > 5}
        q = r.choice(
            [
                f"Write JSON for {cnt} {col} {it} that cost {price} dollars each.",
                f"Make a JSON object: item {it}, colour {col}, price {price}, count {cnt}.",
            ]
        )
    elif k == 2:
        c = r.choice(list(COUNTRIES))
        cap, cont, lang, cur = COUNTRIES[c]
        d = {"country": c, "capital": cap, "continent": cont, "language": lang, "currency": cur}
        q = r.choice(
            [f"Describe {c} as JSON.", f"Give me a JSON object about {c}.", f"Write facts about {c} in JSON."]
        )
    else:
        c = r.choice(list(CATS))
        n = r.randint(3, 5)
        d = {"category": c, "count": n, "items": CATS[c][:n]}
        q = r.choice([f"Give me {NUMW[n]} {c} as JSON.", f"Write a JSON list of {NUMW[n]} {c}."])
    return q, f"Here is the JSON object:\n```json\n{json.dumps(d, indent=2)}\n```"


def read_json_turn(r: Random) -> Turn:
    n, age, city, job = r.choice(BOYS + GIRLS), r.randint(18, 80), r.choice(CITIES), r.choice(JOBS)
    d = {"name": n, "age": age, "city": city, "job": job}
    key = r.choice(list(d))
    return (
        f"What is the {key} in this JSON?\n```json\n{json.dumps(d)}\n```",
        f'The value of "{key}" is {json.dumps(d[key])}.',
    )
