"""The simulation behind the step-through: the real scheduler with made-up tokens."""

from __future__ import annotations

import json

import pytest

from kvlab.errors import RequestError
from kvlab.notebook import NotebookError
from kvlab.notebook.simulation import (
    MAX_REQUESTS,
    REASON_TEXT,
    WORKLOADS,
    Arrival,
    schedule_trace,
    simulate,
)
from kvlab.scheduler import Reason


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_named_workload_runs_to_its_end(name):
    workload = WORKLOADS[name]
    trace = schedule_trace(**json.loads(json.dumps(workload.question())))
    assert json.loads(json.dumps(trace)) == trace
    assert not trace["refused"]
    for arrival, request in zip(workload.arrivals, trace["requests"], strict=True):
        assert (request["id"], request["outputs"]) == (arrival.id, arrival.outputs)
        assert request["finish_reason"] == "length"
        outputs = sum(len(step["outputs"].get(arrival.id, [])) for step in trace["steps"])
        assert outputs == arrival.outputs
    assert all(step["used"] <= step["budget"] for step in trace["steps"])
    assert trace["steps"][-1]["free_after"] == workload.num_blocks
    dropped = trace["totals"]["num_dropped_tokens"]
    again = trace["totals"]["num_recomputed_tokens"] + trace["totals"]["num_resumed_tokens"]
    assert dropped == again


@pytest.mark.parametrize(
    "bad", [Arrival("bad", prompt=0), Arrival("bad", outputs=0), Arrival("bad", prompt=999)]
)
def test_a_request_that_is_refused_harms_no_other(bad):
    trace = simulate([Arrival("a"), bad, Arrival("b")], {})
    assert list(trace["refused"]) == ["bad"]
    assert [request["outputs"] for request in trace["requests"]] == [8, 8]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"arrivals": []}, NotebookError),
        ({"arrivals": [{"id": str(i)} for i in range(MAX_REQUESTS + 1)]}, NotebookError),
        ({"arrivals": [{"id": "a", "prompt": 2.5}]}, NotebookError),
        ({"arrivals": [{"id": "a", "step": -1}]}, NotebookError),
        ({"arrivals": [{"id": "a", "size": 3}]}, NotebookError),
        ({"settings": {"speed": 3}}, NotebookError),
        ({"arrivals": None}, NotebookError),
        ({"arrivals": [{"id": ["a"]}]}, NotebookError),
        ({"arrivals": [{"id": "a", "shared": 2, "group": "x"}]}, NotebookError),
        ({"num_blocks": "9"}, NotebookError),
        ({"num_blocks": 10**9}, NotebookError),
        ({"block_size": 0}, NotebookError),
        ({"settings": {"max_num_seqs": 0}}, RequestError),
    ],
)
def test_a_question_that_cannot_be_simulated_is_named(change, error):
    question = {"arrivals": [{"id": "a"}], "settings": {}, **change}
    with pytest.raises(error):
        schedule_trace(**question)


def test_a_run_without_an_end_is_cut_off():
    with pytest.raises(NotebookError, match="2 steps and 1 requests still there"):
        simulate([Arrival("a")], {}, max_steps=2)


def test_every_reason_has_its_sentence():
    assert set(REASON_TEXT) == set(Reason)
