"""Changes of one line that the quick tests must notice: `python -m tests.mutants [WORD ...]` makes each of them in a copy of the
repository and runs the quick tests that `make check` chooses for the file, then, if they pass, those of its whole package.

It prints a row for each: the part, the change, and the first test that failed, or "lives". The arguments choose rows that contain one of
these words. Services must be up. The exit status is 1 if a mutant lives that is not in EQUIVALENT.
"""

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.suite import QUICK, ROOT, chosen_for, run_pytest

OPTIONS = ("-x", "--numprocesses=2", "--dist=loadscope")


@dataclass(frozen=True, slots=True)
class Mutant:
    """In the file at `path`, the text `was`, which occurs once, becomes another; `says` is what that does."""

    path: str
    was: str
    becomes: str
    says: str


VERDICTS, GRADE = "workers/grading/verdicts.py", "workers/grading/grade.py"
CONTROL, DRAWING = "workers/grading/defence/control.py", "workers/grading/controls/drawing.py"
AFTER, SWEBENCH = "workers/grading/defence/after.py", "workers/grading/swebench_rules.py"
QUEUE, TRANSITIONS = "pipeline/queue.py", "pipeline/transitions.py"
INTAKE, LEDGER = "trainer/rollouts/intake.py", "trainer/rollouts/ledger.py"
CREDIT, PACKING = "trainer/batching/credit.py", "trainer/batching/packing.py"
COLLATE, SAMPLES = "trainer/batching/collate.py", "trainer/batching/samples.py"
REGISTRY, TOKENS = "trainer/learner/objectives/registry.py", "trainer/learner/objectives/tokens.py"
LOSS, UPDATE = "trainer/learner/objectives/loss.py", "trainer/learner/update.py"
FAMILIES, ATTENTION = "trainer/learner/families", "trainer/learner/attention.py"
DELTA_RULE = "trainer/learner/delta_rule.py"
MODEL, PARAMETERS = "trainer/learner/model.py", "trainer/learner/parameters.py"
EXPERTS, DISPATCH, ROUTING = (
    "trainer/learner/experts.py",
    "trainer/learner/dispatch.py",
    "trainer/learner/routing.py",
)
FP8, PRECISION = "trainer/learner/fp8.py", "trainer/learner/precision.py"
PUBLISH, DELIVERIES = "trainer/weights/publish.py", "trainer/weights/deliveries.py"
TRANSPORT = "trainer/weights/transport.py"
TRAJECTORY = "pipeline/trajectory.py"
CONVERSATIONS = "workers/foreign/conversations.py"
IS_DEAD = "if redis.call('HEXISTS', DEAD .. run, id) == 1 then return 0 end"

