// Where the time of a run went, role by role, and what would help most.

import { get, ofRun } from "../api.js";
import { colour } from "../charts.js";
import { element, notice, redraw, section, svg, table } from "../dom.js";
import { clock, duration, moment, percent } from "../format.js";

const WIDTH = 1000; // of the drawing, in its own units; the page stretches it
const HEIGHT = 16;
const ROLES = [["trainer", "The trainer, from its first start to its last row"], ["slots", "The workers' slots, all of them together"], ["engines", "The engines, all of them together"]];

export async function show(here) {
  const body = element("div");
  async function refresh() {
    const found = await get(ofRun(here.run, "where"));
    if (found.unreadable) {
      redraw(body, notice(found.unreadable));
      return found.is_outdated;
    }
    redraw(body,
      element("p", { class: "hint" }, "As of ", element("time", { title: moment(found.at) }, clock(found.at)),
        ". The parts of each table add up to its wall time. A piece of advice can gain at most what it says, by itself; gains do not add up."),
      section("What would help most", advice(found)),
      ...ROLES.map(([role, title]) => section(title, parts(title, found[role].parts_s, found[role].wall_s), said(found[role].unknown))),
      found.gpus.length ? section("How busy the GPUs of the learner were", gpus(found.gpus)) : "",
      found.waiting ? section("What slots did while the trainer waited for groups", parts("Slots while the trainer waited", found.waiting.parts_s,
        Object.values(found.waiting.parts_s).reduce((sum, one) => sum + one, 0)),
      found.waiting.cpu_share === null ? "" : element("p", {}, `The processors of the machine were ${percent(found.waiting.cpu_share)} busy meanwhile.`)) : "",
      section("What trained rollouts waited for", waits(found.rollouts), said(found.rollouts.unknown)));
    return found.is_outdated;
  }
  await refresh();
  return { title: "Where the time went", body, refresh, kinds: ["steps", "fleet", "endings"] };
}

function advice({ advice: found, unknown }) {
  return [table("Advice, the largest gain first", [
    { name: "Change", cell: (one) => element("code", {}, one.setting) },
    { name: "What and why", cell: (one) => one.text },
    { name: "Of the trainer's wall, at most", number: true, cell: (one) => percent(one.gain) },
  ], found, "Nothing that is known would gain 1 %."), said(unknown)];
}

const MOST_RANKS = 16;

/** A row for each rank; of many ranks the least busy ones. */
function gpus(ranks) {
  const sum = (of) => Object.values(of).reduce((total, one) => total + one, 0);
  const doing = [...new Set(ranks.flatMap((one) => Object.keys(one.num_samples)))].sort();
  const shown = [...ranks].sort((a, b) => sum(a.busy) - sum(b.busy)).slice(0, MOST_RANKS);
  const share = (busy, samples) => percent(samples ? (busy ?? 0) / samples : null);
  return [table("Share of the time in which a kernel ran, by what the rank did, the least busy first", [
    { name: "Rank", cell: (one) => one.rank },
    ...doing.map((name) => ({ name, number: true, cell: (one) => share(one.busy[name], one.num_samples[name]) })),
    { name: "In all", number: true, cell: (one) => share(sum(one.busy), sum(one.num_samples)) },
    { name: "Samples", number: true, title: "one a second", cell: (one) => sum(one.num_samples) },
  ], shown), ranks.length > shown.length ? element("p", { class: "hint" }, `${ranks.length - shown.length} ranks that were busier are not listed.`) : ""];
}

function said(sentences) {
  return sentences.map((text) => element("p", { class: "hint" }, text));
}

/** A bar and a table of the parts of a whole, the largest first. */
function parts(caption, seconds, wall) {
  const rows = Object.entries(seconds).filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]);
  if (!rows.length) return element("p", { class: "empty" }, "Nothing is known of it.");
  let from = 0;
  const bar = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, height: HEIGHT, preserveAspectRatio: "none", role: "img",
    "aria-label": rows.map(([name, value]) => `${name} ${percent(value / wall)}`).join(", ") }, rows.map(([name, value], index) => {
    const width = (WIDTH * value) / wall;
    const part = svg("rect", { class: `bar ${colour(index)}`, x: from, y: 0, width, height: HEIGHT }, svg("title", {}, `${name}, ${percent(value / wall)}`));
    from += width;
    return part;
  }));
  return [element("div", { class: "whole" }, bar), table(caption, [
    { name: "Colour", cell: ([, , index]) => element("span", { class: `swatch ${colour(index)}` }) },
    { name: "Part", cell: ([name]) => name },
    { name: "Time", number: true, cell: ([, value]) => duration(value) },
    { name: "Share", number: true, cell: ([, value]) => percent(value / wall) },
  ], [...rows.map(([name, value], index) => [name, value, index])])];
}

function waits({ waits: found, num_rollouts: count, life_p50_s: half, life_p90_s: most }) {
  const rows = Object.entries(found).filter(([, one]) => one.share > 0);
  const whole = count ? [["whole life", { p50_s: half, p90_s: most, share: 1 }]] : [];
  return table(`${count.toLocaleString("en")} trained rollouts, from request to step`, [
    { name: "Wait", cell: ([name]) => name },
    { name: "Median", number: true, cell: ([, one]) => duration(one.p50_s) },
    { name: "90 % below", number: true, cell: ([, one]) => duration(one.p90_s) },
    { name: "Share", number: true, cell: ([, one]) => percent(one.share) },
  ], [...rows, ...whole], "No rollout was trained yet.");
}
