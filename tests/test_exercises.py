"""Every exercise is proved: its solution passes, and each plausible wrong answer is named."""

import importlib

import pytest

from kvlab import exercises

WRONG = {
    number: importlib.import_module(f"wrong_answers.ch{number:02d}").WRONG
    for number in exercises.CHAPTERS
}
ALL = [e for number in exercises.CHAPTERS for e in exercises.chapter_exercises(number)]


@pytest.mark.parametrize("exercise", ALL, ids=lambda e: e.id)
def test_solution_is_accepted(exercise):
    assert exercises.verdict(exercise.id, exercise.solution) == (
        True,
        f"{exercise.id} right. {exercise.title}",
    )


@pytest.mark.parametrize("exercise", ALL, ids=lambda e: e.id)
def test_at_least_five_wrong_answers_are_rejected_with_their_hint(exercise):
    wrong = WRONG[int(exercise.id.split(".")[0])][exercise.id]
    assert len(wrong) >= 5
    for answer, fragment in wrong:
        right, text = exercises.verdict(exercise.id, answer)
        assert not right, f"{exercise.id} accepts {answer!r}"
        assert fragment in text, f"{exercise.id} on {answer!r} says {text!r}"


@pytest.mark.parametrize("number", exercises.CHAPTERS)
def test_a_chapter_has_at_least_three(number):
    assert len(exercises.chapter_exercises(number)) >= 3
    assert set(WRONG[number]) == {e.id for e in exercises.chapter_exercises(number)}


def test_no_answer_is_not_a_wrong_answer():
    right, text = exercises.verdict("1.1", None)
    assert not right and "no answer yet" in text


def test_unknown_exercise_is_a_named_error():
    for name in ("9.1", "1.99", "x", ""):
        with pytest.raises(exercises.UnknownExercise, match="status"):
            exercises.find(name)


def test_prediction_and_outcome(capsys):
    exercises.outcome("never predicted", 3)
    exercises.predict("steps", 10)
    exercises.outcome("steps", 20)
    assert capsys.readouterr().out.splitlines() == [
        "never predicted: measured 3; you made no prediction",
        "steps: you predict 10",
        "steps: you predicted 10, measured 20: 2 x your guess",
    ]
