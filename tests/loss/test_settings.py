"""The `[loss]` section: what is filled in, and what is refused because it would have no effect or be wrong."""

from typing import Any

import pytest

from podium.errors import InputError
from podium.loss.build import build_objective
from podium.settings.lookup import choices
from podium.settings.tables import Settings
from podium.trainer.build import build_reference


def made(loss: dict[str, Any], **others: Any) -> Settings:
    return Settings.from_dict({"loss": loss, **others})


REFUSED = {
    "clip below zero": ({"loss": {"clip": -0.1}}, "loss.clip = -0.1"),
    "unknown estimator": (
        {"loss": {"kl_beta": 0.1, "kl_estimator": "k9"}, "model": {"reference": "initial"}},
        "'k1', 'k2', 'k3', 'k4' or 'in_advantages'",
    ),
    "option of another loss": ({"loss": {"name": "dro", "clip": 0.1}}, "loss.clip is not an option of dro"),
    "kl without a reference": ({"loss": {"kl_beta": 0.1}}, 'set model.reference = "initial"'),
    "reference without kl": ({"model": {"reference": "initial"}}, "model.reference has no effect"),
    "estimator without kl": ({"loss": {"kl_estimator": "k1"}}, "loss.kl_estimator has no effect"),
    "another average": ({"loss": {"name": "gspo", "average": "tokens"}}, "gspo is averaged over rollouts"),
    "a length of nothing": ({"loss": {"average": 0}}, "loss.average = 0: "),
    "correction of a loss that has its own": (
        {"loss": {"name": "reinforce", "correction": {"cap": 3.0}}}, "the ratio is against the sampler already",
    ),
    "correction against the sampler": ({"loss": {"old": "rollout", "correction": {}}}, "against the sampler"),
    "token level of a sequence loss": (
        {"loss": {"name": "gspo", "correction": {"level": "token"}}}, "takes its ratio over whole rollouts",
    ),
    "several updates without a ratio": (
        {"loss": {"name": "mean_logprob"}, "trainer": {"epochs_per_batch": 2}}, "correct only for one update per batch",
    ),
    "several minibatches without a ratio": (
        {"loss": {"name": "mean_logprob"}, "trainer": {"minibatches_per_step": 2}},
        "not with trainer.minibatches_per_step = 2",
    ),
    "a lag without a ratio": (
        {"loss": {"name": "mean_logprob"}, "run": {"max_lag": 1}}, "not with run.max_lag = 1",
    ),
    "rollouts in flight without a ratio": (
        {"loss": {"name": "mean_logprob"}, "run": {"max_lag": 2, "in_flight": True}}, "not with run.max_lag = 2",
    ),
    "a window without a ratio": (
        {"loss": {"name": "mean_logprob"}, "run": {"sync_every": 2}}, "not with run.sync_every = 2",
    ),
    "no sync without a ratio": (
        {"loss": {"name": "mean_logprob"}, "run": {"sync_every": 0}}, "not with run.sync_every = 0",
    ),
    "reinforce without its ratio, several updates": (
        {"loss": {"name": "reinforce", "ratio": False}, "trainer": {"epochs_per_batch": 2}},
        "loss.name = 'reinforce' with loss.ratio = False has no ratio",
    ),
    "reinforce without its ratio, a lag": (
        {"loss": {"name": "reinforce", "ratio": False}, "run": {"max_lag": 1}}, "not with run.max_lag = 1",
    ),
    "reinforce without its ratio, a window": (
        {"loss": {"name": "reinforce", "ratio": False}, "run": {"sync_every": 4}}, "not with run.sync_every = 4",
    ),
    "dro without its penalty, several updates": (
        {"loss": {"name": "dro", "beta": 0}, "trainer": {"epochs_per_batch": 2}}, "loss.beta = 0.0 has no ratio",
    ),
    "dro without its penalty, a lag that nothing corrects": (
        {"loss": {"name": "dro", "beta": 0, "old": "rollout"}, "run": {"max_lag": 1}}, "not with run.max_lag = 1",
    ),
    "a lag that nothing corrects": (
        {"loss": {"correction": False}, "run": {"max_lag": 1}}, "nothing corrects for a sampler that is behind",
    ),
    "a window that nothing corrects": (
        {"loss": {"name": "cispo", "correction": False}, "run": {"sync_every": 2}}, "set loss.old = 'rollout'",
    ),
    "band below one": ({"loss": {"correction": {"band": 0.5}}}, "loss.correction"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_before_anything_is_loaded(kind: str) -> None:
    tables, message = REFUSED[kind]
    with pytest.raises(InputError) as caught:
        Settings.from_dict(tables)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", choices("loss"))
def test_every_loss_has_settings_that_read_back_the_same(name: str) -> None:
    settings = made({"name": name})
    assert Settings.from_dict(settings.to_dict()) == settings
    assert build_objective(settings).policy_loss is not None


def test_the_correction_is_on_where_the_loss_has_room_for_it() -> None:
    levels = {}
    for name in choices("loss"):
        correction = build_objective(made({"name": name})).correction
        levels[name] = None if correction is None else correction.level
    assert levels == {
        "cispo": "token", "dapo": "token", "dro": "token", "grpo": "token", "importance_sampling": "token",
        "gspo": "sequence", "sequence": "sequence", "mean_logprob": None, "reinforce": None,
    }  # fmt: skip


def test_it_can_be_switched_off_and_is_off_against_the_sampler() -> None:
    assert build_objective(made({"correction": False})).correction is None
    assert build_objective(made({"old": "rollout"})).correction is None


def test_what_the_section_says_reaches_the_objective() -> None:
    settings = made(
        {"name": "grpo", "average": "constant", "kl_beta": 0.02, "kl_estimator": "kl2",
         "correction": {"cap": 5.0, "band": 3.0}},
        model={"reference": {"alpha": 0.1, "every": 4}},
        rollout={"max_new_tokens": 99},
    )  # fmt: skip
    objective, reference = build_objective(settings), build_reference(settings)
    assert objective.average == 99
    assert (objective.kl_beta, objective.kl_estimator) == (0.02, "k2")
    assert objective.correction is not None
    assert (objective.correction.cap, objective.correction.band) == (5.0, 3.0)
    assert reference is not None
    assert (reference.alpha, reference.every) == (0.1, 4)


OFF_POLICY = {"several updates": {"trainer": {"epochs_per_batch": 2}}, "a lag": {"run": {"max_lag": 1}}}


@pytest.mark.parametrize("way", OFF_POLICY)
@pytest.mark.parametrize("name", [name for name in choices("loss") if name != "mean_logprob"])
def test_losses_that_correct_for_another_policy_may_train_its_rollouts(name: str, way: str) -> None:
    assert made({"name": name}, **OFF_POLICY[way]).loss.name == name
    against_sampler = made({"name": name, "old": "rollout"}, **OFF_POLICY[way])
    assert Settings.from_dict(against_sampler.to_dict()) == against_sampler


def test_dro_without_its_penalty_may_lag_where_the_lag_is_corrected_for() -> None:
    assert made({"name": "dro", "beta": 0}, run={"max_lag": 1}).loss.correction


def test_an_estimator_whose_expected_gradient_is_0_is_warned_of() -> None:
    reference = {"reference": "initial"}
    [caution] = made({"kl_beta": 0.1, "kl_estimator": "kl"}, model=reference).cautions
    assert "loss.kl_estimator = 'k1' keeps nothing near the reference" in caution
    for other in (
        {"kl_estimator": "k2"},
        {"kl_estimator": "k3"},
        {"kl_estimator": "k4"},
        {"kl_estimator": "in_advantages"},
    ):
        assert made({"kl_beta": 0.1, **other}, model=reference).cautions == []


def test_without_a_kl_no_reference_is_made() -> None:
    assert build_reference(made({})) is None
