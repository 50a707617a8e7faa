"""Imitation by a pretrained model: its lessons are a rollout's tokens, its loss falls, and a kill costs little."""

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from pipeline.chat import ChatMessage
from pipeline.tokenizer import read_bundle
from trainer.demo.family import make_task
from trainer.demo.lessons import Templates, teach
from trainer.learner.architecture import read_architecture
from trainer.warmstart.pretrained import FIRST_PROBE, Imitation, LessonBook, imitate, measure
from workers.policy.render import Renderer

BRIEF = Imitation(num_lessons=48, save_every_updates=4, num_probes=4, peak_lr=3e-3)
IMPORTS = "import signal; from pathlib import Path; from trainer.warmstart.pretrained import Imitation, _Run, imitate"
HELD_AFTER_3_UPDATES = "step = _Run._step; _Run._step = lambda run, *given: step(run, *given) if run._update < 3 else signal.pause()"
"""However fast it is: it waits for its end in the middle of the fourth update."""


def policy_in(directory: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)


def test_a_lesson_is_what_a_rollout_would_have_fed_and_sampled(tiny_model: Path) -> None:
    lesson = LessonBook(tiny_model, seed=3).lesson(5)
    renderer = Renderer(read_bundle(tiny_model))
    taught = teach(make_task(3, "warmstart", 5), random.Random("3/5"), Templates())
    messages = [ChatMessage(one.role, one.content) for one in taught.messages]
    ids = renderer.first_prompt(messages[:2])
    is_reply = [False] * len(ids)
    for place in range(2, len(messages), 2):
        reply = [*renderer.encode_text(messages[place].content), renderer.end_id]
        told = messages[place + 1 : place + 2]
        fed = renderer.suffix(told, last_id=renderer.end_id) if told else []
        ids, is_reply = ids + reply + fed, is_reply + [True] * len(reply) + [False] * len(fed)
    assert lesson.ids == ids
    assert lesson.is_reply == is_reply


@pytest.mark.slow
def test_imitation_lowers_the_loss_on_lessons_that_it_has_not_seen(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "policy"
    imitate(tiny_model, out, BRIEF)
    book = LessonBook(tiny_model, seed=0)
    probes = [book.lesson(FIRST_PROBE + number) for number in range(8)]
    before, after = measure(policy_in(tiny_model), probes), measure(policy_in(out), probes)
    assert after.loss < before.loss - 0.4
    assert after.right_share > before.right_share + 0.1
    assert list(tmp_path.iterdir()) == [out], "nothing but the policy is left"
    assert read_bundle(out) == read_bundle(tiny_model)
    assert read_architecture(out) == read_architecture(tiny_model), (
        "the learner reads it as it reads the other"
    )
    stamp = (out / "config.json").stat().st_mtime_ns
    imitate(tiny_model, out, BRIEF)
    assert (out / "config.json").stat().st_mtime_ns == stamp, "what is complete is kept"


@pytest.mark.slow
def test_a_killed_imitation_goes_on_where_its_state_was_saved(tiny_model: Path, tmp_path: Path) -> None:
    settings = Imitation(num_lessons=12, lessons_per_update=2, save_every_updates=2, num_probes=1)

    def begun(name: str, held: str = "") -> subprocess.Popen[str]:
        code = f"imitate(Path({str(tiny_model)!r}), Path({str(tmp_path / name)!r}), {settings!r})"
        command = [sys.executable, "-c", "; ".join(filter(None, (IMPORTS, held, code)))]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    killed, state = begun("killed", HELD_AFTER_3_UPDATES), tmp_path / "killed.partial" / "state.pt"
    while not state.exists():
        assert killed.poll() is None
        time.sleep(0.001)
    killed.kill()
    killed.communicate()
    assert not (tmp_path / "killed").exists()
    said = {name: begun(name).communicate()[0] for name in ("killed", "whole")}
    assert "goes on from here" in said["killed"]
    assert "goes on from here" not in said["whole"]
    assert said["killed"].splitlines()[-2:-1] == said["whole"].splitlines()[-2:-1]
    resumed, whole = policy_in(tmp_path / "killed"), policy_in(tmp_path / "whole")
    for one, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_a_command_with_other_settings_does_not_go_on_from_a_state(tiny_model: Path, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    torch.save({"settings": b"{}"}, partial / "state.pt")
    with pytest.raises(ValueError, match="is of a command with other settings: repeat that, or remove it"):
        imitate(tiny_model, tmp_path / "out", BRIEF)


def test_a_template_that_ends_no_turn_where_sampling_ends_is_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    changed = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((changed / "config.json").read_text()) | {"eos_token_id": 7}
    (changed / "config.json").write_text(json.dumps(config))
    names = json.loads((changed / "tokenizer_config.json").read_text()) | {"eos_token": "<|endoftext|>"}
    (changed / "tokenizer_config.json").write_text(json.dumps(names))
    with pytest.raises(ValueError, match=r"add its first token to eos_token_id in config\.json"):
        LessonBook(changed, seed=0)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--model=/no/model"], "holds no config.json: give a Hugging Face directory"),
        (["--model=.", "--lessons=0"], "--lessons is 0; it must be 1 or more"),
    ],
)
def test_a_users_mistake_is_one_line(options: list[str], complaint: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainer.warmstart", f"--out={tmp_path / 'out'}", *options]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert complaint in run.stderr
    assert "Traceback" not in run.stderr


def test_the_tokenizer_of_the_policy_is_the_models_own(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "policy"
    imitate(tiny_model, out, Imitation(num_lessons=1, num_probes=1))
    own = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    assert Tokenizer.from_file(str(out / "tokenizer.json")).to_str() == own.to_str()
