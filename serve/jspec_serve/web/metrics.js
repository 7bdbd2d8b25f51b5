// Prometheus' text format, read, and what two readings say about the time between them.

export function parse(text) {
  const values = new Map();
  for (const line of text.split("\n")) {
    if (line && !line.startsWith("#")) {
      const space = line.lastIndexOf(" ");
      values.set(line.slice(0, space), Number(line.slice(space + 1)));
    }
  }
  return values;
}

const value = (reading, name) => reading.values.get(name) ?? 0;

export function between(before, after) {
  const grown = (name) => value(after, name) - value(before, name);
  const ratio = (part, whole) => (whole > 0 ? part / whole : null);
  const seconds = after.time - before.time;
  const positions = [];
  const drafting = value(after, "jspec_drafting_lane_rounds_total");
  for (let position = 1; ; position += 1) {
    const count = after.values.get(`jspec_accepted_at_position_total{position="${position}"}`);
    if (count === undefined) break;
    positions.push(count / drafting);
  }
  return {
    tokensPerSecond: grown("jspec_generated_tokens_total") / seconds,
    running: value(after, "jspec_running"),
    waiting: value(after, "jspec_waiting"),
    acceptance: ratio(grown('jspec_draft_tokens_total{stage="accepted"}'), grown('jspec_draft_tokens_total{stage="verified"}')),
    commitLength: ratio(grown("jspec_committed_nodes_total"), grown("jspec_lane_rounds_total")),
    positions,
  };
}

export function facts(reading) {
  const pages = (kind) =>
    [...reading.values].filter(([name]) => name.startsWith(`jspec_${kind}{`)).map(([, count]) => count).join(", ");
  return [
    ["Tokens generated", value(reading, "jspec_generated_tokens_total").toLocaleString("en")],
    ["Prompt tokens", value(reading, "jspec_prompt_tokens_total").toLocaleString("en")],
    ["of those from the prefix cache", value(reading, "jspec_reused_prompt_tokens_total").toLocaleString("en")],
    ["Free cache pages", `${pages("free_pages")} of ${pages("pages")}`],
    ["Compiled programs", value(reading, "jspec_compiled_programs")],
  ];
}
