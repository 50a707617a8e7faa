// Which numbers of a run are drawn, and how.

import { bars } from "../charts/bars.js";
import { lines } from "../charts/lines.js";
import { element } from "../dom.js";
import { percent, seconds, words } from "../format.js";

// A curve that is `rare` is shown only where it is not always zero.
const CURVES = [
  { title: "Training reward, mean, with 95 % intervals", fields: ["reward_mean"], error: "reward_error", floor: 0, ceiling: 1 },
  { title: "Entropy (nats)", fields: ["entropy"], floor: 0 },
  { title: "Lag, and how far admission may run ahead (versions)", fields: ["lag_mean", "lag_max", "ahead_versions"], floor: 0 },
  { title: "Log-prob gap, engine against learner (nats)", fields: ["logprob_gap_mean", "logprob_gap_max"], floor: 0 },
  { title: "Tokens of an episode, sampled, mean", fields: ["mean_sampled_tokens"], floor: 0 },
  { title: "Turns of an episode, mean", fields: ["mean_turns"], floor: 0 },
  { title: "Tokens of a step", fields: ["num_trained_tokens", "num_unique_sampled_tokens"], floor: 0 },
  { title: "Tokens per second, of all samples, while the learner works", fields: ["tokens_per_s"], floor: 0 },
  { title: "Importance ratio", fields: ["ratio_mean", "ratio_max"] },
  { title: "Effective sample size, share", fields: ["ess_share"], floor: 0, ceiling: 1 },
  { title: "Tokens masked or vetoed, share", fields: ["masked_share", "vetoed_share"], floor: 0, rare: true },
  { title: "Gradient norm", fields: ["grad_norm"], floor: 0 },
  { title: "Loss", fields: ["loss"] },
  { title: "Groups dropped", fields: ["groups_dropped_zero_variance", "groups_dropped_invalid"], floor: 0, rare: true },
  { title: "Members of groups enqueued again, or withdrawn", fields: ["members_refilled", "members_withdrawn"], floor: 0,
    rare: true },
  { title: "Learning rate", fields: ["lr"], floor: 0 },
];
const PARTS = ["wait_s", "forward_s", "backward_s", "optimizer_s", "audit_s", "export_s", "engines_s", "checkpoint_s",
  "evaluation_s", "other_s"];
const OLD_PARTS = ["wait_s", "train_s"]; // of journals without wall_s
const NOT_DRAWN = new Set(["step", "at", "version", "wall_s", "reward_error", ...PARTS, ...OLD_PARTS,
  ...CURVES.flatMap((one) => one.fields)]);
const CONFIDENT = 1.96; // standard errors on each side hold 95 %

/** Charts of curves. `runs` is [{name, series}]; the first is the page's, the others lie over it. */
export function charts(runs) {
  const { marks } = runs[0].series;
  const happens = ({ fields }) => runs.some(({ series }) => series.steps.some((row) => fields.some((field) => row[field])));
  const known = CURVES.filter((curve) => !curve.rare || happens(curve)).map((curve) => ({ ...curve, curves: ofFields(runs, curve.fields, curve.error) }));
  const rest = otherFields(runs).map((field) => ({ title: words(field), curves: ofFields(runs, [field]) }));
  const draw = (charts) => charts.map((chart) => lines({ ...chart, marks }));
  const heldOut = lines({ title: "Held-out success, with 95 % intervals", floor: 0, ceiling: 1, marks, format: percent,
    curves: runs.flatMap(evaluationCurves(runs.length > 1)) });
  const judged = rest.filter((chart) => chart.title.startsWith("judging"));
  const others = rest.filter((chart) => !chart.title.startsWith("judging"));
  return [heldOut, ...draw(known), ...draw(judged), more(() => draw(others), others.length)];
}

/** Charts of what totals are made of, of one run. */
export function breakdowns(series) {
  const { steps, marks } = series;
  const stacks = (parts) => steps.map((row) => ({ x: row.step, parts: parts(row) }));
  const shares = (title, name) =>
    bars({ title, share: true, format: percent, marks, stacks: stacks((row) => row[name] ?? {}) });
  return [
    bars({ title: "Time of a step by its parts", format: seconds, marks, stacks: stacks(parts) }),
    bars({ title: "Where rollouts were during a step, mean", marks, stacks: stacks((row) => row.places ?? {}) }),
    shares("How training episodes ended, share", "outcomes"),
    shares("What became of training episodes, share", "fates"),
    bars({ title: "Slots of workers during a step, mean", marks, stacks: stacks((row) => row.slots ?? {}) }),
    shares("Admission: open, or closed by what, share of the time", "admission"),
  ];
}

function parts(row) {
  const names = Number.isFinite(row.wall_s) && row.wall_s > 0 ? PARTS : OLD_PARTS;
  const named = names.map((name) => [name.replace(/_s$/, ""), row[name]]);
  return Object.fromEntries(named.filter(([, value]) => Number.isFinite(value) && value > 0));
}

/** The curves of some numbers; where runs lie over one another, of the first number only, or nobody could tell them apart. */
function ofFields(runs, fields, error) {
  const shown = runs.length > 1 ? fields.slice(0, 1) : fields;
  return runs.flatMap(({ name, series }) => shown.map((field) => ({
    name: [runs.length > 1 && name, fields.length > 1 && words(field)].filter(Boolean).join(" "),
    points: series.steps.map((row) => ({ x: row.step, y: row[field], error: CONFIDENT * (row[error] ?? 0) })),
  })));
}

function evaluationCurves(named) {
  return ({ name, series }, run) => {
    const groups = new Map();
    for (const row of series.evaluations) {
      const key = [named && name, row.tasks, row.greedy ? "greedy" : "sampled"].filter(Boolean).join(" ");
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push({ x: row.step, y: row.success, error: CONFIDENT * (row.standard_error ?? 0) });
    }
    return [...groups].map(([key, points]) => ({ name: key, points: points.sort((a, b) => a.x - b.x), dots: true,
      run: named ? run : undefined, dashed: named && key.endsWith("sampled") }));
  };
}

function otherFields(runs) {
  const found = new Set(runs.flatMap(({ series }) => series.steps.flatMap((row) =>
    Object.keys(row).filter((name) => Number.isFinite(row[name]) && !NOT_DRAWN.has(name)))));
  return [...found].sort();
}

let opened = false;

/** The remaining charts, drawn when they are opened. They stay open while the page is drawn again. */
function more(draw, count) {
  if (!count) return null;
  const box = element("details", { class: "more", open: opened }, element("summary", {}, `${count} more numbers`));
  const fill = () => box.childElementCount > 1 || box.append(element("div", { class: "charts" }, draw()));
  if (opened) fill();
  box.addEventListener("toggle", () => {
    opened = box.open;
    if (opened) fill();
  });
  return box;
}
