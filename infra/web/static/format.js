// Numbers, times and sizes as text.

const NONE = "–";

/** Four significant digits; thousands are grouped. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 });
}

export function percent(share) {
  return share === null || share === undefined ? NONE : `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)} %`;
}

/** A duration in its largest two units. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

/** A duration as one short number, for an axis. */
export function seconds(value) {
  return `${number(value)} s`;
}

/** How long ago a moment (Unix seconds) was. */
export function ago(at) {
  return at ? `${duration(Math.max(0, Date.now() / 1000 - at))} ago` : NONE;
}

/** A moment (Unix seconds) in local time. */
export function moment(at) {
  return at ? new Date(1000 * at).toLocaleString("en-GB") : NONE;
}

/** A moment (Unix seconds) in local time, with the date only where it is not today's. */
export function clock(at) {
  if (!at) return NONE;
  const [when, now] = [new Date(1000 * at), new Date()];
  const time = when.toLocaleTimeString("en-GB");
  return when.toDateString() === now.toDateString() ? time : `${when.toLocaleDateString("en-CA")} ${time}`;
}

export function bytes(size) {
  if (size === null || size === undefined) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = size > 0 ? Math.min(units.length - 1, Math.floor(Math.log2(size) / 10)) : 0;
  return `${Number((size / 1024 ** power).toPrecision(3))} ${units[power]}`;
}

/** "num_trained_tokens" as words. */
export function words(name) {
  return name.replace(/^num_/, "").replaceAll(/[_.]/g, " ");
}
