"""The tokens that clip_cov, kl_cov and the entropy quantile select."""

import torch

from skylite.algorithms.policy_gradient import (
    clip_cov_selection,
    covariances,
    entropy_threshold,
    kl_cov_selection,
)


def test_covariances():
    # advantages around their mean 1: 2, 0, -2; logprobs around -2: 1, 0, -1
    assert covariances(torch.tensor([3.0, 1.0, -1.0]), torch.tensor([-1.0, -2.0, -3.0])).tolist() == [2, 0, 2]


def test_clip_cov_draws_from_unclipped_tokens_within_the_bounds():
    cov = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 9.0, -2.0])
    clipped = torch.tensor([False, False, True, False, False, False, False, False])

    def chosen(frac: float, seed: int = 0, low: float = 1.0) -> list[int]:
        picked = clip_cov_selection(cov, clipped, frac, low, 5.0, torch.Generator().manual_seed(seed))
        return picked.nonzero().flatten().tolist()

    assert chosen(1.0) == chosen(0.25) == [1, 3]  # 2 of 8
    assert {tuple(chosen(0.0002, seed)) for seed in range(20)} == {
        (1,),
        (3,),
    }  # at least one, drawn at random
    assert chosen(0.0002, 7) == chosen(0.0002, 7)
    assert chosen(1.0, low=4.5) == []


def test_kl_cov_selects_the_highest_and_breaks_ties_by_position():
    cov = torch.tensor([1.0, 9.0, 3.0, 9.0])
    assert kl_cov_selection(cov, 0.5).tolist() == [False, True, False, True]
    assert kl_cov_selection(cov, 0.25).tolist() == [False, True, False, False]
    assert kl_cov_selection(cov, 0.0002).tolist() == [False, True, False, False]
    assert kl_cov_selection(cov, 1.0).all()


def test_entropy_threshold_selects_the_fraction_with_the_highest_entropy():
    entropies = torch.tensor([4.0, 0.0, 2.0, 1.0, 3.0])
    assert entropy_threshold(entropies, 0.25) == 3.0  # three quarters of the way from 0 to 4
    assert entropy_threshold(entropies, 0.375) == 2.5
    assert entropy_threshold(entropies, 1.0) == 0.0
