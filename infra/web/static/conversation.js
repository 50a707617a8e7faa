// One rollout, turn by turn: what the policy read, thought and said, what it ran and saw, and what a judge scored; and the tokens of a
// turn as colours: what engine and learner thought of them, what a step did with them, and the versions that drew them.

import { get, ofRun } from "./api.js";
import { badge, block, element, redraw, say } from "./dom.js";
import { duration, number } from "./format.js";

const MOST_TOKENS = 20000;
// Upper ends of the classes by probability: a token below 0.01 is one that the policy hardly ever draws.
const PROBABILITIES = [0.01, 0.1, 0.3, 0.6, 0.9];
const RARE = ["below 1 %", "below 10 %", "below 30 %", "below 60 %", "below 90 %", "above 90 %"];
// Sizes from which on a number with a sign has the next stronger colour.
const RATIOS = [0.05, 0.2, 1];
const ADVANTAGES = [1e-6, 0.1, 0.5];

const COLOURS = {
  engine: { text: "the engine's probability", of: (token) => token.logprob, colour: rare, legend: () => classes("Probability", rareClasses()) },
  learner: { text: "the learner's probability", of: (token) => token.learner, colour: rare, trained: true,
    legend: () => classes("Probability before the update", rareClasses()) },
  difference: { text: "learner against engine", of: (token) => token.difference, colour: (value) => signed(value, RATIOS), trained: true,
    legend: () => classes("Log-prob of the learner less the engine's, in nats", signedClasses(RATIOS)) },
  advantage: { text: "advantage", of: (token) => token.advantage, colour: (value) => signed(value, ADVANTAGES), trained: true,
    legend: () => classes("Advantage", signedClasses(ADVANTAGES)) },
};
const REASONS = {
  masked: "no gradient: masked or clipped",
  vetoed: "no gradient: its trajectory has an impossible ratio",
  geometric_mask: "no gradient: the mean ratio of its trajectory is outside the geometric mask",
};
// What the reader chose last, for the boxes that are opened next.
let chosen = "engine";

/** A box that draws the tokens of `turn` when it is opened. */
function tokens(turn) {
  if (!turn.tokens?.length) return null;
  const versions = turn.versions.map((span) => span.version);
  const box = element("details", { class: "tokens" }, element("summary", {}, summary(turn, versions)));
  box.addEventListener("toggle", () => {
    if (box.open && box.childElementCount === 1) box.append(contents(turn, versions));
  });
  return box;
}

function summary(turn, versions) {
  const off = turn.trained?.reasons.filter(Boolean).length ?? 0;
  return [`${number(turn.tokens.length)} tokens`, versions.length > 1 ? `versions ${versions.join(", ")}` : `version ${versions[0]}`,
    off ? `${number(off)} without a gradient` : ""].filter(Boolean).join("; ");
}

function contents(turn, versions) {
  const all = turn.tokens.map((token, place) => joined(token, turn.trained, place));
  const drawn = element("div");
  function draw(name) {
    const colours = COLOURS[name];
    say(drawn, element("p", { class: "legend-line" }, colours.legend(), legend(turn, versions)), text(all, versions, colours));
  }
  const offered = Object.entries(COLOURS).filter(([, one]) => turn.trained || !one.trained);
  const first = offered.some(([name]) => name === chosen) ? chosen : "engine";
  draw(first);
  if (offered.length === 1) return drawn;
  const select = element("select", { change: (event) => {
    chosen = event.target.value;
    draw(chosen);
  } }, offered.map(([name, one]) => element("option", { value: name, selected: name === first }, one.text)));
  return element("div", {}, element("form", { class: "filters" }, element("label", {}, "Colour by", select)), drawn);
}

/** A token with what the step did with it. */
function joined(token, trained, place) {
  if (!trained) return { ...token, learner: null, difference: null, advantage: null, weight: null, reason: "" };
  const learner = trained.logprobs[place];
  const difference = token.logprob === null || learner === null ? null : learner - token.logprob;
  return { ...token, learner, difference, advantage: trained.advantages[place], weight: trained.weights[place], reason: trained.reasons[place] };
}

