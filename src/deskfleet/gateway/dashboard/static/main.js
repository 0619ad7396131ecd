// The overview: asks for the state every second and shows it.

import { age, bytes, clock, count, make, percent, rate, seconds, Spark, write } from "./draw.js";
import { startChat } from "./chat.js";

const NUM_POINTS = 300;
const PERIOD_MS = 1000;
const LATE_S = 5;
const MOST_OF_PLAN = 1.25;

const byId = (id) => document.getElementById(id);
let points = [];
let shownRecent = "";
let shownEvents = "";

// --- theme, kept by this browser only

const dark = matchMedia("(prefers-color-scheme: dark)");
function applyTheme() {
  const wanted = byId("theme").value;
  document.documentElement.dataset.theme = wanted === "auto" ? (dark.matches ? "dark" : "light") : wanted;
}
byId("theme").value = localStorage.getItem("deskfleet-theme") ?? "auto";
byId("theme").addEventListener("change", () => {
  localStorage.setItem("deskfleet-theme", byId("theme").value);
  applyTheme();
});
dark.addEventListener("change", applyTheme);
applyTheme();

// --- figures

const FIGURES = {
  tok: { title: "Output, all streams", spark: true },
  stream: { title: "Output, one stream", spark: true },
  ttft: { title: "Time to first token" },
  queue: { title: "Requests running", spark: true },
  kv: { title: "KV cache held", spark: true, most: 1 },
  cache: { title: "Prompt tokens cached" },
  drafts: { title: "Drafts accepted" },
  memory: { title: "Memory left on this host" },
};

for (const figure of Object.values(FIGURES)) {
  figure.value = make("p", { class: "value" });
  figure.note = make("p", { class: "note" });
  const box = make("article", { class: "figure" }, make("h3", {}, figure.title), figure.value, figure.note);
  if (figure.spark) {
    figure.chart = new Spark(figure.title, figure.most ?? null);
    box.append(figure.chart.svg);
  }
  byId("figures").append(box);
}

function showFigure(name, value, unit, note) {
  const figure = FIGURES[name];
  const text = `${value} ${unit}`;
  if (figure.shown !== text) {
    figure.shown = text;
    figure.value.replaceChildren(value, unit ? make("small", {}, ` ${unit}`) : "");
  }
  write(figure.note, note);
}

function showFigures(state) {
  const { summary, health } = state;
  const last = points.at(-1);
  const series = (name) => points.map((point) => point[name]);
  if (last) {
    const most = FIGURES.tok.chart.draw(series("tok_s"));
    showFigure("tok", rate(last.tok_s), "tok/s", `prompts ${rate(last.prompt_tok_s)} tok/s · peak ${rate(most)}`);
    FIGURES.stream.chart.draw(series("stream_tok_s"));
    FIGURES.queue.chart.draw(series("num_running"), series("num_waiting"));
    FIGURES.kv.chart.draw(series("kv_usage"));
    showFigure("queue", count(last.num_running), "", waiting(health, last.num_waiting));
    showFigure("kv", percent(last.kv_usage), "", last.kv_usage === null ? "not told by this engine" : "by running requests");
  }
  showFigure("stream", rate(last?.stream_tok_s ?? summary.stream_tok_s), "tok/s",
    last?.stream_tok_s != null ? "mean of running streams" : summary.num_latest ? `mean of the last ${summary.num_latest}` : "no answer yet");
  showFigure("ttft", seconds(summary.ttft_p50_s), "", summary.num_latest ? `median of ${summary.num_latest} · 95% within ${seconds(summary.ttft_p95_s)}` : "no answer yet");
  showFigure("cache", percent(summary.cache_hit_rate), "", summary.cache_hit_rate === null ? "nothing looked up yet" : "of all looked up since start");
  showFigure("drafts", percent(summary.acceptance_rate), "", summary.acceptance_rate === null ? "no drafts verified" : `${summary.tokens_per_verification.toFixed(2)} tokens per verification`);
  const memory = health.memory;
  showFigure("memory", bytes(memory.host_available_bytes), "", memory.floor_bytes ? `no new requests below ${bytes(memory.floor_bytes)}` : "no floor is set");
}

function waiting(health, number) {
  if (!number) return "none waits";
  const waits = [health.queue, health.gateway_queue].filter((queue) => queue).map((queue) => queue.oldest_wait_s);
  const oldest = waits.length ? `, longest ${age(Math.max(...waits))}` : "";
  return `${count(number)} wait${number === 1 ? "s" : ""} (dashed)${oldest}`;
}

// --- tables

function showRanks(ranks) {
  byId("ranks").hidden = !ranks.length;
  byId("ranks-none").hidden = Boolean(ranks.length);
  byId("ranks").tBodies[0].replaceChildren(...ranks.map((rank) => {
    const isLate = rank.heartbeat_age_s !== null && rank.heartbeat_age_s > LATE_S;
    const kind = rank.state === "ended" ? "bad" : isLate ? "warn" : rank.state === "idle" ? "" : "work";
    const doing = rank.num_tokens > 1 ? `${rank.state}, ${count(rank.num_tokens)} tokens` : rank.state;
    return make("tr", {},
      make("th", { scope: "row" }, String(rank.rank)),
      make("td", { class: "tight" }, make("span", { class: "tag", data: { kind } }, doing)),
      make("td", { class: "n" }, count(rank.num_steps)),
      make("td", { class: "n" }, age(rank.last_step_age_s)),
      make("td", { class: isLate ? "n bad" : "n" }, age(rank.heartbeat_age_s)),
      make("td", { class: "tight" }, ...memoryOf(rank)),
      make("td", { class: "n" }, bytes(rank.host_available_bytes)));
  }));
}

