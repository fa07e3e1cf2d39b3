"""Drafts: proposing, verifying, and how far every cache goes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.errors import RequestError
from kvlab.sampling import NgramProposer, accept, rollback
from kvlab.scheduler import computed_after


def test_the_longest_and_latest_match_is_continued():
    proposer = NgramProposer(num_drafts=2, max_ngram=2)
    assert proposer.propose([1, 2, 9, 3, 1, 2]) == [9, 3]
    assert proposer.propose([1, 2, 9, 1, 2, 8, 1, 2]) == [8, 1]
    assert proposer.propose([5, 2, 9, 4, 2]) == [9, 4]  # only one token matches
    assert proposer.propose([1, 2, 3]) == []
    assert proposer.propose([]) == proposer.propose([1]) == []
    assert proposer.propose([1, 1, 1], limit=1) == [1]
    assert proposer.propose([1, 1, 1], limit=0) == []


@pytest.mark.parametrize(
    ("drafts", "sampled", "outputs"),
    [
        ([4, 5, 6], [4, 5, 9, 1], [4, 5, 9]),
        ([4, 5], [4, 5, 8], [4, 5, 8]),
        ([4], [7, 8], [7]),
        ([], [7], [7]),
    ],
)
def test_a_wrong_guess_and_all_behind_it_are_dropped(drafts, sampled, outputs):
    assert accept(drafts, sampled) == outputs


@pytest.mark.parametrize(("outputs", "computed"), [(2, 12), (1, 11), (0, 10)])
def test_sch_11_rejected_rows_are_taken_back(outputs, computed):
    assert computed_after(10, 3, outputs) == computed


def test_sch_12_target_and_draft_model_go_back_by_different_amounts():
    assert (rollback(4, 2).target_trim, rollback(4, 2).draft_trim) == (2, 1)
    everything = rollback(4, 4)
    assert (everything.target_trim, everything.draft_trim) == (0, 0)
    assert everything.draft_extra_forwards == 1
    assert [rollback(3, a).target_trim for a in (3, 0)] == [0, 3]


@given(st.integers(1, 8), st.data())
def test_sch_12_both_caches_end_at_the_same_token(num_drafts, data):
    accepted = data.draw(st.integers(0, num_drafts))
    trims = rollback(num_drafts, accepted)
    target = num_drafts + 1 - trims.target_trim
    draft = num_drafts - trims.draft_trim + trims.draft_extra_forwards
    assert target == draft == 1 + accepted


def test_bad_counts_are_named():
    with pytest.raises(AssertionError, match="has a row too"):
        accept([1, 2], [1, 2])
    with pytest.raises(AssertionError, match="accepted"):
        rollback(2, 3)
    with pytest.raises(AssertionError, match="outputs"):
        computed_after(10, 1, 3)
    wrong = ({"num_drafts": 0}, {"num_drafts": "3"}, {"num_drafts": 2.5}, {"max_ngram": None})
    for settings in (*wrong, {"min_ngram": 0}, {"min_ngram": 4}):
        with pytest.raises(RequestError, match="expected"):
            NgramProposer(**settings)
