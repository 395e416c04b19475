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

from skylite.report.alarm_evidence import CLEAR, Change, Evidence, change_of, held_out_gain, window
from skylite.report.read_run import HeldOut, number

Kind = Literal[
    "collapse", "reward hacking", "no signal", "drift", "reward fell", "truncated", "mismatch", "skipped"
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
LOST_ACCURACY = 0.25
"""Share of the best held-out accuracy at which a policy whose reward fell, too, has collapsed."""
DRIFTED_LENGTH = 1.5
DRIFTED_TOKENS = 5.0
"""A shorter change is none: an answer of a few tokens doubles with one word."""
DRIFTED_REPETITION = 0.15
FALLEN_REWARD = 0.2
TRUNCATED = 0.25
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
    rules = (_collapse, _hacking, _no_signal, _drift, _reward_fell, _truncated, _mismatch, _skipped)
    found = [Alarm(kind=kind, text=text, since=step) for rule in rules for kind, text in rule(evidence)]
    kinds = {alarm.kind for alarm in found}
    hidden = {follower for kind in kinds for follower in FOLLOWERS.get(kind, ())}
    return [a for a in found if a.kind not in hidden]


Finding = tuple[Kind, str]


def _collapse(e: Evidence) -> Iterator[Finding]:
    if text := _wrong_entropy(e) or _lost_accuracy(e):
        yield "collapse", text


def _wrong_entropy(e: Evidence) -> str:
    entropy = e.change("policy/entropy")
    if entropy is None or entropy.before <= 0:
        return ""
    share, fall = entropy.after / entropy.before, _fall_from_best(e)
    if share <= COLLAPSED_ENTROPY and (fall or (not e.accuracy_rose and e.last("reward/right_frac") < 0.5)):
        return (
            f"The policy collapsed: entropy fell from {entropy.before:.3g} to {entropy.after:.3g}"
            f"{_fall_text(fall) or ' without success'}. "
            "Lower optim.lr, or hold it near the start with algorithm.kl_coef."
        )
    if share >= EXPLODED_ENTROPY and fall:
        return (
            f"The policy became random: entropy rose from {entropy.before:.3g} to {entropy.after:.3g}"
            f"{_fall_text(fall)}. Lower optim.lr."
        )
    return ""


def _lost_accuracy(e: Evidence) -> str:
    """Entropy may fall and then rise again, and pass neither limit. Lost accuracy shows all the same."""
    found = _fallen_accuracy(e)
    if found is None:
        return ""
    best, last, reward = found
    if not reward.fell or last.accuracy.mean > LOST_ACCURACY * best.accuracy.mean:
        return ""
    return (
        f"The policy collapsed: held-out accuracy fell {_from_to(best, last)}, and the training reward from "
        f"{reward.before:.3g} to {reward.after:.3g}. "
        "Lower optim.lr, or hold it near the start with algorithm.kl_coef."
    )


def _fallen_accuracy(e: Evidence) -> tuple[HeldOut, HeldOut, Change] | None:
    """(best, last, change of the training reward after the best) if held-out accuracy clearly fell."""
    if len(e.held_out) < 2:
        return None
    *earlier, last = e.held_out
    best = max(earlier, key=lambda h: h.accuracy.mean)
    rewards = [(int(m["step"]), number(m, "reward/mean")) for m in e.metrics]
    reward = change_of([r for step, r in rewards if step > best.version and math.isfinite(r)])
    return None if reward is None or held_out_gain(best, last) >= 0 else (best, last, reward)


def _from_to(best: HeldOut, last: HeldOut) -> str:
    return (
        f"from {100 * best.accuracy.mean:.1f} % (version {best.version}) to "
        f"{100 * last.accuracy.mean:.1f} % (version {last.version})"
    )


def _hacking(e: Evidence) -> Iterator[Finding]:
    found = _fallen_accuracy(e)
    if found is None or found[2].fell:
        return
    best, last, reward = found
    drift = " ".join(text for _, text in _drift(e))
    rise = (
        f"the training reward rose from {reward.before:.3g} to {reward.after:.3g}"
        if reward.rose
        else f"the training reward stayed at {reward.after:.3g}"
    )
    yield (
        "reward hacking",
        f"Held-out accuracy fell {_from_to(best, last)} while {rise}. {drift}"
        f"{' ' if drift else ''}The policy games the reward or overfits: read the best-rewarded completions.",
    )


def _no_signal(e: Evidence) -> Iterator[Finding]:
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


def _drift(e: Evidence) -> Iterator[Finding]:
    length = e.change("completion/tokens_mean")
    if length is not None and length.before > 0 and not e.accuracy_rose:
        ratio = length.after / length.before
        is_large = abs(length.after - length.before) >= DRIFTED_TOKENS
        if is_large and max(ratio, 1 / max(ratio, 1e-9)) >= DRIFTED_LENGTH and (length.rose or length.fell):
            yield (
                "drift",
                f"Completions went from {length.before:.0f} to {length.after:.0f} tokens, "
                "and accuracy did not rise.",
            )
    repeated = change_of([r for _, r in sorted(e.repetition.items()) if math.isfinite(r)])
    if repeated is not None and repeated.after - repeated.before >= DRIFTED_REPETITION and repeated.rose:
        yield (
            "drift",
            f"Completions repeat themselves: {100 * repeated.before:.0f} % of 4-grams were repeated at "
            f"first, now {100 * repeated.after:.0f} %.",
        )


def _reward_fell(e: Evidence) -> Iterator[Finding]:
    fall = _fall_from_best(e)
    if fall:
        best, last = fall
        yield (
            "reward fell",
            f"The reward fell from {best:.3g} to {last:.3g}. Lower optim.lr, or go back to a "
            "checkpoint with --resume RUN --at STEP.",
        )


def _fall_from_best(e: Evidence) -> tuple[float, float] | None:
    """(best, last) window mean of the reward if it clearly fell by a fifth of its range or more."""
    values = e.series("reward/mean")
    width = window(len(values))
    if len(values) < 2 * width:
        return None
    windows = [values[k : k + width] for k in range(len(values) - width + 1)]
    last, best = windows[-1], max(windows[:-width], key=statistics.fmean)
    high, low = statistics.fmean(best), statistics.fmean(last)
    error = math.sqrt((statistics.variance(best) + statistics.variance(last)) / width)
    # The best of many windows is high by chance: ask for more than CLEAR.
    is_clear = high - low > 2 * CLEAR * error
    return (high, low) if is_clear and high - low >= FALLEN_REWARD * max(abs(high), 1e-3) else None


def _fall_text(fall: tuple[float, float] | None) -> str:
    return f" and the reward from {fall[0]:.3g} to {fall[1]:.3g}" if fall else ""


def _truncated(e: Evidence) -> Iterator[Finding]:
    share = e.last("completion/truncated_frac")
    if not share >= TRUNCATED:  # nan for a short run
        return
    if e.last("turns/mean") > 0:
        what = (
            "episodes ended at a limit of turns, tokens or time: raise it (env.max_turns, env.max_tokens, "
            "rollout.max_completion_tokens, env.timeout_s), unless such an episode is a lost game"
        )
    else:
        what = "completions are cut off: raise rollout.max_completion_tokens"
    yield "truncated", f"{100 * share:.0f} % of {what}."


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
