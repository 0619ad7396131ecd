// The chat box: a conversation over the same endpoint that everybody uses, as it streams in.

import { count, make, rate, seconds, write } from "./draw.js";

const SAMPLE_TOOLS = [{
  type: "function",
  function: {
    name: "weather",
    description: "Say how warm it is in a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];

const byId = (id) => document.getElementById(id);
const AT_END_PX = 60;

/** Wires the form up. `model` gives the name to ask for. Where there are keys, the browser sends the one it has. */
export function startChat({ model }) {
  let conversation = [];
  let images = [];
  let running = null; // the AbortController of the answer under way

  const log = byId("log");

  function append(element) {
    log.querySelector(".hint")?.remove();
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < AT_END_PX;
    log.append(element);
    if (follow) log.scrollTop = log.scrollHeight;
  }

  function following(change) {
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < AT_END_PX;
    change();
    if (follow) log.scrollTop = log.scrollHeight;
  }

  function setRunning(controller) {
    running = controller;
    byId("send").disabled = Boolean(controller);
    byId("stop").disabled = !controller;
    byId("new").disabled = Boolean(controller);
    if (controller) write(byId("chat-status"), "waiting for the first token");
  }

  // --- what is sent

  function options() {
    const body = { model: model(), stream: true, stream_options: { include_usage: true } };
    const thinking = byId("thinking").value;
    if (thinking) body.thinking = { type: thinking };
    const effort = byId("effort").value.trim();
    if (effort) body.reasoning_effort = /^\d+$/.test(effort) ? Number(effort) : effort;
    if (byId("temperature").value !== "") body.temperature = Number(byId("temperature").value);
    if (byId("max-tokens").value !== "") body.max_tokens = Number(byId("max-tokens").value);
    const tools = byId("tool-list").value.trim();
    write(byId("tools-error"), "");
    if (tools) {
      try {
        body.tools = JSON.parse(tools);
      } catch (error) {
        write(byId("tools-error"), `not JSON: ${error.message}`);
        byId("options").open = true;
        return null;
      }
    }
    return body;
  }

  async function ask() {
    const body = options();
    if (!body || running) return;
    const system = byId("system").value.trim();
    body.messages = [...(system ? [{ role: "system", content: system }] : []), ...conversation];
    const answer = new Answer(following);
    append(answer.element);
    const controller = new AbortController();
    setRunning(controller);
    try {
      await answer.follow(await fetch("../v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(body),
        signal: controller.signal,
      }));
    } catch (error) {
      if (error.name === "AbortError") answer.note("stopped");
      else answer.fail(error.message);
    }
    answer.end();
    setRunning(null);
    write(byId("chat-status"), answer.failed ? "the answer failed" : "");
    if (answer.isEmpty) {
      if (answer.failed) conversation.pop(); // so that the same message can be sent again
      return;
    }
    conversation.push(answer.message());
    if (answer.calls.length && !answer.failed) append(toolResults(answer.calls));
  }

  /** A form in which a person plays the tools that the model has called. */
  function toolResults(calls) {
    const fields = calls.map((call) => make("textarea", { rows: 2, id: `result-${call.id}` }));
    const button = make("button", { type: "submit" }, "Send results");
    const form = make("form", { class: "turn" }, ...calls.flatMap((call, place) => [
      make("label", { for: `result-${call.id}` }, `Result of ${call.name}`), fields[place],
    ]), button);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (running) return;
      button.disabled = true;
      calls.forEach((call, place) => {
        fields[place].readOnly = true;
        conversation.push({ role: "tool", tool_call_id: call.id, content: fields[place].value });
      });
      ask();
    });
    return form;
  }

  function send() {
    const text = byId("message").value.trim();
    if (running || (!text && !images.length)) return;
    const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
    if (text) parts.push({ type: "text", text });
    conversation.push({ role: "user", content: images.length ? parts : text });
    append(make("div", { class: "turn user" }, make("p", { class: "who" }, "you"),
      ...images.map((url) => make("img", { src: url, alt: "an image you sent" })),
      text ? make("div", { class: "text" }, text) : null));
    byId("message").value = "";
    images = [];
    showImages();
    log.scrollTop = log.scrollHeight;
    ask();
  }

  // --- images

  function showImages() {
    byId("images").replaceChildren(...images.map((url, place) => {
      const remove = make("button", { type: "button", "aria-label": `Remove image ${place + 1}` }, "×");
      remove.addEventListener("click", () => { images.splice(place, 1); showImages(); });
      return make("figure", {}, make("img", { src: url, alt: `image ${place + 1}, not sent yet` }), remove);
    }));
  }

  function addImages(files) {
    for (const file of files) {
      if (!file.type.startsWith("image/")) continue;
      const reader = new FileReader();
      reader.addEventListener("load", () => { images.push(reader.result); showImages(); });
      reader.readAsDataURL(file);
    }
  }

  byId("file").addEventListener("change", (event) => { addImages(event.target.files); event.target.value = ""; });
  byId("message").addEventListener("paste", (event) => addImages(event.clipboardData.files));
  byId("chat").addEventListener("dragover", (event) => event.preventDefault());
  byId("chat").addEventListener("drop", (event) => { event.preventDefault(); addImages(event.dataTransfer.files); });

  // --- the form

  byId("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  byId("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("new").addEventListener("click", () => { conversation = []; log.replaceChildren(); byId("message").focus(); });
  byId("sample-tool").addEventListener("click", () => {
    byId("tool-list").value = JSON.stringify(SAMPLE_TOOLS, null, 1);
  });
}

/** One answer on its way: the parts it has so far, and their element. */
class Answer {
  constructor(following) {
    this.following = following;
    this.reasoning = "";
    this.content = "";
    this.calls = [];
    this.failed = false;
    this.began = performance.now();
    this.first = null;
    this.usage = null;
    this.finish = null;
    this.headers = null;
    this.thought = make("div", { class: "text" });
    this.details = make("details", { open: true, hidden: true }, make("summary", {}, "Reasoning"), this.thought);
    this.text = make("div", { class: "text" });
    this.callBox = make("div");
    this.numbers = make("p", { class: "numbers" });
    this.element = make("div", { class: "turn assistant" }, make("p", { class: "who" }, "model"),
      this.details, this.text, this.callBox, this.numbers);
  }

  get isEmpty() {
    return !this.content && !this.reasoning && !this.calls.length;
  }

  async follow(response) {
    this.headers = response.headers;
    if (!response.ok) {
      const body = await response.json().catch(() => null);
      this.fail(body?.error?.message ?? `the server said ${response.status}`);
      return;
    }
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      held += value;
      const events = held.split("\n\n");
      held = events.pop();
      this.following(() => {
        for (const event of events) {
          const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
          if (data && data !== "[DONE]") this.take(JSON.parse(data));
        }
        this.show();
      });
    }
  }

  take(chunk) {
    if (chunk.error) { this.fail(chunk.error.message); return; }
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { delta } = choice;
    const added = (delta.reasoning_content ?? "") + (delta.content ?? "") + (delta.tool_calls ? "x" : "");
    if (added && this.first === null) this.first = performance.now();
    this.reasoning += delta.reasoning_content ?? "";
    this.content += delta.content ?? "";
    for (const part of delta.tool_calls ?? []) {
      const call = (this.calls[part.index ?? this.calls.length] ??= { id: "", name: "", arguments: "" });
      call.id ||= part.id ?? "";
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
    if (choice.finish_reason) this.finish = choice.finish_reason;
  }

  show() {
    this.details.hidden = !this.reasoning;
    if (this.reasoning) write(this.thought, this.reasoning.replace(/^\n+/, ""));
    this.text.replaceChildren(...fenced(this.content));
    this.callBox.replaceChildren(...this.calls.map((call) => make("div", { class: "call" },
      make("h4", {}, `calls ${call.name}`), make("pre", {}, pretty(call.arguments)))));
    write(byId("chat-status"), this.content ? "answering" : this.reasoning ? "thinking" : "waiting for the first token");
  }

  fail(why) {
    this.failed = true;
    this.element.append(make("p", { class: "bad", role: "alert" }, why));
  }

  note(what) {
    this.stopped = what;
  }

  /** Everything has come: numbers are shown, a finished thought is folded away. */
  end() {
    if (this.reasoning && this.content) this.details.open = false;
    const facts = [];
    if (this.first !== null) facts.push(`first token ${seconds((this.first - this.began) / 1000)}`);
    const number = this.usage?.completion_tokens;
    if (number) {
      const elapsed = (performance.now() - this.first) / 1000;
      facts.push(`${count(number)} tokens`);
      if (number > 1 && elapsed > 0) facts.push(`${rate((number - 1) / elapsed)} tok/s`);
      const cached = this.usage.prompt_tokens_details?.cached_tokens;
      facts.push(`prompt ${count(this.usage.prompt_tokens)}${cached ? `, ${count(cached)} cached` : ""}`);
    }
    if (this.stopped ?? this.finish) facts.push(this.stopped ?? this.finish);
    const thinking = this.headers?.get("x-deskfleet-thinking");
    if (thinking) facts.push(thinking);
    this.following(() => write(this.numbers, facts.join(" · ")));
    this.numbers.title = this.headers?.get("x-request-id") ?? "";
  }

  /** The answer as the next request repeats it. */
  message() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    if (this.calls.length) {
      message.tool_calls = this.calls.map(({ id, name, arguments: text }) => (
        { id, type: "function", function: { name, arguments: text } }));
    }
    return message;
  }
}

/** Text with ``` fences as preformatted blocks; everything else stays text, whatever it looks like. */
function fenced(text) {
  return text.split(/^```[^\n]*\n?/m).map((part, place) => (place % 2 ? make("pre", {}, part) : part)).filter((part) => part !== "");
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 1);
  } catch {
    return text; // it is not complete yet
  }
}
