"""The load that a verify worker reports names its speed and the price of a row."""

from betoken.engine.bring_up.step_costs import StepCost
from tests.verify_worker.harness import Bench


def test_the_load_says_speed_and_price(fake_runner_class):
    dear = [StepCost(rows, 512, 1_000_000_000 * rows) for rows in (1, 32)]
    bench = Bench(fake_runner_class(), step_costs=dear)
    bench.open(1, [1, 2, 3])
    bench.block(1, 3, [], num_plain_steps=20)  # alike: the price is the table's, at any pace
    bench.run()
    assert bench.sink.load.tokens_per_s > 0 and bench.sink.load.row_price > 0
