"""The cost model learns what it can see, and shrugs off what it should not believe."""

import random

import pytest

from sglang_vericache.scheduler import CostModel, Work

# (fixed, draft_row, draft_key, verify_row, verify_key, verify_pair, loaded_key) seconds
MACHINES = {
    "keys bound": (0.02, 1e-3, 2e-6, 1e-3, 1e-6, 1e-6, 5e-6),
    "rows bound": (0.005, 1e-2, 1e-7, 1e-2, 1e-7, 1e-7, 1e-6),
    "weights bound": (0.01, 1e-5, 4e-8, 1e-5, 4e-8, 1e-9, 1e-7),
}


def true_seconds(costs, work):
    return costs[0] + sum(n * cost for n, cost in zip(work.counts(), costs[1:], strict=True))


def iteration(rng, batch=8):
    """Some requests draft, others verify with various k and contexts."""
    work = Work()
    for _ in range(rng.randint(1, batch)):
        context = rng.randint(500, 8000)
        if rng.random() < 0.7:
            work += Work.draft(context // 10)
        else:
            work += Work.verify(rng.randint(1, 9), context, rng.choice((0, context)))
    return work


@pytest.mark.parametrize("costs", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_predicts_iterations_it_never_saw(costs, noise):
    rng = random.Random(0)
    model = CostModel()
    for _ in range(300):
        work = iteration(rng)
        model.observe(work, true_seconds(costs, work) * rng.uniform(1 - noise, 1 + noise))
    errors = []
    for _ in range(100):
        work = iteration(rng)
        errors.append(abs(model.seconds(work) / true_seconds(costs, work) - 1))
    assert sum(errors) / len(errors) < 0.05 + noise / 4
    assert min(model.coefficients()) > 0


def test_negative_control_an_untrained_model_is_wrong():
    costs = MACHINES["weights bound"]
    work = Work.verify(9, 8000)
    assert abs(CostModel().seconds(work) / true_seconds(costs, work) - 1) > 0.5


def test_one_observation_sets_the_scale():
    model = CostModel()
    work = Work.verify(1, 4000)
    model.observe(work, 7.0)
    assert model.seconds(work) == pytest.approx(7.0, rel=0.05)


def test_outliers_hardly_move_it():
    rng = random.Random(0)
    costs = MACHINES["keys bound"]
    model = CostModel()
    model.observe(Work.verify(1, 4000), 30.0)  # a compilation in the first iteration
    for i in range(300):
        work = iteration(rng)
        model.observe(work, true_seconds(costs, work) * (100 if i % 50 == 7 else 1))
    errors = []
    for _ in range(100):
        work = iteration(rng)
        errors.append(model.seconds(work) / true_seconds(costs, work) - 1)
    assert abs(sum(errors) / len(errors)) < 0.15


def test_follows_a_machine_that_slows_down():
    rng = random.Random(0)
    model = CostModel()
    costs = MACHINES["keys bound"]
    for slowdown in (1, 2):
        for _ in range(1500):
            work = iteration(rng)
            model.observe(work, slowdown * true_seconds(costs, work))
    work = Work.draft(600) + Work.verify(5, 4000)
    assert model.seconds(work) == pytest.approx(2 * true_seconds(costs, work), rel=0.15)


def test_marginal_is_additive():
    model = CostModel()
    model.observe(Work.verify(3, 100), 0.1)
    a, b = Work.draft(300), Work.verify(2, 500)
    assert model.marginal(a + b) == pytest.approx(model.marginal(a) + model.marginal(b))
    assert model.seconds(a) == pytest.approx(model.fixed + model.marginal(a))
