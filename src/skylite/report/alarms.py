"""Warnings in words about a run that does not learn what it should: rules on its metrics.

A rule compares the first and the last fifth of the steps (`change_of`), so that noise of single steps does
not count. docs/how-to/look-at-a-run.md lists the rules.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from skylite.report.read_run import HeldOut, number

Kind = Literal[
    "collapse",
    "reward hacking",
    "no signal",
    "drift",
    "reward fell",
    "truncated",
    "mismatch",
    "skipped",
    "unverified",
]
FOLLOWERS: Mapping[Kind, tuple[Kind, ...]] = {
    "collapse": ("reward fell", "no signal", "truncated"),
    "reward hacking": ("drift", "truncated"),
}
"""Kind -> the kinds that it explains. They are not shown beside it: their advice would mislead."""
ALARMS = ("collapse", "reward hacking", "no signal")
"""Kinds that mean that the run failed; the others are warnings."""

NO_SIGNAL = 0.8
COLLAPSED_ENTROPY = 0.15
"""Share of the first entropy under which a policy without success has collapsed."""
EXPLODED_ENTROPY = 2.0
DRIFTED_LENGTH = 1.5
DRIFTED_TOKENS = 5.0
"""A shorter change is none: an answer of a few tokens doubles with one word."""
DRIFTED_REPETITION = 0.15
TRUNCATED = 0.25
TRUNCATED_AT_ONCE = 0.5
"""A share that needs no three steps to count."""
LENGTH_REWARD = 0.8
"""Correlation of reward and tokens from which a reward is one of length."""
LONGER_IS_BETTER = 0.5
"""Correlation of reward and tokens at which cut completions score better than ended ones."""
SAME_REWARD = 1e-9
LOWER_LR = "Lower optim.lr, or hold it near the start with algorithm.kl_coef."
LOW_ESS = 0.5
FIRST_SEEN_PARTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One finding, in words."""

    kind: Kind
    text: str
    since: int
    """The first step from which on the rule holds to the end, found to a twentieth of the run."""

    @property
    def is_alarm(self) -> bool:
        return self.kind in ALARMS


