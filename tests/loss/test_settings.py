"""The `[loss]` section: what is filled in, and what is refused because it would have no effect or be wrong."""

from typing import Any

import pytest

from podium.errors import InputError
from podium.lookup import choices
from podium.runtime._build import build_objective, build_reference
from podium.settings import Settings


def made(loss: dict[str, Any], **others: Any) -> Settings:
    return Settings.from_dict({"loss": loss, **others})


REFUSED = {
    "clip below zero": ({"loss": {"clip_high": -0.1}}, "loss.clip_high = -0.1"),
    "unknown estimator": (
        {"loss": {"kl_beta": 0.1, "kl_estimator": "k9"}, "model": {"reference": "initial"}}, "'k1', 'k2', 'k3' or 'k4'",
    ),
    "option of another loss": ({"loss": {"name": "dro", "clip_high": 0.1}}, "loss.clip_high is not an option of dro"),
    "kl without a reference": ({"loss": {"kl_beta": 0.1}}, 'set model.reference = "initial"'),
    "reference without kl": ({"model": {"reference": "initial"}}, "model.reference has no effect"),
    "estimator without kl": ({"loss": {"kl_estimator": "k1"}}, "loss.kl_estimator has no effect"),
    "estimator of folded kl": (
        {"loss": {"kl_beta": 0.1, "kl_in": "advantage", "kl_estimator": "k1"}, "model": {"reference": "initial"}},
        "loss.kl_estimator has no effect",
    ),
    "another average": ({"loss": {"name": "gspo", "average": "tokens"}}, "gspo is averaged over rollouts"),
    "constant without its average": ({"loss": {"constant": 7}}, "loss.constant has no effect"),
    "correction of a loss that has its own": (
        {"loss": {"name": "reinforce", "correction": {"cap": 3.0}}}, "the ratio is against the sampler already",
    ),
    "correction against the sampler": ({"loss": {"old": "rollout", "correction": {}}}, "against the sampler"),
    "token level of a sequence loss": (
        {"loss": {"name": "gspo", "correction": {"level": "token"}}}, "takes its ratio over whole rollouts",
    ),
    "several updates without a ratio": (
        {"loss": {"name": "mean_logprob"}, "trainer": {"epochs_per_batch": 2}}, "right for one update per batch only",
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
         "correction": {"cap": 5.0, "band": 3.0, "sequence_band": False}},
        model={"reference": {"alpha": 0.1, "every": 4}},
        rollout={"max_new_tokens": 99},
    )  # fmt: skip
    objective, reference = build_objective(settings), build_reference(settings)
    assert (objective.average, objective.constant) == ("constant", 99)
    assert (objective.kl_beta, objective.kl_estimator, objective.kl_in) == (0.02, "k2", "loss")
    assert objective.correction is not None
    assert (objective.correction.cap, objective.correction.band, objective.correction.sequence_band) == (5.0, 3.0, None)
    assert reference is not None
    assert (reference.alpha, reference.every) == (0.1, 4)


def test_without_a_kl_no_reference_is_made() -> None:
    assert build_reference(made({})) is None
