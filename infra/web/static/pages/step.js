// One optimizer step: its rollouts on the wall clock, what waited for what, its numbers, and what each rollout did to the weights.

import { address, remember } from "../address.js";
import { get, ofRun } from "../api.js";
import { colour } from "../charts.js";
import { element, facts, redraw, section, svg, table } from "../dom.js";
import { clock, duration, moment, number, percent, words } from "../format.js";
import { fate, reward, versions } from "./rollouts.js";

const WIDTH = 1000; // of the drawing, in its own units; the page stretches it
const HEIGHT = 14;
const LEAST_WIDTH = 2; // so that what was short can be seen
const NOT_A_NUMBER = new Set(["step", "at", "began_at", "trained_at", "by_lag"]);

// How the rollouts can be ordered: by a number of each, the largest first.
const ORDERS = {
  group: { name: "group", of: null },
  lag: { name: "staleness", of: (row) => row.lag },
  turns: { name: "turns", of: (row) => row.num_turns },
  tokens: { name: "sampled tokens", of: (row) => row.sampled_tokens },
  reward: { name: "reward", of: (row) => row.reward },
  failed: { name: "failed commands", of: (row) => row.num_failed_commands },
  took: { name: "time played", of: (row) => row.finished_at - row.claimed_at },
  finished: { name: "arrival", of: (row) => -row.finished_at },
  loss: { name: "part of the loss", of: (row, effects) => Math.abs(effects[row.request_id]?.loss ?? 0) },
};

export async function show(here) {
  const drawn = element("div");
  let page = null;
  let effects = {};

  function paint() {
    redraw(drawn, head(here, page), waits(here, page),
      section("Its rollouts on the clock", order(here, effects, paint), clockOf(here, page, effects)),
      section("Rollouts", rollouts(here, page, effects)),
      section("What happened meanwhile", events(page)),
      section("All of its numbers", numbers(page.step)));
  }
  async function refresh() {
    page = await get(ofRun(here.run, "steps", here.more));
    paint();
    // Bodies are read for these, so the page does not wait for them.
    effects = (await get(ofRun(here.run, "steps", `${here.more}`, "effects")).catch(() => ({ effects: {} }))).effects;
    if (Object.keys(effects).length) paint();
  }
  await refresh();
  // Rollouts of its groups that are still open may settle; the rest of a step does not change.
  return { title: `Step ${here.more}`, body: drawn, refresh, kinds: ["reading"] };
}

function head(here, { step, previous, next, num_groups: groups, reward: mean, rollouts: rows }) {
  const to = (number, text) => (number === null ? "" : element("a", { href: address("step", here.run, String(number)) }, text));
  return element("div", {}, element("p", { class: "pager" }, to(previous, `← Step ${previous}`), " ", to(next, `Step ${next} →`)), facts([
    ["Loss", number(step.loss)],
    ["Gradient norm", number(step.grad_norm)],
    ["From weights", `version ${number(step.version)}`],
    ["Groups", number(groups)],
    ["Rollouts trained", number(step.num_trajectories)],
    ["Reward of these groups", mean ? `${number(mean.value)} (${number(mean.low)} to ${number(mean.high)}, 95 %)` : ""],
    ["Reward of all episodes since the step before", number(step.reward_mean)],
    ["Lag", `${number(step.lag_mean)} mean, ${number(step.lag_max)} at most`],
    ["Trained tokens", number(step.num_trained_tokens)],
    ["Masked", percent(step.masked_share)],
    ["Taken at", step.at ? element("time", { title: moment(step.at) }, clock(step.at)) : ""],
    ["Rollouts", element("a", { href: address("rollouts", here.run, "", { step: here.more }) }, `the ${number(rows.filter((row) => row.role === "trained").length)} trained ones as a table`)],
  ]));
}

