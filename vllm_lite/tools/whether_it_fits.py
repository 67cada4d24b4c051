"""Whether a model of the cache fits this machine with the default settings, by the arithmetic of `plan`."""

from typing import NamedTuple

from vllm_lite.checkpoint.hub_cache import CachedModel
from vllm_lite.errors import VllmLiteError
from vllm_lite.tools.plan import PlanConfig, make_plan
from vllm_lite.tools.plan_checkpoint import load


class Fit(NamedTuple):
    """`fits` is None for a model that is not served here, or that cannot be read; `why` says what is in the way."""

    fits: bool | None
    why: str | None = None


def fit_of(model: CachedModel) -> Fit:
    if not model.is_whole:
        return Fit(None, "some of its files are missing: pull it again")
    try:
        config = PlanConfig.check({"model": str(model.path)})
        plan = make_plan(config, load(config))
    except VllmLiteError as error:
        return Fit(None, str(error))
    return Fit(plan.fits, None if plan.fits else "; ".join(plan.problems))
