"""The grammar of the demo's text: every form of line, and how often each appears.

    copy kvb qzr = kvb qzr .                                                     copying
    repeat lamp red sing ; lamp red sing .                                       copying
    keys mo = bird , ra = 12 ; ra -> 12 .                                        recall
    mira has the red lamp , tovo has the old cup ; who has the lamp ? mira .     recall
    7 + 5 = 12 , 9 - 4 = 5 .                                                     small arithmetic
    count bird : lamp bird bird -> 2 .                                           counting
    sing : these birds near this lamp sing .                                     agreement
    open ( [ { ; close } ] ) .                                                   nesting

Strings and keys are fresh random letters, so that copying and recall cannot be solved by memory.
Only `random.Random.random` is drawn from: Python documents its sequence as the same for one seed in every
version and on every platform.

`generate_text` draws a text, `draw_lines` single lines of one skill.  A text is a sequence of lines.  One
line in ten repeats one of the lines just before it, after the word `again`.
"""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from dispfx.errors import DataError

SKILLS = ("copy", "recall", "arithmetic", "counting", "agreement")

NOUNS = (
    "bird", "boat", "cup", "dog", "farmer", "fox", "king", "lamp",
    "letter", "painter", "river", "star", "stone", "tower", "tree", "wagon",
)  # fmt: skip
ADJECTIVES = ("blue", "cold", "green", "old", "quiet", "red", "small", "tall")
ACTIONS = ("fall", "glow", "move", "rest", "sing", "swim", "turn", "wait")
RELATIONS = ("call", "find", "follow", "help", "hold", "like", "need", "see")
PLACES = ("above", "behind", "near", "under")
CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
BRACKETS = {"(": ")", "[": "]", "{": "}", "<": ">"}

LARGEST_OPERAND = 12
LONGEST_COUNT = 9

Item = TypeVar("Item")


class Line(NamedTuple):
    """One line of text, cut where its answer begins and ends.

    `prompt` determines `answer`; both end before a space, so that a tokenizer which keeps the space with the
    word that follows it splits `prompt` and `answer` as it splits the whole line.
    """

    prompt: str
    answer: str
    tail: str = " .\n"

    @property
    def text(self) -> str:
        return self.prompt + self.answer + self.tail


class Dice:
    """Draws that are the same for one seed everywhere."""

    def __init__(self, seed: int):
        self.unit = random.Random(seed).random

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return low + int(self.unit() * (high - low + 1))

    def pick(self, items: Sequence[Item]) -> Item:
        return items[int(self.unit() * len(items))]

    def distinct(self, items: Sequence[Item], count: int) -> list[Item]:
        """`count` of the items, none twice, in random order."""
        rest = list(items)
        return [rest.pop(int(self.unit() * len(rest))) for _ in range(count)]


def _string(dice: Dice) -> str:
    return "".join([dice.pick(LETTERS) for _ in range(dice.between(3, 6))])


def _name(dice: Dice) -> str:
    return "".join([dice.pick(CONSONANTS) + dice.pick(VOWELS) for _ in range(2)])


