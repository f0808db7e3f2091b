"""From `[loss]` to the loss stage: the named policy loss with its correction, KL term and average."""

from functools import partial

from podium.loss.objective import Correction, Objective, checked_loss
from podium.settings.contracts import is_users
from podium.settings.lookup import find
from podium.settings.sections import CorrectionSection
from podium.settings.tables import Settings

SHARED = ("average", "old", "kl_beta", "kl_estimator")
"""Keys of `[loss]` that every policy loss has."""


def build_objective(settings: Settings) -> Objective:
    given = settings.loss
    correction = None
    if isinstance(given.correction, CorrectionSection):
        correction = Correction(**given.correction.model_dump())
    shared = {key: value for key in SHARED if (value := getattr(given, key)) is not None}
    function = partial(find("loss", given.name), **given.options)
    return Objective(
        policy_loss=checked_loss(function, given.name) if is_users(given.name) else function,
        correction=correction,
        **shared,
    )