function text(all, versions, colours) {
  const spans = all.slice(0, MOST_TOKENS).map((token) => {
    const shown = token.text === null || token.text === undefined ? `${token.id} ` : token.text.replaceAll("\n", "⏎\n");
    return element("span", { class: look(token, versions, colours), title: detail(token) }, shown);
  });
  const left = all.length - MOST_TOKENS;
  return element("pre", { class: "token-text", tabindex: 0 }, spans, left > 0 ? `\n… ${number(left)} more tokens` : "");
}

function look(token, versions, colours) {
  const band = `band${Math.max(0, versions.indexOf(token.version)) % 4}`;
  return [colours.colour(colours.of(token)), band, token.reason ? "off" : "", token.trained ? "" : "pale"].filter(Boolean).join(" ");
}

function detail(token) {
  const probability = token.logprob === null ? "–" : number(Math.exp(token.logprob));
  const of_step = token.learner === null ? [] : [`learner's log-prob ${number(token.learner)}`, `difference ${number(token.difference)}`,
    `advantage ${number(token.advantage)}`, `weight ${number(token.weight)}`];
  return [`id ${token.id}`, `log-prob ${number(token.logprob)}`, `probability ${probability}`, `version ${token.version}`, ...of_step,
    token.reason ? REASONS[token.reason] : token.trained ? "trained" : "not trained"].join(" · ");
}

function rare(logprob) {
  if (logprob === null || logprob === undefined) return "";
  const probability = Math.exp(logprob);
  const index = PROBABILITIES.findIndex((end) => probability < end);
  return `rare${index < 0 ? PROBABILITIES.length : index}`;
}

function signed(value, sizes) {
  if (value === null || value === undefined) return "";
  const strength = sizes.filter((size) => Math.abs(value) >= size).length;
  return strength ? `${value < 0 ? "less" : "more"}${strength}` : "";
}

function rareClasses() {
  return RARE.map((said, index) => [said, `rare${index}`]);
}

function signedClasses([small, middle, large]) {
  const [least, most] = small < 1e-3 ? ["0", "0"] : [`−${number(small)}`, number(small)];
  return [[`below −${number(large)}`, "less3"], [`below −${number(middle)}`, "less2"], [`below ${least}`, "less1"],
    [`above ${most}`, "more1"], [`above ${number(middle)}`, "more2"], [`above ${number(large)}`, "more3"]];
}

function classes(name, list) {
  return [`${name}: `, list.map(([said, colour]) => [element("span", { class: colour }, said), " "])];
}

function legend(turn, versions) {
  const parts = [];
  if (versions.length > 1) parts.push("· Version: ", versions.map((version, index) => [element("span", { class: `band${index % 4}` }, version), " "]));
  if (turn.trained?.reasons.some(Boolean)) parts.push("· Struck through: no gradient ");
  if (turn.tokens.some((token) => !token.trained)) parts.push("· Pale: not trained");
  return parts;
}

export const TURNS_AT_ONCE = 50;
const TYPING_MS = 400;
const MOST_LINKS = 60;

/**
 * The turns of a rollout, as many at a time as can be read, with what leads to the others. `opened` is called with the number of a turn
 * that the reader goes to. Returns {body, open}; `open` shows a turn by its number, from 0.
 */