def _names(dice: Dice, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names[_name(dice)] = None
    return list(names)


def copy_strings(dice: Dice) -> Line:
    copied = "".join([" " + _string(dice) for _ in range(dice.between(1, 4))])
    return Line(f"copy{copied} =", copied)


def copy_words(dice: Dice) -> Line:
    words = dice.distinct(NOUNS + ADJECTIVES + ACTIONS, dice.between(3, 8))
    copied = "".join([" " + word for word in words])
    return Line(f"repeat{copied} ;", copied)


def recall_values(dice: Dice) -> Line:
    """Keys with values of three sorts, then questions about some of them."""
    count = dice.between(2, 5)
    keys = _names(dice, count)
    values = [dice.pick(VALUES)(dice) for _ in keys]
    facts = " ,".join([f" {key} = {value}" for key, value in zip(keys, values, strict=True)])
    *asked, last = dice.distinct(range(count), dice.between(1, count))
    answered = "".join([f" {keys[place]} -> {values[place]} ," for place in asked])
    return Line(f"keys{facts} ;{answered} {keys[last]} ->", f" {values[last]}")


VALUES: tuple[Callable[[Dice], str], ...] = (
    lambda dice: dice.pick(NOUNS),
    lambda dice: str(dice.between(0, 2 * LARGEST_OPERAND)),
    _string,
)


def recall_owners(dice: Dice) -> Line:
    """Who owns what, then one question in one of three directions."""
    count = dice.between(2, 4)
    owners, things = _names(dice, count), dice.distinct(NOUNS, count)
    looks = [dice.pick(ADJECTIVES) for _ in owners]
    facts = " , ".join(
        [f"{owner} has the {look} {thing}" for owner, look, thing in zip(owners, looks, things, strict=True)]
    )
    asked = dice.between(0, count - 1)
    question, answer = dice.pick(
        (
            (f"who has the {things[asked]}", owners[asked]),
            (f"what has {owners[asked]}", things[asked]),
            (f"how looks the {things[asked]}", looks[asked]),
        )
    )
    return Line(f"{facts} ; {question} ?", f" {answer}")


def sums(dice: Dice) -> Line:
    *before, (question, answer) = [_sum(dice) for _ in range(dice.between(1, 3))]
    return Line("".join([f"{asked}{told} , " for asked, told in before]) + question, answer)


def _sum(dice: Dice) -> tuple[str, str]:
    left, right = dice.between(0, LARGEST_OPERAND), dice.between(0, LARGEST_OPERAND)
    if dice.unit() < 0.5:
        return f"{left} + {right} =", f" {left + right}"
    return f"{left + right} - {right} =", f" {left}"


def count_run(dice: Dice) -> Line:
    number = dice.between(1, LONGEST_COUNT)
    return Line(f"many{(' ' + dice.pick(NOUNS)) * number} ->", f" {number}")


def count_some(dice: Dice) -> Line:
    sought, other = dice.distinct(NOUNS, 2)
    shown = [dice.pick((sought, other)) for _ in range(dice.between(2, LONGEST_COUNT))]
    return Line(f"count {sought} : {' '.join(shown)} ->", f" {shown.count(sought)}")


def count_up(dice: Dice) -> Line:
    first, length = dice.between(0, 2 * LARGEST_OPERAND), dice.between(2, LONGEST_COUNT)
    last = first + length - 1
    return Line(f"from {first} to {last} :", "".join([f" {number}" for number in range(first, last + 1)]))


def agree(dice: Dice) -> Line:
    """The verb, named in advance, agrees with the subject and not with the noun next to it."""
    subject, plural = _phrase(dice)
    other, _ = _phrase(dice)
    action = dice.pick(ACTIONS)
    return Line(f"{action} : {subject} {dice.pick(PLACES)} {other}", f" {_verb(action, plural)} .", "\n")


def agree_nested(dice: Dice) -> Line:
    """Two verbs in a nested clause, the inner subject's first."""
    subject, plural = _phrase(dice)
    inner, inner_plural = _phrase(dice)
    relation, action = dice.pick(RELATIONS), dice.pick(ACTIONS)
    verbs = f" {_verb(relation, inner_plural)} {_verb(action, plural)} ."
    return Line(f"{relation} {action} : {subject} that {inner}", verbs, "\n")


def _phrase(dice: Dice) -> tuple[str, bool]:
    plural = dice.unit() < 0.5
    look = dice.pick(ADJECTIVES) + " " if dice.unit() < 0.5 else ""
    # Number is told before the noun: after a bare `the bird`, an `s` could always follow.
    noun = dice.pick(NOUNS)
    return (f"these {look}{noun}s" if plural else f"this {look}{noun}"), plural


def _verb(stem: str, plural: bool) -> str:
    return stem if plural else stem + "s"


def nest_mirrored(dice: Dice) -> Line:
    opened = [dice.pick(tuple(BRACKETS)) for _ in range(dice.between(1, 6))]
    closed = "".join([" " + BRACKETS[bracket] for bracket in reversed(opened)])
    return Line(f"open {' '.join(opened)} ; close", closed)


def nest_tree(dice: Dice) -> Line:
    """A random tree of brackets around words; the answer, maybe empty, closes those still open."""
    tokens, open_brackets = ["tree"], []
    for _ in range(dice.between(3, 12)):
        if open_brackets and dice.unit() < 0.4:
            tokens.append(BRACKETS[open_brackets.pop()])
        elif len(open_brackets) < 4:
            open_brackets.append(dice.pick(tuple(BRACKETS)))
            tokens += [open_brackets[-1], dice.pick(ADJECTIVES)]
    closed = "".join([" " + BRACKETS[bracket] for bracket in reversed(open_brackets)])
    return Line(" ".join(tokens), closed)


Form = Callable[[Dice], Line]

# Skill, form, weight in percent.  Heavy in copying and recall: they are what pruning loses first.
FORMS: tuple[tuple[str, Form, int], ...] = (
    ("copy", copy_strings, 20),
    ("copy", copy_words, 8),
    ("recall", recall_values, 18),
    ("recall", recall_owners, 12),
    ("arithmetic", sums, 12),
    ("counting", count_run, 4),
    ("counting", count_some, 6),
    ("counting", count_up, 3),
    ("agreement", agree, 6),
    ("agreement", agree_nested, 5),
    ("nesting", nest_mirrored, 3),
    ("nesting", nest_tree, 3),
)
MIX: tuple[Form, ...] = tuple(form for _, form, weight in FORMS for _ in range(weight))


ECHO_SHARE = 0.1
ECHO_REACH = 4


def generate_text(seed: int, characters: int) -> str:
    """Returns exactly `characters` characters of ASCII text; the last line may be cut.

    The same seed gives the same text in every process and on every platform, and a shorter text is a prefix
    of a longer one.

    Raises:
        DataError: the seed or the number of characters is negative.
    """
    dice = _dice(seed)
    if characters < 0:
        raise DataError(f"a text has at least 0 characters, but {characters} were asked for")
    lines: list[str] = []
    written = 0
    while written < characters:
        line = _echo(dice, lines) if dice.unit() < ECHO_SHARE else dice.pick(MIX)(dice).text
        lines.append(line)
        written += len(line)
    return "".join(lines)[:characters]


def draw_lines(skill: str, seed: int, count: int) -> list[Line]:
    """Returns `count` lines of one of `SKILLS`, in the mix of forms that the text has.

    Raises:
        DataError: there is no such skill, or the seed is negative.
    """
    if skill not in SKILLS:
        raise DataError(f"{skill!r} is not a skill of this grammar", hint=f"one of {', '.join(SKILLS)}")
    dice = _dice(seed)
    forms = [form for name, form, weight in FORMS if name == skill for _ in range(weight)]
    return [dice.pick(forms)(dice) for _ in range(count)]


def _dice(seed: int) -> Dice:
    # Python seeds with the absolute value, so two seeds of opposite sign would give one text.
    if seed < 0:
        raise DataError(f"a seed is 0 or more, but {seed} was given")
    return Dice(seed)


def _echo(dice: Dice, lines: list[str]) -> str:
    recent = lines[-ECHO_REACH:]
    return "again " + dice.pick(recent).removeprefix("again ") if recent else "again .\n"
