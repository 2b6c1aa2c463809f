"""The bound that stops a run whose trainer and rollout engine disagree."""

import pytest

from skyrl_qwen38.logprob_bound import LogprobMismatch, check_logprob_difference


@pytest.mark.parametrize("difference", [None, 0.0, 1e-6, 1e-5])
def test_a_small_log_prob_difference_passes(difference):
    check_logprob_difference(3, difference, 1e-5)


@pytest.mark.parametrize("difference", [1.1e-5, float("inf"), float("nan")])
def test_a_log_prob_difference_above_the_bound_stops_the_run(difference):
    with pytest.raises(LogprobMismatch, match=r"step 3: .*trainer.qwen38.max_logprob_abs_diff=1e-05"):
        check_logprob_difference(3, difference, 1e-5)