export function conversation(run, rollout, opened = () => {}) {
  const { outline } = rollout;
  const isPlayed = !rollout.finished_at && rollout.state === "claimed";
  const empty = isPlayed ? "It is being played: turns appear as they end." : "It has no turns.";
  if (!outline.length) return { body: element("p", { class: "empty" }, empty), open: () => {} };
  const list = element("div");
  let shown = rollout;
  const first = () => shown.turns[0]?.index ?? 0;
  const ask = (query) => get(ofRun(run, "rollouts", rollout.request_id), query);

  function draw() {
    // An exported file has all turns at once.
    // Of an episode that is played, the newest turns are here.
    const from = isPlayed ? Math.max(0, outline.length - TURNS_AT_ONCE) : outline.length > TURNS_AT_ONCE ? first() : 0;
    const turns = shown.turns.filter((turn) => turn.index >= from && turn.index < from + TURNS_AT_ONCE);
    const go = (text, index, possible) => element("button", { type: "button", disabled: !possible, click: () => open(index) }, text);
    const pager = () => (isPlayed || outline.length <= TURNS_AT_ONCE ? "" : element("p", { class: "pager" },
      go("Earlier turns", Math.max(0, from - TURNS_AT_ONCE), from > 0), ` turns ${number(from + 1)} to ${number(from + turns.length)} of ${number(outline.length)} `,
      go("Later turns", from + TURNS_AT_ONCE, from + TURNS_AT_ONCE < outline.length)));
    redraw(list, pager(), element("ol", { class: "turns" }, turns.map((turn) => element("li", { class: "turn", id: `turn-${turn.index}`, tabindex: -1 }, parts(turn)))), pager());
  }
  async function open(index) {
    const from = index - (index % TURNS_AT_ONCE);
    if (!shown.turns.some((turn) => turn.index === index) || (outline.length > TURNS_AT_ONCE && first() !== from)) {
      const reply = await ask({ turns: from });
      shown = { ...reply, turns: reply.turns.filter((turn) => turn.index >= from) };
      draw();
    }
    opened(index);
    const place = list.querySelector(`#turn-${index}`);
    place?.scrollIntoView();
    place?.focus({ preventScroll: true });
  }
  draw();
  if (isPlayed) return { body: element("div", {}, element("p", { class: "hint", role: "status" }, "It is being played: turns appear here as they end."), list), open };
  return { body: element("div", {}, jumps(rollout, open, ask), list), open };
}

/** What leads to the turns for which a reader comes: the first command that failed, the submission, a number, a text. */
function jumps(rollout, open, ask) {
  const { outline } = rollout;
  const failed = outline.findIndex((turn) => turn.is_failed);
  const last = outline.length - 1;
  const submits = rollout.outcome?.kind === "submitted";
  const results = element("span", { role: "status" });
  let timer = null;
  const turnLink = (index) => [element("button", { type: "button", class: "link", click: () => open(index) }, index + 1), " "];
  async function find(text) {
    if (!text) return say(results);
    const { found } = await ask({ turns: 0, find: text });
    if (found === null) return say(results, "Texts cannot be looked for here.");
    say(results, found.length ? [`in ${number(found.length)} turns: `, found.slice(0, MOST_LINKS).map(turnLink), found.length > MOST_LINKS ? "…" : ""] : "in no turn");
  }
  return element("form", { class: "filters", "aria-label": `Turns of ${rollout.request_id}`, submit: (event) => event.preventDefault() },
    failed >= 0 ? element("button", { type: "button", click: () => open(failed) }, `First failed command, turn ${failed + 1}`) : "",
    element("button", { type: "button", click: () => open(last) }, `${submits ? "Submission" : "Last turn"}, turn ${last + 1}`),
    element("label", {}, "Turn", element("input", { type: "number", min: 1, max: outline.length, size: 6, change: (event) => {
      const index = Number(event.target.value) - 1;
      if (outline[index]) open(index);
    } })),
    element("label", {}, "Find in the turns", element("input", { type: "search", size: 18, autocomplete: "off", spellcheck: "false", input: (event) => {
      clearTimeout(timer);
      timer = setTimeout(() => find(event.target.value), TYPING_MS);
    } })), results);
}

