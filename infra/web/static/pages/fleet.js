// What Redis says of a run: its trainer, queue, engines, workers and judges.

import { address } from "../address.js";
import { get, ofRun } from "../api.js";
import { deadLetters } from "../dead.js";
import { badge, element, facts, notice, redraw, section, svg, table } from "../dom.js";
import { ago, bytes, duration, number } from "../format.js";
import { slotLegend, slots } from "../slots.js";

const AGE_WIDTH = 120;

export async function show(here) {
  const body = element("div");
  async function refresh() {
    const [status, dead] = await Promise.all([get(ofRun(here.run, "status")), deadLetters(here.run, refresh)]);
    redraw(body, ...(status.gone ? gone(status.gone) : parts(here.run, status, dead)));
  }
  await refresh();
  return { title: "Fleet", body, refresh, kinds: ["status", "steps", "publications", "rollouts"] };
}

function gone(why) {
  return [notice(`Redis does not answer: ${why}`), element("p", {},
    "Curves, rollouts and tasks come from the run's directory and can still be read.")];
}

function parts(run, status, dead) {
  const complaints = (status.complaints ?? []).map((text) => element("li", {}, text));
  return [
    complaints.length ? element("ul", { class: "notice" }, complaints) : null,
    section("Trainer", trainer(status)),
    section("Rollouts in flight", queue(status.queue), endings(status.queue)),
    section("Workers", workers(run, "Workers", status.workers, status.queue), hosts(status.workers), outages(status)),
    section("Engines", engines(status)),
    status.judging ? section("Judging", queue(status.judging), scoring(status.scoring)) : null,
    status.judges?.length ? section("Judges", workers(run, "Judges", status.judges, status.judging)) : null,
    section("Claims", claims(run, status.queue)),
    dead,
  ].filter(Boolean);
}