MUTANTS: dict[str, list[Mutant]] = {
    "grading": [
        Mutant(
            VERDICTS,
            "resolved = resolved and refuted_by is None",
            "resolved = bool(resolved)",
            "a pass that a run refuted stays a pass",
        ),
        Mutant(
            VERDICTS,
            "resolved=evidence.exit_code == 0,",
            "resolved=evidence.exit_code in (0, 5),",
            "a pytest run without tests is a pass",
        ),
        Mutant(
            VERDICTS,
            'if statuses.get(test.name) != "PASSED":',
            "if test.name not in statuses:",
            "the first of several outcomes of one name counts",
        ),
        Mutant(
            VERDICTS,
            "resolved = passed == len(verdict.tests)",
            "resolved = passed > 0",
            "one of the named tests is enough",
        ),
        Mutant(
            VERDICTS,
            "summary = summary.partition(R2E_SUMMARY)[0]",
            "summary = str(summary)",
            "a second summary is read, too",
        ),
        Mutant(GRADE, "if not patch.strip():", "if not patch:", "a patch of spaces is graded"),
        Mutant(
            GRADE,
            "if tested.reward.resolved and calibration.passing:",
            "if tested.reward.resolved and not calibration.passing:",
            "tests that the known fix passes are not asked for",
        ),
        Mutant(
            GRADE,
            "if result.exit_code == 0 and not result.dropped_bytes else None",
            "if result.exit_code == 0 else None",
            "a parser's output counts without its middle",
        ),
        Mutant(
            SWEBENCH,
            'log.replace(mark, f"(printed by a test) {mark[3:]}").replace(',
            "log.replace(",
            "a marker that a test prints counts",
        ),
        Mutant(
            AFTER,
            "if _stands_for(name, seen.skipped):",
            "if not name:",
            "a skipped test may be claimed to have passed",
        ),
        Mutant(CONTROL, "    if wrong:\n", "    if len(wrong) > 1:\n", "one contradicted test may pass"),
        Mutant(
            DRAWING,
            "if not control.failed(under_it) and",
            "if control.passed(under_it) and",
            "a contradicted test that did not run counts as failed",
        ),
        Mutant(
            DRAWING,
            "if calibration.witnessed and not found.witnessed:",
            "if found.witnessed is None:",
            "a pass that no witness saw is as good as a witnessed one",
        ),
        Mutant(
            DRAWING,
            "return missing if is_fixed and len(missing)",
            "return missing if len(missing)",
            "a run without the fix is repeated, too",
        ),
    ],
    "queue": [
        Mutant(
            TRANSITIONS,
            "return claims[1] == attempt and claims[2] ~= attempt",
            "return claims[1] == attempt",
            "a claim that has ended is in force",
        ),
        Mutant(
            TRANSITIONS,
            "if left_ms ~= -2 then",
            "if left_ms > 60000 then",
            "a request under a lease may be claimed again",
        ),
        Mutant(
            TRANSITIONS,
            "redis.call('ZADD', QUEUE, now + ARGV[3], id)",
            "redis.call('ZADD', QUEUE, now, id)",
            "a failed try is tried again at once",
        ),
        Mutant(
            TRANSITIONS,
            "redis.call('HINCRBY', CLAIMS .. id, 'ended', 1)",
            "redis.call('HINCRBY', CLAIMS .. id, 'ended', 0)",
            "an attempt that ended counts as one that died",
        ),
        Mutant(
            TRANSITIONS,
            f"local num = release_bytes(run, id)\n{IS_DEAD}",
            "local num = release_bytes(run, id)",
            "the evidence of a dead letter expires",
        ),
        Mutant(
            TRANSITIONS,
            "elseif redis.call('EXISTS', PUBLISHED .. id) == 1 then\n  return 0",
            "elseif false then\n  return 0",
            "an answered request may be withdrawn",
        ),
        Mutant(
            TRANSITIONS,
            "local made = redis.call('HINCRBY', CLAIMS .. id, 'made', 1)\n",
            "local made = redis.call('HINCRBY', CLAIMS .. id, 'made', 0)\n",
            "a worker that dead-lettered a request may answer it when it was requeued",
        ),
        Mutant(
            TRANSITIONS,
            "'-inf', border, 'LIMIT', 0, wanted - #ids)",
            "'-inf', border, 'LIMIT', 0, wanted)",
            "a worker gets more requests than it asked for",
        ),
        Mutant(
            QUEUE,
            'b"" if failure is None else encode(failure),',
            'b"",',
            "a failed try leaves no evidence",
        ),
        Mutant(
            QUEUE,
            "lease is not None and lease.attempt == attempt",
            "lease is not None",
            "an earlier attempt's lease counts as this one's",
        ),
        Mutant(
            QUEUE,
            "score is None and entry is None and",
            "score is None and",
            "an answered request may be called lost",
        ),
        Mutant(
            "pipeline/request_store.py",
            'times = 2 if request.purpose == "eval" else 1',
            "times = 1",
            "evaluations wait for training",
        ),
    ],
    "intake": [
        Mutant(
            INTAKE,
            "published.decode() != delivery.entry_id",
            "published.decode() == delivery.entry_id",
            "copies are taken for originals",
        ),
        Mutant(
            INTAKE,
            'fate: Fate = "failed" if head.reward is None else "late"',
            'fate: Fate = "late"',
            "what comes late is late, a failure too",
        ),
        Mutant(
            INTAKE,
            "member.entries[:0] = replaced.entries",
            "member.entries[:0] = []",
            "entries of a replaced member are forgotten",
        ),
        Mutant(
            INTAKE,
            "return old.reward is None and new.reward is not None",
            "return new.reward is not None",
            "any graded trajectory replaces what its group holds",
        ),
        Mutant(
            INTAKE,
            "num_refills(cursor) < self._sources.at(",
            "num_refills(cursor) <= self._sources.at(",
            "a group has one refill more than the recipe gives",
        ),
        Mutant(
            INTAKE,
            'the second copy is dropped", head.request_id)\n                member.entries += entries',
            'the second copy is dropped", head.request_id)',
            "the second copy is never acknowledged",
        ),
        Mutant(
            INTAKE,
            "            self._may_have_lost = True\n",
            "            self._may_have_lost = False\n",
            "entries of a broken read are never read again",
        ),
        Mutant(
            "trainer/rollouts/groups.py",
            "return self.head.reward is not None and not self.fault",
            "return self.head.reward is not None",
            "a member whose tokens are unsound is valid",
        ),
        Mutant(
            LEDGER,
            "self._pending = [pair for pair in self._pending if pair not in settled]",
            "self._pending = []",
            "what was settled during an acknowledgement is never acknowledged",
        ),
        Mutant(
            LEDGER,
            "while self._closed_below in self._closed_above:",
            "if self._closed_below in self._closed_above:",
            "settled groups above the watermark stay there",
        ),
        Mutant(
            "trainer/rollouts/admission.py",
            "self.max_lag_versions + served_steps + 1, self.num_steps",
            "self.max_lag_versions + served_steps + 2, self.num_steps",
            "groups are enqueued that come one version too late",
        ),
    ],
    "batching": [
        Mutant(
            CREDIT,
            "mean, others = fmean(rewards.values()), len(rewards) - 1",
            "mean, others = fmean(rewards.values()), len(rewards)",
            "leave-one-out divides by the whole group",
        ),
        Mutant(
            CREDIT,
            "turn + 1: advantage - coefficient / 2 * deviation",
            "turn: advantage - coefficient / 2 * deviation",
            "a potential is that of the state after the turn",
        ),
        Mutant(
            CREDIT,
            "coefficient * (deviation - mean)",
            "coefficient * deviation",
            "scores of a trajectory do not add up to nothing",
        ),
        Mutant(
            PACKING,
            "num_positions = samples[index].num_tokens - 1",
            "num_positions = samples[index].num_tokens - 2",
            "a sample takes one position less",
        ),
        Mutant(
            PACKING,
            "targets_P=np.concatenate([sample.tokens_T[1:]",
            "targets_P=np.concatenate([sample.tokens_T[:-1]",
            "a token is predicted from itself",
        ),
        Mutant(
            COLLATE,
            "lag_of(member.lag_from) > withhold_beyond",
            "lag_of(member.lag_from) >= withhold_beyond",
            "a member at the bound on lag is withheld",
        ),
        Mutant(
            COLLATE,
            'return "trained" if _is_as_sampled(member) else "altered"',
            'return "trained"',
            "samples that changed in memory are trained",
        ),
        Mutant(
            SAMPLES,
            "if logprobs.max() > LOGPROB_SLACK:",
            "if logprobs.max() > 1 + LOGPROB_SLACK:",
            "a probability above 1 reaches the learner",
        ),
        Mutant(
            SAMPLES,
            "            [False] * num_tokens,\n",
            "            self.trained[:num_tokens],\n",
            "tokens that two samples share are trained twice",
        ),
        Mutant(
            TRAJECTORY,
            "elif every_step or turn.kept_tokens < run.num_tokens:",
            "elif every_step:",
            "a turn whose context was cut continues the sample",
        ),
    ],
    "learner": [
        Mutant(
            REGISTRY,
            "masked_P = (tokens.advantages_P.sign() * moved_P) > bounds.delta",
            "masked_P = moved_P > bounds.delta",
            "the mask ignores the advantage's sign",
        ),
        Mutant(
            REGISTRY,
            "torch.where(tokens.advantages_P > 0, 1.0,",
            "torch.where(tokens.advantages_P < 0, 1.0,",
            "bad actions are pushed away without a bound",
        ),
        Mutant(
            TOKENS,
            "return self.bounded(self.policy_logprobs_P - self.behaviour_logprobs_P)",
            "return self.bounded(self.behaviour_logprobs_P - self.policy_logprobs_P)",
            "the log ratio has the other sign",
        ),
        Mutant(
            TOKENS,
            "return vetoed_P if others is None else others.vetoed_P | vetoed_P",
            "return vetoed_P",
            "a veto in one sample of a trajectory spares the others",
        ),
        Mutant(
            LOSS,
            'num_trajectories * (constant_tokens if aggregation == "constant" else 1)',
            "num_trajectories",
            "a constant divisor is 1",
        ),
        Mutant(
            LOSS,
            "doubt_P = -torch.expm1(",
            "doubt_P = torch.exp(",
            "a token's signal grows with its probability",
        ),
        Mutant(
            UPDATE,
            "np.random.default_rng((config.seed, batch.step, epoch))",
            "np.random.default_rng((config.seed, batch.step))",
            "each epoch divides the batch in the same way",
        ),
        Mutant(
            "trainer/learner/optimizer.py",
            "adam_beta2=config.betas[1],",
            "adam_beta2=config.betas[0],",
            "Adam's second moment decays as the first",
        ),
    ],
    "weights": [
        Mutant(
            PUBLISH,
            "return 0 if newest is None else newest.version + 1",
            "return 0 if newest is None else newest.version",
            "the next version has the number of the last",
        ),
        Mutant(
            PUBLISH,
            "if await weights.newest_version(self._redis, self._run_id) != version:",
            "if version:",
            "a version is announced again after an outage",
        ),
        Mutant(
            TRANSPORT,
            "if old.name < _name(oldest_needed):",
            "if old.name <= _name(oldest_needed):",
            "a version that an engine has yet to load is removed",
        ),
        Mutant(
            TRANSPORT,
            "return served.model_path == version.directory",
            "return bool(served.model_path)",
            "an engine with other weights of the same name is believed",
        ),
        Mutant(
            DELIVERIES,
            "            await self._engines.resume(url)\n            self._pauses",
            "            self._pauses",
            "an engine stays paused after its update",
        ),
        Mutant(
            DELIVERIES,
            "return self._pinned or self._newest",
            "return self._newest",
            "a new version interrupts an evaluation",
        ),
        Mutant(
            DELIVERIES,
            "common = min(version for",
            "common = max(version for",
            "a version is served when the first engine has it",
        ),
        Mutant(
            "pipeline/weights.py",
            "weights.version <= newest.version:",
            "weights.version < newest.version:",
            "a version may be announced twice",
        ),
    ],
    "families": [
        Mutant(
            f"{FAMILIES}/minimax.py",
            "normed_qk=True, normed_together=True",
            "normed_qk=True",
            "each of MiniMax's heads is normalised by itself",
        ),
        Mutant(
            f"{FAMILIES}/minimax.py",
            "return self.rotary_dim or self.head_width",
            "return self.head_width",
            "MiniMax's heads are rotated as a whole",
        ),
        Mutant(
            "trainer/learner/hf.py",
            "return matrix.float() * spread[:rows, :columns]",
            "return matrix.float() / spread[:rows, :columns]",
            "weights in eight bits are divided by their scales",
        ),
        Mutant(
            f"{FAMILIES}/family.py",
            'rope.get("rope_theta") or self.rope_theta or',
            "self.rope_theta or",
            "the base of the rotary embedding is read from its older place alone",
        ),
        Mutant(
            f"{FAMILIES}/family.py",
            "num_key_value_heads=self.num_key_value_heads or self.num_attention_heads",
            "num_key_value_heads=self.num_attention_heads",
            "each head has a key of its own",
        ),
        Mutant(
            f"{FAMILIES}/family.py",
            "return self.head_dim or self.hidden_size // self.num_attention_heads",
            "return self.hidden_size // self.num_attention_heads",
            "the size of a head is that of the model over its heads",
        ),
        Mutant(
            f"{FAMILIES}/family.py",
            '"quantization_config": not _is_readable(self.quantization_config),',
            '"quantization_config": False,',
            "weights in eight bits are read as they are",
        ),
        Mutant(
            f"{FAMILIES}/family.py",
            '"self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",)',
            '"self_attention.q_layernorm.weight": ("self_attn.k_norm.weight",)',
            "queries are normalised as keys",
        ),
        Mutant(
            f"{FAMILIES}/smollm3.py",
            "(layer + 1) % interval != 0",
            "layer % interval != 0",
            "other layers of SmolLM3 ignore positions",
        ),
        Mutant(
            f"{FAMILIES}/smollm3.py",
            "if not given[layer])",
            "if given[layer])",
            "layers that should rotate do not",
        ),
        Mutant(
            f"{FAMILIES}/seed_oss.py",
            "biased_qkv=bool(self.attention_bias)",
            "biased_qkv=True",
            "Seed-OSS has biases in any case",
        ),
        Mutant(
            f"{FAMILIES}/mistral.py",
            "frozenset(range(self.num_hidden_layers))",
            "frozenset[int]()",
            "a window of attention is ignored",
        ),
        Mutant(
            f"{FAMILIES}/glm.py",
            "weight_factor=self.routed_scaling_factor",
            "weight_factor=1.0",
            "the weights of experts are not scaled",
        ),
        Mutant(
            f"{FAMILIES}/glm.py",
            "corrected=True",
            "corrected=False",
            "experts are chosen without their corrections",
        ),
        Mutant(
            f"{FAMILIES}/glm.py",
            'scores="sigmoid"',
            'scores="softmax"',
            "experts are scored against each other",
        ),
        Mutant(
            f"{FAMILIES}/glm.py",
            "shared_width=self.n_shared_experts * self.moe_intermediate_size",
            "shared_width=self.moe_intermediate_size",
            "of several shared experts one is built",
        ),
        Mutant(
            f"{FAMILIES}/glm.py",
            "num_dense_layers=self.first_k_dense_replace",
            "num_dense_layers=1",
            "all models have one layer without experts",
        ),
        Mutant(
            f"{FAMILIES}/glm.py",
            "self.n_group != self.topk_group",
            "False",
            "experts in groups are chosen as if they had none",
        ),
        Mutant(
            DELTA_RULE,
            "if index in firsts or state_GRKV is None:",
            "if state_GRKV is None:",
            "a sample begins with the state of the one before it",
        ),
        Mutant(
            DELTA_RULE,
            "rows_P + num_before, inputs_PE",
            "rows_P, inputs_PE",
            "the convolution of a sample reaches into the next one",
        ),
        Mutant(
            DELTA_RULE,
            ".double().cumsum(-1)",
            ".cumsum(-1)",
            "long sums of decays are rounded before their difference is taken",
        ),
        Mutant(
            DELTA_RULE,
            "query_PGK.shape[-1] ** -0.5",
            "value_PGRV.shape[-1] ** -0.5",
            "queries are scaled by the width of values",
        ),
        Mutant(
            "trainer/learner/delta_net.py",
            "decay_PGR.float() + bias_GR",
            "decay_PGR.float()",
            "decays have no bias",
        ),
        Mutant(
            "trainer/learner/hf.py",
            "return heads.transpose(dim + 1, dim + 2).flatten(dim, dim + 3)",
            "return heads.flatten(dim, dim + 3)",
            "the gates of attention stay beside their queries",
        ),
        Mutant(
            f"{FAMILIES}/qwen_next.py",
            "(layer + 1) % interval == 0",
            "layer % interval == 0",
            "the first layer of four has attention",
        ),
        Mutant(
            "trainer/learner/export.py",
            "if name.startswith(prefixes)",
            "if name.startswith(prefixes) and False",
            "exports have no vision tower",
        ),
        Mutant(
            "trainer/learner/optimizer.py",
            "*zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True),",
            "",
            "checkpoints leave out the optimizer of weights in fp32",
        ),
        Mutant(
            ATTENTION,
            "exponents = torch.arange(0, width, 2, dtype=torch.float32) / width",
            "exponents = torch.arange(0, width, 2, dtype=torch.float32) / architecture.head_width",
            "a part of a head is rotated as slowly as the whole",
        ),
        Mutant(
            ATTENTION,
            "torch.cat([turned, vectors_LHD[..., width:]], dim=-1)",
            "torch.cat([vectors_LHD[..., width:], turned], dim=-1)",
            "the rest of a head comes before what is rotated",
        ),
        Mutant(
            ATTENTION,
            "torch.where(wavelengths > longest, frequencies / rope.factor, mixed)",
            "mixed",
            "the longest wavelengths of Llama 3.1 are mixed, too",
        ),
        Mutant(
            ATTENTION,
            "layer not in architecture.unrotated_layers",
            "layer_number not in architecture.unrotated_layers",
            "the layer before the one that ignores positions ignores them",
        ),
        Mutant(
            ATTENTION,
            "torch.floor(positions_L / scaling.original_positions)",
            "positions_L / scaling.original_positions",
            "queries are scaled between the steps, too",
        ),
        Mutant(
            MODEL,
            '"moe_router_bias_update_rate": 0.0,',
            '"moe_router_bias_update_rate": 1e-3,',
            "the corrections of experts move with their load",
        ),
        Mutant(
            MODEL,
            "    model.to(transformer.params_dtype)\n    keep_in_fp32(model)\n",
            "    model.to(transformer.params_dtype)\n",
            "the corrections of experts are rounded to half precision",
        ),
        Mutant(
            MODEL,
            "[0] * num_dense + [1] * (architecture.num_layers - num_dense)",
            "[1] * architecture.num_layers",
            "all layers count as layers with experts",
        ),
        Mutant(
            PARAMETERS,
            "experts = architecture.experts_of(layer)",
            "experts = architecture.experts_of(0)",
            "all layers have the parameters of the first",
        ),
        Mutant(
            "trainer/plan/division.py",
            "count * copies * parameter.num_values(tensor)",
            "num_layers * copies * parameter.num_values(tensor)",
            "each parameter is counted for all layers",
        ),
        Mutant(
            ATTENTION,
            "mask_TT.triu(1 - self.window)",
            "mask_TT.triu(-self.window)",
            "a window is one position longer",
        ),
        Mutant(
            ATTENTION, "self.window - 1, 0)", "self.window, 0)", "the kernel's window is one position longer"
        ),
        Mutant(
            ATTENTION,
            "of_sinks_H = -((sinks_H",
            "of_sinks_H = ((sinks_H",
            "sinks learn in the other direction",
        ),
        Mutant(
            ATTENTION,
            "query_PHD, key_PHD, value_PHD, sinks_H, attended_PHD, with_sink_HP, rng_state, unused",
            "query_PHD, key_PHD, value_PHD, sinks_H, attended_PHD, sums_HP, rng_state, unused",
            "the backward pass forgets the sinks",
        ),
        Mutant(
            MODEL,
            '"glu_linear_offset": 1.0',
            '"glu_linear_offset": 0.0',
            "gpt-oss multiplies by the projection without adding 1",
        ),
        Mutant(MODEL, '"activation_func_clamp_value": limit, ', "", "gpt-oss's gate is not clamped"),
        Mutant(
            "trainer/learner/hf.py",
            "torch.cat([outputs_first[::2], outputs_first[1::2]])",
            "torch.cat(outputs_first.chunk(2))",
            "gates and projections that alternate are read as halves",
        ),
        Mutant(
            "trainer/learner/hf.py",
            "values[(blocks & 15).long()], values[(blocks >> 4).long()]",
            "values[(blocks >> 4).long()], values[(blocks & 15).long()]",
            "the upper half of a byte is read first",
        ),
        Mutant(
            "trainer/learner/hf.py",
            "if num_values != prod(parameter.shape):",
            "if num_values > prod(parameter.shape):",
            "weights with too few rows are read",
        ),
        Mutant(
            f"{FAMILIES}/gpt_oss.py",
            "LAYER_KINDS[layer % 2]",
            "LAYER_KINDS[(layer + 1) % 2]",
            "the other layers have windows",
        ),
    ],
    "experts": [
        Mutant(
            EXPERTS,
            "weight in zip(parts, weights, strict=True)])",
            "weight in zip(parts, weights[::-1], strict=True)])",
            "rows are multiplied by other experts' matrices",
        ),
        Mutant(
            EXPERTS,
            "parts = [bias * part for bias, part in zip(",
            "parts = [bias + 0 * part for bias, part in zip(",
            "biases of experts are not shared out",
        ),
        Mutant(
            EXPERTS,
            "weighted = (self._gated(joint) * shares).to(rows_RE.dtype)",
            "weighted = self._gated(joint).to(rows_RE.dtype)",
            "the share of an expert is forgotten",
        ),
        Mutant(
            EXPERTS,
            "up.clamp(-limit, limit)",
            "up.clamp(max=limit)",
            "the other half of a gate is clamped above alone",
        ),
        Mutant(
            EXPERTS,
            "(up + self.config.glu_linear_offset)",
            "up",
            "nothing is added to the other half of a gate",
        ),
        Mutant(
            EXPERTS,
            "weighted = (gradient * shares_R1).to(biases[0].dtype)",
            "weighted = gradient.to(biases[0].dtype)",
            "grouped gradients of biases forget the shares",
        ),
        Mutant(
            EXPERTS,
            "of_weights = F.grouped_mm(gradient.T, rows, offs=ends_G).unbind()",
            "of_weights = F.grouped_mm(rows.T, gradient, offs=ends_G).unbind()",
            "grouped gradients of weights are turned around",
        ),
        Mutant(
            EXPERTS,
            "ends_G, torch.arange(num_rows, device=ends_G.device), right=True",
            "ends_G, torch.arange(num_rows, device=ends_G.device)",
            "the last row of an expert has the next one's bias",
        ),
        Mutant(
            DISPATCH,
            "shares_R = probs.T.flatten().gather(0, choices.clamp(min=0)).where(choices >= 0, 0)",
            "shares_R = probs.T.flatten().gather(0, choices.clamp(min=0))",
            "rows that nobody chose have a share",
        ),
        Mutant(
            DISPATCH,
            "self._order = of_row.argsort(stable=True)",
            "self._order = torch.arange(len(of_row))",
            "rows of several processes are not sorted by expert",
        ),
        Mutant(
            DISPATCH,
            "counts[-1] += num_rows - counts.sum()",
            "counts[0] += num_rows - counts.sum()",
            "what is left over goes to the first expert",
        ),
        Mutant(
            ROUTING,
            "filled = np.full(shape, -1, np.int16)",
            "filled = np.zeros(shape, np.int16)",
            "padding goes to the first expert",
        ),
        Mutant(
            ROUTING,
            "return scores_LN.gather(1, experts_LK), experts_LK",
            "return own_LK, experts_LK",
            "replayed experts keep the scores of others",
        ),
        Mutant(
            ROUTING,
            "self._again.popleft() if is_backward",
            "self._again[-1] if is_backward and self._again",
            "layers that are computed again replay the newest micro-batch",
        ),
    ],
    "fp8": [
        Mutant(
            FP8,
            "blocks.abs().amax(dim=(1, 3)) / LARGEST",
            "blocks.amax(dim=(1, 3)) / LARGEST",
            "the scale of a block is that of its positive numbers",
        ),
        Mutant(
            FP8,
            "blocks.abs().amax(dim=(1, 3)) / LARGEST",
            "blocks.abs().mean(dim=(1, 3)) / LARGEST",
            "the scale of a block is that of its mean",
        ),
        Mutant(FP8, "torch.where(scales == 0, 1.0, scales)", "scales", "a block of zeros has the scale 0"),
        Mutant(
            FP8,
            "[:rows, :columns].contiguous(), scales",
            "[:rows, :columns].contiguous(), 1 / scales",
            "scales are written as their inverse",
        ),
        Mutant(
            FP8,
            "return frozenset(name for name in tensors if scale_name(name) in tensors)",
            "return frozenset(tensors)",
            "every tensor counts as packed",
        ),
        Mutant(
            FP8,
            "(*map(scale_name, packed), *kept, *packed)",
            "(*map(scale_name, packed), *packed, *kept)",
            "packed tensors have the names of others",
        ),
        Mutant(
            PRECISION,
            "if not origin.endswith(_KEPT):",
            "if True:",
            "strengths and decays of linear attention are packed",
        ),
        Mutant(
            PRECISION,
            "return [(rows - 2 * keys,), (keys,), (keys,)]",
            "return [(rows,), (keys,), (keys,)]",
            "queries count the rows of keys and values",
        ),
        Mutant(
            PRECISION,
            "saved = matrix.num_values * (value_bytes - 1) - matrix.num_scales * SCALE_BYTES",
            "saved = matrix.num_values * (value_bytes - 1)",
            "scales take no bytes",
        ),
        Mutant(
            PRECISION,
            'if scale_format not in (None, "float"):',
            "if False:",
            "scales that are powers of two are taken",
        ),
        Mutant(
            PRECISION,
            "if matrix.num_heads else engine_gpus",
            "if False else engine_gpus",
            "key-value heads are divided below one",
        ),
        Mutant(
            PRECISION,
            'f".{one.strip(\'.\')}." in f".{matrix.module}."',
            "one in matrix.module",
            "a module is left out if its name has another's in it",
        ),
    ],
    "foreign": [
        Mutant(
            CONVERSATIONS,
            "one.name == other.name and same_arguments(one.arguments, other.arguments)",
            "one.name == other.name and one.arguments == other.arguments",
            "arguments are compared as text",
        ),
        Mutant(
            CONVERSATIONS, "        return one is other\n", "        return bool(one == other)\n", "1 is true"
        ),
        Mutant(
            CONVERSATIONS,
            "if (one.role, one.text, one.call_id) != (other.role, other.text, other.call_id):",
            "if (one.role, one.text) != (other.role, other.text):",
            "a result may belong to another call",
        ),
        Mutant(
            CONVERSATIONS,
            "if (one.role, one.text, one.call_id) != (other.role, other.text, other.call_id):",
            "if replace(one, call=None, message=0) != replace(other, call=None, message=0):",
            "thoughts are compared",
        ),
        Mutant(
            CONVERSATIONS,
            "if following is not None and following.message == piece.message != UNPARTED:",
            "if following is None and piece.message == UNPARTED:",
            "a text with calls may be the copy of one without",
        ),
        Mutant(
            CONVERSATIONS,
            "has_all = text == said.content and [call.id for call in returned] == list(own)",
            "has_all = [call.id for call in returned] == list(own)",
            "a copy with other words counts as the same",
        ),
        Mutant(
            CONVERSATIONS,
            "elif last is not None and last[0] == reply:",
            "elif last is not None and last == reply:",
            "parallel calls that come back one by one stay apart",
        ),
        Mutant(
            CONVERSATIONS,
            "                made.pop()\n",
            "                break\n",
            "text that is repeated before a further call stays",
        ),
        Mutant(
            CONVERSATIONS,
            "yield from sorted(group, key=lambda one: called_at.get(one.call_id, len(pieces)))",
            "yield from group",
            "results keep the order in which they arrived",
        ),
        Mutant(
            CONVERSATIONS,
            "return piece.call is not None and not piece.thought",
            "return piece.call is not None",
            "a call with a thought of its own continues the message before it",
        ),
        Mutant(
            CONVERSATIONS,
            "if root.tools_key == tools_key]",
            "if root.tools_key or tools_key]",
            "a request continues a conversation with other tools",
        ),
        Mutant(
            CONVERSATIONS,
            "rank = (end, node.session == session,",
            "rank = (-end, node.session == session,",
            "a request continues the first reply that fits",
        ),
        Mutant(
            CONVERSATIONS,
            "rank = (end, node.session == session,",
            "rank = (end, False,",
            "of equal conversations, that of another session may be continued",
        ),
        Mutant(
            CONVERSATIONS,
            "node.session == session, node.is_taken, node.number)",
            "node.session == session, node.number)",
            "a reply that was not delivered may be continued in place of its delivered twin",
        ),
        Mutant(
            CONVERSATIONS,
            "if node.parent is not None or node.tools_key != NO_TOOLS:",
            "if node.parent is not None:",
            "a first reply with tools may be an aside",
        ),
        Mutant(
            CONVERSATIONS,
            "if node.children or node.is_quoted_later:",
            "if node.children:",
            "a summary that a later conversation quotes is an aside",
        ),
    ],
}

