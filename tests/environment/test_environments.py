"""The environments that come with Podium, played by hand."""

import sys
from typing import Any

import pytest

from podium.data.reasoning_gym import reasoning_gym
from podium.environment.grid_world import GridWorld
from podium.environment.guess_number import GuessNumber
from podium.environment.reasoning_gym import ReasoningGym
from podium.environment.word_guess import WordGuess, marks
from podium.records import Prompt


def prompt_of(answer: Any = None, text: str = "Play.", **others: Any) -> Prompt:
    return Prompt(0, (1,), ({"role": "user", "content": text},), answer, **others)


def test_a_number_is_guessed() -> None:
    game = GuessNumber(highest=20, guesses=3)
    assert "1 to 20" in game.reset(prompt_of(7))
    assert game.step("10").messages == "Lower. 2 guesses left."
    assert game.step("I say 3 or 5").messages == "Higher. 1 guesses left."
    last = game.step("7")
    assert (last.messages, last.reward, last.done) == ("Right.", 1.0, True)


def test_out_of_guesses_is_a_reward_of_0() -> None:
    game = GuessNumber(guesses=2)
    game.reset(prompt_of("50"))
    assert game.step("no number").messages == "That is no number. 1 guesses left."
    last = game.step("9" * 5000)
    assert (last.reward, last.done) == (0.0, True)


@pytest.mark.parametrize("make", [GuessNumber, WordGuess, GridWorld])
def test_a_game_follows_from_its_row(make: Any) -> None:
    def played(text: str) -> list[Any]:
        game = make()
        return [game.reset(prompt_of(text=text)), *(game.step(said) for said in ("40", "apple", "down", "right"))]

    assert played("a") == played("a")
    assert len({repr(played(text)) for text in "abcdefgh"}) > 1


@pytest.mark.parametrize(
    ("guess", "word", "said"),
    [
        ("apple", "apple", "+++++"),
        ("paper", "apple", "??+?-"),
        ("eerie", "apple", "----+"),
        ("llama", "apple", "?-?--"),
    ],
)
def test_letters_are_marked(guess: str, word: str, said: str) -> None:
    assert marks(guess, word) == said


def test_a_word_is_guessed_and_a_miss_gets_its_letters() -> None:
    game = WordGuess(guesses=2)
    assert "5 letters" in game.reset(prompt_of("Apple"))
    assert game.step("I guess apply").messages == "++++- 1 guesses left."
    assert game.step("cat").reward == pytest.approx(0.4)  # four of five letters, halved


def test_a_way_leads_to_the_goal() -> None:
    game = GridWorld(size=3, steps=6, walls=0.0)
    assert game.reset(prompt_of()).endswith("@..\n...\n..G")
    assert game.step("go up").messages.startswith("There is a wall.")
    for said in ("down", "down", "Right, then RIGHT"):
        made = game.step(said)
        assert not made.done
    made = game.step("right")
    assert (made.reward, made.done) == (1.0, True)


@pytest.mark.parametrize("row", range(20))
def test_every_map_has_a_way(row: int) -> None:
    game = GridWorld(size=5, walls=0.5)
    game.reset(prompt_of(row))
    assert game._is_reachable()


def test_a_walk_ends_after_its_turns() -> None:
    game = GridWorld(steps=2)
    game.reset(prompt_of())
    assert game.step("?").messages.startswith("Write up, down")
    assert game.step("up").done


def test_a_task_of_reasoning_gym_is_tried_again() -> None:
    [row] = reasoning_gym(task="chain_sum", size=1)
    prompt = Prompt(0, (1,), row.messages, row.answer, row.reward, "reasoning_gym", row.metadata)
    game = ReasoningGym(tries=3, decay=0.5)
    game.reset(prompt)
    assert game.step("<answer>1e9</answer>").messages == "That is not right. 2 more to try."
    made = game.step(f"<answer>{row.answer}</answer>")
    assert (made.reward, made.done) == (0.5, True)


def test_reasoning_gym_refuses_other_rows() -> None:
    with pytest.raises(ValueError, match="reasoning_gym"):
        ReasoningGym().reset(prompt_of())


TEXTARENA = [
    "FrozenLake-v0",
    "Sudoku-v0-easy",
    "Minesweeper-v0-small",
    "GuessTheNumber-v0",
    "TowerOfHanoi-v0",
    "2048-v0",
]


@pytest.mark.skipif(sys.platform != "linux", reason="tried on Linux only")
@pytest.mark.parametrize("name", TEXTARENA)
@pytest.mark.filterwarnings("ignore")
def test_games_of_textarena_run_to_their_end(name: str) -> None:
    pytest.importorskip("textarena")
    from podium.environment.textarena import Textarena

    game, said = Textarena(game=name), ["[right]", "[down]", "[5]", "[A C]", "[left]", "[1 1 1]"]
    assert len(game.reset(prompt_of(3))) > 100
    for turn in range(300):
        made = game.step(said[turn % len(said)])
        assert made.messages or made.done
        if made.done:
            break
    assert made.done
    assert -1.0 <= made.reward <= 1.0


def test_a_game_of_textarena_shows_what_is_new_and_not_the_reply() -> None:
    pytest.importorskip("textarena")
    from podium.environment.textarena import Textarena

    game = Textarena()
    game.reset(prompt_of(5))
    made = game.step("[down]")
    assert "Welcome" not in made.messages
    assert "[Player]" not in made.messages


def test_an_environment_of_gymnasium_is_shown_as_text() -> None:
    pytest.importorskip("gymnasium")
    from podium.environment.gymnasium import Gymnasium

    game = Gymnasium(id="FrozenLake-v1", rules="Walk to G.", options={"is_slippery": False})
    assert game.reset(prompt_of(1)) == "Walk to G.\nAnswer with a number from 0 to 3.\nSFFF\nFHFH\nFFFH\nHFFG"
    assert game.step("I go 7").messages == "That is no action. Answer with a number from 0 to 3."
    for action in (1, 1, 2, 2, 1):
        assert not game.step(f"{action}").done
    made = game.step("2")
    assert (made.reward, made.done) == (1.0, True)
    game.close()
