import http.client
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podium.errors import InputError
from podium.report.web.serve import Server, find_runs, report_server
from podium.run.folder import Ledger, RunFolder, flattened
from tests.report.runs import add_step, make_run

Serve = Callable[[Path], int]
"""A folder in, the port of its server out."""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make_run(tmp_path / "one", steps=2, texts=["a", "b"])
    make_run(tmp_path / "deep" / "two", steps=3, texts=["c"], seed=7)
    return tmp_path


@pytest.fixture
def serve() -> Iterator[Serve]:
    started: list[Server] = []

    def start(path: Path) -> int:
        server = report_server(path, 0)
        started.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server.server_address[1]

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_a_run_is_served_with_its_data_and_every_rollout(runs: Path, serve: Serve) -> None:
    port = serve(runs / "one")
    status, headers, page = ask(port, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"one: grpo on embedded" in page
    data = json.loads(ask(port, "/data.json")[2])
    assert (data["live"], data["series"]["steps"]) == (True, [1, 2])
    rollouts = json.loads(ask(port, "/rollouts/2")[2])["rollouts"]
    assert [(each["step"], each["text"]) for each in rollouts] == [(2, "a"), (2, "b")]


def test_data_is_sent_again_only_when_there_is_something_new(runs: Path, serve: Serve) -> None:
    port = serve(runs / "one")
    version = ask(port, "/data.json")[1]["ETag"]
    assert ask(port, "/data.json", If_None_Match=version)[0] == 304
    add_step(Ledger(RunFolder(runs / "one")), 3, ["third"])
    status, _, body = ask(port, "/data.json", If_None_Match=version)
    assert status == 200
    assert json.loads(body)["series"]["steps"] == [1, 2, 3]


def test_a_folder_of_runs_has_them_side_by_side_with_their_settings(runs: Path, serve: Serve) -> None:
    port = serve(runs)
    data = json.loads(ask(port, "/data.json")[2])
    assert [(run["name"], run["link"]) for run in data["runs"]] == [("deep/two", "run/deep/two/"), ("one", "run/one/")]
    two, one = data["runs"]
    assert (two["series"]["steps"], one["series"]["steps"]) == ([1, 2, 3], [1, 2])
    assert one["series"]["columns"]["time/step_s"]["mean"] == [0.79, 0.79]  # 0.5 + 0.01 + 0.25 + 0.02 + 0.01
    differing = {key for key in one["settings"] if one["settings"][key] != two["settings"][key]}
    assert differing == {"run.folder", "run.steps", "run.seed"}
    assert b"2 runs" not in ask(port, "/run/one/")[2]
    assert json.loads(ask(port, "/run/deep/two/data.json")[2])["home"] == "../../../"
    assert json.loads(ask(port, "/run/one/rollouts/1")[2])["rollouts"][0]["text"] == "a"


def test_a_run_that_begins_later_is_found(runs: Path, serve: Serve) -> None:
    port = serve(runs)
    make_run(runs / "three")
    assert len(json.loads(ask(port, "/data.json")[2])["runs"]) == 3


@pytest.mark.parametrize(
    "path",
    [
        "/settings.toml",
        "/run/one/../one/",
        "/run/../../etc/passwd",
        "/run/none/",
        "/rollouts/x",
        "/run/one/rollouts/-1",
    ],
)
def test_nothing_else_is_served(runs: Path, serve: Serve, path: str) -> None:
    assert ask(serve(runs), path)[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", ""])
def test_only_requests_that_name_this_machine_are_answered(runs: Path, serve: Serve, host: str) -> None:
    assert ask(serve(runs), "/", Host=host)[0] == 403


def test_localhost_is_this_machine_too(runs: Path, serve: Serve) -> None:
    port = serve(runs)
    assert ask(port, "/", Host=f"localhost:{port}")[0] == 200


def test_nothing_can_be_written(runs: Path, serve: Serve) -> None:
    assert ask(serve(runs), "/", method="POST")[0] == 501


def test_it_listens_on_the_loopback_only(runs: Path) -> None:
    with report_server(runs, 0) as server:
        assert server.server_address[0] == "127.0.0.1"


def test_a_port_that_is_taken_is_an_error_and_the_usual_one_gives_way(runs: Path) -> None:
    with report_server(runs) as first, report_server(runs) as second:
        assert first.server_address[1] != second.server_address[1]
        with pytest.raises(
            InputError, match=r"--port \d+ cannot be used: Address already in use; 0 takes any free one"
        ):
            report_server(runs, first.server_address[1])


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a run folder and contains none"):
        report_server(tmp_path, 0)
    with pytest.raises(InputError, match="is not a folder"):
        report_server(tmp_path / "nothing", 0)


def test_runs_are_found_one_or_two_levels_down(runs: Path) -> None:
    assert list(find_runs(runs)) == ["deep/two", "one"]


def test_settings_are_flattened_by_dots_and_numbers() -> None:
    tables = {"run": {"seed": 0}, "reward": [{"name": "a"}, {"name": "b"}], "trainer": {"betas": [0.9, 0.99]}}
    assert flattened(tables) == {
        "run.seed": 0,
        "reward.0.name": "a",
        "reward.1.name": "b",
        "trainer.betas": [0.9, 0.99],
    }
    assert flattened({"data": [{"remap": {}}]}) == {"data.0.remap": {}}
    assert flattened({}) == {}
