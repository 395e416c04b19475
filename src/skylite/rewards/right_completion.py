"""The form that a reward of the user's own wants: `prepare` and `train` try the usual ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skylite.rewards.call_rewards import Item
from skylite.types import Prompt

ANSWER = "{answer}"
"""Where a template has the answer. Other braces stay as they are."""
_THOUGHT = "1 + 1 = 2"
USUAL_FORMS = (
    ANSWER,
    f"<answer>{ANSWER}</answer>",
    f"<think>\n{_THOUGHT}\n</think>\n<answer>{ANSWER}</answer>",
    f"<think>\n{_THOUGHT}\n</think>\n<answer>\n{ANSWER}\n</answer>",
    f"<think>{_THOUGHT}</think><answer>{ANSWER}</answer>",
    f"<reasoning>\n{_THOUGHT}\n</reasoning>\n<answer>\n{ANSWER}\n</answer>\n",
    f"{_THOUGHT}\n</think>\n<answer>{ANSWER}</answer>",  # the template opened <think>
    f"\\boxed{{{ANSWER}}}",
    f"$\\boxed{{{ANSWER}}}$",
    f"<think>\n{_THOUGHT}\n</think>\n\\boxed{{{ANSWER}}}",
    f"<think>\n{_THOUGHT}\n</think>\n{ANSWER}",
    f"#### {ANSWER}",
    f"Answer: {ANSWER}",
    f"The answer is {ANSWER}.",
    f"The answer is {ANSWER}",
)
"""The likeliest first."""
PROBES = 8
"""Rows to try the forms with, at equal distances in the data."""
TOLERANCE = 1e-6
"""Two scores this near are equal: 0.2 + 1.0 is not exactly 1.2."""
ScoreItems = Callable[[Sequence[Item]], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RightForm:
    """The form in which a reward likes a right answer best, and what it gives for it."""

    template: str
    scores: tuple[float, ...]
    """Of the right answers of the probed rows, in this form."""
    best: float | None
    """What a right completion scores at least; None: that differs between rows."""
    floor: float
    """The highest score of a wrong or empty completion."""
    beats_wrong: bool
    """Whether right answers score more than wrong ones, on average."""

    @property
    def fits(self) -> bool:
        """Whether the reward may look at the answer. Only one that gives right answers nothing does not."""
        return self.beats_wrong or max(self.scores) > 0

    def accepts(self, value: float) -> bool:
        """Whether a right completion of one row may score so."""
        if self.best is not None:
            return value >= self.best - TOLERANCE
        return value > self.floor or not self.beats_wrong

    def wanted(self) -> str:
        """What `accepts` asks for, to continue "a right completion scores"."""
        return f"above {self.floor:g}" if self.best is None else f"{self.best:g}"


def is_made_up(template: str) -> bool:
    """Whether the template has thoughts that fit no question."""
    return _THOUGHT in template


def fill(template: str, answer: str) -> str:
    """A completion that gives the answer."""
    return template.replace(ANSWER, answer)


def probe_rows(prompts: Sequence[Prompt]) -> list[Prompt]:
    """A few rows with an answer, from all of the data."""
    answered = [prompt for prompt in prompts if prompt.answer]
    return answered[:: max(1, len(answered) // PROBES)][:PROBES]


def find_form(
    score: ScoreItems,
    rows: Sequence[Prompt],
    templates: Sequence[str] = USUAL_FORMS,
    best: float | None = None,
) -> RightForm:
    """The template under which the right answers of `rows` score highest, above wrong answers if possible.

    `best`: what a right completion scores at least, if the user says so. Raises what `score` raises.
    """
    empty = list(score([(row, "") for row in rows]))
    forms: list[RightForm] = []
    for template in dict.fromkeys(templates):
        forms.append(_try_form(score, rows, template, empty, best))
        if forms[-1].beats_wrong and min(forms[-1].scores) >= 1.0 > forms[-1].floor:
            break  # no form can be more right than this
    return max(forms, key=lambda form: (form.beats_wrong, sum(form.scores)))


def form_of_scores(scores: Sequence[float], floor: float) -> RightForm:
    """What a reward gives completions that are known to be right. `floor`: what it gives empty ones."""
    beats = sum(scores) > floor * len(scores) + TOLERANCE
    return RightForm(
        template=ANSWER, scores=tuple(scores), best=usual_score(scores), floor=floor, beats_wrong=beats
    )


def _try_form(
    score: ScoreItems, rows: Sequence[Prompt], template: str, empty: list[float], best: float | None
) -> RightForm:
    right = list(score([(row, fill(template, row.answer)) for row in rows]))
    wrong = empty
    if sum(right) > sum(empty) + TOLERANCE:  # else it cannot beat a wrong answer, and a call may be slow
        others = [_other_answer(rows, number) for number in range(len(rows))]
        scores = score([(row, fill(template, other)) for row, other in zip(rows, others, strict=True)])
        wrong = [max(pair) for pair in zip(scores, empty, strict=True)]
    return RightForm(
        template=template,
        scores=tuple(right),
        best=usual_score(right) if best is None else best,
        floor=max(wrong),
        beats_wrong=sum(right) > sum(wrong) + TOLERANCE,
    )


def _other_answer(rows: Sequence[Prompt], number: int) -> str:
    """The answer of another row that differs from this row's; empty if all are equal."""
    own = rows[number].answer
    later = (*rows[number + 1 :], *rows[:number])
    return next((row.answer for row in later if row.answer != own), "")


def usual_score(scores: Sequence[float]) -> float | None:
    """The score of more than half of the rows; None: there is no such score."""
    value, count = Counter(round(score, 6) for score in scores).most_common(1)[0]
    value += 0.0  # 0, not -0, of a reward that is minus an error
    return value if count * 2 > len(scores) else None