EQUIVALENT = ("an answered request may be called lost", "Adam's second moment decays as the first")
"""RE_ENQUEUE leaves answered requests alone, and each update sets Adam's numbers again, so these change nothing."""


def caught_by(mutant: Mutant, copy: Path) -> str:
    """The first test that fails in `copy`, an unchanged copy of the repository, with this change; empty if none does."""
    file = copy / mutant.path
    text = file.read_text()
    assert text.count(mutant.was) == 1, f"{mutant.path}: {mutant.was!r} occurs {text.count(mutant.was)} times"
    file.write_text(text.replace(mutant.was, mutant.becomes))
    try:
        package = f"tests/{mutant.path.rpartition('/')[0]}"
        for paths in (chosen_for([mutant.path], copy), [package]):
            words = ["-m", QUICK, *OPTIONS, *paths]
            results = run_pytest(words, copy / ".run/mutant.jsonl", root=copy)
            if results.failed:
                return next(iter(results.failed))
        return ""
    finally:
        file.write_text(text)


def main(words: list[str]) -> int:
    files = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True
    )
    with tempfile.TemporaryDirectory(prefix="swerve-mutants-") as folder:
        copy = Path(folder)
        for name in filter(None, files.stdout.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
        # Some tests ask git which files there are.
        subprocess.run(["git", "-C", folder, "init", "-q"], check=True)
        subprocess.run(["git", "-C", folder, "add", "-A"], check=True)
        (copy / ".venv").symlink_to(ROOT / ".venv")
        rows = [(part, mutant) for part, mutants in MUTANTS.items() for mutant in mutants]
        num_living = 0
        for part, mutant in rows:
            row = f"| {part} | `{mutant.path.rpartition('/')[2]}`: {mutant.says} |"
            if words and not any(word in row for word in words):
                continue
            test = caught_by(mutant, copy)
            num_living += not test and mutant.says not in EQUIVALENT
            print(f"{row} {f'`{test}`' if test else 'lives'} |", flush=True)
    return 1 if num_living else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