/** What waited for what, in sentences. */
function waits(here, { waits: found, rollouts: rows }) {
  const last = rows.find((row) => row.request_id === found.last);
  const said = [
    found.played_s === null ? "" : `A trained rollout was ${found.queued_s === null ? "" : `${duration(found.queued_s)} in the queue, `}`
      + `${duration(found.played_s)} on a worker${found.waited_s === null ? "" : `, and ${duration(found.waited_s)} ready before its step began`} (means).`,
    found.learner_waited_s > 0 ? `The learner waited ${duration(found.learner_waited_s)} for rollouts.` : "The learner did not wait for rollouts.",
  ].filter(Boolean).join(" ");
  const arrived = last && ["The last one to arrive was ", element("a", { href: address("rollout", here.run, last.request_id) }, last.task_id),
    ` after ${duration(last.finished_at - last.claimed_at)} on ${last.worker || "its worker"}`,
    found.last_before_step_s === null ? "." : `, ${duration(Math.max(0, found.last_before_step_s))} before the step began.`];
  return element("p", {}, said, " ", arrived || "");
}

function order(here, effects, paint) {
  const known = Object.entries(ORDERS).filter(([name]) => name !== "loss" || Object.keys(effects).length);
  return element("p", {}, element("label", {}, "Ordered by ", element("select", { name: "order", change: (event) => {
    remember(here, { ...here.query, order: event.target.value });
    paint();
  } }, known.map(([name, { name: text }]) => element("option", { value: name, selected: (here.query.order ?? "group") === name }, text)))));
}

function ordered(here, rows, effects) {
  const of = ORDERS[here.query.order]?.of;
  const value = (row) => of(row, effects) ?? -Infinity;
  return of ? [...rows].sort((a, b) => value(b) - value(a)) : rows;
}

/** A lane for each rollout: pale in the queue, in its version's colour on a worker, thin until its step began. */
function clockOf(here, page, effects) {
  const { begins_at: start, ends_at: end, step, rollouts: rows } = page;
  if (!(end > start)) return element("p", { class: "empty" }, "The journal has no times of them.");
  const x = (at) => (WIDTH * (at - start)) / (end - start);
  const known = [...new Set(rows.map((row) => row.version_first).filter((version) => version !== null))].sort((a, b) => a - b);
  const lanes = ordered(here, rows, effects).map((row) => element("a", { class: "lane", href: address("rollout", here.run, row.request_id),
    "aria-label": told(row) }, element("span", { class: "label" }, reward(row), " ", row.task_id, failed(row)), lane(row, step, x, known)));
  const legend = element("ul", { class: "legend" }, known.map((version, index) => element("li", { class: colour(index) }, `version ${version}`)),
    element("li", { class: "colour8 pale" }, "in the queue"), element("li", { class: "trains" }, "the learner works on the step"),
    rows.some((row) => row.num_failed_commands) ? element("li", { class: "unmarked" }, "✗ a command failed") : "");
  return element("figure", { class: "chart lanes" }, legend, lanes,
    element("div", { class: "lane", "aria-hidden": "true" }, element("span"), element("span", { class: "ends" },
      element("time", { title: moment(start) }, clock(start)), element("span", {}, duration(end - start)), element("time", { title: moment(end) }, clock(end)))));
}

/** A mark at rollouts in which a command failed. */
function failed({ num_failed_commands: count }) {
  return count ? [" ", element("span", { class: "bad", title: count === 1 ? "a command failed" : `${number(count)} commands failed` }, "✗")] : "";
}

function told(row) {
  const played = row.finished_at && row.claimed_at ? `, ${duration(row.finished_at - row.claimed_at)} on a worker` : "";
  const weights = row.version_first === null ? "" : `, weights version ${versions(row)}`;
  return `${row.task_id}, reward ${number(row.reward)}${played}${weights}${row.num_failed_commands ? `, ${number(row.num_failed_commands)} commands failed` : ""}, ${row.role}`;
}

