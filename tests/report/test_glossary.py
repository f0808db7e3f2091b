from pathlib import Path

import pytest

from podium.report.web.glossary import CHAPTERS, explain, explanations, names_of, to_markdown

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "metrics.md"


def test_the_document_says_what_the_page_says() -> None:
    """If not: python -m podium.report.web.glossary > docs/metrics.md"""
    assert DOCUMENT.read_text(encoding="utf-8") == to_markdown()


def test_no_metric_is_explained_twice() -> None:
    names = [name for chapter in CHAPTERS for metric in chapter.metrics for name in names_of(metric)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "is_"),
    [
        ("reward/mean", "mean reward of all rollouts that have a reward, including penalties for truncated ones"),
        ("reward/gsm8k_mean", "mean of one reward, unweighted and without penalties"),
        ("reward/kept_gsm8k_mean", "the same metrics over the trained groups only, so after filtering"),
        ("time/eval_s", "of the previous step, because these stages follow its report"),
    ],
)
def test_a_metric_has_its_own_entry_or_that_of_its_kind(name: str, is_: str) -> None:
    found = explain(name)
    assert found is not None
    assert found.formula == is_


def test_what_is_not_known_is_left_out() -> None:
    assert list(explanations(["loss/total", "no/such", "reward/a/b_mean"])) == ["loss/total"]
