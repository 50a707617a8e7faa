// The server's JSON, and its events.

let tellReading = () => {};

/** Call `told` with {read_bytes, total_bytes} while the server still reads the run that is shown, otherwise with null. */
export function onReading(told) {
  tellReading = told;
}

/** GET as JSON. An Error says in one sentence why there is none. */
export async function get(path, query = {}) {
  const wanted = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const search = new URLSearchParams(wanted).toString();
  let response;
  try {
    response = await fetch(search ? `${path}?${search}` : path, { headers: { accept: "application/json" } });
  } catch {
    throw new Error("The server does not answer. Is `swerve web` still running?");
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(body.error ?? `The server answered ${response.status} to ${path}.`);
  if ("reading" in body) tellReading(body.reading);
  return body;
}

/** POST an action as JSON. The header says that it comes from one of our pages. */
export async function act(path, body) {
  const headers = { "content-type": "application/json", "x-swerve-action": "page" };
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
  const told = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(told.error ?? `The server answered ${response.status} to ${path}.`);
  return told;
}

/** The path of a run, or of something below it. */
export function ofRun(run, ...parts) {
  return ["/api/runs", ...[run, ...parts].map(encodeURIComponent)].join("/");
}

/**
 * Call `changed` with each event {run, kind}, and `connected` with true or false. The browser reconnects by itself.
 *
 * A page that nobody sees listens to nothing: a browser opens six connections to one server, for all of its tabs together.
 */
export function listen(changed, connected) {
  let source = null;
  function follow() {
    if (document.visibilityState === "hidden") return close();
    if (source) return;
    source = new EventSource("/events");
    source.addEventListener("open", () => connected(true));
    source.addEventListener("error", () => connected(false));
    source.addEventListener("change", (event) => changed(JSON.parse(event.data)));
  }
  function close() {
    source?.close();
    source = null;
  }
  document.addEventListener("visibilitychange", follow);
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", follow);
  follow();
}
