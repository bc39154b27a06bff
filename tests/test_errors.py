"""Errors that are kept drop their frames; a note holds the traceback."""

import weakref

from mlx_paged.errors import RequestFailedError, without_frames
from tests.support.without_collector import without_collector


class Held:
    """An object that a frame refers to."""


def caught(chained: bool = False) -> tuple[ValueError, weakref.ref[Held]]:
    """Return an error whose frame refers to it, and a reference to another object of that frame."""
    held = Held()
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer") from (inner if chained else None)
    except ValueError as error:
        kept = error
    return kept, weakref.ref(held)


def test_without_frames_frees_frames_and_keeps_the_traceback_as_a_note() -> None:
    with without_collector():
        error, held = caught()
        assert held() is not None
        assert without_frames(error) is error
        assert held() is None
        assert error.__traceback__ is None and error.__context__.__traceback__ is None
        (note,) = error.__notes__
        assert 'raise ValueError("outer")' in note and note.endswith("ValueError: outer")


def test_without_frames_clears_causes_that_form_a_cycle() -> None:
    with without_collector():
        error, held = caught(chained=True)
        error.__cause__.__cause__ = error
        without_frames(error)
        assert held() is None
        assert 'raise KeyError("inner")' in error.__notes__[0]
        error.__cause__.__cause__ = None


def test_error_raised_repeatedly_has_one_note() -> None:
    error = ValueError("the same")
    error.add_note("the caller's own")
    for _ in range(3):
        try:
            raise error
        except ValueError as again:
            without_frames(again)
    assert error.__notes__[0] == "the caller's own" and len(error.__notes__) == 2
    assert error.__notes__[1].count("Traceback") == 1


def test_request_failed_error_keeps_its_cause_without_frames() -> None:
    error, held = caught()
    report = RequestFailedError(7, without_frames(error))
    assert held() is None
    assert report.uid == 7 and report.__cause__ is error and "outer" in str(report)