def find_alarms(
    metrics: Sequence[Mapping[str, Any]],
    held_out: Sequence[HeldOut] = (),
    repetition: Mapping[int, float] | None = None,
) -> list[Alarm]:
    """All findings at the last step, alarms first. Empty for a healthy or a very short run."""
    if not metrics:
        return []
    found = _at(metrics, held_out, repetition or {}, len(metrics))
    if not found:
        return []
    since = {alarm.kind: alarm.since for alarm in found}
    ends = sorted({max(1, len(metrics) * k // FIRST_SEEN_PARTS) for k in range(1, FIRST_SEEN_PARTS)})
    held = set(since)
    for end in reversed(ends):
        seen = {alarm.kind for alarm in _at(metrics, held_out, repetition or {}, end)}
        held &= seen
        since |= {kind: int(metrics[end - 1]["step"]) for kind in held}
    return sorted((replace(a, since=since[a.kind]) for a in found), key=lambda a: not a.is_alarm)


def _at(
    metrics: Sequence[Mapping[str, Any]],
    held_out: Sequence[HeldOut],
    repetition: Mapping[int, float],
    end: int,
) -> list[Alarm]:
    """The findings after the first `end` recorded steps."""
    step = int(metrics[end - 1]["step"])
    evidence = Evidence(
        metrics[:end],
        [h for h in held_out if h.version <= step],
        {s: r for s, r in repetition.items() if s <= step},
    )
    rules = (
        _collapse,
        _hacking,
        _no_signal,
        _drift,
        _reward_fell,
        _truncated,
        _mismatch,
        _skipped,
        _unverified,
    )
    found = [Alarm(kind=kind, text=text, since=step) for rule in rules for kind, text in rule(evidence)]
    kinds = {alarm.kind for alarm in found}
    hidden = {follower for kind in kinds for follower in FOLLOWERS.get(kind, ())}
    return [a for a in found if a.kind not in hidden]


Finding = tuple[Kind, str]


def _collapse(e: Evidence) -> Iterator[Finding]:
    if text := _wrong_entropy(e) or _lost_score(e) or _lost_reward(e):
        yield "collapse", f"The policy {text}"


def _wrong_entropy(e: Evidence) -> str:
    entropy, reward = e.change("policy/entropy"), e.change("reward/mean")
    if entropy is None or entropy.before <= 0:
        return ""
    share, fall = entropy.after / entropy.before, e.reward_fall()
    has_success = e.improved or e.last("reward/right_frac") >= 0.5 or (reward is not None and reward.rose)
    if share <= COLLAPSED_ENTROPY and (fall or not has_success):
        return (
            f"collapsed: entropy fell from {entropy.before:.3g} to {entropy.after:.3g}"
            f"{_fall_text(fall) or ' without success'}. {LOWER_LR}"
        )
    if share >= EXPLODED_ENTROPY and fall:
        return (
            f"became random: entropy rose from {entropy.before:.3g} to {entropy.after:.3g}"
            f"{_fall_text(fall)}. Lower optim.lr."
        )
    return ""


def _lost_score(e: Evidence) -> str:
    """Entropy may fall and then rise again, and pass neither limit. The lost score shows all the same."""
    fall = e.held_out_fall()
    if fall is None or fall.share < LOST or fall.reward_held:
        return ""
    reward = (
        f"the training reward from {fall.before:.3g} to {fall.after:.3g}"
        if fall.after < fall.before
        else f"the training reward stayed at {fall.after:.3g}"
    )
    return f"collapsed: {_held_out_text(fall)}, and {reward}. {LOWER_LR}"


def _lost_reward(e: Evidence) -> str:
    """Without two held-out scores, which show it better, the reward alone decides."""
    fall = e.reward_fall()
    if fall is None or fall.share < LOST or len(e.held_out) >= 2:
        return ""
    return f"collapsed: the reward fell from {fall.best:.3g} to {fall.last:.3g}. {LOWER_LR}"


def _held_out_text(fall: HeldOutFall) -> str:
    best, last = fall.best, fall.last
    return (
        f"held-out {best.score.name} fell from {best.score.value} (version {best.version}) to "
        f"{last.score.value} (version {last.version})"
    )


def _hacking(e: Evidence) -> Iterator[Finding]:
    fall = e.held_out_fall()
    if text := _length_reward(e):
        yield "reward hacking", text
    elif fall is not None and fall.reward_held:
        drift = " ".join(text for _, text in _drift(e))
        rise = (
            f"the training reward rose from {fall.before:.3g} to {fall.after:.3g}"
            if fall.reward_rose
            else f"the training reward stayed at {fall.after:.3g}"
        )
        yield (
            "reward hacking",
            f"{_sentence(_held_out_text(fall))} while {rise}. {drift}{' ' if drift else ''}The policy games "
            "the reward or overfits: read the best-rewarded completions.",
        )


def _length_reward(e: Evidence) -> str:
    """A reward that grows with the length, and a policy that found it: truncation is its success."""
    length, share = e.change("completion/tokens_mean"), e.last("reward/tokens_corr")
    if not share >= LENGTH_REWARD or length is None or e.accuracy_rose:
        return ""
    is_longer = (
        length.after - length.before >= DRIFTED_TOKENS and length.after >= DRIFTED_LENGTH * length.before
    )
    if not (is_longer and length.rose):
        return ""
    return (
        f"The reward follows the length of completions (correlation {share:.2f}), and they grew from "
        f"{length.before:.0f} to {length.after:.0f} tokens. The policy learns to write more: reward what the "
        "completion says, and do not raise rollout.max_completion_tokens."
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _no_signal(e: Evidence) -> Iterator[Finding]:
    if e.series("teacher/kl"):  # groups of equal rewards learn from the teacher
        return
    if text := constant_reward(e.metrics):
        yield "no signal", text
        return
    sampled = e.last("groups/zero_std_sampled_frac")
    share = sampled if math.isfinite(sampled) else e.last("groups/zero_std_frac")
    if not share >= NO_SIGNAL:
        return
    correct = e.last("reward/right_frac")
    remedy = (
        "the policy solves nearly all problems: harder data"
        if correct > 0.9
        else "a larger group, or algorithm.zero_std_groups=resample"
        if correct > 0.3
        else "easier data or a larger group"
    )
    yield "no signal", f"{100 * share:.0f} % of groups gave no signal: {remedy}."


def constant_reward(metrics: Sequence[Mapping[str, Any]]) -> str:
    """A sentence if all completions of the last steps got one and the same reward; else empty."""
    last = metrics[-window(len(metrics)) :]
    means, stds = [number(m, "reward/mean") for m in last], [number(m, "reward/std") for m in last]
    if len(last) < MIN_WINDOW or not all(abs(s) < SAME_REWARD for s in stds):
        return ""
    if not max(means) - min(means) < SAME_REWARD:
        return ""
    # A step's mean of zero-std groups may differ in its last bits.
    text = (
        f"All completions of the last {len(last)} steps got the reward {means[-1]:.3g}: nothing is learned. "
    )
    right = number(last[-1], "reward/right_frac")
    if right == 1.0:
        return (
            f"{text}The policy solves all problems, or the reward accepts anything: read `skylite samples`."
        )
    if means[-1] <= 0:
        return (
            f"{text}Check with `skylite samples` that the reward accepts a right answer. If it does, the "
            "problems are too hard: easier data, or a model that solves some of them."
        )
    return f"{text}The reward does not tell completions apart: correct it."


def _drift(e: Evidence) -> Iterator[Finding]:
    length = e.change("completion/tokens_mean")
    if length is not None and length.before > 0 and not e.improved:
        ratio = length.after / length.before
        is_large = abs(length.after - length.before) >= DRIFTED_TOKENS
        if is_large and max(ratio, 1 / max(ratio, 1e-9)) >= DRIFTED_LENGTH and (length.rose or length.fell):
            yield (
                "drift",
                f"Completions went from {length.before:.0f} to {length.after:.0f} tokens, "
                "and the score did not rise.",
            )
    repeated = change_of([r for _, r in sorted(e.repetition.items()) if math.isfinite(r)])
    if repeated is not None and repeated.after - repeated.before >= DRIFTED_REPETITION and repeated.rose:
        yield (
            "drift",
            f"Completions repeat themselves: {100 * repeated.before:.0f} % of 4-grams were repeated at "
            f"first, now {100 * repeated.after:.0f} %.",
        )


def _reward_fell(e: Evidence) -> Iterator[Finding]:
    remedy = "Lower optim.lr, or go back to a checkpoint with --resume RUN --at STEP."
    if fall := e.reward_fall():
        yield "reward fell", f"The reward fell from {fall.best:.3g} to {fall.last:.3g}. {remedy}"
    elif (found := e.held_out_fall()) is not None and not found.reward_held:
        yield "reward fell", f"{_sentence(_held_out_text(found))}, and the reward did not rise. {remedy}"


def _fall_text(fall: Fall | None) -> str:
    return f" and the reward from {fall.best:.3g} to {fall.last:.3g}" if fall else ""


def _truncated(e: Evidence) -> Iterator[Finding]:
    share, first = e.last("completion/truncated_frac"), e.last("completion/truncated_frac", least=1)
    if not (share >= TRUNCATED or first >= TRUNCATED_AT_ONCE):
        return
    if e.last("turns/mean", least=1) > 0:
        what = (
            "episodes ended at a limit of turns, tokens or time: raise it (env.max_turns, env.max_tokens, "
            "rollout.max_completion_tokens, env.timeout_s), unless such an episode is a lost game"
        )
    elif e.last("reward/tokens_corr", least=1) >= LONGER_IS_BETTER:
        what = (
            "completions are cut off, and longer ones score more: check what the reward rewards before you "
            "raise rollout.max_completion_tokens"
        )
    else:
        what = "completions are cut off: raise rollout.max_completion_tokens"
    yield "truncated", f"{100 * first:.0f} % of {what}."


def _mismatch(e: Evidence) -> Iterator[Finding]:
    gap = e.change("mismatch/logprob_diff_mean")
    if gap is not None and gap.rose and gap.after > max(1e-3, 10 * gap.before):
        yield (
            "mismatch",
            f"Trainer and engine drift apart: the mean log-probability difference grew from "
            f"{gap.before:.1e} to {gap.after:.1e}.",
        )
    elif e.last("mismatch/ess_frac") < LOW_ESS:
        yield (
            "mismatch",
            f"The effective sample size is {100 * e.last('mismatch/ess_frac'):.0f} % of the tokens: the "
            "engine samples from another policy than the trainer's.",
        )


def _skipped(e: Evidence) -> Iterator[Finding]:
    skipped = [int(m["step"]) for m in e.metrics if number(m, "anomaly/skipped") > 0]
    if skipped:
        yield (
            "skipped",
            f"{len(skipped)} steps were not learned from, the last was step {skipped[-1]}: see "
            "rejected_steps/.",
        )


def _unverified(e: Evidence) -> Iterator[Finding]:
    if number(e.metrics[-1], "canary/verified") != 0:
        return
    small = sum(number(m, "canary/verified") == 0 for m in e.metrics)
    yield (
        "unverified",
        f"The adapter moves too little to tell whether the engine samples from it: in {small} of "
        f"{len(e.metrics)} steps, and in the last. See canary/visible_frac.",
    )


MIN_WINDOW = 3
CLEAR = 2.5
"""Standard errors from which a difference of means over steps counts."""
CLEAR_HELD_OUT = 1.96
"""Standard errors from which a difference of held-out accuracies counts."""
FALLEN_REWARD = 0.2
"""Lost part of the best reward from which it fell."""
LOST = 0.75
"""Lost part of the best score or reward from which a policy has collapsed."""
SAMPLES = 16
"""Independent completions that a step has at least: sets the noise of a single step's mean reward."""


@dataclass(frozen=True, slots=True)
class Change:
    """The mean of a metric over the first and the last fifth of the steps."""

    before: float
    after: float
    error: float
    """Standard error of the difference."""

    @property
    def rose(self) -> bool:
        return self.after - self.before > max(CLEAR * self.error, 1e-6)

    @property
    def fell(self) -> bool:
        return self.before - self.after > max(CLEAR * self.error, 1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """A reward that clearly fell, from its best to the last fifth of the steps."""

    best: float
    last: float

    @property
    def share(self) -> float:
        """The lost part of the best reward."""
        return (self.best - self.last) / max(abs(self.best), 1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutFall:
    """A held-out score that clearly fell, and the training reward from that version to the end."""

    best: HeldOut
    last: HeldOut
    before: float
    """Mean training reward around the best version."""
    after: float
    """Mean training reward of the last fifth of the steps."""
    reward_rose: bool
    reward_held: bool
    """The training reward kept four fifths of its level, above the bottom of its range."""

    @property
    def share(self) -> float:
        """The lost part of the best score."""
        best = self.best.score.mean
        return (best - self.last.score.mean) / max(abs(best), 1e-3)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The input of the rules: everything up to one step."""

    metrics: Sequence[Mapping[str, Any]]
    held_out: Sequence[HeldOut]
    repetition: Mapping[int, float]
    """Step -> mean repetition of its completions, for the steps that were read."""

    def series(self, key: str) -> list[float]:
        return [x for m in self.metrics if math.isfinite(x := number(m, key))]

    def last(self, key: str, least: int = MIN_WINDOW) -> float:
        """Mean over the last fifth of the steps, nan with fewer than `least` values."""
        values = self.series(key)
        return statistics.fmean(values[-window(len(values)) :]) if len(values) >= least else math.nan

    def change(self, key: str) -> Change | None:
        return change_of(self.series(key))

    @property
    def improved(self) -> bool:
        """By the held-out score; without two evaluations by the share of right completions."""
        if len(self.held_out) >= 2:
            return held_out_gain(self.held_out[0], self.held_out[-1]) > 0
        return self._right_rose

    @property
    def accuracy_rose(self) -> bool:
        """As `improved`, but only scores of 0 or 1 count: a partial score may be what is gamed."""
        if len(self.held_out) >= 2 and all(h.score.is_binary for h in self.held_out):
            return self.improved
        return self._right_rose

    @property
    def _right_rose(self) -> bool:
        change = self.change("reward/right_frac")
        return change is not None and change.rose

    def reward_fall(self) -> Fall | None:
        """Set if the reward clearly lost a fifth of its best, or three quarters of its first steps'."""
        return self._slow_fall() or self._instant_fall()

    def _slow_fall(self) -> Fall | None:
        values = self.series("reward/mean")
        width = window(len(values))
        if len(values) < 2 * width:
            return None
        windows = [values[k : k + width] for k in range(len(values) - width + 1)]
        last, best = windows[-1], max(windows[:-width], key=statistics.fmean)
        fall = Fall(best=statistics.fmean(best), last=statistics.fmean(last))
        error = math.sqrt((statistics.variance(best) + statistics.variance(last)) / width)
        # The best of many windows is high by chance: ask for more than CLEAR.
        is_clear = fall.best - fall.last > 2 * CLEAR * error
        return fall if is_clear and fall.share >= FALLEN_REWARD else None

    def _instant_fall(self) -> Fall | None:
        """A fall within the first fifth of the steps, which no comparison of fifths shows."""
        rows = [(number(m, "reward/mean"), number(m, "reward/std")) for m in self.metrics]
        rows = [row for row in rows if all(map(math.isfinite, row))]
        width = window(len(rows))
        last = [mean for mean, _ in rows[-width:]]
        for count in range(1, min(width, len(rows) - width + 1)):
            noise = statistics.fmean(std**2 for _, std in rows[:count]) / (SAMPLES * count)
            error = math.sqrt(noise + statistics.variance(last) / width)
            fall = Fall(best=statistics.fmean(mean for mean, _ in rows[:count]), last=statistics.fmean(last))
            if fall.share >= LOST and fall.best - fall.last > CLEAR * error:
                return fall
        return None

    def held_out_fall(self) -> HeldOutFall | None:
        """Set if the last held-out score is clearly under the best one before it."""
        if len(self.held_out) < 2:
            return None
        *earlier, last = self.held_out
        best = max(earlier, key=lambda h: h.score.mean)
        rewards = [(int(m["step"]), r) for m in self.metrics if math.isfinite(r := number(m, "reward/mean"))]
        # Step v + 1 is sampled from version v.
        before = [r for step, r in rewards if step <= best.version + 1][-MIN_WINDOW:]
        after = [r for step, r in rewards if step > best.version + 1]
        if held_out_gain(best, last) >= 0 or not before or not after:
            return None
        rose = change_of([r for step, r in rewards if step > best.version])
        end, start = statistics.fmean(after[-window(len(after)) :]), statistics.fmean(before)
        low, high = min(r for _, r in rewards), max(r for _, r in rewards)
        has_rose = rose is not None and rose.rose
        is_level = start - end < FALLEN_REWARD * max(abs(start), 1e-3)
        return HeldOutFall(
            best=best,
            last=last,
            before=start,
            after=end,
            reward_rose=has_rose,
            reward_held=has_rose or (is_level and end - low > FALLEN_REWARD * (high - low)),
        )


def window(count: int) -> int:
    """A fifth of the steps, at least three."""
    return max(MIN_WINDOW, count // 5)


def change_of(values: Sequence[float]) -> Change | None:
    """None with too few values for two windows."""
    width = window(len(values))
    if len(values) < 2 * width:
        return None
    first, last = values[:width], values[-width:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / width)
    return Change(statistics.fmean(first), statistics.fmean(last), error)


def held_out_gain(a: HeldOut, b: HeldOut) -> float:
    """The accuracy of b over that of a; 0 if the difference is within the noise or not measurable."""
    error = math.hypot(a.score.standard_error, b.score.standard_error)
    gain = b.score.mean - a.score.mean
    return gain if abs(gain) > CLEAR_HELD_OUT * error else 0.0
