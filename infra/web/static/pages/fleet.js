// What Redis says of a run: its trainer, queue, engines, workers with their slots, and judges; and its dead letters, with what may be
// done with them where the server was started with --allow-actions.

import { address } from "../address.js";
import { act, get, ofRun } from "../api.js";
import { badge, element, facts, notice, redraw, say, section, svg, table, unwell } from "../dom.js";
import { ago, bytes, duration, number } from "../format.js";

const COLOURS = { opening: "colour6", agent: "colour0", judging: "colour0", grading: "colour3", publishing: "colour2" };
const MOST_BOXES = 64;

/** The boxes of `worker`; `claims` are all of the run, by request id. */
function slots(run, worker, claims) {
  const used = worker.running.slice(0, MOST_BOXES).map((id) => element("li", {}, box(run, id, claims.get(id))));
  const idle = Math.max(0, Math.min(worker.slots, MOST_BOXES) - used.length);
  const boxes = [...used, ...Array.from({ length: idle }, () => element("li", {}, element("span", { class: "slot" })))];
  return element("div", { class: "slots" }, element("ol", {}, boxes), ` ${worker.running.length} of ${worker.slots}`);
}

function box(run, id, claim) {
  if (!claim) return element("span", { class: "slot other", title: `${id}, of another run, or ending` });
  const { phase, turn, claimed_at: claimedAt } = claim.lease;
  const said = `${id}: ${phase}${turn ? `, turn ${turn} of ${claim.max_turns}` : ""}, claimed ${ago(claimedAt)}`;
  return element("a", { class: `slot ${COLOURS[phase] ?? "colour8"}`, href: address("rollout", run, id), title: said, "aria-label": said });
}

/** What the colours say, of the phases that there are. */
function slotLegend(claims) {
  const phases = [...new Set([...claims.values()].map((claim) => claim.lease.phase))].sort();
  return phases.length ? element("ul", { class: "legend" }, phases.map((phase) => element("li", { class: COLOURS[phase] ?? "colour8" }, phase))) : null;
}

const AT_ONCE = 500;
const ACTIONS = {
  requeue: { verb: "Requeue", all: "Requeue all", says: "They get a fresh budget of tries and are played again." },
  drop: { verb: "Drop", all: "Drop all", says: "The requests and the evidence of their failures are deleted. This cannot be undone." },
};

/** The section about dead letters; null if there are none. `changed` is called after an action. */
async function deadLetters(run, changed) {
  const found = await get(ofRun(run, "dead"));
  if (!found.dead?.length) return null;
  const told = element("div", { "aria-live": "polite" });
  const button = (action, text, ids) => element("button", { type: "button", click: () => carryOut(run, action, ids, told, changed) }, text);
  const columns = [
    { name: "Request", cell: (one) => element("a", { href: address("rollout", run, one.request_id) }, one.request_id) },
    { name: "Kind", cell: (one) => one.kind },
    { name: "Class", cell: (one) => badge(one.class, "bad") },
    { name: "Task", cell: (one) => one.task_id },
    { name: "Tries", number: true, cell: (one) => number(one.failures.length) },
    { name: "Died", number: true, cell: (one) => ago(one.died_at) },
    { name: "Last failure", cell: (one) => one.failures.at(-1)?.message ?? "" },
  ];
  if (found.allows_actions)
    columns.push({ name: "Action", cell: (one) => Object.entries(ACTIONS).map(([action, { verb }]) => button(action, verb, [one.request_id])) });
  const ids = [...new Set(found.dead.map((one) => one.request_id))];
  return section("Dead letters", table("Dead letters, newest first", columns, found.dead.slice(0, AT_ONCE)),
    found.allows_actions ? element("p", {}, Object.entries(ACTIONS).map(([action, { all }]) => button(action, `${all} ${number(ids.length)}`, ids))) : null,
    told);
}

async function carryOut(run, action, ids, told, changed) {
  const { verb, says } = ACTIONS[action];
  const what = ids.length === 1 ? `request ${ids[0]}` : `${number(ids.length)} requests`;
  if (!(await agreed(`${verb} ${what} of run ${run}?`, says, verb))) return;
  try {
    const left = [];
    for (let first = 0; first < ids.length; first += AT_ONCE) {
      const { changed: rows } = await act(ofRun(run, "dead", action), { request_ids: ids.slice(first, first + AT_ONCE) });
      left.push(...rows.filter((row) => row.reason));
    }
    if (left.length) say(told, notice(`${number(left.length)} left as they were: ${left[0].reason}`));
    else await changed();
  } catch (error) {
    say(told, notice(error.message));
  }
}

/** Ask in a dialog. Resolves to whether the reader agreed; Escape and Cancel are no. */
function agreed(question, says, verb) {
  return new Promise((resolve) => {
    const answer = (value) => () => dialog.close(value);
    const heading = element("h2", { id: "question" }, question);
    const dialog = element("dialog", { "aria-labelledby": "question", close: () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    } }, heading, element("p", {}, says), element("p", { class: "answers" },
      element("button", { type: "button", autofocus: true, click: answer("") }, "Cancel"),
      element("button", { type: "button", click: answer("yes") }, verb)));
    document.body.append(dialog);
    dialog.showModal();
  });
}

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
  return [notice(why), element("p", {},
    "Curves, rollouts and tasks come from the run's directory and can still be read.")];
}

function parts(run, status, dead) {
  return [
    unwell(status),
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
    ["Tokens with a teacher's log-prob", found.num_logprobs ? number(found.num_logprobs) : ""],
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
