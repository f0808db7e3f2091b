import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from podium.records import EvalReport
from podium.report.page import MAX_POINTS, Page, chosen_rollouts
from podium.run_folder import RunFolder
from tests.builders import make_group, make_prompt, make_rollout, make_step_report

CARD = {"title": "sums: grpo on embedded", "folder": "runs/one", "steps": 3, "facts": {"model": "embedded", "lr": 1e-5}}
SUMMARY = {"state": "finished", "step": 3, "steps": 3}


def data_of(folder: Path) -> dict[str, Any]:
    """The JSON object that the page draws from."""
    page = (folder / "report.html").read_text(encoding="utf-8")
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def make_page(folder: Path, every_s: float = 0.0) -> Page:
    page = Page(RunFolder(folder), every_s=every_s)
    page.start(CARD, [])
    return page


def test_a_page_is_there_from_the_start(tmp_path: Path) -> None:
    make_page(tmp_path)
    assert data_of(tmp_path) == {"state": "running", "card": CARD, "steps": [], "evals": [], "rollouts": []}


def test_the_page_shows_the_steps_the_evaluations_and_the_rollouts_of_the_last_step(tmp_path: Path) -> None:
    page = make_page(tmp_path)
    page.evaluated(EvalReport(0, 0, {"eval/accuracy": 0.25}, 1.0))
    page.write(make_step_report(make_group((0.2,), rollouts=(make_rollout("first"),)), step=1, reward__mean=0.2))
    page.write(make_step_report(make_group((1.2,), rollouts=(make_rollout("second"),)), step=2, reward__mean=1.2))
    shown = data_of(tmp_path)
    assert shown["steps"] == [{"step": 1, "reward/mean": 0.2}, {"step": 2, "reward/mean": 1.2}]
    assert shown["evals"] == [{"step": 0, "eval": True, "eval/accuracy": 0.25}]
    assert {rollout["text"] for rollout in shown["rollouts"]} == {"second"}


def test_a_resumed_run_shows_the_steps_that_it_had_done(tmp_path: Path) -> None:
    page = Page(RunFolder(tmp_path), every_s=0.0)
    page.start(CARD, [{"step": 0, "eval": True, "eval/accuracy": 0.5}, {"step": 1, "reward/mean": 0.1}])
    page.write(make_step_report(step=2, reward__mean=0.2))
    assert [line["step"] for line in data_of(tmp_path)["steps"]] == [1, 2]
    assert data_of(tmp_path)["evals"] == [{"step": 0, "eval": True, "eval/accuracy": 0.5}]


def test_a_page_is_not_written_more_often_than_asked(tmp_path: Path) -> None:
    page = make_page(tmp_path, every_s=3600.0)
    page.write(make_step_report(step=1))
    assert data_of(tmp_path)["steps"] == []
    page.finish(SUMMARY)
    assert [line["step"] for line in data_of(tmp_path)["steps"]] == [1]


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_the_end_of_a_run_is_on_the_page(tmp_path: Path, state: str) -> None:
    page = make_page(tmp_path)
    page.finish(SUMMARY | {"state": state})
    assert data_of(tmp_path)["state"] == state


def test_a_broken_run_is_on_the_page(tmp_path: Path) -> None:
    make_page(tmp_path).fail()
    assert data_of(tmp_path)["state"] == "failed"


def test_a_run_that_broke_before_it_started_leaves_no_page(tmp_path: Path) -> None:
    Page(RunFolder(tmp_path)).fail()
    assert list(tmp_path.iterdir()) == []


def test_nothing_unfinished_lies_beside_the_page(tmp_path: Path) -> None:
    make_page(tmp_path).finish(SUMMARY)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        (MAX_POINTS, list(range(1, MAX_POINTS + 1))),
        # 2500 steps: every third, 1, 4, …, 2497, and the last
        (2500, [*range(1, 2500, 3), 2500]),
    ],
)
def test_a_long_run_shows_every_nth_step_and_the_last(tmp_path: Path, steps: int, shown: list[int]) -> None:
    page = Page(RunFolder(tmp_path))
    page.start(CARD, [{"step": step} for step in range(1, steps + 1)])
    assert [line["step"] for line in data_of(tmp_path)["steps"]] == shown
    assert len(shown) <= MAX_POINTS


def test_the_best_the_middle_and_the_worst_rollouts_are_chosen() -> None:
    rewards = (0.3, 0.9, 0.1, 0.5, 0.7, 0.0, 0.2, 0.8, 0.4, 0.6)
    chosen = chosen_rollouts([make_group(rewards[:5]), make_group(rewards[5:])])
    # ranked 0.9 … 0.0; the middle starts at 10 // 2 − 3 // 2 = 4
    assert [(each["kind"], each["reward"]) for each in chosen] == [
        *[("best", reward) for reward in (0.9, 0.8, 0.7)],
        *[("middle", reward) for reward in (0.5, 0.4, 0.3)],
        *[("worst", reward) for reward in (0.2, 0.1, 0.0)],
    ]


