"""How a batch is divided into the samples of each update."""

from tests.trainer.learner.tiny import branched, config, make_batch, make_samples
from trainer.learner.update import minibatches


def test_minibatches_divide_every_epoch_anew_and_alike_everywhere() -> None:
    samples = make_samples()
    divided = config(num_minibatches=3, num_epochs=2)
    parts = list(minibatches(make_batch(samples), divided))
    assert parts == list(minibatches(make_batch(samples), divided))
    assert len(parts) == 6
    assert sorted(parts[0] + parts[1] + parts[2]) == sorted(parts[3] + parts[4] + parts[5]) == list(range(6))
    assert parts[:3] != parts[3:]


def test_minibatches_do_not_depend_on_the_order_of_arrival() -> None:
    samples, divided = make_samples(), config(num_minibatches=2)
    backwards = samples[::-1]
    one = [{samples[i].request_id for i in part} for part in minibatches(make_batch(samples), divided)]
    other = [{backwards[i].request_id for i in part} for part in minibatches(make_batch(backwards), divided)]
    assert one == other


def test_a_trajectory_is_never_divided_between_updates() -> None:
    samples = branched(make_samples(), offender=0)
    parts = list(minibatches(make_batch(samples), config(num_minibatches=3, num_epochs=2)))
    assert all(len({0, 1, 2} & set(part)) in (0, 3) for part in parts)
