// Text of policies, commands and tasks: whatever it holds, it is shown as text and stays in its place.

import { element } from "./dom.js";

const SHOWN_CHARS = 6000;
const LINE_CHARS = 2000;
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g;
// They would reorder what stands beside them, or cannot be seen.
const HIDDEN = /[\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

/** Control characters as their symbols, invisible and reordering ones by their number. */
export function visible(text) {
  return text
    .replaceAll("\r\n", "\n")
    .replace(CONTROLS, (char) => (char < " " ? String.fromCharCode(0x2400 + char.charCodeAt(0)) : "\u2421"))
    .replace(HIDDEN, (char) => `⟨U+${char.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** A block of text. Of a long one the beginning and the end are shown, and a button shows the rest. */
export function block(text, kind = "") {
  const box = element("pre", { class: kind, tabindex: text.length > LINE_CHARS ? 0 : undefined });
  if (text.length <= SHOWN_CHARS) {
    box.textContent = visible(text);
    return box;
  }
  const half = SHOWN_CHARS / 2;
  const rest = element("button", { type: "button", click: () => box.replaceChildren(visible(text)) },
    `Show the ${(text.length - SHOWN_CHARS).toLocaleString("en")} characters between`);
  box.append(visible(text.slice(0, half)), element("span", { class: "between" }, rest), visible(text.slice(-half)));
  return box;
}
