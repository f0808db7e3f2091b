from pathlib import Path

import pytest

from podium.report.page import WEB, explanations, glossary

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "metrics.md"


def test_the_document_says_what_the_page_says() -> None:
    """If not: make docs"""
    assert DOCUMENT.read_text(encoding="utf-8") == (WEB / "metrics.md").read_text(encoding="utf-8")


def test_every_row_of_the_tables_is_read() -> None:
    rows = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert sum(row.split(" | ")[0].count("`") // 2 for row in rows) == len(glossary()) > 80
    assert glossary()["optim/lr"] == ("learning rate of the update", "")


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
    assert explanations([name])[name][0] == is_


def test_what_is_not_known_is_left_out() -> None:
    assert list(explanations(["loss/total", "no/such", "reward/a/b_mean"])) == ["loss/total"]
