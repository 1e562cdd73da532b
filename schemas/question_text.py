"""What the model reads of a question: its words, and what is cut of them where its tokens are too many.

Owns the wording and the rule of the cuts, for the engine and for whoever submits a job. Makes no tokens itself.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schemas.question import SIDES, QuestionSet

SIDE_DESCRIPTIONS = {"false": "no, the statement does not hold", "true": "yes, the statement holds"}
OPTION_TOKENS = 48  # of an option's text, without its mask token
LEAST_OPTION_TOKENS = 4  # with its mask token, when options have to be cut to fit
LEAST_INSTRUCTION_TOKENS = 8
TIGHT_BUDGET = 16  # fewer tokens than this for the instructions, and the options are cut

Label = str | int | float | bool


@dataclass(frozen=True)
class Question:
    """A checked question. `options` are the answer's keys, `option_texts` what the model reads, in the same order."""

    id: str
    type: str
    instructions: str
    options: tuple[Label, ...]
    option_texts: tuple[str, ...]
    legend: tuple[str, ...] = ()  # of a score: its levels' descriptions
    order: tuple[int, ...] | None = None  # the model reads option order[j] in place j

    @property
    def text(self) -> str:
        """What the model reads before the options."""
        return f"{self.type} question: {self.instructions}"

    @property
    def texts(self) -> list[str]:
        """What is made tokens: `text`, then the options in the order in which the model reads them."""
        order = self.order or range(len(self.option_texts))
        return [self.text, *(f" {self.option_texts[place]}" for place in order)]


@dataclass(frozen=True)
class SequenceLimits:
    """In tokens: the longest sequence, and what the question's part should not exceed."""

    max_len: int
    head_max_len: int


@dataclass(frozen=True)
class HeadCuts:
    """What a question's part keeps, in tokens, and at which place of the sequence each option begins."""

    instructions: int
    options: tuple[int, ...]  # of each option's text, without its mask token
    option_limit: int  # what each option was cut to, mask token included; 0 where the budget cut none
    markers: tuple[int, ...]  # the places of the options' mask tokens


def json_line(value: Any) -> str:
    """Text as it is; anything else as JSON on one line, non-ASCII kept. Raises ValueError when it has no JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def word_questions(checked: QuestionSet) -> tuple[Question, ...]:
    """Word questions that `check_questions` returned, in their order."""
    return tuple(_word(name, question) for name, question in checked.items())


def _word(name: str, question: dict[str, Any]) -> Question:
    kind: str = question["type"]
    criteria: Any = question.get("criteria")
    order = question.get("option_order")
    options: tuple[str, ...]
    legend: tuple[str, ...] = ()
    if kind == "choice":
        described = criteria if isinstance(criteria, dict) else dict.fromkeys(criteria)
        options = tuple(described)
        texts = [
            label if what is None or what == "" else f"{label}: {json_line(what)}" for label, what in described.items()
        ]
    elif kind == "score":
        legend = tuple(map(json_line, criteria))
        options = tuple(str(level) for level in range(len(legend)))
        texts = [f"level {level}: {what}" for level, what in enumerate(legend)]
    else:
        options, sides, labels = SIDES, criteria or {}, question.get("labels") or {}
        said = {side: SIDE_DESCRIPTIONS[side] if sides.get(side) in (None, "") else sides[side] for side in SIDES}
        texts = [f"{labels.get(side, side)}: {json_line(said[side])}" for side in SIDES]
    instructions = json_line(question["instructions"])
    return Question(name, kind, instructions, options, tuple(texts), legend, None if order is None else tuple(order))


def cut_head(instructions: int, options: Sequence[int], head_max_len: int) -> HeadCuts:
    """Cut a question of so many tokens of instructions and of each option's text to about `head_max_len` tokens.

    Options keep 48 tokens and their mask token. Where fewer than 16 tokens are left for the instructions, every option
    is cut to an equal share of the rest, but not below 4. The instructions keep what is left, but not below 8.
    """
    spans, limit = [1 + min(option, OPTION_TOKENS) for option in options], 0
    if head_max_len - sum(spans) < TIGHT_BUDGET:
        limit = max(LEAST_OPTION_TOKENS, (head_max_len - TIGHT_BUDGET) // len(spans))
        spans = [min(span, limit) for span in spans]
    kept = min(instructions, max(LEAST_INSTRUCTION_TOKENS, head_max_len - sum(spans)))
    markers, place = [], kept + 2  # after [CLS], the instructions and [SEP]
    for span in spans:
        markers.append(place)
        place += span
    return HeadCuts(kept, tuple(span - 1 for span in spans), limit, tuple(markers))


def count_distinct(options: Sequence[Sequence[int]], cuts: HeadCuts) -> int:
    """Return how many different options are left of the options' tokens: others are alike to the model."""
    return len({tuple(option[:kept]) for option, kept in zip(options, cuts.options, strict=True)})


def why_unfit(question: str, cuts: HeadCuts, limits: SequenceLimits) -> str | None:
    """Return why a question cannot be asked, with the numbers and what to do; None when all its options fit."""
    count = len(cuts.markers)
    fitting = sum(marker < limits.max_len for marker in cuts.markers)
    if fitting == count:
        return None
    spans = [min(1 + option, LEAST_OPTION_TOKENS) for option in cuts.options[:-1]]
    least = min(cuts.instructions, LEAST_INSTRUCTION_TOKENS) + 3 + sum(spans)
    if least > limits.max_len:
        mend = f"raise max_len to {least} or more, or ask with fewer options"
    else:
        mend = "lower head_max_len, raise max_len, or ask with fewer or shorter options"
    return (
        f"question {question!r}: {fitting} of its {count} options fit in max_len {limits.max_len} with "
        f"head_max_len {limits.head_max_len}; {mend}"
    )


def why_alike(question: str, cuts: HeadCuts, distinct: int) -> str | None:
    """Return what is lost where the model cannot tell options apart, and what to do; None where it can."""
    count = len(cuts.options)
    if distinct == count:
        return None
    if cuts.option_limit:
        cut = f"its {count} options, cut to {cuts.option_limit} tokens each,"
        mend = "raise head_max_len, ask with fewer options, or begin each with what sets it apart"
    else:
        cut = f"its {count} options, of which {OPTION_TOKENS} tokens each are read,"
        mend = "begin each with what sets it apart, in words that the tokenizer knows"
    return (
        f"question {question!r}: {cut} leave {distinct} that the model can tell apart, and a choice among the "
        f"others means nothing; {mend}"
    )
