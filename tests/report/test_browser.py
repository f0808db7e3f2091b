"""The page in a real browser: Debian's chromium, driven by Playwright."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from podium.records import RunState, StepReport
from podium.report.page import page_data, render
from podium.report.web.reader import RunReader
from podium.report.web.serve import report_server
from podium.run.folder import Ledger, RunFolder
from tests.builders import make_episode, make_group, make_prompt
from tests.report.runs import add_step, make_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")

FLAGS = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync"]


class Tab:
    """A page, with every complaint of its console and every address that it asked for."""

    def __init__(self, page: Any) -> None:
        self.page, self.complaints, self.asked = page, list[str](), list[str]()
        page.on(
            "console", lambda message: message.type in ("error", "warning") and self.complaints.append(message.text)
        )
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_text_contents()


Open = Callable[..., Tab]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Open]:
    """Opens an address, and in the end sees to it that nothing was complained of and nothing left the machine."""
    tabs: list[Tab] = []

    def go(address: str, **options: Any) -> Tab:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        tab = Tab(context.new_page())
        tabs.append(tab)
        tab.page.goto(address)
        return tab

    yield go
    for tab in tabs:
        tab.page.context.close()
        assert tab.complaints == []
        assert all(address.startswith(("file:///", "data:", "http://127.0.0.1:")) for address in tab.asked)


def written(folder: RunFolder) -> str:
    """The address of the run's page on disk."""
    reader = RunReader(folder)
    reader.refresh()
    folder.page.write_text(render(page_data(reader)), encoding="utf-8")
    return f"file://{folder.page}"


@pytest.fixture
def running() -> Iterator[Callable[[RunFolder], None]]:
    """Holds a run's lock, as its process does."""
    held: list[RunFolder] = []

    def hold(folder: RunFolder) -> None:
        folder.lock()
        held.append(folder)

    yield hold
    for folder in held:
        folder.unlock()


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    servers = []

    def start(path: Path) -> str:
        server = report_server(path, 0)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_from_disk_it_shows_state_numbers_curves_timeline_steps_and_health(tmp_path: Path, visit: Open) -> None:
    tab = visit(written(make_run(tmp_path / "run", steps=30)))
    page = tab.page
    assert page.title() == "30/30 run: grpo on embedded"
    assert tab.texts("#badge") == ["finished"]
    assert "step 30 of 30" in page.locator("#progress").text_content()
    assert "Held-out accuracy 0.25 before, 0.75 after" in page.locator("#ending").text_content()
    labels = tab.texts(".stats .card > span:first-child")
    assert {"mean reward", "correct rollouts", "held-out accuracy", "loss", "policy version"} <= set(labels)
    assert "+0.5 since the start" in page.locator(".stats").text_content()
    charts = tab.texts("#curves .chart h3")
    assert charts[:2] == ["Reward and correctness", "Loss"]
    assert {"Entropy of the policy", "Length of answers", "Sampler and trainer"} <= set(charts)
    assert page.locator("#curves .chart path.curve").count() >= len(charts)
    assert page.locator("#timeline rect.span").count() == 6 * 6  # six steps of five laps and the reward beside
    assert page.locator("#steps-table tbody tr").count() == 25
    assert page.locator("#steps-table tbody tr").first.locator("td").first.text_content() == "30"
    assert "All four checks hold" in tab.texts("#health h3")
    assert [address.rpartition("/")[2] for address in tab.asked if not address.startswith("data:")] == ["report.html"]


@pytest.mark.parametrize("state", ["finished", "stopped", "running"])
def test_the_title_names_run_loss_and_model_in_every_state(
    tmp_path: Path, visit: Open, running: Callable[[RunFolder], None], state: str
) -> None:
    folder = make_run(tmp_path / "sums", steps=4, state=state)
    if state == "running":
        running(folder)
    tab = visit(written(folder))
    assert tab.page.title() == "4/4 sums: grpo on embedded"
    assert tab.texts("h1") == ["sums: grpo on embedded"]
    assert tab.texts("#badge") == [state]


def test_a_run_whose_settings_cannot_be_read_is_titled_by_its_folder(tmp_path: Path, visit: Open) -> None:
    folder = make_run(tmp_path / "sums", steps=2)
    folder.settings.write_text("[run")
    assert visit(written(folder)).page.title() == "2/2 sums"


