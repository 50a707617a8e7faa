// The curves of a run, of its steps and evaluations, with other runs laid over it: which numbers are drawn, and how.

import { address, remember } from "../address.js";
import { get, ofRun } from "../api.js";
import { bars, lines, STEPS } from "../charts.js";
import { badge, element, facts, notice, redraw, saveText, section, table, unwell } from "../dom.js";
import { ago, clock, duration, moment, number, percent, seconds, words } from "../format.js";

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
function charts(runs, view) {
  const marks = placed(runs[0].series.marks, runs[0].series, view);
  const happens = ({ fields }) => runs.some(({ series }) => series.steps.some((row) => fields.some((field) => row[field])));
  const known = CURVES.filter((curve) => !curve.rare || happens(curve)).map((curve) => ({ ...curve, curves: ofFields(runs, view, curve.fields, curve.ends) }));
  const rest = otherFields(runs).map((field) => ({ title: words(field), curves: ofFields(runs, view, [field]) }));
  const heldOut = { title: "Held-out success, with 95 % intervals", floor: 0, ceiling: 1, format: percent,
    curves: runs.flatMap(evaluationCurves(runs.length > 1, view)) };
  const judged = rest.filter((chart) => chart.title.startsWith("judging"));
  const others = rest.filter((chart) => !chart.title.startsWith("judging"));
  const draw = (charts) => charts.map((chart) => lines({ ...chart, marks, view }));
  // Who looks for a number by its name finds it among all of them.
  if (view.match) return draw([heldOut, ...known, ...rest].filter((chart) => isNamed(chart, view)));
  return [...draw([heldOut, ...known, ...judged]), more(() => draw(others), others.length)];
}

/** Charts of what totals are made of, of one run. */
function breakdowns(series, view) {
  const marks = placed(series.marks, series, view);
  const drawn = (title, parts, options = {}) => isNamed({ title }, view) && bars({ title, marks, view, ...options,
    stacks: placed(series.steps, series, view).map((row) => ({ x: row.x, parts: parts(row) })) });
  const shares = (title, name) => drawn(title, (row) => row[name] ?? {}, { share: true, format: percent });
  return [
    drawn("Time of a step by its parts", parts, { format: seconds }),
    drawn("Where rollouts were during a step, mean", (row) => row.places ?? {}),
    shares("How training episodes ended, share", "outcomes"),
    shares("What became of training episodes, share", "fates"),
    drawn("Slots of workers during a step, mean", (row) => row.slots ?? {}),
    shares("Admission: open, or closed by what, share of the time", "admission"),
  ].filter(Boolean);
}

/** The rows with their place on the axis: the step, or the seconds since the run's first row. */
function placed(rows, series, { byTime }) {
  const first = Math.min(...[series.steps[0]?.at, series.marks[0]?.at].filter(Number.isFinite));
  return rows.map((row) => ({ ...row, x: byTime ? row.at - first : row.step }));
}

/** Whether the title or a number of the chart has the text for which the reader looks. */
function isNamed({ title, fields = [] }, { match }) {
  return [title, ...fields, ...fields.map(words)].some((name) => name.toLowerCase().includes(match.toLowerCase()));
}

function parts(row) {
  const names = Number.isFinite(row.wall_s) && row.wall_s > 0 ? PARTS : OLD_PARTS;
  const named = names.map((name) => [name.replace(/_s$/, ""), row[name]]);
  return Object.fromEntries(named.filter(([, value]) => Number.isFinite(value) && value > 0));
}

/** The curves of some numbers; where several runs are drawn, of the first number only, or nobody could distinguish them. */
function ofFields(runs, view, fields, [low, high] = []) {
  const shown = runs.length > 1 ? fields.slice(0, 1) : fields;
  return runs.flatMap(({ name, series }) => shown.map((field) => ({
    name: [runs.length > 1 && name, fields.length > 1 && words(field)].filter(Boolean).join(" "),
    points: placed(series.steps, series, view).map((row) => ({ x: row.x, y: row[field], low: row[low], high: row[high] })),
  })));
}