function trainer({ run, has_trainer: alive, silent_s: silentFor, admission, lags }) {
  if (!run) return element("p", { class: "empty" }, "No trainer has sent a heartbeat.");
  const state = alive ? badge("alive", "good") : badge(run.ended ? "ended" : "no heartbeat", run.ended ? "plain" : "bad");
  return facts([
    ["State", element("span", {}, state, " ", run.ended || run.phase)],
    ["Doing", run.detail],
    ["Step", run.num_steps ? `${number(run.step)} of ${number(run.num_steps)}` : number(run.step)],
    ["Version", number(run.version)],
    ["Last heartbeat", ago(Date.now() / 1000 - (silentFor ?? 0))],
    ["Admission", admission],
    ["Lag of what arrived", lags?.length ? `mean ${number(mean(lags))}, at most ${Math.max(...lags)}` : ""],
    ["Groups without signal in a row",
      run.max_groups_without_signal ? `${run.groups_without_signal} of at most ${run.max_groups_without_signal}` : ""],
    ["Quarantined tasks", (run.quarantined ?? []).join(", ")],
  ]);
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function queue(jobs) {
  return facts([
    ["Queued", number(jobs.queued)],
    ["Of these waiting out a back-off", jobs.waiting_out ? number(jobs.waiting_out) : ""],
    ["Oldest queued", jobs.oldest_queued_at ? ago(jobs.oldest_queued_at) : ""],
    ["Claimed", number(jobs.claimed.length)],
    ["Oldest claim", jobs.oldest_claim_at ? ago(jobs.oldest_claim_at) : ""],
    ["Unread", number(jobs.unread)],
    ["Not in a checkpoint yet", `${number(jobs.unacknowledged)} (${bytes(jobs.unacknowledged_bytes)})`],
    ["Dead", element("span", {}, jobs.dead ? badge(number(jobs.dead), "bad") : "0")],
    ["Could not be decoded", jobs.malformed ? number(jobs.malformed) : ""],
    ["Finished per minute", number(jobs.finished_per_min)],
  ]);
}

function endings(jobs) {
  const rows = Object.entries(jobs.outcomes ?? {}).sort((a, b) => b[1] - a[1]);
  return facts(rows.map(([outcome, count]) => [outcome, number(count)]));
}

function claims(run, jobs) {
  const oldestFirst = [...jobs.claimed].sort((a, b) => a.lease.claimed_at - b.lease.claimed_at).slice(0, 500);
  return table("Claims, oldest first", [
    { name: "Request", cell: (claim) => element("a", { href: address("rollout", run, claim.request_id) }, claim.request_id) },
    { name: "Task", cell: (claim) => claim.task_id },
    { name: "For", cell: (claim) => claim.purpose },
    { name: "Worker", cell: (claim) => claim.lease.worker },
    { name: "Attempt", number: true, cell: (claim) => number(claim.lease.attempt) },
    { name: "Phase", cell: (claim) => claim.lease.phase },
    { name: "Turn", number: true, cell: (claim) => `${number(claim.lease.turn)} of ${number(claim.max_turns)}` },
    { name: "Age", cell: (claim) => age(claim.lease.claimed_at, oldestFirst[0].lease.claimed_at) },
  ], oldestFirst, "No request is claimed.");
}

/** How old a claim is, and a bar whose full length is the oldest. */
function age(claimedAt, oldestAt) {
  const now = Date.now() / 1000;
  const share = Math.max(0, Math.min(1, (now - claimedAt) / Math.max(1, now - oldestAt)));
  return element("span", { class: "age" }, svg("svg", { width: AGE_WIDTH, height: 12, class: "colour0", "aria-hidden": "true" },
    svg("rect", { class: "bar", y: 1, width: AGE_WIDTH * share, height: 10 })), ` ${duration(Math.max(0, now - claimedAt))}`);
}

function scoring(found) {
  if (!found) return null;
  return facts([
    ["Steps with a score", `${number(found.num_scored)} of ${number(found.num_steps)}`],
    ["Valid votes", `${number(found.num_valid_votes)} of ${number(found.num_votes)}`],
  ]);
}

function engines({ engines: found, learned, confirmed_at: confirmedAt }) {
  const newest = learned?.version;
  return element("div", {},
    facts([["Newest version", newest === undefined ? "" : `${newest} (${bytes(learned.num_bytes)}), ${ago(learned.published_at)}`],
      ["Served by all in routing", confirmedAt ? ago(confirmedAt) : ""]]),
    table("Engines", [
      { name: "Address", cell: (engine) => engine.url },
      { name: "Version", number: true, cell: (engine) => number(engine.version) },
      { name: "Behind", number: true, cell: (engine) => (newest === undefined || engine.version === null ? "–" : number(newest - engine.version)) },
      { name: "Routing", cell: (engine) => (engine.routed ? badge("in", "good") : badge("out", "bad")) },
    ], found ?? [], "No engine has confirmed a version."));
}

function workers(run, caption, found, jobs) {
  const claims = new Map((jobs?.claimed ?? []).map((claim) => [claim.request_id, claim]));
  return [table(caption, [
    { name: "Name", cell: (worker) => worker.name },
    { name: "State", cell: workerState },
    { name: "Slots", cell: (worker) => slots(run, worker, claims) },
    { name: "Finished", number: true, cell: (worker) => number(worker.finished) },
    { name: "Failed", number: true, cell: (worker) => number(worker.failed) },
    { name: "Started", number: true, cell: (worker) => ago(worker.started_at) },
    { name: "Heartbeat", number: true, cell: (worker) => ago(worker.updated_at) },
  ], found ?? [], `There are no ${caption.toLowerCase()}.`), slotLegend(claims)];
}

function workerState(worker) {
  if (worker.paused) return [badge("paused", "bad"), " ", worker.paused];
  return worker.set_aside ? [badge("set aside", "warn"), " ", worker.set_aside] : badge("claims", "good");
}

/** The Docker hosts of all workers. */
function hosts(found) {
  const rows = (found ?? []).flatMap((worker) => (worker.hosts ?? []).map((host) => ({ ...host, worker: worker.name })));
  return rows.length ? table("Docker hosts", [
    { name: "Docker host", cell: (host) => host.name },
    { name: "Worker", cell: (host) => host.worker },
    { name: "State", cell: (host) => (host.out ? [badge("out", "bad"), " ", host.out] : badge("in use", "good")) },
    { name: "Episodes", number: true, cell: (host) => `${number(host.running)} of ${number(host.slots)}` },
  ], rows) : null;
}

/** What does not work at the moment, wherever it is. */
function outages({ workers: found, judges, silent, engines: served }) {
  const paused = [...(found ?? []), ...(judges ?? [])].filter((worker) => worker.paused || worker.set_aside)
    .map((worker) => [worker.name, worker.paused || worker.set_aside]);
  const gone = Object.entries(silent ?? {}).map(([name, at]) => [name, `no heartbeat for ${duration(Math.max(0, Date.now() / 1000 - at))}`]);
  const out = (served ?? []).filter((engine) => !engine.routed).map((engine) => [engine.url, "out of routing until it serves the newest version"]);
  return table("Outages at the moment", [
    { name: "What", cell: ([name]) => name },
    { name: "Why", cell: ([, why]) => why },
  ], [...paused, ...gone, ...out], "Nothing is out.");
}