def test_the_clock_shows_what_was_sampled_and_trained_at_the_same_time(tmp_path: Path, visit: Open) -> None:
    folder = make_run(tmp_path / "run")
    folder.event("sampling", ordinals=[1, 2])
    folder.event("group", ordinal=1, policy_version=[0, 0])
    folder.event("trained", updated=True, seconds=0.25)
    folder.event("group", ordinal=2, policy_version=[0, 0])
    folder.event("pushed", policy_version=1, channel="shared", seconds=0.01)
    page = visit(written(folder)).page
    assert page.locator("#clock text").all_text_contents()[:4] == ["sampling", "groups", "training", "push"]
    assert page.locator("#clock rect.moment").count() == 5  # one span of sampling, two groups, a training, a push
    page.locator("#clock rect.moment").nth(1).hover()
    assert page.locator("#tip").text_content().startswith("training\n0.25 s")


def test_a_number_tells_its_formula_and_what_a_bad_value_means(tmp_path: Path, visit: Open) -> None:
    page = visit(written(make_run(tmp_path / "run"))).page
    page.locator(".stats .term", has_text="entropy").focus()  # by keyboard as by pointer
    told = page.locator("#tip").text_content()
    assert told.startswith("policy/entropy\nmean entropy of the policy's distribution")
    assert "Bad: falls to 0" in told
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_curves_are_read_by_pointer_and_by_arrow_keys_and_can_be_hidden(tmp_path: Path, visit: Open) -> None:
    page = visit(written(make_run(tmp_path / "run", steps=30))).page
    chart = page.locator(".chart", has_text="Length of answers")
    chart.locator("svg").hover()
    assert chart.locator(".readout").text_content().startswith("step 1")
    chart.locator("svg").focus()
    page.keyboard.press("Home")
    assert chart.locator(".readout").text_content().startswith("step 1: mean ")
    page.keyboard.press("ArrowRight")
    assert chart.locator(".readout").text_content().startswith("step 2: mean ")
    assert chart.locator("path.curve").count() == 2
    chart.locator(".legend button", has_text="longest").click()
    assert page.locator(".chart", has_text="Length of answers").locator("path.curve").count() == 1


def test_rollouts_are_narrowed_by_step_reward_verifier_end_and_text(tmp_path: Path, visit: Open) -> None:
    tab = visit(written(make_run(tmp_path / "run", steps=3, texts=["alpha", "beta", "gamma", "delta"])))
    page = tab.page

    def count() -> int:
        return page.locator(".list button[data-key]").count()

    assert count() == 12
    page.select_option("#pick-step", "2")
    assert count() == 4
    page.fill("#pick-low", "0.5")
    assert count() == 3  # rewards 1.2, 0.75, 0.5, 0.25
    page.select_option("#pick-verifier", "format")  # whose values are all 0.1
    assert count() == 0
    page.fill("#pick-low", "")
    assert count() == 4
    page.select_option("#pick-finish", "length")  # every second one
    assert count() == 2
    page.select_option("#pick-finish", "")
    page.fill("#pick-search", "GAM")
    assert count() == 1
    assert tab.texts("#answer-text") == ["gamma"]
    assert "format" in page.locator(".parts").text_content()


def test_tokens_are_coloured_by_logprob_advantage_and_difference(tmp_path: Path, visit: Open) -> None:
    tab = visit(written(make_run(tmp_path / "run", steps=1, texts=["best", "worst"])))
    page = tab.page

    def colours() -> list[str]:
        return page.eval_on_selector_all("#answer-tokens .token", "all => all.map(one => one.style.background)")

    page.select_option("#pick-colour", "logprob")
    assert tab.texts("#answer-tokens .token") == ["<8>", "<24>", "<2>"]
    assert len(set(colours())) == 1  # all are −0.5
    page.select_option("#pick-colour", "gap")  # 0, +0.25 and −1
    none, above, below = colours()
    assert none == ""
    assert "--c0" in above
    assert "--c4" in below
    page.locator("#answer-tokens .token").nth(2).hover()
    told = page.locator("#tip").text_content()
    assert "sampler's logprob −0.5" in told
    assert "trainer's logprob −1.5, difference −1" in told
    page.select_option("#pick-colour", "advantage")
    assert all("--good" in colour for colour in colours())  # 1
    page.keyboard.press("Escape")
    page.locator("h2").first.click()
    page.keyboard.press("j")  # the worst: advantage 0, and never trained, so no difference to show
    assert set(colours()) == {""}
    assert "gap" not in page.eval_on_selector_all("#pick-colour option", "all => all.map(one => one.value)")


