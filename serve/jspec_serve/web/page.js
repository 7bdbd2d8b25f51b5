// The chat, and the charts beside it.

import { Answer, verdict } from "./answer.js";
import { ApiError, getJson, getText, stream, useKey } from "./api.js";
import { BarChart, LineChart } from "./charts.js";
import { between, facts, parse } from "./metrics.js";

const find = (id) => document.getElementById(id);
const CAPACITY = 120; // readings that the charts hold
const EVERY = 1000; // milliseconds between two of them
const SUGGESTIONS = [
  "Repeat after me: the ship sails at noon, and the ship returns at nine.",
  "List the numbers from one to thirty in words.",
  "Write a Python class Point with x, y, add, subtract and scale.",
  "What is a prime number?",
];

let info = null;
let messages = [];
let running = null; // AbortController of the answer that is being decoded

// -- errors ------------------------------------------------------------------

function showError(problem) {
  const text = problem instanceof ApiError ? problem.message : `The server cannot be reached: ${problem.message}`;
  find("error").textContent = problem.code ? `${text} (${problem.code})` : text;
  find("error").hidden = false;
  if (problem.status === 401) {
    find("key-form").hidden = false;
    find("key").focus();
  }
}

function clearError() {
  find("error").hidden = true;
}

// -- the chat ----------------------------------------------------------------

function number(id) {
  return find(id).value === "" ? null : Number(find(id).value);
}

function body(plain) {
  const temperature = number("temperature") ?? 0;
  const draftLength = number("draft-length");
  return {
    model: info.model,
    messages,
    max_tokens: number("max-tokens"),
    temperature,
    seed: temperature > 0 ? (number("seed") ?? 0) : null,
    speculation: plain ? "off" : draftLength === null ? "on" : { draft_length: draftLength },
    stream: true,
    stream_options: { include_usage: true, include_tokens: true },
  };
}

function busy(controller) {
  running = controller;
  find("send").hidden = controller !== null;
  find("stop").hidden = controller === null;
}

async function decode(answer, plain, signal) {
  const turns = find("turns");
  answer.start();
  try {
    await stream("/v1/chat/completions", body(plain), signal, (chunk) => {
      const atEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 80;
      answer.take(chunk);
      if (atEnd) turns.scrollTop = turns.scrollHeight;
    });
  } finally {
    answer.end();
  }
}

async function ask(text) {
  if (running !== null) return;
  clearError();
  const controller = new AbortController();
  busy(controller);
  find("welcome").hidden = true;
  const question = Object.assign(document.createElement("p"), { className: "question", textContent: text });
  const race = Object.assign(document.createElement("div"), { className: "race" });
  find("turns").append(question, race);
  const known = messages;
  let drafted = null;
  try {
    info ??= await getJson("/server_info");
    drafted = new Answer(`With the drafter (${info.drafter})`, false);
    race.append(drafted.node);
    const compare = find("compare").checked;
    const plain = new Answer("Plain decoding", true);
    if (compare) race.append(plain.node);
    find("turns").scrollTop = find("turns").scrollHeight;
    messages = [...known, { role: "user", content: text }];
    await decode(drafted, false, controller.signal);
    if (compare) {
      await decode(plain, true, controller.signal);
      const said = verdict(drafted, plain);
      find("turns").append(said);
      find("said").textContent = said.textContent;
    }
    find("turns").scrollTop = find("turns").scrollHeight;
  } catch (problem) {
    if (problem.name !== "AbortError") showError(problem);
  }
  if (!question.isConnected) {
    messages = []; // a new chat was begun meanwhile
  } else if (drafted?.text) {
    messages = [...known, { role: "user", content: text }, { role: "assistant", content: drafted.text }];
  } else {
    // Nothing was said: the question can be asked again.
    messages = known;
    find("prompt").value ||= text;
    question.remove();
    race.remove();
  }
  busy(null);
}

function startAgain() {
  running?.abort();
  messages = [];
  clearError();
  for (const node of [...find("turns").children]) if (node.id !== "welcome") node.remove();
  find("welcome").hidden = false;
  find("prompt").focus();
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = find("prompt").value.trim();
  if (!text || running !== null) return;
  find("prompt").value = "";
  ask(text);
});
find("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
find("stop").addEventListener("click", () => running?.abort());
find("new").addEventListener("click", startAgain);
for (const text of SUGGESTIONS) {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: text });
  button.addEventListener("click", () => ask(text));
  find("suggestions").append(button);
}

// -- the charts --------------------------------------------------------------

const charts = {
  speed: new LineChart(find("charts"), "Tokens per second"),
  load: new LineChart(find("charts"), "Requests: running, waiting (dashed)"),
  acceptance: new LineChart(find("charts"), "Verified draft tokens accepted", 1),
  commit: new LineChart(find("charts"), "Tokens committed a round"),
  positions: new BarChart(find("charts"), "Accepted by position"),
};
const history = [];
let reading = null;

const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(0)}%`);

function draw() {
  const newest = history[history.length - 1];
  const of = (name) => history.map((one) => one[name]);
  const latest = (name) => of(name).findLast((value) => value !== null) ?? null;
  charts.speed.draw([of("tokensPerSecond")], CAPACITY, newest.tokensPerSecond.toFixed(1));
  charts.load.draw([of("running"), of("waiting")], CAPACITY, `${newest.running}, ${newest.waiting}`);
  charts.acceptance.draw([of("acceptance")], CAPACITY, percent(latest("acceptance")));
  charts.commit.draw([of("commitLength")], CAPACITY, latest("commitLength")?.toFixed(2) ?? "–");
  charts.positions.draw(newest.positions, newest.positions.map(percent).join(" "));
  const listed = facts(reading).flatMap(([name, value]) => [
    Object.assign(document.createElement("dt"), { textContent: name }),
    Object.assign(document.createElement("dd"), { textContent: value }),
  ]);
  find("facts").replaceChildren(...listed);
}

async function read() {
  const next = { time: performance.now() / 1000, values: parse(await getText("/metrics")) };
  if (reading !== null) history.push(between(reading, next));
  if (history.length > CAPACITY) history.shift();
  reading = next;
  if (history.length) draw();
}

async function describe() {
  info = await getJson("/server_info");
  const drafts = info.draft_length ? `${info.drafter}, up to ${info.draft_length} draft tokens` : "no drafter";
  find("served").textContent = `${info.model} · ${drafts} · ${info.max_slots} slots of ${info.max_context} tokens`;
  find("draft-length").max = info.draft_length;
  find("state").textContent = info.state;
  find("light").className = info.state === "ok" ? "light ok" : "light bad";
}

async function watch() {
  try {
    await describe();
    if (document.visibilityState === "visible") await read();
    find("key-form").hidden = true;
  } catch (problem) {
    find("state").textContent = problem.status === 401 ? "asks for a key" : "no answer";
    find("light").className = "light bad";
    if (problem.status === 401) find("key-form").hidden = false;
  }
  setTimeout(watch, EVERY);
}

find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(find("key").value);
  find("key").value = "";
  clearError();
});

find("prompt").focus();
watch();
