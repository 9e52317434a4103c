"""Text with structure worth learning, drawn from a seeded grammar.

Entry points: `generate_text` for a text, `draw_lines` for single lines of one skill.

A text is a sequence of lines, each an instance of one form of `grammar`.  One line in ten repeats one of the
lines just before it, after the word `again`.
"""

from dispfx.demo.grammar import FORMS, MIX, SKILLS, Dice, Line
from dispfx.errors import DataError

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