def test_keys_lead_through_the_page(tmp_path: Path, visit: Open) -> None:
    page = visit(written(make_run(tmp_path / "run", texts=["one", "two"]))).page
    page.keyboard.press("j")
    assert page.locator("#answer-text").text_content() == "two"
    page.keyboard.press("k")
    assert page.locator("#answer-text").text_content() == "one"
    page.keyboard.press("c")
    assert page.locator("#answer-tokens").count() == 1
    page.keyboard.press("6")
    assert page.evaluate("document.getElementById('health').getBoundingClientRect().top < innerHeight")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "pick-search"
    page.keyboard.press("Tab")
    page.locator("h2").first.click()
    page.keyboard.press("?")
    assert "next and previous rollout" in page.locator("dialog").text_content()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_follows_the_readers_light(tmp_path: Path, visit: Open, scheme: str) -> None:
    options = {"viewport": {"width": 360, "height": 740}, "color_scheme": scheme}
    page = visit(written(make_run(tmp_path / "run", steps=30)), **options).page
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    luminance = page.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0)"
    )
    assert (luminance > 600) == (scheme == "light")


HOSTILE = {
    "script": "</script><script>document.title='hacked'</script>",
    "image": "<img src=x onerror=\"document.title='hacked'\">",
    "comment": "<!--<script>",
    "right to left": "abc \u202egnp.exe",
    "nul": "a\x00b\x1b[2J",
    "surrogate": "half \ud800 pair",
    "template": "{{DATA}} ${document.title='hacked'}",
    "long": "x" * 1_000_000,
}


@pytest.mark.parametrize("live", [False, True])
def test_hostile_text_is_shown_as_text(tmp_path: Path, visit: Open, serve: Callable[[Path], str], live: bool) -> None:
    folder = make_run(tmp_path / "run", steps=1, texts=list(HOSTILE.values()))
    settings = folder.settings.read_text()
    folder.settings.write_text(settings.replace('name = "embedded"', "name = '''<img src=x onerror=alert(1)>'''"))
    tab = visit(serve(folder.path) if live else written(folder))
    page = tab.page
    if live:
        page.fill("#pick-step", "1")
        playwright.expect(page.locator("#rollouts-count")).to_have_text("8 rollouts")
    shown = {}
    for name, place in zip(HOSTILE, range(len(HOSTILE)), strict=True):
        page.locator(f'.list button[data-key="1/1/{place}"]').click()
        shown[name] = page.locator("#answer-text").text_content()
    assert [shown[name] for name in ("script", "image", "comment")] == [
        HOSTILE[n] for n in ("script", "image", "comment")
    ]
    assert shown["right to left"] == "abc ⟨U+202E⟩gnp.exe"
    assert shown["nul"] == "a␀b␛[2J"
    assert shown["template"] == HOSTILE["template"]
    if live:
        assert len(shown["long"]) == 20_000
        page.get_by_text("show all 1,000,000 characters").click()
        for wait_ms in (0, 2500):  # the page is drawn again in between
            page.wait_for_timeout(wait_ms)
            assert len(page.locator("#answer-text").text_content()) == 1_000_000
    else:
        assert len(shown["long"]) == 12_000
        assert "The first 12,000 of 1,000,000 characters" in page.locator("#detail").text_content()
    assert page.title() == "1/1 run: grpo on <img src=x onerror=alert(1)>"
    assert page.locator("img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_live_it_grows_as_steps_finish_and_keeps_what_the_reader_chose(
    tmp_path: Path, visit: Open, serve: Callable[[Path], str], running: Callable[[RunFolder], None]
) -> None:
    folder = make_run(tmp_path / "run", steps=2, state="running")
    running(folder)
    page = visit(serve(folder.path)).page
    assert page.locator("#badge").text_content() == "running"
    page.fill("#pick-search", "#### 4")
    add_step(Ledger(folder), 3, ["#### 4", "#### 5"])
    folder.write_status("finished", 3, 3)
    playwright.expect(page.locator("#badge")).to_have_text("finished", timeout=15_000)
    assert page.locator("#steps-table tbody tr").first.locator("td").first.text_content() == "3"
    assert page.input_value("#pick-search") == "#### 4"
    assert page.evaluate("document.activeElement.id") == "pick-search"
    assert page.locator(".list button[data-key]").count() == 3


