// What takes the place of static/api.js in an exported file: the server's replies, from the file itself.

const held = JSON.parse(document.getElementById("data").textContent);
const PAGE_SIZE = 50;
if (!location.hash) location.hash = `#/run/${encodeURIComponent(held.run)}`;

/** A reply as the server gave it when the file was made. An Error says that the file does not hold it. */
export async function get(path, query = {}) {
  if (path === ofRun(held.run, "rollouts")) return table(query);
  const reply = held.replies[path];
  if (!reply) throw new Error("This is not in the exported file. The run's own pages (`swerve web`) have it.");
  // The file does not grow, so there is nothing after any step.
  if (query.after !== undefined) return { ...reply, steps: [] };
  return query.find ? { ...reply, found: turnsWith(reply.turns, query.find) } : reply;
}

export function ofRun(run, ...parts) {
  return ["/api/runs", ...[run, ...parts].map(encodeURIComponent)].join("/");
}

export async function act() {
  throw new Error("Nothing can be changed from an exported file.");
}

export function listen() {}

export function onReading() {}

function table(query) {
  const tests = Object.entries(query).filter(([name, value]) => value && TESTS[name]).map(([name, value]) => TESTS[name](value));
  const rows = held.rows.filter((row) => tests.every((test) => test(row)));
  const sort = query.sort || "-finished_at";
  const [column, sign] = sort.startsWith("-") ? [sort.slice(1), -1] : [sort, 1];
  const known = rows.filter((row) => (row[column] ?? null) !== null);
  known.sort((a, b) => sign * (a[column] < b[column] ? -1 : Number(a[column] > b[column])));
  const ordered = [...known, ...rows.filter((row) => (row[column] ?? null) === null)];
  const page = Number(query.page || 0), size = Number(query.page_size || PAGE_SIZE);
  return { total: rows.length, num_rollouts: held.num_rollouts, page, page_size: size, rows: ordered.slice(page * size, (page + 1) * size),
    took_ms: 0, text_searched: rows.length, text_complete: true, reading: null };
}

// As the server filters: infra/web/rollout_table.py.
const TESTS = {
  task: (text) => like(text, "task_id"),
  outcome: (text) => like(text, "outcome"),
  worker: (text) => like(text, "worker"),
  engine: (text) => like(text, "engines"),
  purpose: (text) => (row) => row.purpose === text,
  fate: (text) => (row) => row.fate === text,
  group: (text) => (row) => row.group_id === text,
  reward: (text) => (row) => row.reward === (text === "none" ? null : Number(text)),
  step: (text) => within(text, "step"),
  version: (text) => within(text, "version_first"),
  turns: (text) => within(text, "num_turns"),
  tokens: (text) => within(text, "sampled_tokens"),
  lag: (text) => within(text, "lag"),
  failed: (text) => within(text, "num_failed_commands"),
  text: (text) => (row) => JSON.stringify(held.replies[ofRun(held.run, "rollouts", row.request_id)]?.turns ?? "")
    .toLowerCase().includes(JSON.stringify(text).slice(1, -1).toLowerCase()),
};

/** The turns in which a text occurs, as infra/web/rollout_page.py finds them. */
function turnsWith(turns, text) {
  const texts = (turn) => [turn.raw, ...turn.told.map((message) => message.content), ...turn.actions.flatMap((action) => [action.command, action.observation?.output ?? ""])];
  return turns.filter((turn) => texts(turn).some((one) => one.toLowerCase().includes(text.toLowerCase()))).map((turn) => turn.index);
}

/** A number, or a range such as 3-7 or 3-. */
function within(text, column) {
  const [first, last = first] = text.split("-");
  const most = last === "" ? Infinity : Number(last);
  return (row) => (row[column] ?? null) !== null && Number(first) <= row[column] && row[column] <= most;
}

function like(pattern, column) {
  const parts = pattern.split("*").map((part) => part.replaceAll(/[.+?^${}()|[\]\\]/g, "\\$&"));
  const wanted = new RegExp(parts.length > 1 ? `^${parts.join(".*")}$` : parts[0], "is");
  return (row) => [row[column]].flat().some((value) => wanted.test(value));
}