function memoryOf(rank) {
  if (rank.memory_bytes === null) return ["–"];
  if (!rank.planned_bytes) return [bytes(rank.memory_bytes)];
  // The plan is that of a loaded rank at rest, marked on the bar; a step needs something besides.
  const share = rank.memory_bytes / rank.planned_bytes;
  const fill = make("span");
  fill.style.width = `${Math.min(100, 100 * share / MOST_OF_PLAN)}%`;
  const mark = make("i");
  mark.style.left = `${100 / MOST_OF_PLAN}%`;
  const bar = make("span", { class: "bar", "aria-hidden": "true" }, fill, mark);
  if (share > MOST_OF_PLAN) bar.dataset.over = "";
  return [bar, `${bytes(rank.memory_bytes)} of ${bytes(rank.planned_bytes)}, ${percent(share)}`];
}

const COLUMNS = [
  ["began", "tight", (r) => clock(r.at)],
  ["asked by", "tight", (r) => r.key ?? r.client ?? "–"],
  ["protocol", "tight", (r) => r.protocol],
  ["prompt", "n", (r) => count(r.num_prompt_tokens)],
  ["cached", "n", (r) => count(r.num_cached_tokens)],
  ["generated", "n", (r) => count(r.num_generated_tokens)],
  ["first token", "n", (r) => seconds(r.ttft_s)],
  ["tok/s", "n", (r) => rate(r.tok_s)],
  ["took", "n", (r) => seconds(r.duration_s)],
  ["end", "", end],
];
const KINDS = { ok: "ok", refused: "warn", cancelled: "", failed: "bad" };

function stage(request) {
  if (request.queue_position !== null) return `waits, number ${request.queue_position}`;
  return request.ttft_s === null ? "waits" : "runs";
}

function end(request) {
  if (request.outcome === null) return make("span", { class: "tag", data: { kind: "work" } }, stage(request));
  const word = request.outcome === "ok" ? (request.stop_reason ?? request.finish_reason ?? "ok") : `${request.outcome} ${request.status}`;
  const tag = make("span", { class: "tag", data: { kind: KINDS[request.outcome] } }, word);
  return request.error ? make("span", {}, tag, make("span", { class: "why" }, ` ${request.error}`)) : tag;
}

function row(request) {
  return make("tr", { title: request.id }, ...COLUMNS.map(([, kind, show]) => make("td", { class: kind }, show(request))));
}

for (const table of ["running", "recent"]) {
  byId(table).tHead.append(make("tr", {}, ...COLUMNS.map(([name, kind]) => make("th", { scope: "col", class: kind }, name))));
}

function showRequests(state) {
  byId("running").tBodies[0].replaceChildren(...state.running.map(row));
  byId("running").hidden = !state.running.length;
  byId("running-none").hidden = Boolean(state.running.length);
  const names = state.recent.map((request) => `${request.id} ${request.at}`).join();
  if (names === shownRecent) return;
  shownRecent = names;
  byId("recent").tBodies[0].replaceChildren(...state.recent.map(row));
  byId("recent").hidden = !state.recent.length;
  byId("recent-none").hidden = Boolean(state.recent.length);
}

// --- health

function showHealth(health) {
  const pill = byId("state").firstElementChild;
  pill.dataset.state = health.state;
  write(pill, health.state);
  write(byId("reasons"), health.reasons.join("; "));
  const canary = health.canary;
  const token = health.last_token_age_s === null ? "No token yet." : `Latest token ${age(health.last_token_age_s)} ago.`;
  const asked = canary.age_s === null ? "No canary was needed yet."
    : `Canary ${age(canary.age_s)} ago: ${canary.error ?? `answered in ${seconds(canary.took_s)}`} (${count(canary.num_good)} good, ${count(canary.num_failed)} failed).`;
  write(byId("canary"), `${health.state} for ${seconds(health.state_s)}. ${token} ${asked}`);
  const names = JSON.stringify(health.events);
  if (names === shownEvents) return;
  shownEvents = names;
  byId("events").replaceChildren(...health.events.map((event) => make("li", {},
    make("time", { datetime: new Date(event.at * 1000).toISOString() }, clock(event.at)),
    `${event.state}${event.reason ? `: ${event.reason}` : ""}`)));
}

function showUnreachable(why) {
  const pill = byId("state").firstElementChild;
  pill.dataset.state = "unreachable";
  write(pill, "unreachable");
  write(byId("reasons"), why);
}

// --- once a second, while somebody looks

async function refresh() {
  const since = points.at(-1)?.number ?? 0;
  let response;
  try {
    response = await fetch(`state?since=${since}`, { signal: AbortSignal.timeout(5000) });
  } catch {
    showUnreachable("no answer from the server; trying again");
    return;
  }
  if (!response.ok) {
    showUnreachable(response.status === 401 ? "this server wants a key: load the page again" : `the server said ${response.status}`);
    return;
  }
  const state = await response.json();
  // A server that began anew counts from one again.
  if (state.points.length && state.points[0].number <= since) points = [];
  points = [...points, ...state.points].slice(-NUM_POINTS);
  write(byId("model"), state.model);
  write(byId("version"), `deskfleet ${state.version}`);
  document.title = `${state.health.state} · ${state.model}`;
  document.body.dataset.model = state.model;
  showHealth(state.health);
  showFigures(state);
  showRanks(state.health.ranks);
  showRequests(state);
}

async function poll() {
  if (!document.hidden) await refresh();
  setTimeout(poll, PERIOD_MS);
}

startChat({ model: () => document.body.dataset.model });
poll();