def test_from_disk_a_running_page_loads_itself_again_and_keeps_what_the_reader_chose(
    tmp_path: Path, visit: Open, running: Callable[[RunFolder], None]
) -> None:
    folder = make_run(tmp_path / "run", steps=2, state="running")
    running(folder)
    page = visit(written(folder)).page
    page.select_option("#pick-sort", "worst")
    page.locator("h2").first.click()
    page.evaluate("document.activeElement.blur()")
    add_step(Ledger(folder), 3, ["#### 4"])
    written(folder)
    playwright.expect(page.locator("#steps-table tbody td").first).to_have_text("3", timeout=20_000)
    assert page.input_value("#pick-sort") == "worst"


def test_runs_lie_over_one_another_and_their_settings_are_compared(
    tmp_path: Path, visit: Open, serve: Callable[[Path], str]
) -> None:
    make_run(tmp_path / "one", steps=5)
    make_run(tmp_path / "two", steps=9, seed=4)
    tab = visit(serve(tmp_path))
    page = tab.page
    assert page.locator("#runs-table tbody tr").count() == 2
    chart = page.locator(".chart", has_text="Mean reward")
    assert chart.locator("path.curve").count() == 2
    rows = [row.locator("td").all_text_contents() for row in page.locator("#differences tbody tr").all()]
    assert ["run.seed", "0", "4"] in rows
    assert ["run.steps", "5", "9"] in rows
    page.uncheck("#run-1")
    assert page.locator(".chart", has_text="Mean reward").locator("path.curve").count() == 1
    page.locator("#runs-table a", has_text="two").click()
    playwright.expect(page).to_have_title("9/9 two: grpo on embedded")
    page.locator("header a", has_text="runs").click()
    playwright.expect(page).to_have_title("2 runs")


@pytest.mark.timeout(600)
def test_ten_thousand_steps_and_a_hundred_thousand_rollouts_stay_small_and_quick(tmp_path: Path, visit: Open) -> None:
    folder = make_run(tmp_path / "run", steps=10_000, texts=[f"answer {n} " + "word " * 200 for n in range(10)])
    address = written(folder)
    assert folder.page.stat().st_size < 10_000_000
    page = visit(address).page
    playwright.expect(page.locator("#curves")).to_contain_text("A point stands for 17 steps")
    page.screenshot()  # so that it has painted
    assert page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") < 2000
    assert page.locator("#steps-table tbody td").first.text_content() == "10000"
    page.select_option("#pick-step", "10000")
    assert page.locator(".list button[data-key]").count() == 10


def test_an_episode_is_shown_as_a_conversation_and_what_was_read_is_grey(tmp_path: Path, visit: Open) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    hostile = "<img src=x onerror=alert(1)> #### 3"
    episodes = (
        make_episode("first <b>turn</b>", hostile),
        make_episode("alone", sample_index=1, finish_reason="abort", failure="step: the <i>game</i> broke"),
    )
    group = make_group((1.2, None), prompt=make_prompt(7), rollouts=episodes, advantages=(1.0, 0.0))
    report = StepReport(RunState(step=2), {"reward/mean": 1.2}, (group,), (7,))
    Ledger(folder, lambda token_id: f"<{token_id}>").write(report)
    folder.write_status("finished", 2, 2)
    page = visit(written(folder)).page
    page.locator(".list button", has_text="step 2").first.click()
    shown = page.locator("#turns .turn")
    assert shown.locator("pre").all_text_contents() == ["first <b>turn</b>", "answer 1", hostile]
    notes = shown.locator("p").all_text_contents()
    assert notes == [
        "policy · 3 tokens of policy version 0 · 0.5 s",
        "user · 0.25 s",
        "policy · 3 tokens of policy version 1 · 0.5 s",
    ]
    page.select_option("#pick-colour", "logprob")
    assert page.locator("#answer-tokens .token").count() == 8
    assert page.locator("#answer-tokens .token.read").all_text_contents() == ["<40>", "<41>"]
    page.locator(".list button", has_text="abort").click()
    assert "The environment failed: step: the <i>game</i> broke" in page.locator("#detail").text_content()
