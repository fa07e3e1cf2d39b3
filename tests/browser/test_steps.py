"""The engine's step-through in a browser: the recorded trace, and kvlab's scheduler in the page."""

from __future__ import annotations

import copy

import pytest

from kvlab.notebook.simulation import WORKLOADS, schedule_trace
from kvlab.notebook.widgets.scenes import Steps

pytestmark = pytest.mark.browser

RECORDED = schedule_trace(**WORKLOADS["small_pool"].question())


def shows(watched, record: dict) -> None:
    """Sentence, request table and ragged batch on the page are those of a step of Python's."""
    page = watched.page
    watched.sentence(
        f"Step {record['step']}, {record['mode'].upper()}: {record['used']} of "
        f"{record['budget']} tokens for {len(record['shares'])} requests; "
        f"{len(record['reasons'])} wait; {record['free_after']} of {record['usable_blocks']} "
        f"blocks free after it."
    ).wait_for()
    people = watched.table("This step, request by request")[1:]
    assert [row[0] for row in people] == [
        *(share["id"] for share in record["shares"]), *record["reasons"],
    ]
    assert [int(row[1]) for row in people] == [
        *(share["tokens"] for share in record["shares"]), *(0 for _ in record["reasons"]),
    ]
    batch = record["batch"]
    rows = watched.table("Its ragged batch, one row a token")[1:]
    assert [[int(cell) for cell in row[2:6]] for row in rows] == [
        list(row) for row in zip(
            batch["req_indices"], batch["query_pos"], batch["positions"], batch["slot_mapping"],
        )
    ]  # fmt: skip
    assert [i for i, row in enumerate(rows) if row[6] == "sampled"] == batch["logits_rows"]
    page.get_by_text(f"query_start_loc [{', '.join(map(str, batch['query_start_loc']))}]").wait_for()


def test_every_recorded_step_by_keyboard(widget_page):
    watched = widget_page(Steps(step=0))
    slider = watched.page.get_by_role("slider", name="step")
    slider.focus()
    for record in RECORDED["steps"]:
        shows(watched, record)
        watched.page.keyboard.press("ArrowRight")
    watched.check()


def test_a_column_is_selected_by_pointer(widget_page):
    watched = widget_page(Steps(step=0))
    columns = watched.page.locator("section.kvlab svg rect[fill=transparent]")
    assert columns.count() == len(RECORDED["steps"])
    columns.nth(6).click()
    shows(watched, RECORDED["steps"][6])
    watched.page.get_by_text("gave its blocks to an earlier request").first.wait_for()
    watched.check()


def test_the_twin_holds_every_step(widget_page):
    watched = widget_page(Steps(), scripts=False)
    rows = watched.page.locator("details.kvlab-twin tr")
    assert rows.count() == len(RECORDED["steps"]) + 1
    assert watched.page.locator("details.kvlab-twin").is_visible()


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390), ("light", 390)])
def test_it_fits_and_can_be_used_by_all(widget_page, theme, width):
    watched = widget_page(Steps(), theme=theme, width=width)
    assert watched.overflow() <= 0
    watched.check()
    assert watched.axe() == []  # last: axe fetches the style sheet, which a page from disk forbids


def test_the_scheduler_runs_in_the_page(widget_page):
    watched = widget_page(Steps(step=0), reduced_motion=True)
    page = watched.page
    assert page.get_by_label("token budget of a step").is_disabled()
    watched.start()

    question = copy.deepcopy(WORKLOADS["first_chunk"].question())
    page.get_by_label("workload").select_option("first_chunk")
    shows(watched, schedule_trace(**question)["steps"][0])
    page.get_by_role("slider", name="step").focus()
    page.keyboard.press("End")
    shows(watched, schedule_trace(**question)["steps"][-1])

    page.get_by_label("admission").select_option("full_length")
    question["settings"]["admission"] = "full_length"
    changed = schedule_trace(**question)
    page.get_by_text(f"{changed['totals']['num_preemptions']} preemptions: "
                     f"{changed['totals']['num_dropped_tokens']} tokens dropped").wait_for()

    page.get_by_label("token budget of a step").fill("6")
    page.get_by_label("pool, blocks of 4 tokens").fill("30")
    page.get_by_label("prefix caching").check()
    question["settings"]["max_num_batched_tokens"] = 6
    question |= {"num_blocks": 30, "prefix_caching": True}
    page.get_by_text(f"{schedule_trace(**question)['totals']['num_steps']} steps, ").wait_for()
    page.get_by_role("slider", name="step").focus()
    page.keyboard.press("Home")
    shows(watched, schedule_trace(**question)["steps"][0])

    page.get_by_text("The requests: when they come").click()
    group = page.get_by_role("group", name="request D")
    group.get_by_label("comes at step").fill("0")
    question["arrivals"][3]["step"] = 0
    shows(watched, schedule_trace(**question)["steps"][0])
    watched.check()


def test_a_request_that_never_fits_is_named_and_the_others_run(widget_page):
    watched = widget_page(Steps(step=0))
    watched.start()
    watched.page.get_by_label("pool, blocks of 4 tokens").fill("4")
    watched.page.get_by_role("alert").filter(has_text="make the pool larger").wait_for()
    question = copy.deepcopy(WORKLOADS["small_pool"].question()) | {"num_blocks": 4}
    shows(watched, schedule_trace(**question)["steps"][0])
    watched.check()
