// The curves of a run, of its steps and evaluations, with other runs laid over it.

import { address, remember } from "../address.js";
import { get, ofRun } from "../api.js";
import { badge, element, facts, notice, redraw, section, table } from "../dom.js";
import { ago, duration, moment, number, percent } from "../format.js";
import { breakdowns, charts } from "./run_charts.js";

const OVERLAP_STEPS = 50;

export async function show(here) {
  const others = (await get("/api/runs")).filter((run) => run.id !== here.run && run.directory);
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
    const runs = await get("/api/runs");
    const run = runs.find((one) => one.id === here.run);
    const status = run?.live ? await get(ofRun(here.run, "status")) : {};
    redraw(top, ...(run ? [summary(run), status.queue ? flow(here.run, status) : ""]
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
  const state = run.live ? badge("live", "good") : badge(run.ended ? "ended" : "no trainer", run.ended ? "plain" : "warn");
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
    { name: "Success", number: true, cell: (row) => `${percent(row.success)} ± ${percent(1.96 * (row.standard_error ?? 0))}` },
    ...passes.map((count) => ({ name: `pass@${count}`, number: true, cell: (row) => percent(row.pass_at?.[count]) })),
    { name: "Episodes", number: true, cell: (row) => number(row.num_episodes) },
    { name: "Failed", number: true, cell: (row) => number(row.num_failed) },
    { name: "Turns", number: true, cell: (row) => number(row.mean_turns) },
    { name: "Tokens", number: true, cell: (row) => number(row.mean_sampled_tokens) },
  ], [...series.evaluations].reverse(), "There was no evaluation yet."));
}

function marks(series) {
  const shown = [...series.marks].reverse().slice(0, 200);
  const first = series.steps[0]?.at ?? series.marks[0]?.at;
  return section("What happened", table("Events of the run, newest first", [
    { name: "After", number: true, title: "since the first row of the journal", cell: (mark) => duration(mark.at - Math.min(first, mark.at)) },
    { name: "Step", number: true, cell: (mark) => number(mark.step) },
    { name: "Kind", cell: (mark) => badge(mark.kind, mark.kind === "published" ? "plain" : "warn") },
    { name: "What", cell: (mark) => mark.text },
  ], shown));
}