function lane(row, step, x, known) {
  const bar = (from, to, name, y = 0, height = HEIGHT) => (from && to && to >= from ? svg("rect", { class: name, x: x(from), y, height,
    width: Math.max(LEAST_WIDTH, x(to) - x(from)) }) : "");
  const drawnIn = row.version_first === null ? "colour8" : colour(known.indexOf(row.version_first));
  const waited = row.role === "not trained" ? "" : bar(row.finished_at, step.began_at, `bar ${drawnIn}`, HEIGHT / 2 - 1, 2);
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", height: HEIGHT, "aria-hidden": "true" }, svg("title", {}, told(row)),
    bar(step.began_at, step.trained_at, "trains"), bar(row.enqueued_at, row.claimed_at, "bar colour8 pale"), bar(row.claimed_at, row.finished_at, `bar ${drawnIn}`), waited);
}

function rollouts(here, page, effects) {
  const of = (row) => effects[row.request_id];
  const columns = [
    { name: "Task", cell: (row) => element("a", { href: address("rollout", here.run, row.request_id) }, row.task_id) },
    { name: "Group", cell: (row) => `${row.group_id} ${row.member + 1}/${row.group_size}` },
    { name: "Reward", number: true, cell: reward },
    { name: "Outcome", cell: (row) => row.outcome },
    { name: "Fate", cell: (row) => (row.role === "baseline" ? "counts in the baseline" : fate(here.run, row)) },
    { name: "Versions", number: true, cell: versions },
    { name: "Lag", number: true, cell: (row) => number(row.lag) },
    { name: "Turns", number: true, cell: (row) => number(row.num_turns) },
    { name: "Failed commands", number: true, cell: (row) => number(row.num_failed_commands) },
    { name: "Sampled", number: true, cell: (row) => number(row.sampled_tokens) },
    { name: "On a worker", number: true, cell: (row) => (row.finished_at && row.claimed_at ? duration(row.finished_at - row.claimed_at) : "–") },
  ];
  const measured = [
    { name: "Loss", number: true, title: "mean over its tokens of minus weight times advantage, 0 for masked tokens", cell: (row) => number(of(row)?.loss) },
    { name: "Advantage", number: true, title: "mean over its tokens", cell: (row) => number(of(row)?.advantage) },
    { name: "Ratio", number: true, title: "probability of the learner over that of the engine: mean, largest", cell: (row) =>
      (of(row) ? `${number(of(row).ratio_mean)}, ${number(of(row).ratio_max)}` : "–") },
    { name: "Masked", number: true, cell: (row) => percent(of(row)?.masked_share) },
  ];
  const isMeasured = Object.keys(effects).length > 0;
  return [isMeasured ? "" : element("p", { class: "hint" }, "Loss, ratio and mask of each rollout are shown where the recipe has rollouts.tokens."),
    table(`Rollouts of the groups of step ${here.more}`, isMeasured ? [...columns, ...measured] : columns, ordered(here, page.rollouts, effects),
      "The journal has no rollouts of this step.")];
}

function events({ marks }) {
  return table("Between the first enqueued rollout and the step", [
    { name: "At", cell: (mark) => element("time", { title: moment(mark.at) }, clock(mark.at)) },
    { name: "Kind", cell: (mark) => mark.kind },
    { name: "What", cell: (mark) => mark.text },
  ], marks, "Nothing.");
}

function numbers(step) {
  const rows = Object.entries(step).filter(([name, value]) => !NOT_A_NUMBER.has(name) && typeof value === "number");
  const lags = step.by_lag ?? [];
  return [facts(rows.map(([name, value]) => [words(name), number(value)])),
    lags.length ? table("Its tokens by lag", [
      { name: "Lag", number: true, cell: (row) => number(row.lag) },
      { name: "Tokens", number: true, cell: (row) => number(row.num_tokens) },
      { name: "Effective sample size", number: true, cell: (row) => percent(row.ess_share) },
      { name: "Masked", number: true, cell: (row) => percent(row.masked_share) },
      { name: "Vetoed", number: true, cell: (row) => percent(row.vetoed_share) },
      { name: "KL to the engine's weights", number: true, cell: (row) => number(row.behaviour_kl) },
    ], lags) : ""];
}