function parts(turn) {
  // From the second turn on, the input is mostly the observation that the turn before already shows.
  const told = turn.told?.length ? (turn.index === 0 ? messages(turn.told) : folded("Its input", messages(turn.told))) : null;
  return [heading(turn), turn.cut ? element("p", { class: "notice" }, cut(turn.cut)) : null, told,
    turn.thought ? labelled("Thought", block(turn.thought, "thought")) : null,
    turn.text ? labelled("Reply", block(turn.text)) : null,
    ...turn.actions.map(action),
    turn.actions.length || !turn.raw ? null : element("p", { class: "hint" }, "This reply holds no command."),
    turn.judged ? judged(turn.judged) : null, tokens(turn)];
}

function heading(turn) {
  const said = [...place(turn), turn.generate_s ? `replied in ${duration(turn.generate_s)}` : "",
    turn.num_sampled ? `${number(turn.num_sampled)} tokens sampled, ${number(turn.num_fed)} fed` : "",
    turn.stop && turn.stop !== "stop" ? `stopped by ${turn.stop}` : "", turn.engine].filter(Boolean);
  return element("h3", {}, `Turn ${turn.index + 1} `, element("small", {}, said.join(" · ")));
}

// Where a turn of an agent program belongs, if not behind the turn before it.
function place({ index, after, thread, aside }) {
  const follows = after === -1 ? (index ? "begins a conversation" : "") : after !== null && after !== index - 1 ? `follows turn ${after + 1}` : "";
  return [thread, follows, aside ? "an aside, not trained" : ""];
}

function messages(told) {
  return told.map((message) => {
    const long = message.role === "system";
    const text = block([message.reasoning, message.content].filter(Boolean).join("\n\n"));
    return long ? folded(`Told by ${message.role}`, text) : labelled(`Told by ${message.role}`, text);
  });
}

function action({ command, observation }) {
  const ran = labelled("Command", block(command, "command"));
  if (!observation) return element("div", { class: "action" }, ran, element("p", { class: "hint" }, "It was not run, or ended the episode."));
  const { exit_code: code, wall_s: wall, dropped_chars: dropped } = observation;
  const ended = code === null ? badge("killed at its deadline", "bad") : badge(`exit ${code}`, code ? "warn" : "good");
  const cutOut = dropped ? ` · ${number(dropped)} characters were cut out` : "";
  return element("div", { class: "action" }, ran,
    element("p", { class: "label" }, "Output ", ended, ` ${duration(wall)}${cutOut}`),
    observation.output ? block(observation.output, "output") : element("p", { class: "hint" }, "No output."));
}

function cut(found) {
  return ["The context was cut before this turn.",
    found.num_omitted ? ` Turns omitted so far: ${number(found.num_omitted)}.` : "",
    found.num_thoughts ? ` Replies that lost their thoughts: ${number(found.num_thoughts)}.` : "",
    found.dropped_chars ? ` Characters of the newest messages that did not fit: ${number(found.dropped_chars)}.` : ""].join("");
}

function judged({ score, unscored, votes, num_logprobs }) {
  if (num_logprobs) return element("p", { class: "label" }, "Teacher ", badge(`log-probs of ${number(num_logprobs)} tokens`, "plain"));
  const kind = score === null ? "plain" : score > 0.2 ? "good" : score < -0.2 ? "bad" : "warn";
  const said = score === null ? `no score: ${unscored ?? "the judge abstains"}` : number(score);
  const opinions = (votes ?? []).map((vote) => element("li", {},
    badge(vote.value === null ? "no vote" : number(vote.value)), vote.error ? ` ${vote.error}` : "", vote.text ? block(vote.text) : ""));
  const line = element("p", { class: "label" }, "Judge ", badge(said, kind));
  return opinions.length ? element("div", {}, line, folded(`${opinions.length} votes`, element("ol", {}, opinions))) : line;
}

function labelled(label, content) {
  return element("div", {}, element("p", { class: "label" }, label), content);
}

export function folded(label, content) {
  return element("details", {}, element("summary", {}, label), content);
}
