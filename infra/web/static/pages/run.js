// The curves of a run, of its steps and evaluations, with other runs laid over it: which numbers are drawn, and how.

import { address, remember } from "../address.js";
import { get, ofRun } from "../api.js";
import { bars, lines } from "../charts.js";
import { badge, element, facts, notice, redraw, section, table, unwell } from "../dom.js";
import { ago, duration, moment, number, percent, seconds, words } from "../format.js";

// A curve that is `rare` is shown only where it is not always zero.
const CURVES = [
  { title: "Training reward, mean, with 95 % intervals", fields: ["reward_mean"], ends: ["reward_low", "reward_high"], floor: 0, ceiling: 1 },
  { title: "Reverse KL to the teacher (nats a token), with 95 % intervals", fields: ["distill_reverse_kl"],
    ends: ["distill_reverse_kl_low", "distill_reverse_kl_high"], rare: true },
  { title: "Entropy (nats)", fields: ["entropy"], floor: 0 },
  { title: "Lag, and how far admission may run ahead (versions)", fields: ["lag_mean", "lag_max", "ahead_versions"], floor: 0 },
  { title: "Log-prob gap, engine against learner (nats)", fields: ["logprob_gap_mean", "logprob_gap_max"], floor: 0 },
  { title: "Tokens of an episode, sampled, mean", fields: ["mean_sampled_tokens"], floor: 0 },
  { title: "Turns of an episode, mean", fields: ["mean_turns"], floor: 0 },
  { title: "Tokens of a step", fields: ["num_trained_tokens", "num_unique_sampled_tokens"], floor: 0 },
  { title: "Tokens per second, of all samples, while the learner works", fields: ["tokens_per_s"], floor: 0 },
  { title: "Importance ratio", fields: ["ratio_mean", "ratio_max"] },
  { title: "Effective sample size, share of the tokens, and of their signal", fields: ["signal_ess_share", "ess_share"], floor: 0, ceiling: 1 },
  { title: "Masked or vetoed, share of the signal, and of the tokens",
    fields: ["signal_masked_share", "signal_vetoed_share", "masked_share", "vetoed_share"], floor: 0, rare: true },
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
const NOT_DRAWN = new Set(["step", "at", "began_at", "trained_at", "version", "wall_s", "reward_low", "reward_high",
  "distill_reverse_kl_low", "distill_reverse_kl_high", ...PARTS, ...OLD_PARTS,
  ...CURVES.flatMap((one) => one.fields)]);

/** Charts of curves. `runs` is [{name, series}]; the first is the page's, the others are drawn over it. */
function charts(runs) {
  const { marks } = runs[0].series;
  const happens = ({ fields }) => runs.some(({ series }) => series.steps.some((row) => fields.some((field) => row[field])));
  const known = CURVES.filter((curve) => !curve.rare || happens(curve)).map((curve) => ({ ...curve, curves: ofFields(runs, curve.fields, curve.ends) }));
  const rest = otherFields(runs).map((field) => ({ title: words(field), curves: ofFields(runs, [field]) }));
  const draw = (charts) => charts.map((chart) => lines({ ...chart, marks }));
  const heldOut = lines({ title: "Held-out success, with 95 % intervals", floor: 0, ceiling: 1, marks, format: percent,
    curves: runs.flatMap(evaluationCurves(runs.length > 1)) });
  const judged = rest.filter((chart) => chart.title.startsWith("judging"));
  const others = rest.filter((chart) => !chart.title.startsWith("judging"));
  return [heldOut, ...draw(known), ...draw(judged), more(() => draw(others), others.length)];
}

/** Charts of what totals are made of, of one run. */
function breakdowns(series) {
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

/** The curves of some numbers; where several runs are drawn, of the first number only, or nobody could distinguish them. */
function ofFields(runs, fields, [low, high] = []) {
  const shown = runs.length > 1 ? fields.slice(0, 1) : fields;
  return runs.flatMap(({ name, series }) => shown.map((field) => ({
    name: [runs.length > 1 && name, fields.length > 1 && words(field)].filter(Boolean).join(" "),
    points: series.steps.map((row) => ({ x: row.step, y: row[field], low: row[low], high: row[high] })),
  })));
}

function evaluationCurves(named) {
  return ({ name, series }, run) => {
    const groups = new Map();
    for (const row of series.evaluations) {
      const key = [named && name, row.tasks, row.greedy ? "greedy" : "sampled"].filter(Boolean).join(" ");
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push({ x: row.step, y: row.success, low: row.success_low, high: row.success_high });
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

const OVERLAP_STEPS = 50;
const MOST_MARKS = [200, 200, 50]; // alarms, all else, publications

export async function show(here) {
  const others = (await get("/api/runs")).runs.filter((run) => run.id !== here.run && run.directory);
  const store = new Map();
  const top = element("div");
  const drawn = element("div");
  let chosen = (here.query.with ?? "").split(",").filter((id) => others.some((run) => run.id === id));

  async function draw() {
    const ids = [here.run, ...chosen];
    const found = await Promise.all(ids.map((id) => newest(store, id)));
    const named = found.map((series, index) => ({ series, name: ids[index] }));
    redraw(drawn,
      element("p", { class: "hint" }, "Ticks on the axis are published weight versions; dashed lines are what is listed under What happened."),
      element("div", { class: "charts" }, charts(named)),
      element("div", { class: "charts" }, breakdowns(named[0].series)),
      evaluations(named[0].series), marks(named[0].series));
  }
  async function refresh() {
    const [{ runs }, status] = await Promise.all([get("/api/runs"), get(ofRun(here.run, "status"))]);
    const run = runs.find((one) => one.id === here.run);
    redraw(top, ...(run ? [run.live === null ? notice(status.gone ?? "") : "", unwell({ ...status, pauses: run.live ? status.pauses : [] }), summary(run),
      status.queue && (run.live || status.queue.dead) ? flow(here.run, status) : ""]
      : [notice("The server no longer knows this run.")]));
    await draw();
  }
  async function choose(ids) {
    chosen = ids;
    remember(here, { with: ids.join(",") });
    await draw();
  }
  await refresh();
  const body = element("div", {}, top, overlays(others, chosen, choose), drawn);
  return { title: here.run, body, refresh, kinds: ["steps", "evaluations", "publications", "endings", "alarms", "status"] };
}

/** The series of a run: what is stored, with the newest rows asked for again, because some arrive late. */
async function newest(store, id) {
  const known = store.get(id);
  const after = (known?.steps.at(-1)?.step ?? 0) - OVERLAP_STEPS;
  if (!known || after <= 0) return keep(store, id, await get(ofRun(id, "series")));
  const late = await get(ofRun(id, "series"), { after });
  // No row where there was one: the run was resumed from an older checkpoint.
  if (!late.steps.length) return keep(store, id, await get(ofRun(id, "series")));
  const merged = { ...late };
  for (const name of ["steps", "evaluations", "publications", "deliveries", "marks"])
    merged[name] = [...(known[name] ?? []).filter((row) => row.step <= after), ...(late[name] ?? [])];
  return keep(store, id, merged);
}

function keep(store, id, series) {
  store.set(id, series);
  return series;
}

function summary(run) {
  const unknown = run.live === null ? badge("not known") : badge("no trainer", "warn");
  const state = run.live ? badge(...(run.complaints.length ? ["unwell", "bad"] : ["live", "good"]))
    : run.ended ? badge("ended") : unknown;
  return facts([
    ["State", element("span", {}, state, " ", run.live ? `${run.phase ?? ""} ${run.detail ?? ""}` : run.ended)],
    ["Step", run.num_steps ? `${number(run.step)} of ${number(run.num_steps)}` : number(run.step)],
    ["Version", number(run.version)],
    ["Held-out success", run.success === null ? "" : percent(run.success)],
    ["Started", moment(run.started_at)],
    ["Last heard", ago(run.updated_at)],
    ["Directory", run.directory || "only in Redis"],
  ]);
}

/** What is under way at the moment, and why no more is. */
function flow(run, { queue, admission, lags }) {
  return facts([
    ["Queued", number(queue.queued)],
    ["Claimed", number(queue.claimed.length)],
    ["Finished per minute", number(queue.finished_per_min)],
    ["Arrived, not read yet", number(queue.unread)],
    ["Dead", queue.dead ? element("a", { href: address("fleet", run) }, badge(`${number(queue.dead)}, listed there`, "bad")) : ""],
    ["Lag of what arrived last", lags?.length ? number(lags.at(-1)) : ""],
    ["Admission", admission],
    ["More", element("a", { href: address("fleet", run) }, "workers, engines and claims")],
  ]);
}

function overlays(others, chosen, choose) {
  if (!others.length) return "";
  const boxes = others.map((run) => element("label", {},
    element("input", { type: "checkbox", value: run.id, checked: chosen.includes(run.id) }), ` ${run.id}`));
  const form = element("fieldset", { class: "overlays" }, element("legend", {}, "Lay over it"), boxes);
  form.addEventListener("change", () =>
    choose([...form.querySelectorAll("input:checked")].map((box) => box.value)));
  return form;
}

function evaluations(series) {
  const passes = [...new Set(series.evaluations.flatMap((row) => Object.keys(row.pass_at ?? {})))];
  return section("Held-out evaluations", table("Held-out evaluations, newest first", [
    { name: "Name", cell: (row) => row.name },
    { name: "Decoding", cell: (row) => (row.greedy ? "greedy" : "sampled") },
    { name: "Step", number: true, cell: (row) => number(row.step) },
    { name: "Version", number: true, cell: (row) => number(row.version) },
    { name: "Success, 95 % interval", number: true, cell: (row) => `${percent(row.success)} (${percent(row.success_low)} to ${percent(row.success_high)})` },
    ...passes.map((count) => ({ name: `pass@${count}`, number: true, cell: (row) => percent(row.pass_at?.[count]) })),
    { name: "Episodes", number: true, cell: (row) => number(row.num_episodes) },
    { name: "Failed", number: true, cell: (row) => number(row.num_failed) },
    { name: "Turns", number: true, cell: (row) => number(row.mean_turns) },
    { name: "Tokens", number: true, cell: (row) => number(row.mean_sampled_tokens) },
  ], [...series.evaluations].reverse(), "There was no evaluation yet."));
}

/** Alarms and all else first: a run publishes at every step, and has few of them. */
function marks(series) {
  const newest = [...series.marks].reverse();
  const kinds = [newest.filter((mark) => mark.kind === "alarm"), newest.filter((mark) => mark.kind !== "alarm" && mark.kind !== "published"),
    newest.filter((mark) => mark.kind === "published")];
  const shown = kinds.flatMap((found, index) => found.slice(0, MOST_MARKS[index]));
  const left = newest.length - shown.length;
  const first = series.steps[0]?.at ?? series.marks[0]?.at;
  return section("What happened", table("Alarms, then all else, then publications, each newest first", [
    { name: "After", number: true, title: "since the first row of the journal", cell: (mark) => duration(mark.at - Math.min(first, mark.at)) },
    { name: "Step", number: true, cell: (mark) => number(mark.step) },
    { name: "Kind", cell: (mark) => badge(mark.kind, mark.kind === "published" ? "plain" : "warn") },
    { name: "What", cell: (mark) => mark.text },
  ], shown), left ? element("p", { class: "hint" }, `${number(left)} older ones are not listed.`) : "");
}
