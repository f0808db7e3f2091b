from podium.report.web.reader import Series


def make_series(*values: float | None, name: str = "loss/total") -> Series:
    series = Series()
    for step, value in enumerate(values, start=1):
        series.add({"step": step} | ({} if value is None else {name: value}))
    return series


def test_a_metric_that_comes_and_goes_keeps_its_places() -> None:
    series = make_series(None, 0.5, None, 0.25, None)
    assert series.column("loss/total") == [None, 0.5, None, 0.25, None]
    assert series.column("not/there") == [None] * 5
    assert series.last("loss/total", 3) == [0.25]


def test_a_short_run_has_a_point_a_step() -> None:
    assert make_series(1.0, 2.0, None).sampled(3) == {
        "steps": [1, 2, 3],
        "stride": 1,
        "columns": {"loss/total": {"mean": [1.0, 2.0, None]}},
    }


def test_a_point_of_a_long_run_has_the_mean_and_the_ends_of_its_steps() -> None:
    # 7 steps in at most 3 points: 3 + 3 + 1
    sampled = make_series(1.0, 2.0, 9.0, None, 4.0, 2.0, 5.0).sampled(3)
    assert (sampled["steps"], sampled["stride"]) == ([3, 6, 7], 3)
    assert sampled["columns"]["loss/total"] == {
        "mean": [4.0, 3.0, 5.0],
        "low": [1.0, 2.0, 5.0],
        "high": [9.0, 4.0, 5.0],
    }


def test_points_without_a_value_stay_empty() -> None:
    assert make_series(None, None, 1.0, 3.0).sampled(2)["columns"]["loss/total"]["mean"] == [None, 2.0]


def test_the_last_steps_come_in_full() -> None:
    series = make_series(1.0, None, 3.0)
    assert series.lines(2) == [{"step": 2}, {"step": 3, "loss/total": 3.0}]
    assert len(series.lines(99)) == 3


def test_no_steps_are_no_points() -> None:
    assert Series().sampled(10) == {"steps": [], "stride": 1, "columns": {}}