def test_rollouts_without_a_reward_are_not_chosen() -> None:
    assert {each["reward"] for each in chosen_rollouts([make_group((None, 0.5, None))])} == {0.5}
    assert chosen_rollouts([make_group((None, None))]) == []


HOSTILE = [
    "</script><script>document.title='hacked'</script>",
    "<img src=x onerror=\"document.title='hacked'\">",
    "<!--<script>",
    "/*DATA*/ ]]> &lt;b&gt; \u2028 \x00 \ud800",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_can_leave_the_json_object(tmp_path: Path, text: str) -> None:
    page = make_page(tmp_path)
    group = make_group((1.0,), prompt=make_prompt(text=text, answer=text), rollouts=(make_rollout(text),))
    page.write(make_step_report(group))
    assert data_of(tmp_path)["rollouts"][0]["text"] == text
    written = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert written.count("<script") == 2
    assert written.count("</script") == 2


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    make_page(tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    links = set(re.findall(r"https?://[^\"'\s)]+", page))
    assert links <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"<link|<script[^>]+src=|@import|fetch\(|XMLHttpRequest", page)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=2000",
    "--dump-dom",
]


def open_page(folder: Path, profile: Path) -> str:
    """The document as it is once its scripts have run."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", f"file://{folder / 'report.html'}"]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    return done.stdout.decode("utf-8", errors="replace")


def body_before_scripts(dom: str) -> str:
    """What is seen: the markup up to the data's script element."""
    return dom[dom.index("<body>") : dom.index('<script id="data"')]


@needs_chromium
def test_the_browser_shows_title_badge_charts_table_and_rollouts(tmp_path: Path) -> None:
    page = make_page(tmp_path)
    page.evaluated(EvalReport(0, 0, {"eval/accuracy": 0.25}, 1.0))
    for step in (1, 2, 3):
        metrics = {"reward__mean": 0.1 * step, "reward__correct_rate": 0.25 * step, "loss__total": -0.5}
        page.write(make_step_report(make_group((0.2, 1.2)), step=step, **metrics))
    page.evaluated(EvalReport(3, 3, {"eval/accuracy": 0.75}, 1.0))
    page.finish(SUMMARY)
    dom = open_page(tmp_path, tmp_path / "profile")
    seen = body_before_scripts(dom)
    assert "<title>sums: grpo on embedded</title>" in dom
    assert '<span id="title">sums: grpo on embedded</span>' in seen
    assert '<span id="badge" class="badge finished">finished</span>' in seen
    assert "model embedded · lr 0.00001" in seen
    # accuracy (sampled, held out), reward (all groups), loss: four curves in three charts
    assert re.findall(r'aria-label="([^"]*)"', seen) == ["Accuracy", "Reward", "Loss"]
    assert seen.count("<polyline") == 4
    assert "held out, step 3: 0.75" in seen
    assert '<b>0.75</b><span class="soft">+0.5 since the start</span>' in seen
    assert "+0.1 since the last step" in seen
    # the newest step first, below the heading
    assert re.findall(r"<tr><td>(\d)</td><td>([\d.]+)</td>", seen) == [("3", "0.3"), ("2", "0.2"), ("1", "0.1")]
    assert seen.count("<pre>What is 1 + 2?</pre><pre>#### 3</pre>") == 6
    assert "best · reward 1.2 · 3 tokens, stop · expected 3" in seen


@needs_chromium
def test_the_browser_shows_hostile_text_as_text(tmp_path: Path) -> None:
    page = Page(RunFolder(tmp_path))
    page.start(CARD | {"title": HOSTILE[1], "facts": {HOSTILE[0]: HOSTILE[1]}}, [])
    rollouts = tuple(make_rollout(text) for text in HOSTILE[:3])
    group = make_group((1.0, 0.5, 0.0), prompt=make_prompt(text=HOSTILE[0], answer=HOSTILE[1]), rollouts=rollouts)
    page.write(make_step_report(group, reward__mean=0.5))
    page.finish(SUMMARY)
    dom = open_page(tmp_path, tmp_path / "profile")
    seen = body_before_scripts(dom)
    assert "<img" not in dom
    assert dom.count("<script") == 2
    assert "<title>hacked" not in dom
    shown = {unescape(text) for text in re.findall(r"<pre>(.*?)</pre>", seen, re.DOTALL)}
    assert shown == set(HOSTILE[:3])
    title = re.search(r'<span id="title">(.*?)</span>', seen)
    assert title is not None
    assert unescape(title[1]) == HOSTILE[1]


@needs_chromium
def test_the_browser_shows_a_run_of_which_nothing_is_known_yet(tmp_path: Path) -> None:
    make_page(tmp_path).fail()
    seen = body_before_scripts(open_page(tmp_path, tmp_path / "profile"))
    assert '<span id="badge" class="badge failed">failed</span>' in seen
    assert "<polyline" not in seen
    assert seen.count("<b>–</b>") == 7  # one a number that there is not yet
    assert "<th>reward/mean</th>" in seen