function evaluationCurves(named, view) {
  return ({ name, series }, run) => {
    const groups = new Map();
    for (const row of placed(series.evaluations, series, view)) {
      const key = [named && name, row.tasks, row.greedy ? "greedy" : "sampled"].filter(Boolean).join(" ");
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push({ x: row.x, y: row.success, low: row.success_low, high: row.success_high });
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

/** How the address says that curves are drawn. */
function viewOf(here, changed) {
  const { smooth, axis, log, match, from, to } = here.query;
  const [low, high] = [Number.parseFloat(from), Number.parseFloat(to)];
  const byTime = axis === "time";
  return { byTime, log: log === "1", match: match ?? "", smoothing: Math.min(0.99, Math.max(0, Number(smooth) || 0)),
    range: high > low ? [low, high] : null,
    formatX: byTime ? duration : STEPS.formatX, label: byTime ? "time" : STEPS.label,
    open: byTime ? null : (step) => { location.hash = address("step", here.run, String(step)); },
    zoom: ([start, end]) => changed({ from: start.toPrecision(6), to: end.toPrecision(6) }) };
}

/** The controls of the charts. `changed` is called with what changes in the address. */
function controls(here, series, changed) {
  const { query } = here;
  const ends = (name, label) => element("label", {}, label, element("input", { name, size: 8, inputmode: "decimal", autocomplete: "off",
    value: query[name] ?? "", change: (event) => changed({ [name]: event.target.value }) }));
  const form = element("form", { class: "filters", "aria-label": "How curves are drawn", submit: (event) => event.preventDefault() },
    element("label", {}, "Find a number", element("input", { name: "match", type: "search", size: 16, value: query.match ?? "", autocomplete: "off",
      input: (event) => changed({ match: event.target.value }) })),
    element("label", {}, "Smoothing", element("input", { name: "smooth", type: "range", min: 0, max: 0.99, step: 0.01, value: query.smooth ?? 0,
      input: (event) => changed({ smooth: Number(event.target.value) ? event.target.value : "" }) })),
    element("label", {}, "Along", element("select", { name: "axis", change: (event) => changed({ axis: event.target.value, from: "", to: "" }) },
      [["", "steps"], ["time", "time"]].map(([value, text]) => element("option", { value, selected: (query.axis ?? "") === value }, text)))),
    element("label", {}, "Heights", element("select", { name: "log", change: (event) => changed({ log: event.target.value }) },
      [["", "linear"], ["1", "logarithmic"]].map(([value, text]) => element("option", { value, selected: (query.log ?? "") === value }, text)))),
    ends("from", "From"), ends("to", "To"),
    element("button", { type: "button", click: () => changed({ from: "", to: "" }) }, "Show all"),
    element("button", { type: "button", click: () => saveText(`${here.run} steps.csv`, stepsAsCsv(series())) }, "Save the steps as CSV"));
  return { form, say: () => {
    for (const name of ["from", "to"]) form.elements[name].value = here.query[name] ?? "";
  } };
}

/** All numbers of all steps, one step a line. */
function stepsAsCsv({ steps }) {
  const columns = [...new Set(steps.flatMap((row) => Object.keys(row).filter((name) => typeof row[name] !== "object" || row[name] === null)))];
  return [columns, ...steps.map((row) => columns.map((name) => row[name] ?? ""))].map((row) => row.join(",")).join("\r\n");
}

export async function show(here) {
  let known = await get("/api/runs");
  const others = known.runs.filter((run) => run.id !== here.run && run.directory);
  const store = new Map();
  const top = element("div");
  const drawn = element("div");
  let chosen = (here.query.with ?? "").split(",").filter((id) => others.some((run) => run.id === id));

  let named = [];
  function change(query) {
    remember(here, { ...here.query, ...query });
    asked.say();
    paint();
  }
  const asked = controls(here, () => named[0].series, change);
  function paint() {
    const view = viewOf(here, change);
    const found = [charts(named, view), breakdowns(named[0].series, view)];
    redraw(drawn,
      element("p", { class: "hint" }, "Ticks on the axis are published weight versions; dashed lines are what is listed under What happened. "
        + "A click on a curve opens the page of the step; drawing across a chart enlarges that part in all of them."),
      ...found.map((of) => element("div", { class: "charts" }, of)),
      found.flat().some(Boolean) ? "" : notice(`No number has ${view.match || "a value there"}.`),
      evaluations(named[0].series), marks(here, named[0].series, (kind) => change({ kind })));
  }
  async function draw() {
    const ids = [here.run, ...chosen];
    const found = await Promise.all(ids.map((id) => newest(store, id)));
    named = found.map((series, index) => ({ series, name: ids[index] }));
    paint();
  }
  async function refresh() {
    const [{ runs }, status] = await Promise.all([known ?? get("/api/runs", { only: here.run }), get(ofRun(here.run, "status"))]);
    known = null;
    const run = runs.find((one) => one.id === here.run);
    redraw(top, ...(run ? [run.live === null ? notice(status.gone ?? "") : "", unwell({ ...status, pauses: run.live ? status.pauses : [] }), summary(run),
      status.queue && (run.live || status.queue.dead) ? flow(here.run, status) : ""]
      : [notice("The server no longer knows this run.")]));
    await draw();
  }
  async function choose(ids) {
    chosen = ids;
    remember(here, { ...here.query, with: ids.join(",") });
    await draw();
  }
  await refresh();
  const body = element("div", {}, top, overlays(others, chosen, choose), asked.form, drawn);
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

const MOST_SHOWN = 30; // runs that are offered at a time; a name finds the others

/** The other runs, of which some can be laid over this one. */
function overlays(others, chosen, choose) {
  if (!others.length) return "";
  const list = element("div", { class: "choices" });
  const search = element("input", { type: "search", size: 16, placeholder: "name", "aria-label": "Find a run", autocomplete: "off" });
  let wanted = chosen;
  function offer() {
    const named = others.filter((run) => `${run.id} ${run.name}`.toLowerCase().includes(search.value.toLowerCase()));
    const first = [...others.filter((run) => wanted.includes(run.id)), ...named.filter((run) => !wanted.includes(run.id))];
    const left = first.length - MOST_SHOWN;
    redraw(list, first.slice(0, MOST_SHOWN).map((run) => element("label", {}, element("input", { type: "checkbox", value: run.id,
      checked: wanted.includes(run.id) }), ` ${run.id}`)), left > 0 ? element("span", { class: "hint" }, `and ${number(left)} more`) : "");
  }
  list.addEventListener("change", (event) => {
    wanted = event.target.checked ? [...wanted, event.target.value] : wanted.filter((id) => id !== event.target.value);
    choose(wanted);
  });
  search.addEventListener("input", offer);
  offer();
  return element("fieldset", { class: "overlays" }, element("legend", {}, "Lay over it"), others.length > MOST_SHOWN ? search : "", list);
}

function evaluations(series) {
  const passes = [...new Set(series.evaluations.flatMap((row) => Object.keys(row.pass_at ?? {})))];
  return section("Held-out evaluations", table("Held-out evaluations, newest first", [
    { name: "Name", cell: (row) => row.name },
    { name: "Tasks", cell: (row) => row.tasks || "held out" },
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

/** Alarms and all else first: a run publishes at every step, and has few of them. `choose` is called with the kind that is to be listed. */
function marks(here, series, choose) {
  const kind = here.query.kind ?? "";
  const names = [...new Set(series.marks.map((mark) => mark.kind))].sort();
  const chooser = names.length < 2 ? "" : element("p", {}, element("label", {}, "Kind ",
    element("select", { name: "kind", change: (event) => choose(event.target.value) },
      ["", ...names].map((name) => element("option", { value: name, selected: name === kind }, name || "all")))));
  const newest = series.marks.filter((mark) => !kind || mark.kind === kind).reverse();
  const kinds = [newest.filter((mark) => mark.kind === "alarm"), newest.filter((mark) => mark.kind !== "alarm" && mark.kind !== "published"),
    newest.filter((mark) => mark.kind === "published")];
  const shown = kinds.flatMap((found, index) => found.slice(0, MOST_MARKS[index]));
  const left = newest.length - shown.length;
  const first = series.steps[0]?.at ?? series.marks[0]?.at;
  return section("What happened", chooser, table("Alarms, then all else, then publications, each newest first", [
    { name: "At", cell: (mark) => element("time", { title: moment(mark.at) }, clock(mark.at)) },
    { name: "After", number: true, title: "since the first row of the journal", cell: (mark) => duration(mark.at - Math.min(first, mark.at)) },
    { name: "Step", number: true, cell: (mark) => (mark.step ? element("a", { href: address("step", here.run, String(mark.step)) }, number(mark.step)) : "0") },
    { name: "Kind", cell: (mark) => badge(mark.kind, mark.kind === "published" ? "plain" : "warn") },
    { name: "What", cell: (mark) => mark.text },
  ], shown), left ? element("p", { class: "hint" }, `${number(left)} older ones are not listed.`) : "");
}
