// One rollout, turn by turn: what the policy was told, thought and said, what it ran and saw, and what a judge scored.

import { badge, element } from "./dom.js";
import { duration, number } from "./format.js";
import { block } from "./text.js";
import { tokens } from "./tokens.js";

/** All turns of a rollout. */
export function conversation(rollout) {
  if (!rollout.turns?.length) return element("p", { class: "empty" }, "It has no turns.");
  return element("ol", { class: "turns" }, rollout.turns.map((turn) => element("li", { class: "turn" }, parts(turn))));
}

function parts(turn) {
  // From the second turn on, what was told is mostly the observation that the turn before already shows.
  const told = turn.told?.length ? (turn.index === 0 ? messages(turn.told) : folded("What it was told", messages(turn.told))) : null;
  return [heading(turn), turn.cut ? element("p", { class: "notice" }, cut(turn.cut)) : null, told,
    turn.thought ? labelled("Thought", block(turn.thought, "thought")) : null,
    turn.text ? labelled("Reply", block(turn.text)) : null,
    ...turn.actions.map(action),
    turn.actions.length || !turn.raw ? null : element("p", { class: "hint" }, "This reply holds no command."),
    turn.judged ? judged(turn.judged) : null, tokens(turn)];
}

function heading(turn) {
  const said = [turn.generate_s ? `replied in ${duration(turn.generate_s)}` : "",
    turn.num_sampled ? `${number(turn.num_sampled)} tokens sampled, ${number(turn.num_fed)} fed` : "",
    turn.stop && turn.stop !== "stop" ? `stopped by ${turn.stop}` : "", turn.engine].filter(Boolean);
  return element("h3", { id: `turn-${turn.index}` }, `Turn ${turn.index + 1} `, element("small", {}, said.join(" · ")));
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

function judged({ score, unscored, votes }) {
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
