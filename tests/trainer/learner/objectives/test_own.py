"""An objective in a file of the user's own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainer.learner.objectives.tokens import gradient, loss_of, tokens
from tests.trainer.learner.tiny import config, make_samples, relative_difference, take_step
from trainer.learner.config import LossConfig
from trainer.learner.megatron import Learner
from trainer.learner.objectives.own import check_own

EXAMPLE = Path(__file__).parents[4] / "examples" / "objective.py"

OWN_CISPO = """
from trainer.learner.objectives.tokens import Bounds, PerToken, Tokens


def own(tokens: Tokens, bounds: Bounds) -> PerToken:
    weights_P = tokens.log_ratios_P.detach().exp().clamp(max=bounds.ratio_cap)
    return PerToken(-weights_P * tokens.advantages_P * tokens.policy_logprobs_P, weights_P)


def wrong(tokens, bounds):
    return tokens.advantages_P.sum()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my.py"
    path.write_text(OWN_CISPO)
    return path


def test_a_function_of_the_users_own_trains_like_ours(file: Path, qwen3: Path) -> None:
    own, ours = (
        Learner(config(loss=loss), model_directory=qwen3)
        for loss in (
            LossConfig(objective=f"{file}:own", ratio_cap=2.0),
            LossConfig(kind="cispo", ratio_cap=2.0),
        )
    )
    shares = [take_step(one, make_samples()).ess_share for one in (own, ours)]
    assert shares[0] == pytest.approx(shares[1], rel=1e-5)
    assert relative_difference(own, ours) <= 1e-6


def test_the_example_weighs_by_lag() -> None:
    policy, lags = torch.full((3,), -1.0), torch.tensor([0, 1, 3])
    observed = gradient(
        policy, policy, torch.ones(3), LossConfig(objective=f"{EXAMPLE}:by_lag", ratio_cap=5.0), lags_P=lags
    )
    torch.testing.assert_close(observed, torch.tensor([-1.0, -0.5, -0.25]))


def test_a_file_that_cannot_be_used_is_refused_with_its_name_and_the_fix(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.py: No such file or directory; the path is relative"):
        check_own(f"{tmp_path}/none.py:own")
    with pytest.raises(ValueError, match=r"my\.py defines no function other; it defines own, wrong"):
        check_own(f"{file}:other")
    (tmp_path / "broken.py").write_text("def own(:")
    with pytest.raises(ValueError, match=r"broken\.py is not Python"):
        check_own(f"{tmp_path}/broken.py:own")
    (tmp_path / "needy.py").write_text("import no_such_package\n\ndef own(tokens, bounds): ...\n")
    with pytest.raises(ValueError, match=r"needy\.py cannot be imported: No module named 'no_such_package'"):
        loss_of(tokens(*(torch.ones(1),) * 3), LossConfig(objective=f"{tmp_path}/needy.py:own"))


def test_a_function_that_returns_something_else_is_told_what_to_return(file: Path) -> None:
    with pytest.raises(ValueError, match=r"my\.py:wrong must return PerToken\(loss_P\)"):
        loss_of(tokens(*(torch.ones(2),) * 3), LossConfig(objective=f"{file}:wrong"))


def test_the_file_is_checked_without_torch(file: Path) -> None:
    code = (
        "import sys\nfrom trainer.learner.objectives.own import check_own\n"
        f"check_own({f'{file}:own'!r})\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=EXAMPLE.parents[1])
